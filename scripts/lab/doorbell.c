/* Prototypes of decodes whose layers are split between device and CPU.
 *
 * The calls of the CUDA runtime and driver are those of the real thing, in their order. Each layer's kernels are
 * replaced by work of a given length. What kernels do with rows is replaced by moves of real bytes, so that a missing
 * wait gives wrong numbers: each layer adds 1 to a row, and the host does the adding. It runs on the CUDA stand-in
 * only. scripts/lab/split_price.py compiles it and gives it the lengths.
 *
 * WAITING is today's way, by which the prototype is compared with the program itself:
 *
 *     compute   attention, router | copy ids and rows to the host |             products | copy rows, place them
 *     host                                      synchronise, divide, submit, CPU's pairs, submit twice
 *
 * In DOORBELL no call waits, and the host enqueues layers ahead:
 *
 *     compute   attention, router | record "routed" | products | wait for "landed", place rows
 *     doorbell  wait for "routed", copy ids and rows to the host, write `rung`,
 *               wait until the host has written `answered`, copy rows to the device, record "landed"
 *     host      spin on `rung`, divide, CPU's pairs, write `answered`, enqueue a later layer
 *
 * With `is_pinned`, kernels write ids and rows to pinned memory, and read the CPU's rows from there, in place of copies.
 * So the doorbell's stream only passes words and events on.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <string.h>

void standin_compute_for(CUstream stream, double s);
void standin_move(CUstream stream, void *to, const void *from, size_t n_bytes);
void standin_write_word(uint32_t *word, uint32_t value);
void standin_await_word(const uint32_t *word, uint32_t value);
void standin_wait_until_s(double s);
double standin_now_s(void);

struct layer { double before_s, products_s, host_s; }; /* of the device, of the device, of the host */

enum { WAITING, DOORBELL };
enum { MOST_AHEAD = 64 };

struct decoder {
    int64_t way, is_pinned;
    int64_t n_layers, n_ahead; /* layers that are enqueued before the host answers the first of them */
    const struct layer *layers;
    int64_t row_bytes, n_rows; /* of the CPU's results, and how many cross the link */
    double divide_s, after_s;  /* the host's time between reading a layer's ids and computing, and after that */
    double submit_s, launch_s; /* the host's time for submitting a graph, beside the runtime's call; of a kernel's */
    cudaStream_t compute, doorbell;
    cudaEvent_t routed[MOST_AHEAD], landed[MOST_AHEAD];
    char *state, *landing;     /* in device memory: the row that layers pass on, and the CPU's rows of layers */
    char *read, *results;      /* in pinned memory: one place for each layer that is under way */
    uint32_t *rung, *answered; /* in pinned memory */
    uint32_t n_done;              /* layers of all decodes so far */
};

static void pass(double s) { standin_wait_until_s(standin_now_s() + s); }

static int copied(void *to, const void *from, int64_t n_bytes, int kind, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, (size_t)n_bytes, (enum cudaMemcpyKind)kind, stream);
}

static void submit(struct decoder *d, double s) {
    pass(d->submit_s);
    standin_compute_for(d->compute, s);
}

/* The device's work on layer `n` up to its router. */
static int route(struct decoder *d, int64_t n) {
    int64_t place = n % d->n_ahead, one = d->row_bytes;
    submit(d, d->layers[n].before_s);
    if (d->way == DOORBELL) standin_move(d->compute, d->landing, d->landing, 4); /* looks up the slots of ids */
    if (d->is_pinned) standin_move(d->compute, d->read + place * one, d->state, (size_t)one);
    return d->way == DOORBELL ? cudaEventRecord(d->routed[place], d->compute) : 0;
}

/* Let the device place the CPU's rows of layer `n`. */
static int place_rows(struct decoder *d, int64_t n) {
    int64_t all = d->row_bytes * d->n_rows, place = n % d->n_ahead;
    standin_move(d->compute, d->state, (d->is_pinned ? d->results : d->landing) + place * all, (size_t)all);
    return 0;
}

static int enqueue(struct decoder *d, int64_t n) {
    int64_t place = n % d->n_ahead, one = d->row_bytes, all = one * d->n_rows;
    uint32_t number = d->n_done + (uint32_t)n + 1;
    CUdeviceptr rung = (CUdeviceptr)d->rung, answered = (CUdeviceptr)d->answered;
    int bad = route(d, n);
    submit(d, d->layers[n].products_s);
    bad |= cudaStreamWaitEvent(d->doorbell, d->routed[place], 0);
    if (!d->is_pinned) bad |= copied(d->read + place * one, d->state, one, cudaMemcpyDeviceToHost, d->doorbell);
    bad |= cuStreamWriteValue32(d->doorbell, rung, number, CU_STREAM_WRITE_VALUE_DEFAULT);
    bad |= cuStreamWaitValue32(d->doorbell, answered, number, CU_STREAM_WAIT_VALUE_GEQ);
    if (!d->is_pinned)
        bad |= copied(d->landing + place * all, d->results + place * all, all, cudaMemcpyHostToDevice, d->doorbell);
    bad |= cudaEventRecord(d->landed[place], d->doorbell);
    bad |= cudaStreamWaitEvent(d->compute, d->landed[place], 0);
    return bad | place_rows(d, n);
}

