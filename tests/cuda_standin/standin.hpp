// A stand-in for the CUDA runtime, so that the real ggml-cuda runs on a machine without a GPU.
//
// Kernels compute nothing. ggml-cpu computes each graph's numbers instead, on the same memory and in
// the order of the same CUDA streams (numbers.cpp), so that a missing wait gives wrong numbers.
// docs/gpu.md says what this shows, what it does not show, and which variables change it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace standin {

// -- settings --------------------------------------------------------------------------------------

long   number_setting(const char * name, long otherwise);
size_t bytes_setting(const char * name, size_t otherwise);  // a number with K, M, G or nothing
int    compute_capability();                                // STANDIN_COMPUTE, as 89 for 8.9
int    driver_version();                                    // STANDIN_DRIVER: the newest CUDA, as 12040 for 12.4
bool   skips_products();                                    // STANDIN_SKIP=products
bool   is_ignored(const char * what);                       // listed in STANDIN_IGNORE

constexpr char device_name[] = "stand-in H100";

// -- counters --------------------------------------------------------------------------------------

#define STANDIN_COUNTERS(X)                                                                        \
    X(launches)      /* kernels outside of captures */                                             \
    X(captured)      /* kernels recorded by a capture */                                           \
    X(graph_launches) X(graph_kernels)                                                             \
    X(captures) X(instantiations) X(instances_freed) X(updates) X(failed_updates)                  \
    X(cublas_calls)                                                                                \
    X(h2d) X(h2d_bytes) X(d2h) X(d2h_bytes) X(d2d) X(peer_copies) X(memsets)                       \
    X(pageable)      /* copies from or to pageable memory, for which the caller waits */           \
    X(stream_syncs) X(event_syncs) X(device_syncs) X(event_records) X(event_waits)                 \
    X(value_writes) X(value_waits)                                                                 \
    X(mallocs) X(host_allocs) X(host_registers)                                                    \
    X(out_of_memory)                                                                               \
    X(errors)        /* calls refused for another reason */                                        \
    X(bad_addresses) /* nodes whose tensors are not in their device's memory */                    \
    X(stale_uids)    /* graphs with the uid of a graph before that was another one */              \
    X(bad_ids)       /* products with ids out of range, or that name an expert twice for a token */

struct Counters {
#define X(name) std::atomic<uint64_t> name{0};
    STANDIN_COUNTERS(X)
#undef X
};
extern Counters & counters;

// True if this call was chosen to fail, by standin_fail or STANDIN_FAIL=CALL:N.
bool fails(const char * call);

// -- memory ----------------------------------------------------------------------------------------

int          n_devices();
size_t       total_bytes();
size_t       free_bytes(int device);
void *       device_alloc(int device, size_t size);  // NULL if it exceeds the device's memory
bool         device_free(void * address);
int          device_of(const void * address, size_t size);  // -1 unless the whole range is on one
void *       pinned_alloc(size_t size);
bool         pinned_free(void * address);
bool         pin(void * address, size_t size, bool is_registered = true);  // false if a part is pinned
bool         unpin(void * address);
bool         is_pinned(const void * address, size_t size);
bool         is_registered(const void * address);  // pinned by cudaHostRegister

// -- streams ---------------------------------------------------------------------------------------

struct Stream;
using StreamPtr = std::shared_ptr<Stream>;
using Work      = std::function<void()>;

// A place in a stream's queue. It is passed when the first `n` items are complete.
struct Point {
    StreamPtr stream;
    uint64_t  n = 0;

    void wait() const;
};

// A place in a stream's queue, and the virtual time at which it is passed (clock.hpp).
struct Moment {
    Point                   point;
    std::shared_ptr<double> passed_s;  // NULL without a clock

    void wait_on_host() const;
    void wait_in_stream() const;
};

// A recorded call. Graphs can replace each other if the names of their calls agree.
struct Node {
    std::string name;
    Work        work;  // empty for kernels, which compute nothing
};

