// Reads an image file from standard input and writes its pixels: "WIDTH HEIGHT\n", then RGB bytes, row by row.
// It decodes with the copy of stb_image that libmtmd has, so the pixels are those of llama-server. Files come from
// strangers, so this is a program of its own: the caller limits its memory and time, and it may die.
// A file that is refused gets one sentence on standard error, and exit code 2.
#include <cstdio>
#include <sys/resource.h>
#include <vector>

#define STB_IMAGE_IMPLEMENTATION
#define STBI_NO_HDR
#define STBI_NO_LINEAR
#include "stb/stb_image.h"

static const long long MOST_PIXELS = 50LL * 1000 * 1000;
static const int MOST_RATIO = 200;

static void limit(int resource, rlim_t most) {
    const rlimit limits = {most, most};
    setrlimit(resource, &limits);
}

int main() {
    limit(RLIMIT_AS, (rlim_t) 1 << 30);  // bytes
    limit(RLIMIT_CPU, 10);               // seconds
    limit(RLIMIT_CORE, 0);
    std::vector<unsigned char> file;
    unsigned char part[65536];
    size_t n;
    while ((n = fread(part, 1, sizeof part, stdin)) > 0) file.insert(file.end(), part, part + n);
    int width = 0, height = 0, channels = 0;
    const int size = (int) file.size();
    if (!stbi_info_from_memory(file.data(), size, &width, &height, &channels)) {
        fprintf(stderr, "it is no image of a known type: send a PNG, JPEG, GIF or BMP file");
        return 2;
    }
    if ((long long) width * height > MOST_PIXELS) {
        fprintf(stderr, "it has %d x %d pixels, and at most %lld are read: make it smaller", width, height, MOST_PIXELS);
        return 2;
    }
    if (width > (long long) MOST_RATIO * height || height > (long long) MOST_RATIO * width) {
        fprintf(stderr, "it has %d x %d pixels, and one side may be at most %d times as long as the other", width, height, MOST_RATIO);
        return 2;
    }
    unsigned char * pixels = stbi_load_from_memory(file.data(), size, &width, &height, &channels, 3);
    if (pixels == nullptr) {
        fprintf(stderr, "its data is damaged or cut off (%s)", stbi_failure_reason());
        return 2;
    }
    printf("%d %d\n", width, height);
    fwrite(pixels, 3, (size_t) width * height, stdout);
    return fflush(stdout) == 0 ? 0 : 1;
}
