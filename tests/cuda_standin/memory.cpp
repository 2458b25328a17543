// Settings, counters, device memory (host memory that is counted) and pinned ranges.
#include "standin.hpp"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

namespace standin {

long number_setting(const char * name, long otherwise) {
    const char * text = std::getenv(name);
    return text ? std::atol(text) : otherwise;
}

size_t bytes_setting(const char * name, size_t otherwise) {
    const char * text = std::getenv(name);
    if (!text) {
        return otherwise;
    }
    char *       unit;
    const double value = std::strtod(text, &unit);
    const int    shift = *unit == 'K' ? 10 : *unit == 'M' ? 20 : *unit == 'G' ? 30 : 0;
    return static_cast<size_t>(value * static_cast<double>(size_t{1} << shift));
}

bool skips_products() {
    static const bool found = [] {
        const char * what = std::getenv("STANDIN_SKIP");
        return what && std::strcmp(what, "products") == 0;
    }();
    return found;
}

bool is_ignored(const char * what) {
    const char * list = std::getenv("STANDIN_IGNORE");
    return list && std::strstr(list, what);
}

Counters & counters = *new Counters;  // never destroyed: threads outlive main

namespace {

struct Fault {
    std::mutex  mutex;
    std::string call;
    long        n_left = 0;  // calls until one fails

    Fault() {
        const char * text  = std::getenv("STANDIN_FAIL");
        const char * colon = text ? std::strchr(text, ':') : nullptr;
        if (colon) {
            call.assign(text, colon);
            n_left = std::atol(colon + 1);
        }
    }
};

Fault & fault() {
    static Fault * made = new Fault;
    return *made;
}

// Ranges of addresses that do not overlap.
class Ranges {
  public:
    struct Range {
        size_t size;
        int    device;
    };

    bool add(const void * address, size_t size, int device = 0) {
        const auto at   = reinterpret_cast<uintptr_t>(address);
        const auto next = ranges_.lower_bound(at);
        if (find(at, 1) || (next != ranges_.end() && next->first < at + size)) {
            return false;
        }
        ranges_[at] = {size, device};
        return true;
    }
    Range remove(const void * address) {
        const auto found = ranges_.find(reinterpret_cast<uintptr_t>(address));
        if (found == ranges_.end()) {
            return {0, -1};
        }
        const Range range = found->second;
        ranges_.erase(found);
        return range;
    }
    const Range * find(const void * address, size_t size) const {
        return find(reinterpret_cast<uintptr_t>(address), size);
    }

  private:
    const Range * find(uintptr_t at, size_t size) const {
        auto after = ranges_.upper_bound(at);
        if (after == ranges_.begin()) {
            return nullptr;
        }
        --after;
        return at + size <= after->first + after->second.size ? &after->second : nullptr;
    }
    std::map<uintptr_t, Range> ranges_;
};

struct Memory {
    std::mutex          mutex;
    Ranges              device, pinned;
    std::vector<size_t> used = std::vector<size_t>(n_devices());
};

Memory & memory() {
    static Memory * made = new Memory;
    return *made;
}

const size_t total   = bytes_setting("STANDIN_VRAM", size_t{80} << 30);
const size_t context = bytes_setting("STANDIN_CONTEXT", size_t{512} << 20);  // what CUDA keeps
const long   fill    = number_setting("STANDIN_FILL", -1);                   // byte of new memory

const int registered = 1;  // in place of a device, for pinned ranges

size_t whole_pages(size_t size) { return (size + 4095) / 4096 * 4096; }

void * map_pages(size_t size) {
    void * made = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return made == MAP_FAILED ? nullptr : made;
}

}  // namespace

bool fails(const char * call) {
    std::lock_guard<std::mutex> lock(fault().mutex);
    return fault().n_left > 0 && fault().call == call && --fault().n_left == 0;
}

int compute_capability() {
    static const int found = static_cast<int>(number_setting("STANDIN_COMPUTE", 90));
    return found;
}

int driver_version() {
    static const int found = static_cast<int>(number_setting("STANDIN_DRIVER", CUDART_VERSION));
    return found;
}

int n_devices() {
    static const int n = static_cast<int>(number_setting("STANDIN_DEVICES", 1));
    return n;
}

size_t total_bytes() { return total; }

size_t free_bytes(int device) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const size_t                used = memory().used[device] + context;
    return used < total ? total - used : 0;
}

void * device_alloc(int device, size_t size) {
    size = whole_pages(size);
    std::lock_guard<std::mutex> lock(memory().mutex);
    if (memory().used[device] + context + size > total) {
        return nullptr;
    }
    void * made = map_pages(size);
    if (!made) {
        return nullptr;
    }
    if (fill >= 0) {
        std::memset(made, static_cast<int>(fill), size);
    }
    memory().device.add(made, size, device);
    memory().used[device] += size;
    return made;
}

bool device_free(void * address) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto                  range = memory().device.remove(address);
    if (range.size) {
        munmap(address, range.size);
        memory().used[range.device] -= range.size;
    }
    return range.size > 0;
}

int device_of(const void * address, size_t size) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto *                range = memory().device.find(address, size);
    return range ? range->device : -1;
}

void * pinned_alloc(size_t size) {
    size        = whole_pages(std::max<size_t>(size, 1));
    void * made = map_pages(size);
    if (made) {
        pin(made, size, false);
    }
    return made;
}

bool pinned_free(void * address) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const size_t                size = memory().pinned.remove(address).size;
    if (size) {
        munmap(address, size);
    }
    return size > 0;
}

bool pin(void * address, size_t size, bool is_registered) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    return memory().pinned.add(address, size, is_registered ? registered : 0);
}

bool is_registered(const void * address) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto *                range = memory().pinned.find(address, 1);
    return range && range->device == registered;
}

bool unpin(void * address) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    return memory().pinned.remove(address).size > 0;
}

bool is_pinned(const void * address, size_t size) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    return memory().pinned.find(address, size) != nullptr;
}

}  // namespace standin

// -- what tests call -------------------------------------------------------------------------------

extern "C" {

// Writes all counters as a JSON object, as far as `size` goes. Returns its length.
size_t standin_counters(char * json, size_t size) {
    std::string text;
#define X(name) \
    text += (text.empty() ? "{\"" #name "\": " : ", \"" #name "\": ") + std::to_string(standin::counters.name);
    STANDIN_COUNTERS(X)
#undef X
    text += "}";
    if (size) {
        const size_t n = std::min(size - 1, text.size());
        std::memcpy(json, text.data(), n);
        json[n] = 0;
    }
    return text.size();
}

void standin_reset(void) {
#define X(name) standin::counters.name = 0;
    STANDIN_COUNTERS(X)
#undef X
}

// Lets the n-th of the following calls of one kind fail: malloc, host_alloc, host_register,
// instantiate or cublas. 0: none.
void standin_fail(const char * call, long n) {
    std::lock_guard<std::mutex> lock(standin::fault().mutex);
    standin::fault().call   = call;
    standin::fault().n_left = n;
}

// 1 if the call that standin_fail or STANDIN_FAIL chose has not come yet.
int standin_fault_is_due(void) {
    std::lock_guard<std::mutex> lock(standin::fault().mutex);
    return standin::fault().n_left > 0;
}

}  // extern "C"