struct Graph {
    std::vector<Node> nodes;  // in the order of the calls, whatever their stream
};
using GraphPtr = std::shared_ptr<Graph>;

enum class CaptureMode { global, thread_local_, relaxed };  // the runtime's numbers

struct Capture {
    GraphPtr          graph = std::make_shared<Graph>();
    CaptureMode       mode;
    int               device;
    bool              is_blocking;  // its stream is ordered with the legacy stream
    std::thread::id   thread        = std::this_thread::get_id();
    std::atomic<bool> is_valid{true};
};
using CapturePtr = std::shared_ptr<Capture>;

// A queue with a thread that takes its items in order.
struct Stream : std::enable_shared_from_this<Stream> {
    static StreamPtr make(int device, bool is_blocking);
    Stream(int device, bool is_blocking) : device(device), is_blocking(is_blocking) {}

    void  call(const std::string & name, Work work);  // records it during a capture, else queues it
    void  push(Work work);                            // queues it, capture or not
    void  push(Work work, double at_s);               // ... and it could begin at that virtual time
    Point tail();                                     // behind everything that is queued
    Moment mark();                                    // the same, with its virtual time
    void  want();                                     // runs everything that is queued, if it is lazy
    bool  is_over();                                  // true if nothing is queued or running
    void  close();                                    // ends the thread when the queue is empty

    const int  device;
    const bool is_blocking;  // ordered with the legacy stream
    bool       is_legacy = false;
    CapturePtr capture;

  private:
    friend struct Point;
    void run();
    void wait_for_legacy();
    void want_up_to(uint64_t n);  // with the mutex held

    struct Item {
        uint64_t number;
        Work     work;
        double   at_s;  // virtual time at which the host enqueued it
    };

    std::mutex              mutex_;
    std::condition_variable more_, done_;
    std::deque<Item>        queue_;
    uint64_t                n_pushed_ = 0, n_done_ = 0, n_wanted_ = 0;
    bool                    is_closed_ = false;
    double                  now_s_     = 0;  // virtual time at which its last item ended
    std::mt19937            random_;
};

// -- copy engines ----------------------------------------------------------------------------------

enum class Direction { to_device, to_host };

// Returns the work of a copy between host and device, which takes its turn on the device's engine.
// Records that the copy was enqueued, if copies are recorded.
Work on_engine(Direction direction, const Stream & stream, const void * handle, size_t bytes, bool is_pinned,
               Work copy);

// --------------------------------------------------------------------------------------------------

StreamPtr legacy_stream(int device);
void      wait_for_device(int device);
void      begin_capture(const StreamPtr & stream, CaptureMode mode);
void      end_capture(const CapturePtr & capture);  // its streams run again

// Each of these is true if a capture forbids the call. The capture is then invalid.
bool forbids_unsafe();                  // calls like cudaMalloc, according to the capture modes
bool forbids_legacy(const Stream & stream);  // work on the legacy stream
bool forbids_device_sync(int device);

// -- the thread that calls -------------------------------------------------------------------------

extern thread_local CaptureMode thread_mode;

StreamPtr stream_of(void * handle);  // a cudaStream_t
int       current_device();
void      count_kernel(const StreamPtr & stream, const char * name);
// A line in the file STANDIN_TRACE, if it is set.
void trace(const char * what, const void * stream, size_t bytes = 0, const char * name = "");

// While a graph is submitted whose numbers ggml-cpu will compute, copies inside the device and
// memsets write nothing, and `before_read` is called before bytes are copied to the host.
struct Submission {
    virtual void before_read(const void * device_address) = 0;
    virtual void launched(size_t n_kernels)               = 0;
    virtual ~Submission()                                 = default;
};
extern thread_local Submission * submission;
extern thread_local void *       last_stream;  // the handle that this thread used last

}  // namespace standin
