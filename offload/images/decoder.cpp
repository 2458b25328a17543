// Reads image files from standard input and writes their sizes to standard output, or also their pixels to a file.
//
//     decode-image MOST_S MOST_ALL_S sizes < files
//     decode-image MOST_S MOST_ALL_S pixels DESCRIPTOR < files
//
// MOST_S and MOST_ALL_S are seconds of processor time, for an image and for all images of a call.
//
// Each file comes after its length (8 bytes, little-endian), and gets one line: "WIDTH HEIGHT", or "! " and a
// sentence. With `pixels`, the RGB bytes of all images that were read follow each other, row by row, in the file that
// is open as this descriptor.
//
// It decodes with the copy of stb_image that libmtmd has, so the pixels are those of llama-server, except that a photo
// is turned as its EXIF orientation says, and that what is transparent becomes white (llama-server shows the colours
// below it, which nobody sees; hermes-agent #64548). Files come from strangers: each is decoded in a process of its own with
// limited memory and time, and all files of a call share one limit of time.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <csignal>
#include <unistd.h>
#include <vector>

#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_BMP
#define STBI_ONLY_GIF
#define STBI_ONLY_JPEG
#define STBI_ONLY_PNG
#include "stb/stb_image.h"

static const long long MOST_PIXELS = 50LL * 1000 * 1000;       // of an image
static const long long MOST_ALL_PIXELS = 200LL * 1000 * 1000;  // of all images of a call
static const int MOST_RATIO = 200;
// The model's threads come first. Requests that take long come after all others.
static const int NICENESS = 5, LATER_NICENESS = 19;
static const double SOON_S = 0.5;  // of processor time for all images, after which they do
static const int REFUSED = 2;

static int PIXELS = -1;  // the descriptor of the file for pixels

static void limit(int resource, rlim_t most) {
    const rlimit limits = {most, most};
    setrlimit(resource, &limits);
}

static bool read_all(int descriptor, void * into, size_t n) {
    for (char * at = (char *) into; n > 0;) {
        const ssize_t got = read(descriptor, at, n);
        if (got <= 0) return false;
        at += got, n -= (size_t) got;
    }
    return true;
}

static bool write_all(int descriptor, const void * from, size_t n) {
    for (const char * at = (const char *) from; n > 0;) {
        const ssize_t put = write(descriptor, at, n);
        if (put <= 0) return false;
        at += put, n -= (size_t) put;
    }
    return true;
}

// ---- EXIF orientation: 1 to 8, 1 if there is none (Exif 3.0, 4.6.5; PNG 3, 11.3.4.5)

struct Bytes {
    const uint8_t * data;
    size_t n;
    bool is_little = false;

    uint32_t number(size_t at, int size) const {  // 0 outside of the bytes
        if (at > n || n - at < (size_t) size) return 0;
        uint32_t value = 0;
        for (int i = 0; i < size; i++) value = value << 8 | data[at + (is_little ? size - 1 - i : i)];
        return value;
    }
    Bytes from(size_t at, size_t length) const {
        if (at > n) return {data, 0};
        return {data + at, length < n - at ? length : n - at};
    }
};

static int orientation_in_tiff(Bytes tiff) {
    tiff.is_little = tiff.n > 1 && tiff.data[0] == 'I';
    if (tiff.number(2, 2) != 42) return 1;
    const size_t first = tiff.number(4, 4);
    const uint32_t n_entries = tiff.number(first, 2);
    for (uint32_t i = 0; i < n_entries; i++) {
        const size_t entry = first + 2 + 12 * (size_t) i;
        if (tiff.number(entry, 2) != 0x0112 || tiff.number(entry + 2, 2) != 3) continue;
        const uint32_t found = tiff.number(entry + 8, 2);
        return found >= 1 && found <= 8 ? (int) found : 1;
    }
    return 1;
}

