// The virtual clock of host threads, and what the lab calls to set rates and to read the time.
#include "clock.hpp"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace standin {

Rates & rates = *new Rates;  // never destroyed: threads outlive main

thread_local double * stream_now_s = nullptr;

namespace {

struct HostThread {
    double waited_s = 0;               // time for which it waited for streams, events and other threads
    double now_s = 0, left_at_s = -1;  // `left_at_s`: its processor time when it left the stand-in, -1 before that
    int    depth = 0;
};
thread_local HostThread host;
std::atomic<double>     latest_s{0};  // time of the thread that is furthest on

double processor_s() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Seconds between two readings of a thread's processor time with nothing between them.
double reading_s() {
    static const double found = [] {
        double least = 1;
        for (int i = 0; i < 1000; ++i) {
            const double began = processor_s();
            least              = std::min(least, processor_s() - began);
        }
        return least;
    }();
    return found;
}

}  // namespace

bool has_clock() {
    static const bool is_on = number_setting("STANDIN_CLOCK", 0) != 0;
    return is_on;
}

double host_now_s() { return host.now_s; }

void host_wait_until(double s) {
    host.waited_s += std::max(0.0, s - host.now_s);
    host.now_s = std::max(host.now_s, s);
}

HostCall::HostCall(double cost_s) {
    if (!has_clock()) {
        return;
    }
    if (host.depth++ == 0) {
        if (host.left_at_s < 0) {
            host.now_s = latest_s;
        } else {
            host.now_s += rates.host_scale * std::max(0.0, processor_s() - host.left_at_s - reading_s());
        }
    }
    host.now_s += cost_s;
}

HostCall::~HostCall() {
    if (!has_clock() || --host.depth > 0) {
        return;
    }
    double before = latest_s;
    while (before < host.now_s && !latest_s.compare_exchange_weak(before, host.now_s)) {
    }
    host.left_at_s = processor_s();
}

void spend(double s) {
    if (stream_now_s) {
        *stream_now_s += s;
    }
}

void note(const char * what, int device, double begin_s, double end_s, size_t amount) {
    static std::FILE * const file = [] {
        const char * path = std::getenv("STANDIN_TIMELINE");
        return path ? std::fopen(path, "w") : nullptr;
    }();
    if (file) {
        std::fprintf(file, "%s %d %.3f %.3f %zu\n", what, device, 1e6 * begin_s, 1e6 * end_s, amount);
    }
}

double Unit::take(double ready_s, double length_s) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto                        next = busy_.upper_bound(ready_s);
    if (next != busy_.begin()) {
        ready_s = std::max(ready_s, std::prev(next)->second);
    }
    for (; next != busy_.end() && next->first < ready_s + length_s; ++next) {
        ready_s = next->second;
    }
    const double end = ready_s + length_s;
    busy_[ready_s]   = end;
    if (busy_.size() > 65536) {
        busy_.erase(busy_.begin(), std::next(busy_.begin(), 32768));  // the oldest
    }
    return end;
}

double Unit::end_beside(double ready_s, double length_s, double share, double beside_share) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto                        next = busy_.upper_bound(ready_s);
    if (next != busy_.begin() && std::prev(next)->second > ready_s) {
        --next;  // it is busy already
    }
    double now_s = ready_s, late_s = 0;  // `late_s`: what it is busy with ends later than without this work
    for (; next != busy_.end(); ++next) {
        const double work_s = next->second - std::max(next->first, ready_s);
        const double idle_s = std::max(0.0, next->first + late_s - now_s);
        if (length_s <= share * idle_s) {
            break;
        }
        length_s -= share * idle_s;
        now_s += idle_s;
        const double both_s = work_s / (1 - beside_share);
        if (length_s <= beside_share * both_s) {
            return now_s + length_s / beside_share;
        }
        length_s -= beside_share * both_s;
        now_s += both_s;
        late_s += both_s - work_s;
    }
    return now_s + length_s / share;
}

}  // namespace standin

extern "C" {

// The calling thread's virtual time in seconds.
double standin_now_s(void) {
    const standin::HostCall call;
    return standin::host_now_s();
}

// The virtual seconds for which the calling thread has waited.
double standin_waited_s(void) { return standin::host.waited_s; }

// The calling thread goes on at that virtual time, at the earliest.
void standin_wait_until_s(double s) {
    const standin::HostCall call;
    standin::host_wait_until(s);
}

// Sets one of the rates of clock.hpp. Returns 0, or 1 if there is none of that name.
int standin_set_rate(const char * name, double value) {
#define X(rate, otherwise)                    \
    if (std::strcmp(name, #rate) == 0) {      \
        standin::rates.rate = value;          \
        return 0;                             \
    }
    STANDIN_RATES(X)
#undef X
    return 1;
}

}  // extern "C"
