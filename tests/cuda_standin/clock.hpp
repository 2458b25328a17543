// A virtual clock: how long the same calls would take on a card with given rates.
//
// It is on if STANDIN_CLOCK is set. The time of a host thread is the processor time that it spends outside of the
// stand-in, plus a fixed time for each call, plus its waits. A stream's time is that of its items, each of which
// begins when the item before it ends, and not before the host enqueued it.
#pragma once
#include "standin.hpp"

#include <map>

namespace standin {

// Rates of a card, in bytes/s and operations/s, and fixed times in seconds.
#define STANDIN_RATES(X)                                                                                   \
    X(vram_bytes_per_s, 800e9)                                                                             \
    X(flops, 40e12)             /* of products, in whole prompts */                                        \
    X(attention_flops, 56e12)                                                                              \
    X(link_bytes_per_s, 25e9)   /* pinned memory, each direction; also between two devices */              \
    X(staging_bytes_per_s, 10e9) /* the host's copies between pageable memory and the driver's buffer */   \
    X(kernel_s, 2.4e-6)         /* of each kernel, beside its bytes or operations */                       \
    X(copy_s, 2e-6)             /* of each copy on its engine, beside its bytes */                         \
    X(launch_call_s, 2.2e-6)    /* on the host: to launch a kernel */                                      \
    X(graph_call_s, 6e-6)       /* on the host: to launch a graph */                                       \
    X(graph_node_call_s, 0.3e-6) /* on the host: for each node of a graph that is instantiated or updated */ \
    X(copy_call_s, 2.2e-6)      /* on the host: to enqueue a copy or a memset */                           \
    X(event_call_s, 0.6e-6)     /* on the host: to record an event or let a stream wait for one */         \
    X(sync_call_s, 5e-6)        /* on the host: from the end of what it waits for until it goes on */      \
    X(idle_sync_call_s, 1e-6)   /* on the host: to wait for what is over */                                \
    /* Only the price of split layers sets these two (scripts/lab/split_price.py). They are 0 otherwise. */ \
    X(copy_latency_s, 0)        /* from the end of a copy on its engine until its stream goes on */        \
    X(event_wait_s, 0)          /* from an event until a stream that waits for it goes on */               \
    /* Of cuStreamWriteValue32 and cuStreamWaitValue32. scripts/lab/split_price.py has the sources. */      \
    X(value_write_s, 3e-6)      /* of the write in its stream, until the host can see it */                \
    X(value_wait_s, 3e-6)       /* from the host's write until the stream goes on */                       \
    X(value_call_s, 1e-6)       /* on the host: to enqueue one of them */                                  \
    X(mapped_s, 1.5e-6)         /* of a kernel's first access to pinned memory, beside its bytes */        \
    X(mapped_share, 1)          /* share of an idle link that a kernel's accesses to pinned memory fill */ \
    X(mapped_beside, 0.5)       /* the same while a copy in the same direction runs */                     \
    X(poll_s, 0.5e-6)           /* on the host: until a loop sees what a stream wrote */                   \
    /* Of the CPU that computes experts (standin_compute). */                                              \
    X(host_expert_s, 40e-6)     /* of one expert of one token */                                           \
    X(host_graph_s, 5e-6)       /* to begin a graph and to end it, on all threads */                       \
    X(host_scale, 1)            /* the host's time in the processor time that was measured here */

struct Rates {
#define X(name, value) std::atomic<double> name{value};
    STANDIN_RATES(X)
#undef X
};
extern Rates & rates;

bool   has_clock();
double host_now_s();               // of the calling thread, which is inside a HostCall
void   host_wait_until(double s);  // the calling thread goes on then, at the earliest

// A call into the stand-in. What the thread does until the end of it is no time of the host: `cost_s` is.
class HostCall {
  public:
    explicit HostCall(double cost_s = 0);
    ~HostCall();
    HostCall(const HostCall &)             = delete;
    HostCall & operator=(const HostCall &) = delete;
};

// The time of the stream whose item runs on this thread.
extern thread_local double * stream_now_s;

// Lets the running item take this long.
void spend(double s);

// Lets the running item, a kernel, read pinned memory over a device's link (`to_device`) or write it (`to_host`). While
// a copy in the same direction runs, it has `mapped_beside` of the link. Copies that come later lose the link for its
// bytes, so the link moves as many bytes in all.
void access_over_link(int device, Direction direction, double bytes);

// A line in the file STANDIN_TIMELINE, if it is set: what ran where, from when to when, and its bytes or kernels.
void note(const char * what, int device, double begin_s, double end_s, size_t amount);

// Something that does one thing at a time, in the order in which things become ready.
class Unit {
  public:
    // Takes the first free time of that length from `ready_s` on. Returns its end.
    double take(double ready_s, double length_s);

    // Work that would take `length_s` of the whole unit begins at `ready_s`. It has `share` of the unit, and
    // `beside_share` while the unit is busy. Returns its end. Takes no time of the unit.
    double end_beside(double ready_s, double length_s, double share, double beside_share);

  private:
    std::mutex               mutex_;
    std::map<double, double> busy_;  // ends by beginnings
};

}  // namespace standin