static int orientation_of(const std::vector<uint8_t> & file) {
    const Bytes all = {file.data(), file.size()};
    if (all.number(0, 2) == 0xFFD8) {  // JPEG: segments up to the picture
        for (size_t at = 2; all.number(at, 1) == 0xFF;) {
            const uint32_t kind = all.number(at + 1, 1), length = all.number(at + 2, 2);
            if (kind == 0xFF) { at++; continue; }  // a fill byte
            if (kind == 0xDA || kind == 0xD9 || length < 2) break;
            const Bytes segment = all.from(at + 4, length - 2);
            if (kind == 0xE1 && segment.n > 6 && memcmp(segment.data, "Exif\0", 5) == 0)
                return orientation_in_tiff(segment.from(6, segment.n));
            at += 2 + length;
        }
    }
    if (all.number(0, 4) == 0x89504E47)  // PNG: chunks
        for (size_t at = 8; at < all.n; at += 12 + (size_t) all.number(at, 4))
            if (all.number(at + 4, 4) == 0x65584966)  // eXIf
                return orientation_in_tiff(all.from(at + 8, all.number(at, 4)));
    return 1;
}

static bool is_on_its_side(int orientation) { return orientation >= 5; }

// Returns the pixels in the order of the rows that a viewer shows. `width` and `height` are those of the file.
static std::vector<uint8_t> turned(const uint8_t * pixels, int width, int height, int orientation) {
    const bool swaps = is_on_its_side(orientation);
    const long columns = swaps ? height : width, rows = swaps ? width : height;
    std::vector<uint8_t> out((size_t) 3 * width * height);
    uint8_t * put = out.data();
    for (long row = 0; row < rows; row++)
        for (long column = 0; column < columns; column++, put += 3) {
            long x = swaps ? row : column, y = swaps ? column : row;
            if (orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8) x = width - 1 - x;
            if (orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7) y = height - 1 - y;
            memcpy(put, pixels + 3 * ((size_t) y * width + x), 3);
        }
    return out;
}

// Puts RGBA pixels on white, and leaves RGB in the first 3/4 of their memory.
static void put_on_white(uint8_t * pixels, size_t n_pixels) {
    const uint8_t * from = pixels;
    for (uint8_t * to = pixels; n_pixels > 0; n_pixels--, from += 4) {
        const int alpha = from[3];
        for (int i = 0; i < 3; i++) *to++ = (uint8_t) ((from[i] * alpha + 255 * (255 - alpha) + 127) / 255);
    }
}

// ---- one file, in a process of its own

static void yield_to_others(int) { setpriority(PRIO_PROCESS, 0, LATER_NICENESS); }

static void limit_this_process(double may_take_s, double all_used_s) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    limit(RLIMIT_AS, (rlim_t) 1 << 30);          // bytes
    limit(RLIMIT_CPU, (rlim_t) may_take_s + 1);  // whole seconds
    if (all_used_s >= SOON_S) return yield_to_others(0);
    signal(SIGPROF, yield_to_others);
    const itimerval soon = {{0, 0}, {0, (suseconds_t) (1e6 * (SOON_S - all_used_s))}};
    setitimer(ITIMER_PROF, &soon, nullptr);
}

static int refused(int line, const char * words) {
    dprintf(line, "! %s\n", words);
    return REFUSED;
}

