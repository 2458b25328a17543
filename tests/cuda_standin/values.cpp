// libcuda's two calls with which a stream and the host wait for each other without a synchronisation:
// cuStreamWriteValue32 and cuStreamWaitValue32, and what replaces the host's side under a virtual clock.
//
// https://docs.nvidia.com/cuda/archive/13.0.0/cuda-driver-api/group__CUDA__MEMOP.html describes them. A real card
// waits for a value for ever. Here a watchdog ends the process with a sentence, so that no test hangs.
#include "clock.hpp"

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

using namespace standin;

namespace {

using Clock = std::chrono::steady_clock;

const long watchdog_s = number_setting("STANDIN_WATCHDOG", 60);

constexpr size_t most_writes = 64;  // of one word, whose times are remembered

struct Write {
    uint32_t value;
    double   at_s;
};

// When words were written, in virtual time. A word that is written otherwise has no time.
struct Times {
    std::mutex                             mutex;
    std::map<uintptr_t, std::deque<Write>> writes;
};

Times & times() {
    static Times * made = new Times;  // never destroyed: threads outlive main
    return *made;
}

bool is_met(uint32_t found, uint32_t value, unsigned condition) {
    switch (condition) {
        case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<int32_t>(found - value) >= 0;
        case CU_STREAM_WAIT_VALUE_EQ: return found == value;
        case CU_STREAM_WAIT_VALUE_AND: return (found & value) != 0;
        default: return ~(found | value) != 0;
    }
}

void store(uint32_t * word, uint32_t value, double at_s) {
    if (has_clock()) {
        std::lock_guard<std::mutex> lock(times().mutex);
        auto &                      writes = times().writes[reinterpret_cast<uintptr_t>(word)];
        writes.push_back({value, at_s});
        if (writes.size() > most_writes) {
            writes.pop_front();
        }
    }
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// The virtual time of the first write that met the condition; 0 if none is known.
double written_s(const uint32_t * word, uint32_t value, unsigned condition) {
    std::lock_guard<std::mutex> lock(times().mutex);
    for (const Write & write : times().writes[reinterpret_cast<uintptr_t>(word)]) {
        if (is_met(write.value, value, condition)) {
            return write.at_s;
        }
    }
    return 0;
}

void wait_for(const uint32_t * word, uint32_t value, unsigned condition, const char * who) {
    const auto until = Clock::now() + std::chrono::seconds(watchdog_s);
    for (long n = 0; !is_met(__atomic_load_n(word, __ATOMIC_ACQUIRE), value, condition); ++n) {
        if (n > 100) {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        if (n % 64 == 0 && Clock::now() > until) {
            std::fprintf(stderr,
                         "stand-in: %s has waited %ld s for the value %u at %p, which holds %u"
                         " (STANDIN_WATCHDOG sets the seconds)\n",
                         who, watchdog_s, value, static_cast<const void *>(word), __atomic_load_n(word, __ATOMIC_ACQUIRE));
            std::abort();
        }
    }
}

CUresult refuse(CUresult error) {
    ++counters.errors;
    return error;
}

// NULL unless it is a whole word of device memory, or of pinned host memory.
uint32_t * word_at(CUdeviceptr address) {
    void * const at = reinterpret_cast<void *>(address);
    const bool   is_known = device_of(at, sizeof(uint32_t)) >= 0 || is_pinned(at, sizeof(uint32_t));
    return address % sizeof(uint32_t) == 0 && is_known ? static_cast<uint32_t *>(at) : nullptr;
}

}  // namespace

extern "C" {

CUresult cuStreamWriteValue32(CUstream handle, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    const HostCall   call(rates.value_call_s);
    uint32_t * const word = word_at(address);
    if (!word || flags & ~unsigned{CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER}) {
        return refuse(CUDA_ERROR_INVALID_VALUE);
    }
    const StreamPtr stream = stream_of(handle);
    if (forbids_legacy(*stream)) {
        return refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    ++counters.value_writes;
    trace("write value", handle, sizeof(value));
    const bool is_captured = stream->capture != nullptr;
    stream->call("write value", [word, value] {
        spend(rates.value_write_s);
        store(word, value, stream_now_s ? *stream_now_s : 0);
    });
    if (!is_captured) {
        stream->want();  // the host may wait for the word, and no call would tell
    }
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue32(CUstream handle, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    const HostCall         call(rates.value_call_s);
    const uint32_t * const word = word_at(address);
    // Neither the comparison NOR nor the flush of remote writes is there on all cards.
    if (!word || flags > CU_STREAM_WAIT_VALUE_AND) {
        return refuse(word && (flags & ~unsigned{CU_STREAM_WAIT_VALUE_FLUSH}) <= CU_STREAM_WAIT_VALUE_NOR
                          ? CUDA_ERROR_NOT_SUPPORTED
                          : CUDA_ERROR_INVALID_VALUE);
    }
    const StreamPtr stream = stream_of(handle);
    if (forbids_legacy(*stream)) {
        return refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    ++counters.value_waits;
    trace("wait value", handle, sizeof(value));
    static const bool ignored = is_ignored("value_waits");
    if (ignored) {
        return CUDA_SUCCESS;
    }
    stream->call("wait value", [word, value, flags] {
        wait_for(word, value, flags, "a stream");
        if (has_clock()) {
            *stream_now_s = std::max(*stream_now_s, written_s(word, value, flags)) + rates.value_wait_s;
        }
    });
    return CUDA_SUCCESS;
}

// -- the host's side -------------------------------------------------------------------------------

// Writes a word that a stream waits for. A plain atomic store does the same, but has no virtual time.
void standin_write_word(uint32_t * word, uint32_t value) {
    const HostCall call;
    store(word, value, host_now_s());
}

// Returns when the word holds at least that value, as a loop over atomic loads would. Virtual time passes until the
// word was written, but not the processor time of the loop.
void standin_await_word(const uint32_t * word, uint32_t value) {
    const HostCall call;
    wait_for(word, value, CU_STREAM_WAIT_VALUE_GEQ, "the host");
    if (has_clock()) {
        host_wait_until(std::max(host_now_s(), written_s(word, value, CU_STREAM_WAIT_VALUE_GEQ)) + rates.poll_s);
    }
}

// The same for a host that has other work: returns whether the word holds that value by now, and waits for it only if
// `waits` is set.
int standin_see_word(const uint32_t * word, uint32_t value, int waits) {
    if (waits) {
        standin_await_word(word, value);
        return 1;
    }
    const HostCall call;
    return is_met(__atomic_load_n(word, __ATOMIC_ACQUIRE), value, CU_STREAM_WAIT_VALUE_GEQ) &&
           written_s(word, value, CU_STREAM_WAIT_VALUE_GEQ) <= host_now_s();
}

// Lets a stream compute for that long, as a graph whose launch the host calls now.
void standin_compute_for(CUstream handle, double s) {
    const HostCall call(rates.graph_call_s);
    stream_of(handle)->call("graph", [s] { spend(s); });
}

// Lets a stream copy rows by a kernel of that graph, or of the one launched next. Either side may be pinned memory:
// then the kernel goes over the link.
void standin_move(CUstream handle, void * to, const void * from, size_t n_bytes) {
    const HostCall  call;
    const StreamPtr stream = stream_of(handle);
    const bool      writes = is_pinned(to, n_bytes), reads = is_pinned(from, n_bytes);
    stream->call("kernel", [=, device = stream->device] {
        std::memmove(to, from, n_bytes);
        spend(rates.kernel_s);
        if (writes || reads) {
            access_over_link(device, writes ? Direction::to_host : Direction::to_device, static_cast<double>(n_bytes));
        }
    });
}

}  // extern "C"