/* The CPU's pairs of layer `n`. */
static void compute(struct decoder *d, int64_t n) {
    int64_t place = n % d->n_ahead;
    int32_t *row = (int32_t *)(d->results + place * d->row_bytes * d->n_rows);
    pass(d->layers[n].host_s);
    memcpy(row, d->read + place * d->row_bytes, (size_t)d->row_bytes);
    row[0]++;
}

static int decode_with_doorbell(struct decoder *d) {
    int64_t n_enqueued = 0;
    int bad = 0;
    for (; n_enqueued < d->n_ahead && n_enqueued < d->n_layers; n_enqueued++) bad |= enqueue(d, n_enqueued);
    for (int64_t n = 0; n < d->n_layers && !bad; n++) {
        standin_await_word(d->rung, d->n_done + (uint32_t)n + 1);
        pass(d->divide_s);
        compute(d, n);
        standin_write_word(d->answered, d->n_done + (uint32_t)n + 1);
        pass(d->after_s);
        if (n_enqueued < d->n_layers) bad |= enqueue(d, n_enqueued++);
    }
    return bad;
}

static int decode_waiting(struct decoder *d) {
    int bad = 0;
    for (int64_t n = 0; n < d->n_layers && !bad; n++) {
        int64_t place = n % d->n_ahead, one = d->row_bytes, all = one * d->n_rows;
        bad |= route(d, n);
        if (!d->is_pinned) { /* ids, then rows */
            bad |= copied(d->read + place * one, d->state, 32, cudaMemcpyDeviceToHost, d->compute);
            bad |= copied(d->read + place * one, d->state, one, cudaMemcpyDeviceToHost, d->compute);
        }
        bad |= cudaStreamSynchronize(d->compute);
        pass(d->divide_s);
        /* Slot numbers. A kernel could read them from pinned memory, too. */
        if (!d->is_pinned) bad |= copied(d->landing, d->read, 32, cudaMemcpyHostToDevice, d->compute);
        submit(d, d->layers[n].products_s);
        compute(d, n);
        pass(d->after_s);
        if (!d->is_pinned) {
            bad |= copied(d->landing + place * all, d->results + place * all, all, cudaMemcpyHostToDevice, d->compute);
            pass(d->submit_s + d->launch_s); /* a graph of one kernel, which is launched by itself */
        }
        bad |= place_rows(d, n);
    }
    return bad;
}

/* Decode a token. Returns 0, or not 0 if the runtime refused a call. */
int doorbell_decode(struct decoder *d) {
    int bad = d->way == DOORBELL ? decode_with_doorbell(d) : decode_waiting(d);
    if (bad) return bad;
    d->n_done += (uint32_t)d->n_layers;
    return (int)cudaStreamSynchronize(d->compute); /* for the logits */
}

static int made(void *at, int64_t n_bytes, int is_pinned) {
    return is_pinned ? cudaHostAlloc(at, (size_t)n_bytes, 0) : cudaMalloc(at, (size_t)n_bytes);
}

/* Allocate memory, streams and events of a decoder whose numbers are filled. Returns 0, or not 0 if one is refused. */
int doorbell_open(struct decoder *d) {
    int64_t n = d->n_ahead, one = d->row_bytes, all = one * d->n_rows;
    if (n < 1 || n > MOST_AHEAD || d->n_rows < 1 || one < 32) return 1;
    int bad = made(&d->state, all, 0) | made(&d->landing, n * all, 0);
    bad |= made(&d->read, n * one, 1) | made(&d->results, n * all, 1) | made(&d->rung, 64, 1) | made(&d->answered, 64, 1);
    if (bad) return bad;
    bad |= cudaStreamCreateWithFlags(&d->compute, cudaStreamNonBlocking);
    bad |= cudaStreamCreateWithFlags(&d->doorbell, cudaStreamNonBlocking);
    for (int64_t i = 0; i < n; i++) {
        bad |= cudaEventCreateWithFlags(&d->routed[i], cudaEventDisableTiming);
        bad |= cudaEventCreateWithFlags(&d->landed[i], cudaEventDisableTiming);
    }
    return bad | cudaMemset(d->state, 0, (size_t)all) | cudaDeviceSynchronize();
}

/* The number of layers whose results arrived, in all decodes so far: n_done, if no wait is missing. -1: an error. */
int64_t doorbell_sum(struct decoder *d) {
    int32_t sum = 0;
    if (copied(d->read, d->state, sizeof sum, cudaMemcpyDeviceToHost, d->compute)) return -1;
    if (cudaStreamSynchronize(d->compute)) return -1;
    memcpy(&sum, d->read, sizeof sum);
    return sum;
}