static int decode(const std::vector<uint8_t> & file, bool with_pixels, long long pixels_left, int line) {
    int width = 0, height = 0, channels = 0;
    const int size = (int) file.size();
    char words[200];
    if (!stbi_info_from_memory(file.data(), size, &width, &height, &channels))
        return refused(line, "it is no image of a known type: send a PNG, JPEG, GIF or BMP file");
    if ((long long) width * height > MOST_PIXELS) {
        snprintf(words, sizeof words, "it has %d x %d pixels, and at most %lld are read: make it smaller", width, height, MOST_PIXELS);
        return refused(line, words);
    }
    if (width > (long long) MOST_RATIO * height || height > (long long) MOST_RATIO * width) {
        snprintf(words, sizeof words, "it has %d x %d pixels, and one side may be at most %d times as long as the other", width, height, MOST_RATIO);
        return refused(line, words);
    }
    if ((long long) width * height > pixels_left) {
        snprintf(words, sizeof words, "the images of a request may have %lld pixels together: send fewer or smaller ones", MOST_ALL_PIXELS);
        return refused(line, words);
    }
    const int orientation = orientation_of(file);
    if (with_pixels) {
        const bool has_alpha = channels == 2 || channels == 4;
        uint8_t * pixels = stbi_load_from_memory(file.data(), size, &width, &height, &channels, has_alpha ? 4 : 3);
        if (pixels == nullptr) {
            snprintf(words, sizeof words, "its data is damaged or cut off (%s)", stbi_failure_reason());
            return refused(line, words);
        }
        if (has_alpha) put_on_white(pixels, (size_t) width * height);
        const size_t n_bytes = (size_t) 3 * width * height;
        bool is_written;
        if (orientation == 1) is_written = write_all(PIXELS, pixels, n_bytes);
        else is_written = write_all(PIXELS, turned(pixels, width, height, orientation).data(), n_bytes);
        if (!is_written) return refused(line, "there is no memory for its pixels");
    }
    if (is_on_its_side(orientation)) std::swap(width, height);
    dprintf(line, "%d %d\n", width, height);
    return 0;
}

// ---- all files

static double used_s(const rusage & usage) {
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + 1e-6 * (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

int main(int n_words, char ** words) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody wants the pixels of a server that is gone
    setpriority(PRIO_PROCESS, 0, NICENESS);
    limit(RLIMIT_CORE, 0);
    if (n_words < 4) return 1;
    const double most_s = atof(words[1]), most_all_s = atof(words[2]);
    const bool with_pixels = n_words == 5 && strcmp(words[3], "pixels") == 0;
    if (with_pixels) PIXELS = atoi(words[4]);
    double left_s = most_all_s;
    long long pixels_left = MOST_ALL_PIXELS;
    std::vector<uint8_t> file;
    for (uint64_t n_bytes; read_all(STDIN_FILENO, &n_bytes, sizeof n_bytes);) {
        file.resize((size_t) n_bytes);
        if (!read_all(STDIN_FILENO, file.data(), file.size())) return 1;
        if (left_s <= 0) {
            printf("! decoding the images of the request takes over %g s of processor time\n", most_all_s);
            fflush(stdout);
            continue;
        }
        int line[2];
        if (pipe(line) != 0) return 1;
        const off_t before = with_pixels ? lseek(PIXELS, 0, SEEK_CUR) : 0;
        const double may_take_s = left_s < most_s ? left_s : most_s;
        const pid_t child = fork();
        if (child < 0) return 1;
        if (child == 0) {
            limit_this_process(may_take_s, most_all_s - left_s);
            _exit(decode(file, with_pixels, pixels_left, line[1]));
        }
        close(line[1]);
        std::string said;
        char part[256];
        for (ssize_t n; (n = read(line[0], part, sizeof part)) > 0;) said.append(part, (size_t) n);
        close(line[0]);
        int status = 0;
        rusage usage;
        if (wait4(child, &status, 0, &usage) != child) return 1;
        left_s -= used_s(usage);
        const bool is_done = WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == REFUSED) && !said.empty();
        if (!is_done && used_s(usage) >= may_take_s) {
            snprintf(part, sizeof part, "! decoding it takes over %g s of processor time\n", may_take_s);
            said = part;
        } else if (!is_done) {
            const int sign = WIFSIGNALED(status) ? WTERMSIG(status) : SIGABRT;
            snprintf(part, sizeof part, "! its decoder died (%s), as the file is damaged or too large\n", strsignal(sign));
            said = part;
        }
        int width, height;
        if (sscanf(said.c_str(), "%d %d", &width, &height) == 2) pixels_left -= (long long) width * height;
        else if (with_pixels && (ftruncate(PIXELS, before) != 0 || lseek(PIXELS, before, SEEK_SET) != before)) return 1;
        fputs(said.c_str(), stdout);
        fflush(stdout);
    }
    return 0;
}
