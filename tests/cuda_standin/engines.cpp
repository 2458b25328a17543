// The copy engines: each device has one for each direction, as most cards have. An engine makes one
// copy at a time, whatever stream it comes from, in the order in which streams come to their copies.
//
// A stream that waits for an event does not hold an engine, and engines do not order streams: an
// order that a card does not promise would hide a missing wait.
#include "clock.hpp"

#include <algorithm>
#include <cstring>
#include <map>

namespace standin {

namespace {

struct Engine {
    std::mutex              mutex;
    std::condition_variable free;
    uint64_t                n_taken = 0, n_done = 0;
    Unit                    unit;  // the same in virtual time

    void run(const Work & copy, const char * what, int device, size_t bytes) {
        std::unique_lock<std::mutex> lock(mutex);
        const uint64_t               turn = n_taken++;
        free.wait(lock, [&] { return n_done == turn; });
        lock.unlock();
        copy();
        lock.lock();
        ++n_done;
        free.notify_all();
        const double length_s = rates.copy_s + static_cast<double>(bytes) / rates.link_bytes_per_s;
        // Copies that follow each other in a stream wait for the engine. Only what comes after them waits for the
        // last one's latency.
        thread_local const Engine * last       = nullptr;
        thread_local double         last_end_s = -1, last_latency_s = 0;
        const bool                  follows    = last == this && *stream_now_s == last_end_s;
        const double end_s = unit.take(*stream_now_s - (follows ? last_latency_s : 0), length_s);
        note(what, device, end_s - length_s, end_s, bytes);
        last           = this;
        last_latency_s = rates.copy_latency_s;
        last_end_s = *stream_now_s = end_s + last_latency_s;
    }
};

struct Record {
    int          device;
    Direction    direction;
    const void * stream;
    size_t       bytes;
    bool         is_pinned;
};

struct Engines {
    std::mutex                                 mutex;
    std::map<std::pair<int, Direction>, Engine> all;
    bool                                       is_recording = false;
    std::vector<Record>                        enqueued;
};

Engines & engines() {
    static Engines * made = new Engines;  // never destroyed: threads outlive main
    return *made;
}

}  // namespace

void access_over_link(int device, Direction direction, double bytes) {
    if (!stream_now_s) {
        return;  // there is no clock
    }
    Unit * unit;
    {
        std::lock_guard<std::mutex> lock(engines().mutex);
        unit = &engines().all[{device, direction}].unit;
    }
    const double begin_s = *stream_now_s + rates.mapped_s;
    const double link_s  = bytes / rates.link_bytes_per_s;
    const double share   = rates.mapped_share;
    const double end_s   = unit->end_beside(begin_s, link_s, share, std::min<double>(share, rates.mapped_beside));
    unit->take(begin_s, link_s);
    note(direction == Direction::to_device ? "read" : "write", device, *stream_now_s, end_s, static_cast<size_t>(bytes));
    *stream_now_s = end_s;
}

Work on_engine(Direction direction, const Stream & stream, const void * handle, size_t bytes, bool is_pinned,
               Work copy) {
    std::lock_guard<std::mutex> lock(engines().mutex);
    if (engines().is_recording && !stream.capture) {
        engines().enqueued.push_back({stream.device, direction, handle, bytes, is_pinned});
    }
    Engine &     engine = engines().all[{stream.device, direction}];
    const char * what   = direction == Direction::to_device ? "to-device" : "to-host";
    const int    device = stream.device;
    return [&engine, what, device, bytes, copy = std::move(copy)] { engine.run(copy, what, device, bytes); };
}

}  // namespace standin

extern "C" {

// Starts a new record of the copies between host and devices, or ends it.
void standin_record_copies(int is_recording) {
    std::lock_guard<std::mutex> lock(standin::engines().mutex);
    standin::engines().is_recording = is_recording != 0;
    standin::engines().enqueued.clear();
}

// Writes the record as a JSON array, as far as `size` goes. Returns its length. Copies are in the
// order in which they were enqueued.
size_t standin_copies(char * json, size_t size) {
    std::lock_guard<std::mutex> lock(standin::engines().mutex);
    std::string                 text;
    for (const auto & copy : standin::engines().enqueued) {
        text += text.empty() ? "[" : ", ";
        text += "{\"device\": " + std::to_string(copy.device);
        text += ", \"to_device\": " + std::to_string(copy.direction == standin::Direction::to_device);
        text += ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(copy.stream));
        text += ", \"bytes\": " + std::to_string(copy.bytes);
        text += ", \"is_pinned\": " + std::to_string(copy.is_pinned) + "}";
    }
    text += text.empty() ? "[]" : "]";
    if (size) {
        const size_t n = std::min(size - 1, text.size());
        std::memcpy(json, text.data(), n);
        json[n] = 0;
    }
    return text.size();
}

}  // extern "C"
