// Streams run their items in order, each on a thread of its own. Delays are added on request.
#include "clock.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>

namespace standin {

namespace {

struct Streams {
    std::mutex               mutex;
    std::set<StreamPtr>      all;
    std::map<int, StreamPtr> legacy;  // by device
    std::set<CapturePtr>     captures;  // under way
    unsigned                 n_made = 0;
};

Streams & streams() {
    static Streams * made = new Streams;  // never destroyed: threads outlive main
    return *made;
}

const long jitter_us = number_setting("STANDIN_JITTER", 0);
const long seed      = number_setting("STANDIN_SEED", 1);
const bool is_lazy   = number_setting("STANDIN_LAZY", 0) != 0;

}  // namespace

void Point::wait() const {
    if (!stream) {
        return;
    }
    std::unique_lock<std::mutex> lock(stream->mutex_);
    stream->want_up_to(n);
    stream->done_.wait(lock, [&] { return stream->n_done_ >= n; });
}

void Moment::wait_on_host() const {
    point.wait();
    if (passed_s) {
        const double until_s = *passed_s;
        const double after_s = until_s > host_now_s() ? rates.sync_call_s : rates.idle_sync_call_s;
        const double began_s = host_now_s();
        host_wait_until(std::max(until_s, began_s) + after_s);
        note("host-waits", point.stream->device, began_s, host_now_s(), 0);
    }
}

void Moment::wait_in_stream() const {
    point.wait();
    if (passed_s) {
        *stream_now_s = std::max(*stream_now_s, *passed_s) + rates.event_wait_s;
    }
}

StreamPtr Stream::make(int device, bool is_blocking) {
    auto stream = std::make_shared<Stream>(device, is_blocking);
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        stream->random_.seed(seed * 1000003u + streams().n_made++);
        streams().all.insert(stream);
    }
    std::thread([stream] { stream->run(); }).detach();
    return stream;
}

void Stream::call(const std::string & name, Work work) {
    if (capture) {
        capture->graph->nodes.push_back({name, std::move(work)});
    } else if (work) {
        wait_for_legacy();
        push(std::move(work));
    }
}

void Stream::push(Work work) { push(std::move(work), host_now_s()); }

void Stream::push(Work work, double at_s) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({++n_pushed_, std::move(work), at_s});
    more_.notify_one();
}

Point Stream::tail() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {shared_from_this(), n_pushed_};
}

Moment Stream::mark() {
    if (!has_clock()) {
        return {tail(), nullptr};
    }
    const auto                  passed = std::make_shared<double>(0);
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) {  // its thread may have ended
        return {{shared_from_this(), n_pushed_}, nullptr};
    }
    // An item that notes the time and begins as soon as the one before it ends.
    queue_.push_back({++n_pushed_, [passed] { *passed = *stream_now_s; }, 0});
    more_.notify_one();
    return {{shared_from_this(), n_pushed_}, passed};
}

void Stream::want() {
    std::lock_guard<std::mutex> lock(mutex_);
    want_up_to(n_pushed_);
}

bool Stream::is_over() {
    std::lock_guard<std::mutex> lock(mutex_);
    want_up_to(n_pushed_);
    return n_done_ == n_pushed_;
}

void Stream::want_up_to(uint64_t n) {
    if (is_lazy && n_wanted_ < n) {
        n_wanted_ = n;
        more_.notify_one();
    }
}

void Stream::close() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
    more_.notify_one();
}

void Stream::run() {
    stream_now_s = &now_s_;
    for (;;) {
        Item item;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            more_.wait(lock, [&] {
                const bool is_due = !queue_.empty() && (!is_lazy || queue_.front().number <= n_wanted_);
                return is_closed_ || is_due;
            });
            if (queue_.empty()) {
                break;
            }
            item = std::move(queue_.front());
            queue_.pop_front();
        }
        if (jitter_us > 0 && random_() % 2) {
            std::this_thread::sleep_for(std::chrono::microseconds(random_() % jitter_us));
        }
        now_s_ = std::max(now_s_, item.at_s);
        item.work();
        item.work = nullptr;
        std::lock_guard<std::mutex> lock(mutex_);
        n_done_ = item.number;
        done_.notify_all();
    }
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(shared_from_this());
}

// The legacy stream and a device's blocking streams wait for each other.
void Stream::wait_for_legacy() {
    if (!is_blocking) {
        return;
    }
    std::vector<Moment> before;
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        const auto                  legacy = streams().legacy.find(device);
        if (legacy == streams().legacy.end()) {
            return;
        }
        if (legacy->second.get() != this) {
            before.push_back(legacy->second->mark());
        } else {
            for (const auto & other : streams().all) {
                if (other->is_blocking && other->device == device && other.get() != this) {
                    before.push_back(other->mark());
                }
            }
        }
    }
    for (const auto & moment : before) {
        push([moment] { moment.wait_in_stream(); });
    }
}

StreamPtr legacy_stream(int device) {
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        const auto                  found = streams().legacy.find(device);
        if (found != streams().legacy.end()) {
            return found->second;
        }
    }
    const StreamPtr             made = Stream::make(device, true);
    made->is_legacy                  = true;
    std::lock_guard<std::mutex> lock(streams().mutex);
    return streams().legacy.emplace(device, made).first->second;
}

void wait_for_device(int device) {
    std::vector<Moment> tails;
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        for (const auto & stream : streams().all) {
            if (stream->device == device) {
                tails.push_back(stream->mark());
            }
        }
    }
    for (const auto & tail : tails) {
        tail.wait_on_host();
    }
}

// -- captures --------------------------------------------------------------------------------------

thread_local CaptureMode thread_mode = CaptureMode::global;

namespace {

template <typename Forbids>
bool invalidate(Forbids forbids) {
    std::lock_guard<std::mutex> lock(streams().mutex);
    bool                        found = false;
    for (const auto & capture : streams().captures) {
        if (forbids(*capture)) {
            capture->is_valid = false;
            found             = true;
        }
    }
    return found;
}

}  // namespace

bool forbids_unsafe() {
    if (thread_mode == CaptureMode::relaxed) {
        return false;
    }
    return invalidate([](const Capture & capture) {
        if (capture.thread == std::this_thread::get_id()) {
            return capture.mode != CaptureMode::relaxed;
        }
        return capture.mode == CaptureMode::global && thread_mode == CaptureMode::global;
    });
}

bool forbids_legacy(const Stream & stream) {
    return stream.is_legacy && invalidate([&](const Capture & capture) {
        return capture.is_blocking && capture.device == stream.device;
    });
}

bool forbids_device_sync(int device) {
    return invalidate([&](const Capture & capture) { return capture.device == device; });
}

void begin_capture(const StreamPtr & stream, CaptureMode mode) {
    auto capture         = std::make_shared<Capture>();
    capture->mode        = mode;
    capture->device      = stream->device;
    capture->is_blocking = stream->is_blocking;
    stream->capture      = capture;
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().captures.insert(capture);
}

void end_capture(const CapturePtr & capture) {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().captures.erase(capture);
    for (const auto & stream : streams().all) {
        if (stream->capture == capture) {
            stream->capture = nullptr;
        }
    }
}

}  // namespace standin
