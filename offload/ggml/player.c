/* Plays programs: what repeats identically for each layer of each small decode.
 *
 * Python decides. It compiles a graph to a program (offload/stream/program.py) and calls `player_play`.
 * That function returns when the decode is done, when something failed, or when an instruction needs
 * Python (the codes YIELD_...). After a yield, Python calls it again, and it goes on where it stopped.
 *
 * The file links against nothing but libc and libm. All functions of ggml are pointers in `struct calls`.
 * Every field of a struct is 8 bytes wide, so that offload/ggml/player.py can mirror it. Python owns
 * all structs and arrays, and keeps them alive while a program exists. The player trusts addresses, and
 * the sizes of arrays that the structs name. It checks all other numbers before it uses them as an index.
 *
 * A program is an array of instructions of four numbers: {operation, a, b, c}. `player_check` refuses
 * a program that names a layer, a part or a node that does not exist. The instructions of one layer:
 *
 *     SUBMIT part, other part, layer   submit the nodes up to the layer's first product: whichever of
 *                                      the parts begins at the first node not submitted. `layer`: the
 *                                      layer whose slots these nodes read, or -1.
 *     READ layer          wait for the device, and read the router's ids and the experts' rows
 *     RECORD layer        record the ids in the layer's routing record, if recording is on
 *     DIVIDE layer        choose a side for each expert; upload slot numbers in place of the ids
 *     ARRIVE layer, nth   let Python wait for the copies of the nth product, if some were streamed
 *     OVERLAP part, -1, layer   submit the layer's products, if the CPU computes some experts. This and
 *                         HOST are for split layers only.
 *     HOST layer          compute the CPU's experts, and place their rows
 *     PYTHON stop         let Python do this stop and its next neighbours, which are not in the program. After the
 *                         last stop of all, Python submits the rest, too.
 *     WHOLE part          if `whole` is set: submit the whole graph, and go to END. All experts of all
 *                         layers are in slots, in order, so that nodes may read the router's own ids.
 *     AHEAD segment       submit the segment's nodes, whose layers find their slots on the device. Then read
 *                         the ids of all its layers at once. If an expert was in no slot, go back to READ
 *                         of its layer. Otherwise go on at READ of the next layer, or at END.
 *     RING                compute all layers without a wait of the host for the device, if `bell` is set (below)
 *     END n               the graph has n nodes, and all are submitted
 */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { OP_END, OP_SUBMIT, OP_READ, OP_RECORD, OP_DIVIDE, OP_ARRIVE, OP_OVERLAP, OP_HOST, OP_PYTHON, OP_WHOLE, OP_AHEAD, OP_RING, N_OPS };
enum {
    DONE,            /* the program has ended */
    FAILED,          /* the device returned `status` */
    FAILED_ON_CPU,   /* the CPU returned `status` for its experts of `layer` */
    FAILED_TO_PLACE, /* the device returned `status` for placing rows of `layer` */
    WRONG_ID,        /* the router chose expert `status`, which `layer` does not have */
    WRONG_PROGRAM,   /* the program is wrong at instruction `at` */
    DRIVER_FAILED,   /* the driver refused a call of the doorbell with the error `status` */
    YIELD_SUBMIT,    /* Python has to submit the nodes up to `until` */
    YIELD_STOP,      /* Python has to do stop number `until` */
    YIELD_CLOCK,     /* a layer is reached, and a clock is set */
    YIELD_NEED,      /* Python has to enter the cut: some of the layer's `experts` are in no slot. It calls
                        `player_send` before it enqueues their copies. */
    YIELD_WAIT,      /* Python has to submit up to product `until`, and wait for its copies */
    YIELD_ISSUE,     /* Python has to enqueue the layer's promotions. Layers from `until` on may need copies. */
    YIELD_FETCH,     /* Python has to begin to read experts from the disk, and may fill `kinds` */
    YIELD_LATE       /* Python has to wait for some of the `late` experts */
};
enum { BROKEN = -1 };  /* `status` of DRIVER_FAILED: the watchdog has released the device */
enum { HIT, STREAMED, ON_HOST, LATE }; /* LATE: on the host, after it has been read from the disk */
enum { STAY, ALL_ON_DEVICE, BY_COSTS }; /* how experts are divided */
enum { FREE, LOADING, READY, IN_USE, CLOSED };
enum { ABORTED = 1 }; /* ggml's status of a computation that a signal ended */
enum { MOST_RANGES = 1 << 12 }; /* as in offload/ggml/graph.py */

/* The compiler is told SMALL_BATCH of offload/decode.py. */
enum { MOST_TOKENS = SMALL_BATCH };
_Static_assert(1 <= MOST_TOKENS && MOST_TOKENS <= 64, "counts of rows are kept on the stack, and tables have as many lines");

#define YIELDS_AFTER_S 200e-6 /* a host that waits for a word lets other threads run after this time */
#define ASKS_EACH_S 1.0       /* ... and asks the driver for errors after this time */

typedef int64_t number;

struct calls {
    int (*compute)(void *stream, void *graph);
    void (*set)(void *stream, void *tensor, const void *from, size_t offset, size_t n_bytes);
    void (*get)(void *stream, const void *tensor, void *to, size_t offset, size_t n_bytes);
    void (*synchronize)(void *stream);
    void (*set_n_threads)(void *stream, int n);
    void (*set_threadpool)(void *stream, void *pool);
    number at_ne, at_nb, at_data, at_buffer, at_parameters; /* offsets in ggml's struct of a tensor */
};

/* The counts of a decode. Python adds them to its own. */
struct counts {
    number cuts, bands, router_reads, hits, misses, prefetched_used, n_pairs_hit, n_pairs_streamed,
        n_pairs_host, n_recorded, n_nodes_ahead, split_layers, whole_graphs, n_repairs,
        layers_ahead, layers_repeated, layers_missed, n_between, layers_rung, rows_by_kernels;
    double host_s, split_s, step_s, idle_s, native_s, between_s, left_s;
};

struct part { /* nodes [first, end) as a graph */
    number first, end;
    void *graph;
    uint64_t *uid;
    uint64_t first_uid; /* uid of the part if its nodes see the first range of slots; 0: it has none */
};

struct redirect { void **source; void *own, *other; };      /* a pointer in a tensor, and its two values */
struct view { char *tensor, *base; number stride, axis; };  /* a tensor that shows a range of slots */

struct host { /* the CPU's graph for layers of one form, and the graph that places its rows */
    void *graph;
    number most, row_bytes, rows_per_token, n_counts, n_sources, n_scales;
    int32_t *ids, *places;
    char *inputs, *rows;
    number **counts;
    void ***sources;
    float **scales;
    void *staging, *results, *placing; /* tensor on the device, host memory, graph of one SET_ROWS */
    number header_bytes, out_bytes, n_out_counts, n_into_counts;
    number **out_counts, **into_counts;
    char *into, *set_rows; /* the tensors that move to the output */
    char *down;            /* the tensor that the CPU's rows are computed into */
};

struct costs { /* tables of offload/schedule/division.py */
    number n_lines, n_ends, n_rows, n_copies;
    const double *by_rows_s, *work, *copies_s, *idle;
    double idle_fixed_s, copy_s;
};

struct layer {
    number layer, cut, at, last, n_experts, n_used, n_tokens, n_slots, n_own_slots, may_repeat, n_ahead, n_readers;
    void *ids_tensor, *ids_at;
    number ids_bytes, ids_stride;
    void *rows_tensor, *rows_to;
    number rows_bytes;
    void *slot_ids_tensor;
    int32_t *slot_ids;
    const int32_t *slot_of;  /* slot of each expert, or -1 */
    const int32_t *state;    /* state of each slot */
    number *last_use;        /* last use of each slot */
    int8_t *reason;          /* number of the reason of each slot's copy, until its first use */
    double *rank;            /* the cache rule's rank of each expert */
    float *score;            /* the guess's score of each expert */
    int16_t *by_token;       /* 1 + the experts that each token chose last */
    number *likeliest;       /* the expert without a slot that is likeliest to be used again */
    double *likeliest_score;
    int16_t *record;         /* ring of recorded tokens */
    number *recorded;        /* position in the ring, tokens */
    number n_record;         /* tokens in the ring */
    number n_redirects, n_reads, n_views, home; /* home: first slot of the layer's experts in order, or -1 */
    struct redirect *redirects; /* the first n_reads read slots, the others slot numbers */
    struct view *views;
    struct host *host;       /* NULL: the layer is not split, and the device computes all experts */
    void **weights;          /* sources of the host graph */
    float **scale_tables;
    void *output;
    /* Set in each decode: */
    number first_slot, n_slots_seen; /* range of slots that the nodes see */
    number n_pairs, n_on_device, n_on_host;
    number n_early;                  /* the first of these pairs, whose experts are in memory */
    number waits;                    /* 1: Python has entered the cut, and copies may be under way */
    number missed;                   /* 1: the CPU computes experts that are in no slot */
    double split_at_s;
    number issues;                   /* 1: promotions are due */
};

/* Layers [first, end) that are submitted before their ids are known. `part` has their nodes, and the nodes up to
 * the products of layer `end`, if there is one. `other` replaces it if the CPU computed experts of the layer
 * before. */
struct segment { number part, other, first, end, next; }; /* next: instruction after it, if no expert was missing */

struct ahead { /* memory for computing layers of one graph ahead; all graphs share the tables */
    struct segment *segments;
    number n_segments;
    struct redirect *moved; /* pointers to the results that a repair reads, and to the memory that keeps them */
    number n_moved;
    const number *resume;   /* [layers] number of each layer's READ instruction */
    void *ids_tensor;       /* all layers' ids in device memory, and their copy on the host */
    char *ids;
    number ids_bytes;
    const number *ids_at, *table_at; /* [layers] offset of a layer's ids, bytes, and its first entry in the table */
    void *table_tensor;              /* the device's table: slot of each expert, or of another if it has none */
    int32_t *table;
    uint8_t *there;                  /* 1: the table's slot holds the expert */
    uint8_t *taken;                  /* [slots] 0, except while a layer's experts get slots */
    number n_table, n_taken;
};

/* A stream of ours beside the backend's, two events that both know, and two words in pinned memory. */
struct bell {
    int (*wait_for)(void *stream, void *event, unsigned flags);
    int (*record)(void *event, void *stream);
    int (*write)(void *stream, uint64_t word, uint32_t value, unsigned flags);
    int (*wait)(void *stream, uint64_t word, uint32_t value, unsigned flags);
    int (*query)(void *stream);
    void (*backend_record)(void *event, void *stream);
    void (*backend_wait)(void *stream, void *event);
    int (*see)(const uint32_t *word, uint32_t value, int waits); /* both NULL, except under a virtual clock */
    void (*tell)(uint32_t *word, uint32_t value);
    void *stream;
    void *routed, *landed;             /* the driver's events: a layer's ids are there; the CPU's rows are there */
    void *backend_routed, *backend_landed; /* the backend's handles of them */
    uint32_t *rung, *answered;         /* the number of the last layer that the device, and the host, has told */
    number n_told;                     /* layers of all decodes so far, as a word counts them */
    number n_ahead;                    /* layers that are enqueued before the host answers the first of them */
    /* For the watchdog, which is another thread: */
    number n_layers;                   /* of the decode that is under way; 0: none is */
    number n_steps;                    /* layers that were enqueued, and layers that were answered */
    volatile number is_broken;         /* 1: the watchdog has answered all layers, since nothing went on */
};

struct ringing { /* of one layer */
    number products, rest; /* parts: the layer's products; from the CPU's rows to the next layer's router */
    /* Numbers of the rows that the output and the CPU's results begin with, as the kernel counts them that fetches a
     * row for each pair. -1: it writes each row of the results to a place. */
    number device_row, host_row;
    const int32_t *ids;  /* where a kernel leaves the layer's ids and rows, in pinned memory */
    const char *rows;
};

struct event { number kind, layer, a, b; double start_s, end_s; };
enum { SUBMITTED, READ_IDS, COMPUTED, PLACED };

struct player {
    const struct calls *calls;
    void *stream, *cpu;
    const number *program;
    number n_words;
    struct part *parts;
    number n_parts;
    struct layer *layers;
    number n_layers, n_stops;
    struct costs *costs;
    number splitter;
    const volatile char *interrupt; /* not zero: a signal has asked to end the decode. May be NULL. */
    number n_threads[2];
    void *pools[2];
    number chosen; /* which of the pools the CPU's stream has */
    number recording, clocked, python_open, from_disk, whole;
    number clock_ns; /* time to read the thread's clock. Not 0: add up the time in ggml's functions. */
    /* of the cache rule, and of the guess */
    double half_life;
    number rule_used, rule_scan, rule_skipped;
    double decay;
    const number *token_rows; /* rows of the decode's tokens in `by_token`, if they are known */
    number n_token_rows, most_token_rows; /* `most_token_rows`: rows of each `by_token` */
    struct event *events;
    number most_events, n_events;
    struct counts counts;
    /* scratch, each with room for the layer with the most */
    int32_t *ids;      /* [pairs] */
    int32_t *rows;     /* [experts] tokens that use each expert */
    int32_t *used;     /* [experts] the experts that tokens use, ascending */
    uint8_t *resident; /* [experts] */
    uint8_t *kinds;    /* [experts] */
    int32_t *experts;  /* [experts] those of the device, then those of the CPU */
    int32_t *slots;    /* [experts + 2 * used] */
    int32_t *shown;    /* [experts] slot that the nodes see for each expert */
    int32_t *order;    /* [experts + 1] */
    double *ends;      /* [lines * (experts + 1)] */
    struct ahead *ahead; /* NULL: the program has neither AHEAD nor RING. RING uses its table and what it moves. */
    struct bell *bell;   /* NULL: RING does nothing in this decode */
    struct ringing *ringing; /* [layers] */
    number first_part;   /* part up to the first layer's products */
    number is_careful;   /* 1: no call of the backend is made while a stream waits for the host */
    int32_t *late;     /* [experts] experts that are being read, in the order of their arrival */
    int32_t *late_pairs; /* [pairs] their pairs, in the same order */
    number n_late, n_arrived, n_late_done; /* numbers of late experts: all, read, computed */
    number most_pairs, most_experts, most_lines;
    /* where the player is */
    number n_used; /* experts in `used` */
    number at, phase, done, open, layer, until, status, use, known; /* known: layer whose ids are read, or -1 */
    double read_s; /* clock time at which the device was seen to be idle; 0: it has work, or lacks an expert */
};

static double clock_s(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double now_s(void) { return clock_s(CLOCK_MONOTONIC); }

/* Read the clock of events, or the thread's own clock to add up the time in ggml's functions. */
static double began(const struct player *p) {
    return p->events ? now_s() : p->clock_ns ? clock_s(CLOCK_THREAD_CPUTIME_ID) : 0.0;
}

static void ended(struct player *p, number kind, number layer, number a, number b, double start_s) {
    if (!p->clock_ns && !p->events) return;
    double end_s = began(p);
    p->counts.native_s += end_s - start_s + 1e-9 * (double)p->clock_ns;
    if (p->events && p->n_events < p->most_events)
        p->events[p->n_events++] = (struct event){kind, layer, a, b, start_s, end_s};
}

static int interrupted(const struct player *p) { return p->interrupt && *p->interrupt; }

static number most(number a, number b) { return a > b ? a : b; }
static number least(number a, number b) { return a < b ? a : b; }

/* -- submitting -------------------------------------------------------------------------------- */

static void point(const struct layer *l, number n, int elsewhere) {
    for (number i = 0; i < n; i++) {
        const struct redirect *r = &l->redirects[i];
        *r->source = elsewhere ? r->other : r->own;
    }
}

static number range_step(const struct layer *l) { return most(1, l->n_slots / 16); }

/* Whether the layer's nodes see the layer's own slots, which hold its experts in order, and no others. */
static int sees_home(const struct layer *l) { return l->first_slot == l->home && l->n_slots_seen == l->n_experts; }

/* Return the number of the range of slots that the layer's nodes see, less than MOST_RANGES. */
static uint64_t range_number(const struct layer *l) {
    if (sees_home(l)) return MOST_RANGES - 1;
    return (uint64_t)(l->first_slot / range_step(l) * 64 + (l->n_slots_seen - 1) / range_step(l));
}

static int submit(struct player *p, const struct part *part) {
    if (interrupted(p)) return ABORTED;
    struct layer *l = p->open >= 0 ? &p->layers[p->open] : NULL;
    double start_s = began(p);
    uint64_t uid = part->first_uid;
    if (l) {
        if (uid) uid += range_number(l);
        point(l, l->n_redirects, 1);
    }
    *part->uid = uid;
    int status = p->calls->compute(p->stream, part->graph);
    if (p->read_s != 0.0) {
        p->counts.between_s += now_s() - p->read_s;
        p->counts.n_between++;
        p->read_s = 0.0;
    }
    if (l) {
        point(l, l->n_redirects, 0);
        if (l->last < part->end) p->open = -1;
    }
    p->done = part->end;
    ended(p, SUBMITTED, l ? l->layer : -1, part->first, part->end, start_s);
    return status;
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Copy a layer's ids from `from`, where they were read to, and check them. */
static int take_ids(struct player *p, const struct layer *l, const int32_t *from) {
    int32_t *to = p->ids;
    for (number t = 0; t < l->n_tokens; t++, from += l->ids_stride)
        for (number i = 0; i < l->n_used; i++) {
            if (from[i] < 0 || from[i] >= l->n_experts) {
                p->status = from[i];
                return WRONG_ID;
            }
            *to++ = from[i];
        }
    return DONE;
}

/* Read `n_bytes` of a tensor to the host, and the input rows of layer `l`'s experts if `l` is a split layer. */
static void read_back(struct player *p, const struct layer *l, void *tensor, void *to, number at, number n_bytes) {
    double start_s = began(p);
    p->calls->get(p->stream, tensor, to, (size_t)at, (size_t)n_bytes);
    if (l && l->host) p->calls->get(p->stream, l->rows_tensor, l->rows_to, 0, (size_t)l->rows_bytes);
    p->calls->synchronize(p->stream);
    p->read_s = now_s();
    ended(p, READ_IDS, l ? l->layer : -1, 0, 0, start_s);
    p->counts.router_reads++;
}

static void record(struct player *p, struct layer *l) {
    if (!p->recording || !l->record) return;
    number at = l->recorded[0];
    if (at < 0) at = 0;
    for (number t = 0; t < l->n_tokens; t++) {
        if (at >= l->n_record) at = 0;
        for (number i = 0; i < l->n_used; i++)
            l->record[at * l->n_used + i] = (int16_t)p->ids[t * l->n_used + i];
        at++;
    }
    l->recorded[0] = at;
    l->recorded[1] += l->n_tokens;
    p->counts.n_recorded += l->n_tokens;
}

/* -- dividing ---------------------------------------------------------------------------------- */

/* Choose the number of misses to stream: the same sums in the same order as division.py's. `order`: the
 * used experts, hits first, misses in the order of streaming. */
static number best_cut(struct player *p, const int32_t *order, number n_hits, number n_misses) {
    const struct costs *c = p->costs;
    number n = n_hits + n_misses, n_lines = c->n_lines, n_columns = n_misses + 1;
    double host_s = 0.0, device_s = 0.0, *ends = p->ends;
    const double *host_of = c->by_rows_s + n_lines * c->n_rows, *device_of = host_of + c->n_rows;
    for (number i = 0; i < n; i++) {
        host_s += host_of[p->rows[order[i]]];
        device_s += device_of[p->rows[order[i]]];
    }
    for (number line = 0; line < n_lines; line++) {
        const double *of = c->by_rows_s + line * c->n_rows, *copies = c->copies_s + line * c->n_copies;
        double sum = 0.0, work = c->work[line] * host_s;
        for (number i = 0; i < n_hits; i++) sum += of[p->rows[order[i]]];
        for (number j = 0; j <= n_misses; j++) {
            if (j) sum += of[p->rows[order[n_hits + j - 1]]];
            ends[line * n_columns + j] = copies[j] - sum + work;
        }
    }
    if (n_lines > c->n_ends) {
        for (number i = 0; i < c->n_ends * n_columns; i++)
            if (ends[c->n_ends * n_columns + i] < ends[i]) ends[i] = ends[c->n_ends * n_columns + i];
        for (number stage = 1; stage < c->n_ends; stage++)
            ends[stage * n_columns + n_misses] =
                c->idle_fixed_s + (double)n_misses * c->idle[2 * stage - 2] + c->idle[2 * stage - 1] * device_s;
    }
    ends[n_misses] = 0.0;
    if (!n_hits)
        for (number stage = 1; stage < c->n_ends; stage++) ends[stage * n_columns] = 0.0;
    number best = 0;
    double best_s = INFINITY, cpu_s = 0.0, other_s = 0.0;
    for (number j = 0; j < n_columns; j++) {
        double stages_s = ends[n_columns + j];
        for (number stage = 2; stage < c->n_ends; stage++)
            if (ends[stage * n_columns + j] > stages_s) stages_s = ends[stage * n_columns + j];
        double end_s = ends[j] > stages_s ? ends[j] : stages_s;
        if (end_s < best_s) best = j, best_s = end_s, cpu_s = ends[j], other_s = stages_s;
    }
    double left_s = ends[0]; /* the end if no miss is streamed */
    for (number stage = 1; stage < c->n_ends; stage++)
        if (ends[stage * n_columns] > left_s) left_s = ends[stage * n_columns];
    p->counts.left_s += left_s - best_s;
    double step_s = cpu_s > other_s ? cpu_s : other_s, idle_s = step_s - (double)best * c->copy_s;
    p->counts.step_s += step_s;
    p->counts.idle_s += idle_s > 0.0 ? idle_s : 0.0;
    return best;
}

static void by_costs(struct player *p, const struct layer *l, const int32_t *used, number n) {
    int32_t *order = p->order;
    number n_hits = 0, at = 0;
    if (l->n_tokens == 1) { /* misses in the order of the ids */
        for (number i = 0; i < n; i++)
            if (p->resident[p->ids[i]]) order[n_hits++] = p->ids[i];
        at = n_hits;
        for (number i = 0; i < n; i++)
            if (!p->resident[p->ids[i]]) order[at++] = p->ids[i];
    } else { /* those with the most rows first, otherwise by number */
        number starts[2][MOST_TOKENS + 2] = {{0}};
        for (number i = 0; i < n; i++) starts[!p->resident[used[i]]][MOST_TOKENS - p->rows[used[i]] + 1]++;
        for (number side = 0; side < 2; side++) {
            if (side) starts[1][0] = starts[0][MOST_TOKENS + 1];
            for (number r = 1; r < MOST_TOKENS + 2; r++) starts[side][r] += starts[side][r - 1];
        }
        n_hits = starts[1][0];
        for (number i = 0; i < n; i++)
            order[starts[!p->resident[used[i]]][MOST_TOKENS - p->rows[used[i]]]++] = used[i];
    }
    number n_streamed = best_cut(p, order, n_hits, n - n_hits);
    for (number i = 0; i < n; i++)
        p->kinds[order[i]] = i < n_hits ? HIT : i < n_hits + n_streamed ? STREAMED : ON_HOST;
}

/* Count the tokens that use each expert, and list the used experts by number. `waits`: whether one is in no
 * slot. */
static int count_rows(struct player *p, struct layer *l) {
    int32_t *used = p->used;
    number n = 0, n_pairs = l->n_tokens * l->n_used;
    memset(p->rows, 0, (size_t)l->n_experts * sizeof *p->rows);
    for (number i = 0; i < n_pairs; i++) {
        int32_t e = p->ids[i];
        if (++p->rows[e] > l->n_tokens) { /* tables of costs end at n_tokens */
            p->status = e;
            return WRONG_ID;
        }
        if (l->n_tokens > 1) continue;
        number at = n++;
        for (; at && used[at - 1] > e; at--) used[at] = used[at - 1];
        used[at] = e;
    }
    for (number e = 0; l->n_tokens > 1 && e < l->n_experts; e++)
        if (p->rows[e]) used[n++] = (int32_t)e;
    l->waits = 0;
    p->n_used = n;
    for (number i = 0; i < (p->from_disk ? l->n_experts : n); i++) { /* then Python gets `resident` of all */
        number e = p->from_disk ? i : used[i];
        int32_t slot = l->slot_of[e];
        if (slot >= l->n_slots) return WRONG_PROGRAM;
        p->resident[e] = slot >= 0 && l->state[slot] != LOADING;
        l->waits |= p->rows[e] && !p->resident[e];
    }
    p->counts.layers_missed += l->waits;
    if (l->waits) p->read_s = 0.0; /* this wait would be needed anyway */
    return DONE;
}

static int costs_fit(const struct player *p) {
    const struct costs *c = p->costs;
    return c && c->n_ends >= 2 && c->n_ends <= c->n_lines &&
           (c->n_lines == c->n_ends || c->n_lines - c->n_ends == c->n_ends) &&
           c->n_lines <= p->most_lines && c->n_rows > MOST_TOKENS && c->n_copies > p->most_experts;
}

/* Divide the used experts. */
static void choose_kinds(struct player *p, const struct layer *l) {
    const int32_t *used = p->used;
    number n = p->n_used;
    if (l->host && p->splitter == BY_COSTS) {
        by_costs(p, l, used, n);
    } else {
        uint8_t miss = l->host && p->splitter == STAY ? ON_HOST : STREAMED;
        for (number i = 0; i < n; i++) p->kinds[used[i]] = p->resident[used[i]] ? HIT : miss;
    }
}

/* The device gets no more experts than there are slots, lent ones not counted, hits first. */
static void cap(struct player *p, const struct layer *l, const int32_t *used, number n) {
    if (l->n_tokens * l->n_used <= l->n_own_slots) return;
    number n_on_device = 0;
    for (int hits = 1; hits >= 0; hits--)
        for (number i = 0; i < n; i++)
            if (p->kinds[used[i]] < ON_HOST && !!p->resident[used[i]] == hits && ++n_on_device > l->n_own_slots)
                p->kinds[used[i]] = ON_HOST;
}

/* Set the `n` pairs that the CPU computes next, from `inputs`. Their rows come after the first `n_before` rows of the
 * results. */
static void fill_host(const struct host *h, const char *inputs, void *const *weights, float *const *scales,
                      const int32_t *ids, number n_used, const int32_t *pairs, number n, number n_before) {
    for (number i = 0; i < h->n_counts; i++) *h->counts[i] = n;
    for (number i = 0; i < n; i++) {
        int32_t pair = pairs[i], expert = ids[pair];
        number row = h->rows_per_token > 1 ? pair : pair / n_used;
        h->ids[i] = expert;
        h->places[n_before + i] = pair;
        memcpy(h->rows + i * h->row_bytes, inputs + row * h->row_bytes, (size_t)h->row_bytes);
        for (number s = 0; s < h->n_scales; s++) h->scales[s][i] = scales[s][expert];
    }
    for (number i = 0; i < h->n_sources; i++) *h->sources[i] = weights[i];
}

/* Make the CPU write its next rows after the first `n_before` rows of the results. */
static void shift_results(const struct player *p, const struct host *h, number n_before) {
    char *at = (char *)h->results + h->header_bytes + n_before * h->out_bytes;
    memcpy(h->down + p->calls->at_data, &at, sizeof at);
}

/* Set the CPU's pairs whose experts are in memory, and list the pairs of late experts. */
static void fill_early(struct player *p, struct layer *l, const int32_t *pairs) {
    number n_pairs = l->n_tokens * l->n_used;
    l->n_early = l->n_pairs;
    fill_host(l->host, l->host->inputs, l->weights, l->scale_tables, p->ids, l->n_used, pairs, l->n_early, 0);
    for (number k = 0; k < p->n_late; k++)
        for (number i = 0; i < n_pairs; i++)
            if (p->ids[i] == p->late[k]) p->late_pairs[l->n_pairs++ - l->n_early] = (int32_t)i;
}

/* Whether `late` has each used expert of kind LATE once, and no other expert. */
static int late_fit(struct player *p, const struct layer *l) {
    if (p->n_late < 0 || p->n_late > l->n_experts || (p->n_late && !l->host)) return 0;
    for (number k = 0; k < p->n_late; k++) {
        int32_t e = p->late[k];
        if (e < 0 || e >= l->n_experts || p->kinds[e] != LATE || !p->rows[e]) return 0;
        for (number i = 0; i < k; i++)
            if (p->late[i] == e) return 0;
    }
    if (!p->from_disk) return 1;
    number n_late = 0;
    for (number e = 0; e < l->n_experts; e++) n_late += p->rows[e] && p->kinds[e] == LATE;
    return n_late == p->n_late;
}

/* Fill `experts` by side, count pairs, and gather the rows of the CPU's pairs. Returns whether each of the
 * device's experts is in a slot. */
static int gather_sides(struct player *p, struct layer *l) {
    const int32_t *used = p->used;
    number n = p->n_used, n_hit = 0, n_device = 0, n_pairs = l->n_tokens * l->n_used;
    if (l->host) cap(p, l, used, n);
    int ready = 1;
    l->missed = 0;
    for (number i = 0; i < n; i++) {
        int32_t e = used[i];
        if (p->kinds[e] >= ON_HOST) {
            l->missed |= !p->resident[e];
            continue;
        }
        p->experts[n_device++] = e;
        if (p->resident[e]) n_hit += p->rows[e];
        else ready = 0;
    }
    number at = n_device;
    for (number i = 0; i < n; i++)
        if (p->kinds[used[i]] >= ON_HOST) p->experts[at++] = used[i];
    l->n_on_device = n_device;
    l->n_on_host = n - n_device;
    l->n_pairs = l->n_early = 0;
    l->split_at_s = now_s();
    if (l->n_on_host) {
        int32_t *pairs = l->slot_ids; /* free until the slot numbers are written */
        for (number i = 0; i < n_pairs; i++)
            if (p->kinds[p->ids[i]] == ON_HOST) pairs[l->n_pairs++] = (int32_t)i;
        fill_early(p, l, pairs);
    }
    if (!l->host) return ready;
    p->counts.split_layers++;
    p->counts.n_pairs_hit += n_hit;
    p->counts.n_pairs_host += l->n_pairs;
    p->counts.n_pairs_streamed += n_pairs - l->n_pairs - n_hit;
    return ready;
}

/* Count the use of the layer's experts, as Schedule.enter and Lrfu.touched do. */
static void use_experts(struct player *p, struct layer *l) {
    number n = l->n_on_device + l->n_on_host, misses = 0;
    if (!n) return;
    p->use++;
    for (number i = 0; i < l->n_on_device; i++) {
        int32_t slot = l->slot_of[p->experts[i]];
        if (slot < 0) continue; /* evicted after its use was submitted */
        l->last_use[slot] = p->use;
        if (l->reason[slot]) { /* 1: needed, 2: ahead */
            misses += l->reason[slot] <= 2;
            p->counts.prefetched_used += l->reason[slot] != 1;
            l->reason[slot] = 0;
        }
    }
    p->counts.hits += l->n_on_device - misses;
    p->counts.misses += misses;
    double fresh = (double)(p->use - p->rule_skipped) / p->half_life;
    if (n >= p->rule_scan) fresh -= log2((double)n / (double)p->rule_used);
    for (number i = 0; i < n; i++) {
        double *rank = &l->rank[p->experts[i]], old = *rank;
        *rank = old > fresh ? old + log2(1.0 + pow(2.0, fresh - old)) : fresh + log2(1.0 + pow(2.0, old - fresh));
    }
}

/* Learn which experts the layer uses, as RoutingGuess.observe does. */
static int observe(struct player *p, struct layer *l) {
    double share = 1.0 / (double)l->n_tokens;
    float decay = (float)p->decay, best = -1.0f;
    number likeliest = 0;
    for (number e = 0; e < l->n_experts; e++) {
        float kept = l->score[e] * decay;
        l->score[e] = kept = (float)((double)kept + (double)p->rows[e] * share);
        if (l->slot_of[e] < 0 && kept > best) best = kept, likeliest = e;
    }
    if (p->n_token_rows == l->n_tokens)
        for (number t = 0; t < l->n_tokens; t++) {
            if (p->token_rows[t] < 0 || p->token_rows[t] >= p->most_token_rows) return WRONG_PROGRAM;
            for (number i = 0; i < l->n_used; i++)
                l->by_token[p->token_rows[t] * l->n_used + i] = (int16_t)(p->ids[t * l->n_used + i] + 1);
        }
    *l->likeliest = likeliest;
    *l->likeliest_score = (double)best;
    return DONE;
}

/* -- slot numbers (offload/stream/slot_ids.py has the reasons) ------------------------------- */

/* Append to `slots` up to `n` of the `n_all` slots that are not among its first `n_taken`, but near the first
 * of them. Return how many. */
number player_other_slots(number n_all, int32_t *slots, number n_taken, number n) {
    number start = n_taken ? slots[0] : 0, n_near = n + n_taken, found = 0;
    number n_first = least(n_near, n_all - start), n_wrapped = most(0, least(start, start + n_near - n_all));
    for (number i = 0; i < n_first + n_wrapped && found < n; i++) {
        int32_t slot = (int32_t)(i < n_first ? start + i : i - n_first);
        int taken = 0;
        for (number k = 0; k < n_taken && !taken; k++) taken = slots[k] == slot;
        if (!taken) slots[n_taken + found++] = slot;
    }
    return found;
}

/* Replace each -1 in `ids` [n_tokens, n_used] by a slot that its token does not use yet. `slots`: all slots
 * in `ids`, then `n_others` other slots: n_used, or all if there are fewer. */
void player_fill_in(int32_t *ids, number n_tokens, number n_used, const int32_t *slots, number n, number n_others) {
    const int32_t *others = slots + n;
    for (number t = 0; t < n_tokens; t++, ids += n_used) {
        number next = 0;
        for (number i = 0; i < n_used; i++) {
            if (ids[i] >= 0) continue;
            if (n_others >= n_used) { /* column i gets others[i], so that no token gets a slot twice */
                ids[i] = others[i];
                continue;
            }
            for (; next < n_others + n; next++) {
                int32_t slot = next < n_others ? others[next] : slots[next - n_others];
                int taken = 0;
                for (number k = 0; k < n_used && !taken; k++) taken = ids[k] == slot;
                if (!taken) {
                    ids[i] = slot;
                    break;
                }
            }
        }
    }
}

/* Let the layer's nodes see `n_seen` slots from `first` on. */
static void show(struct player *p, struct layer *l, number first, number n_seen) {
    if (first == l->first_slot && n_seen == l->n_slots_seen) return;
    l->first_slot = first;
    l->n_slots_seen = n_seen;
    for (number i = 0; i < l->n_views; i++) {
        const struct view *v = &l->views[i];
        number *ne = (number *)(v->tensor + p->calls->at_ne), *nb = (number *)(v->tensor + p->calls->at_nb);
        *(char **)(v->tensor + p->calls->at_data) = v->base + first * v->stride;
        ne[v->axis] = n_seen;
        for (number dim = v->axis + 1; dim < 4; dim++) nb[dim] = v->stride * n_seen;
    }
}

/* Choose the range of slots that the nodes see, as schedule/batch.py's slot_range does. The layer's own slots
 * are preferred to a longer range, since a CPU backend looks at each slot of the range for each product. */
static void choose_range(struct player *p, struct layer *l, const int32_t *slots, number n) {
    number first = 0, n_seen = l->n_slots, low = 0, high = l->n_slots - 1;
    if (n) low = high = slots[0];
    for (number i = 1; i < n; i++) low = least(low, slots[i]), high = most(high, slots[i]);
    if (n && l->n_tokens > 1) {
        number step = range_step(l);
        first = low / step * step;
        n_seen = least(l->n_slots, (high / step + 1) * step) - first;
        if (l->first_slot <= low && high < l->first_slot + l->n_slots_seen && l->n_slots_seen <= 2 * n_seen)
            first = l->first_slot, n_seen = l->n_slots_seen;
    }
    if (l->home >= 0 && l->home <= low && high < l->home + l->n_experts && n_seen > l->n_experts)
        first = l->home, n_seen = l->n_experts;
    p->counts.bands += n_seen < l->n_slots;
    show(p, l, first, n_seen);
}

static int send_slots(struct player *p, struct layer *l) {
    int32_t *slots = p->slots, *shown = p->shown, *out = l->slot_ids;
    number n = l->n_on_device, n_host = l->n_on_host, n_others = 0, n_used = l->n_used;
    for (number i = 0; i < n; i++) {
        slots[i] = l->slot_of[p->experts[i]];
        if (slots[i] < 0 || slots[i] >= l->n_slots) return WRONG_PROGRAM; /* Python gave it no slot */
    }
    int32_t *others = slots + n;
    if (n_host && l->may_repeat) others[0] = n ? slots[0] : (int32_t)most(0, l->home), n_others = 1;
    else if (n_host) n_others = player_other_slots(l->n_slots, slots, n, least(n_host, n_used));
    choose_range(p, l, slots, n + n_others);
    for (number i = 0; i < n + n_others; i++) slots[i] -= (int32_t)l->first_slot;
    for (number i = 0; i < n; i++) shown[p->experts[i]] = slots[i];
    int by_expert = l->may_repeat || n_others == n_host; /* each of the CPU's experts has a slot of its own */
    for (number i = 0; i < n_host; i++)
        shown[p->experts[n + i]] = by_expert ? others[l->may_repeat ? 0 : i] : -1;
    for (number i = 0; i < l->n_tokens * n_used; i++) out[i] = shown[p->ids[i]];
    if (!by_expert) player_fill_in(out, l->n_tokens, n_used, slots, n, n_others);
    p->calls->set(p->stream, l->slot_ids_tensor, l->slot_ids, 0, (size_t)(l->n_tokens * n_used) * sizeof *out);
    return DONE;
}

/* Learn from the layer's misses, and upload its slot numbers. */
static int announce(struct player *p, struct layer *l) {
    int code = l->missed || p->from_disk ? observe(p, l) : DONE;
    return code == DONE ? send_slots(p, l) : code;
}

enum { IS_SENT = 5 }; /* phase of a layer whose slot numbers Python has let the player upload */

/* Upload the slot numbers of the layer that YIELD_NEED named, after its experts got slots. Python calls this before
 * it enqueues the experts' copies: a device has one engine for copies from the host, which takes them in order, so
 * that a few bytes behind an expert would wait for megabytes. Returns DONE, or a code that ends the decode. */
number player_send(struct player *p) {
    const number *w = &p->program[4 * p->at];
    if (4 * p->at >= p->n_words || w[0] != OP_DIVIDE || w[1] != p->layer || p->phase != 4) return WRONG_PROGRAM;
    int code = announce(p, &p->layers[p->layer]);
    if (code == DONE) p->phase = IS_SENT;
    return code;
}

static int divide(struct player *p, struct layer *l) {
    if (p->phase == 0) {
        int code = p->splitter == BY_COSTS && !costs_fit(p) ? WRONG_PROGRAM : count_rows(p, l);
        if (code != DONE) return code;
        p->phase = 1;
        p->n_late = p->n_arrived = p->n_late_done = 0;
        if (p->from_disk) return YIELD_FETCH; /* Python sets `phase` to 2 if it divides the layer */
    }
    if (p->phase == 1) {
        p->phase = 2;
        choose_kinds(p, l);
    }
    if (p->phase == 2) {
        p->phase = 3;
        if (!late_fit(p, l)) return WRONG_PROGRAM;
        l->waits = !gather_sides(p, l);
    }
    if (p->phase == 3) {
        p->phase = 4;
        if (l->waits) return YIELD_NEED;
        use_experts(p, l);
    }
    int code = p->phase == IS_SENT ? DONE : announce(p, l);
    p->phase = 0;
    if (code != DONE) return code;
    p->open = l - p->layers;
    p->counts.cuts += l->n_readers;
    return DONE;
}

/* -- the CPU's experts -------------------------------------------------------------------------- */

static int place(struct player *p, const struct layer *l) {
    if (interrupted(p)) {
        p->status = ABORTED;
        return FAILED;
    }
    const struct calls *c = p->calls;
    const struct host *h = l->host;
    const char *output = l->output;
    c->set(p->stream, h->staging, h->results, 0, (size_t)(h->header_bytes + l->n_pairs * h->out_bytes));
    for (number i = 0; i < h->n_out_counts; i++) *h->out_counts[i] = l->n_pairs;
    for (number i = 0; i < h->n_into_counts; i++) *h->into_counts[i] = l->n_tokens * l->n_used;
    memcpy(h->into + c->at_data, output + c->at_data, sizeof(void *));
    memcpy(h->into + c->at_buffer, output + c->at_buffer, sizeof(void *));
    memcpy(h->set_rows + c->at_data, output + c->at_data, sizeof(void *));
    memcpy(h->set_rows + c->at_buffer, output + c->at_buffer, sizeof(void *));
    *(int32_t *)(h->set_rows + c->at_parameters) ^= 1; /* CUDA's backend shall not capture this graph */
    double start_s = began(p);
    p->status = c->compute(p->stream, h->placing);
    ended(p, PLACED, l->layer, 0, 0, start_s);
    p->counts.split_s += now_s() - l->split_at_s;
    if (!p->status) return DONE;
    return p->status == ABORTED ? FAILED : FAILED_TO_PLACE;
}

static int compute_host(struct player *p, struct layer *l) {
    const struct calls *c = p->calls;
    number pool = l->n_tokens > 1;
    if (pool != p->chosen) {
        c->set_n_threads(p->cpu, (int)p->n_threads[pool]);
        c->set_threadpool(p->cpu, p->pools[pool]);
        p->chosen = pool;
    }
    double at_s = now_s(), start_s = began(p);
    p->status = interrupted(p) ? ABORTED : c->compute(p->cpu, l->host->graph);
    p->counts.host_s += now_s() - at_s;
    ended(p, COMPUTED, l->layer, l->n_pairs, 0, start_s);
    if (!p->status) return DONE;
    return p->status == ABORTED ? FAILED : FAILED_ON_CPU;
}

/* Compute the pairs of the late experts that have arrived since the last call. */
static int compute_late(struct player *p, struct layer *l) {
    number first = 0, n = 0, k = 0;
    for (; k < p->n_late_done; k++) first += p->rows[p->late[k]];
    for (; k < p->n_arrived; k++) n += p->rows[p->late[k]];
    p->n_late_done = p->n_arrived;
    const struct host *h = l->host;
    number n_before = l->n_early + first;
    fill_host(h, h->inputs, l->weights, l->scale_tables, p->ids, l->n_used, p->late_pairs + first, n, n_before);
    shift_results(p, h, n_before);
    int code = compute_host(p, l);
    shift_results(p, h, 0);
    return code;
}

/* -- playing ------------------------------------------------------------------------------------ */

/* Whether the layer's numbers fit each other and the scratch. */
static int layer_fits(const struct player *p, const struct layer *l) {
    const struct host *h = l->host;
    if (l->n_tokens < 1 || l->n_tokens > MOST_TOKENS || l->n_used < 1 || l->n_used > l->n_experts) return 0;
    if (l->n_experts > p->most_experts || l->n_experts > INT16_MAX || l->n_used > l->n_slots) return 0;
    if (l->n_own_slots < 1 || l->n_own_slots > l->n_slots) return 0;
    if (l->n_slots > INT32_MAX || l->n_readers < 1 || l->n_readers > INT16_MAX) return 0;
    if (l->n_reads < 0 || l->n_reads > l->n_redirects) return 0;
    if (l->home < -1 || (l->home >= 0 && l->home > l->n_slots - l->n_experts)) return 0;
    if (l->n_ahead < 0 || l->n_ahead > INT32_MAX || (l->record && l->n_record < 1)) return 0;
    number n_pairs = l->n_tokens * l->n_used;
    if (n_pairs > p->most_pairs) return 0;
    if (l->ids_stride < l->n_used || l->ids_stride > INT32_MAX) return 0;
    if (((l->n_tokens - 1) * l->ids_stride + l->n_used) * 4 > l->ids_bytes) return 0;
    for (number i = 0; i < l->n_views; i++)
        if (l->views[i].axis < 0 || l->views[i].axis > 3) return 0;
    if (!h) return 1;
    number n_rows = h->rows_per_token > 1 ? n_pairs : l->n_tokens;
    if (n_pairs > h->most || h->row_bytes < 1 || h->row_bytes > l->rows_bytes / n_rows) return 0;
    if (h->header_bytes < 0 || h->header_bytes > INT32_MAX || h->out_bytes < 1 || h->out_bytes > INT32_MAX) return 0;
    return 1;
}

static int part_fits(const struct player *p, number part) {
    return part >= 0 && part < p->n_parts && p->parts[part].first >= 0 && p->parts[part].end > p->parts[part].first;
}

/* Submit the whole graph, whose experts are all in slots. */
static int submit_whole(struct player *p, const struct part *part) {
    for (number i = 0; i < p->n_layers; i++) {
        struct layer *l = &p->layers[i];
        if (l->home < 0) return WRONG_PROGRAM;
        show(p, l, l->home, l->n_experts);
        number n_pairs = l->n_tokens * l->n_used;
        p->counts.cuts += l->n_readers;
        p->counts.hits += n_pairs;
        p->counts.split_layers += l->host != NULL;
        p->counts.n_pairs_hit += l->host ? n_pairs : 0;
        l->missed = 0;
    }
    for (number i = 0; i < p->n_layers; i++) point(&p->layers[i], p->layers[i].n_reads, 1);
    p->status = submit(p, part);
    for (number i = 0; i < p->n_layers; i++) point(&p->layers[i], p->layers[i].n_reads, 0);
    p->counts.whole_graphs++;
    return p->status ? FAILED : DONE;
}

/* -- computing ahead ---------------------------------------------------------------------------- */

/* Whether a slot's bytes may be read now, whatever they are. */
static int is_readable(int32_t state) { return state != LOADING && state != CLOSED; }

/* Give each expert of a layer a slot in `table`: its own if it is there, else one that no other expert of the layer
 * has. A router chooses distinct experts, so no token names a slot twice. If one did, CUDA's products of several
 * tokens with experts (mmid.cu in ggml-cuda) would write to addresses that nobody set. Results computed with a
 * missing expert's slot are wrong, and a repair overwrites them.
 *
 * Without `may_share`, a missing expert keeps its slot of the table if no other expert needs it. With `may_share`, which
 * is set where the kernel permits repeated slots, all missing experts share a slot that was used last. The device
 * then reads no expert that no token needs. With fewer slots than experts they have to share one. Returns 0 if too few
 * slots are left, or if no expert is there and `needs_one` is set. The layer is then not computed ahead, or has to wait.
 * `changed` gets the range of changed entries. `there` [n_experts] gets 1 for experts that are there.
 * `taken` [n_slots] is 0 before and after. */
number player_table_slots(const int32_t *slot_of, const int32_t *state, const number *last_use, number n_experts,
                          number n_slots, number may_share, number needs_one, int32_t *table, uint8_t *there,
                          uint8_t *taken, number *changed) {
    int32_t any = -1;
    number n_missing = 0, n_lacking = 0;
    for (number e = 0; e < n_experts; e++) {
        int32_t slot = slot_of[e];
        there[e] = slot >= 0 && slot < n_slots && state[slot] != LOADING;
        if (!there[e]) {
            n_missing++;
            continue;
        }
        taken[slot] = 1;
        if (any < 0 || last_use[slot] > last_use[any]) any = slot;
    }
    for (number e = 0; e < n_experts && any >= 0; e++) { /* keep the slot that they share, if it is such a one */
        int32_t slot = table[e];
        if (there[e] || slot < 0 || slot >= n_slots || !taken[slot] || last_use[slot] < last_use[any]) continue;
        any = slot;
        break;
    }
    for (number i = 0; i < n_slots && any < 0 && !needs_one; i++)
        if (is_readable(state[i])) any = (int32_t)i;
    number shares = may_share || n_slots < n_experts, first = n_experts, end = 0;
    int can = any >= 0 && (!shares || may_share || !n_missing);
    for (number e = 0; can && e < n_experts; e++) {
        int32_t slot = there[e] ? slot_of[e] : shares ? any : table[e];
        if (!there[e] && !shares) {
            if (slot < 0 || slot >= n_slots || taken[slot] || !is_readable(state[slot])) {
                n_lacking++;
                there[e] = 2; /* has no slot yet */
                continue;
            }
            taken[slot] = 1;
        }
        if (table[e] == slot) continue;
        table[e] = slot;
        first = least(first, e), end = e + 1;
    }
    number from = any, tried = 0;
    for (number e = 0; n_lacking && e < n_experts; e++) {
        if (there[e] != 2) continue;
        for (; tried < n_slots && (taken[from] || !is_readable(state[from])); tried++)
            from = from + 1 < n_slots ? from + 1 : 0;
        if (tried >= n_slots) {
            can = 0;
            break;
        }
        taken[from] = 1, table[e] = (int32_t)from, there[e] = 0, n_lacking--;
        first = least(first, e), end = most(end, e + 1);
    }
    for (number e = 0; e < n_experts; e++) {
        if (there[e] == 2) there[e] = 0;
        if (there[e] == 1) taken[slot_of[e]] = 0;
        else if (table[e] >= 0 && table[e] < n_slots) taken[table[e]] = 0;
    }
    changed[0] = first, changed[1] = end;
    return can;
}

/* Write the slots of layers [first, end) into the table, and upload what has changed. Returns 0 if a layer cannot be
 * computed ahead. */
static int map_slots(struct player *p, number first, number end, number needs_one) {
    struct ahead *a = p->ahead;
    number low = a->n_table, high = 0, changed[2];
    int can = 1;
    for (number i = first; i < end && can; i++) {
        const struct layer *l = &p->layers[i];
        number at = a->table_at[i], may_share = l->may_repeat || l->n_used == 1;
        can = (int)player_table_slots(l->slot_of, l->state, l->last_use, l->n_experts, l->n_slots, may_share,
                                      needs_one, a->table + at, a->there + at, a->taken, changed);
        if (changed[0] < changed[1]) low = least(low, at + changed[0]), high = most(high, at + changed[1]);
    }
    if (low < high)
        p->calls->set(p->stream, a->table_tensor, a->table + low, (size_t)low * sizeof *a->table,
                      (size_t)(high - low) * sizeof *a->table);
    return can;
}

static int submit_ahead(struct player *p, const struct segment *s, const struct part *part) {
    for (number i = s->first; i < s->end; i++) {
        show(p, &p->layers[i], 0, p->layers[i].n_slots);
        point(&p->layers[i], p->layers[i].n_redirects, 1);
    }
    p->status = submit(p, part);
    for (number i = s->first; i < s->end; i++) point(&p->layers[i], p->layers[i].n_redirects, 0);
    return p->status ? FAILED : DONE;
}

/* Count a layer whose experts all were in slots, as RECORD and DIVIDE do. `ids` has its ids already. */
static int count_hits(struct player *p, struct layer *l) {
    record(p, l);
    int code = p->splitter == BY_COSTS && !costs_fit(p) ? WRONG_PROGRAM : count_rows(p, l);
    if (code != DONE) return code;
    p->counts.layers_missed -= l->waits; /* `waits` is 1 if a promotion has taken a slot since */
    for (number i = 0; i < p->n_used; i++) p->resident[p->used[i]] = 1;
    choose_kinds(p, l);
    memcpy(p->experts, p->used, (size_t)p->n_used * sizeof *p->used);
    l->n_on_device = p->n_used;
    l->n_on_host = l->n_pairs = l->missed = l->waits = 0;
    use_experts(p, l);
    p->counts.cuts += l->n_readers;
    p->counts.layers_ahead++;
    if (!l->host) return DONE;
    p->counts.split_layers++;
    p->counts.n_pairs_hit += l->n_tokens * l->n_used;
    return DONE;
}

/* Check the ids of a segment's layers. Go on after the segment, or back to its first layer with a missing expert. */
static int look_back(struct player *p, const struct segment *s) {
    struct ahead *a = p->ahead;
    for (number i = s->first; i < s->end; i++) {
        struct layer *l = &p->layers[i];
        int code = take_ids(p, l, (const int32_t *)(a->ids + a->ids_at[i])), hit = 1;
        if (code != DONE) return code;
        for (number k = 0; k < l->n_tokens * l->n_used; k++) hit &= a->there[a->table_at[i] + p->ids[k]];
        if (hit) {
            code = count_hits(p, l);
            if (code != DONE) return code;
            continue;
        }
        p->counts.n_repairs++;
        p->counts.layers_repeated += s->end - i;
        p->open = -1;
        p->done = l->at;
        p->at = a->resume[i] - 1;
        return DONE;
    }
    if (s->end < p->n_layers) p->known = s->end;
    p->at = s->next - 1;
    return DONE;
}

static int go_ahead(struct player *p, const struct segment *s) {
    struct ahead *a = p->ahead;
    if (p->phase == 0) {
        const struct part *part = &p->parts[s->part];
        if (part->first != p->done && s->other >= 0) part = &p->parts[s->other];
        /* Go on with the layers one by one if Python submitted a part of them. */
        if (part->first != p->done || p->python_open) return DONE;
        if (p->open >= 0 && p->open + 1 != s->first) return WRONG_PROGRAM;
        if (!map_slots(p, s->first, s->end, 1)) return DONE;
        int code = submit_ahead(p, s, part);
        if (code != DONE) return code;
        p->phase = 1;
    }
    struct layer *l = s->end < p->n_layers ? &p->layers[s->end] : NULL;
    number last = l ? s->end : s->end - 1, from = a->ids_at[s->first];
    for (number i = s->first; i <= last; i++)
        if (p->layers[i].issues) { /* the device computes meanwhile */
            p->layer = i;
            p->until = s->first;
            return YIELD_ISSUE;
        }
    p->phase = 0;
    read_back(p, l, a->ids_tensor, a->ids + from, from, a->ids_at[last] + p->layers[last].ids_bytes - from);
    return look_back(p, s);
}

/* -- without a wait of the host ------------------------------------------------------------------- */

/* The host enqueues layers before their ids are known. For each layer:
 *
 *     backend's stream   attention, router, ids and rows to pinned memory | record `routed` | slots of ids, products |
 *                        wait for `landed`, fetch the CPU's rows
 *     our stream         wait for `routed`, write `rung`, wait until the host has written `answered`, record `landed`
 *     host               see `rung`, choose sides, compute its pairs, write `answered`, enqueue a later layer
 *
 * No copy is enqueued. Kernels write ids and rows to pinned memory, and read the CPU's rows from there. A write of a
 * word by a stream is a fence for the writes before it.
 *
 * A wait for `answered` is never enqueued before what the host needs for writing it. So the streams may share one
 * queue of the card. Each event is recorded before a stream is told to wait for it, as CUDA demands.
 *
 * One place each for ids, rows and results is enough: a layer's ids and rows are written after the rows of the layer
 * before were fetched, and so after the host answered it. */

static uint32_t word_of(const struct bell *b, number layer) { return (uint32_t)(b->n_told + layer + 1); }

static void tell(const struct bell *b, uint32_t value) {
    if (b->tell) b->tell(b->answered, value);
    else __atomic_store_n(b->answered, value, __ATOMIC_RELEASE);
}

/* Whether the device has told layer `i`. */
static int is_rung(const struct bell *b, number i) {
    if (b->see) return b->see(b->rung, word_of(b, i), 0);
    return (int32_t)(__atomic_load_n(b->rung, __ATOMIC_ACQUIRE) - word_of(b, i)) >= 0;
}

enum { NOT_READY = 600 }; /* CUDA_ERROR_NOT_READY */

/* Wait until the device has told layer `i`. */
static int await_ring(struct player *p, number i) {
    const struct bell *b = p->bell;
    double start_s = began(p), from_s = 0.0, asked_s = 0.0;
    if (b->see) b->see(b->rung, word_of(b, i), 1);
    for (number n = 0; !is_rung(b, i); n++) {
        if (interrupted(p)) {
            p->status = ABORTED;
            return FAILED;
        }
        if (n % 64) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            continue;
        }
        double now = now_s();
        if (from_s == 0.0) from_s = asked_s = now;
        if (now - from_s > YIELDS_AFTER_S) sched_yield();
        if (b->is_broken) break;
        if (now - asked_s < ASKS_EACH_S) continue;
        asked_s = now; /* a device that failed writes no word */
        int error = b->query(b->stream);
        if (error != 0 && error != NOT_READY) {
            p->status = error;
            return DRIVER_FAILED;
        }
    }
    ended(p, READ_IDS, p->layers[i].layer, 0, 0, start_s);
    if (!b->is_broken) return DONE;
    p->status = BROKEN;
    return DRIVER_FAILED;
}

static number row_places(const struct layer *l) { return l->n_tokens * l->n_used; }

/* Tell the kernel that follows the answer where the rows of the `n` pairs of the CPU are. All other rows of the output
 * stay as they are: each is fetched from itself, or a row of the results is written to the row behind the output. */
static void tell_places(const struct player *p, number i, const int32_t *pairs, number n) {
    const struct layer *l = &p->layers[i];
    const struct ringing *r = &p->ringing[i];
    int32_t *places = l->host->places;
    number all = row_places(l);
    if (r->host_row < 0) {
        for (number k = 0; k < all; k++) places[k] = k < n ? pairs[k] : (int32_t)all;
        return;
    }
    for (number k = 0; k < all; k++) places[k] = (int32_t)(r->device_row + k);
    for (number k = 0; k < n; k++) places[pairs[k]] = (int32_t)(r->host_row + k);
}

static int of_driver(struct player *p, int error) {
    if (!error) return DONE;
    p->status = error;
    return DRIVER_FAILED;
}

/* Enqueue what tells the host that a layer's ids and rows are there. */
static int enqueue_ring(struct player *p, number i) {
    const struct bell *b = p->bell;
    int error = b->wait_for(b->stream, b->routed, 0);
    if (!error) error = b->write(b->stream, (uint64_t)(uintptr_t)b->rung, word_of(b, i), 0);
    return of_driver(p, error);
}

/* Enqueue the wait for the host's answer, and the nodes from the CPU's rows up to the next layer's router. */
static int enqueue_answer(struct player *p, number i) {
    const struct bell *b = p->bell;
    int error = b->wait(b->stream, (uint64_t)(uintptr_t)b->answered, word_of(b, i), 0 /* at least that value */);
    if (!error) error = b->record(b->landed, b->stream);
    if (error) return of_driver(p, error);
    b->backend_wait(p->stream, b->backend_landed);
    p->status = submit(p, &p->parts[p->ringing[i].rest]);
    if (p->status) return FAILED;
    if (i + 1 < p->n_layers) b->backend_record(b->backend_routed, p->stream);
    return DONE;
}

static int enqueue_products(struct player *p, number i) {
    show(p, &p->layers[i], 0, p->layers[i].n_slots);
    p->open = i;
    p->status = submit(p, &p->parts[p->ringing[i].products]);
    p->open = -1;
    return p->status ? FAILED : DONE;
}

/* Compute the CPU's pairs of layer `i`, whose ids and rows have come, and leave the rows and their places for the
 * device. Sides are those of the table that the device reads. */
static int answer(struct player *p, number i) {
    struct layer *l = &p->layers[i];
    const uint8_t *there = p->ahead->there + p->ahead->table_at[i];
    const struct ringing *r = &p->ringing[i];
    int code = take_ids(p, l, r->ids);
    if (code != DONE) return code;
    record(p, l);
    code = p->splitter == BY_COSTS && !costs_fit(p) ? WRONG_PROGRAM : count_rows(p, l);
    if (code != DONE) return code;
    p->counts.layers_missed -= l->waits;
    for (number k = 0; k < p->n_used; k++) p->resident[p->used[k]] = there[p->used[k]];
    choose_kinds(p, l);
    number n_device = 0, n = 0;
    l->missed = 0;
    for (number k = 0; k < p->n_used; k++) {
        int32_t e = p->used[k];
        p->kinds[e] = there[e] ? HIT : ON_HOST;
        if (there[e]) p->experts[n_device++] = e;
        else l->missed = 1;
    }
    number at = n_device;
    for (number k = 0; k < p->n_used; k++)
        if (!there[p->used[k]]) p->experts[at++] = p->used[k];
    l->n_on_device = n_device, l->n_on_host = p->n_used - n_device;
    int32_t *pairs = l->slot_ids; /* free: the device looks up slot numbers by itself */
    for (number k = 0; k < row_places(l); k++)
        if (p->kinds[p->ids[k]] == ON_HOST) pairs[n++] = (int32_t)k;
    l->n_pairs = l->n_early = n;
    l->waits = 0;
    l->split_at_s = now_s();
    fill_host(l->host, r->rows, l->weights, l->scale_tables, p->ids, l->n_used, pairs, n, 0);
    tell_places(p, i, pairs, n);
    use_experts(p, l);
    if (l->missed) code = observe(p, l);
    if (code == DONE && n) code = compute_host(p, l);
    p->counts.layers_missed += l->missed;
    p->counts.cuts += l->n_readers;
    p->counts.split_layers++;
    p->counts.layers_rung++;
    p->counts.rows_by_kernels += r->host_row < 0 ? row_places(l) : n;
    p->counts.n_pairs_hit += row_places(l) - n;
    p->counts.n_pairs_host += n;
    p->counts.n_nodes_ahead += n ? l->n_ahead : 0;
    p->counts.split_s += now_s() - l->split_at_s;
    return code;
}

/* After a failure, let the device run through the layers that are enqueued. Their results are wrong, so the decode
 * fails. Places are valid, as a wrong one would be written to. */
static void release(struct player *p, number n_enqueued) {
    for (number i = 0; i < n_enqueued; i++) tell_places(p, i, NULL, 0);
    tell(p->bell, word_of(p->bell, n_enqueued - 1));
}

static int ring_through(struct player *p) {
    struct bell *b = p->bell;
    number n_enqueued = 0, i = 0, n_ahead = p->is_careful ? 1 : b->n_ahead;
    int code = DONE;
    for (number k = 0; k < p->n_layers; k++) tell_places(p, k, NULL, 0); /* valid if the watchdog answers */
    b->n_layers = p->n_layers;
    for (; i < p->n_layers && code == DONE && !b->is_broken; b->n_steps++) {
        if (n_enqueued == i || (n_enqueued < least(p->n_layers, i + n_ahead) && !is_rung(b, i))) {
            code = enqueue_products(p, n_enqueued);
            if (code == DONE) code = enqueue_ring(p, n_enqueued);
            if (code == DONE && !p->is_careful) {
                n_enqueued++;
                code = enqueue_answer(p, n_enqueued - 1);
            } else if (code == DONE) {
                n_enqueued++;
            }
            continue;
        }
        code = await_ring(p, i);
        if (code == DONE) code = answer(p, i);
        if (code != DONE) break;
        tell(b, word_of(b, i));
        if (p->is_careful) code = enqueue_answer(p, i);
        i++;
    }
    if (code == DONE && b->is_broken) { /* the device may have read rows that were not there yet */
        p->status = BROKEN;
        code = DRIVER_FAILED;
    }
    if (code != DONE) release(p, n_enqueued);
    b->n_layers = 0;
    b->n_told += p->n_layers;
    return code;
}

/* Play all layers. Does nothing if a layer cannot be mapped; its instructions follow. */
static int ring(struct player *p) {
    if (p->phase == 0) {
        const struct part *part = &p->parts[p->first_part];
        if (p->done != part->first || p->open >= 0) return WRONG_PROGRAM;
        p->status = submit(p, part);
        if (p->status) return FAILED;
        p->bell->backend_record(p->bell->backend_routed, p->stream);
        p->phase = 1;
    }
    for (number i = 0; i < p->n_layers; i++)
        if (p->layers[i].issues) { /* the device computes meanwhile, and reads no table yet */
            p->layer = i;
            p->until = 0;
            return YIELD_ISSUE;
        }
    p->phase = 0;
    if (!map_slots(p, 0, p->n_layers, 0)) return DONE;
    int code = ring_through(p);
    p->at = p->n_words / 4 - 2;
    return code;
}

static int ring_fits(const struct player *p) {
    const struct ahead *a = p->ahead;
    if (!a || !p->ringing || !part_fits(p, p->first_part) || p->n_layers < 1) return 0;
    if (p->parts[p->first_part].end != p->layers[0].at) return 0;
    for (number i = 0; i < p->n_layers; i++) {
        const struct layer *l = &p->layers[i];
        const struct ringing *r = &p->ringing[i];
        if (!layer_fits(p, l) || !l->host || !part_fits(p, r->products) || !part_fits(p, r->rest)) return 0;
        if (p->parts[r->products].first != l->at || p->parts[r->products].end <= l->last) return 0;
        if (p->parts[r->rest].first != p->parts[r->products].end) return 0;
        if (i + 1 < p->n_layers && p->parts[r->rest].end != p->layers[i + 1].at) return 0;
        number most_row = INT32_MAX - l->host->most;
        if (r->device_row < 0 || r->device_row > most_row || r->host_row < -1 || r->host_row > most_row) return 0;
        if (a->table_at[i] < 0 || a->table_at[i] > a->n_table - l->n_experts || l->n_slots > a->n_taken) return 0;
    }
    return 1;
}

/* Whether segment `n`, which the instruction `at` names, fits the program and its memory. */
static int segment_fits(const struct player *p, number n, number at) {
    const struct ahead *a = p->ahead;
    if (!a || n < 0 || n >= a->n_segments) return 0;
    const struct segment *s = &a->segments[n];
    if (!part_fits(p, s->part) || (s->other != -1 && !part_fits(p, s->other))) return 0;
    if (s->other != -1 && p->parts[s->other].end != p->parts[s->part].end) return 0;
    if (s->first < 0 || s->end <= s->first || s->end > p->n_layers) return 0;
    if (s->next <= at || s->next >= p->n_words / 4) return 0; /* no way back before this instruction */
    const number *next = p->program + 4 * s->next;
    if (s->end < p->n_layers ? next[0] != OP_READ || next[1] != s->end : next[0] != OP_END) return 0;
    for (number i = s->first; i < most(s->end, least(s->end + 1, p->n_layers)); i++) {
        const struct layer *l = &p->layers[i];
        if (!layer_fits(p, l) || a->ids_at[i] < 0 || a->ids_at[i] % 4) return 0;
        if (a->ids_at[i] > a->ids_bytes - l->ids_bytes) return 0;
        if (i > s->first && a->ids_at[i] < a->ids_at[i - 1]) return 0;
        if (a->table_at[i] < 0 || a->table_at[i] > a->n_table - l->n_experts) return 0;
        if (l->n_slots > a->n_taken) return 0;
        if (a->resume[i] <= at || a->resume[i] >= p->n_words / 4) return 0;
        if (p->program[4 * a->resume[i]] != OP_READ || p->program[4 * a->resume[i] + 1] != i) return 0;
    }
    return 1;
}

/* Move the results that a repair reads to memory of their own, or back to ggml's if `elsewhere` is 0. */
void player_move(struct player *p, number elsewhere) {
    for (number i = 0; p->ahead && i < p->ahead->n_moved; i++) {
        const struct redirect *r = &p->ahead->moved[i];
        *r->source = elsewhere ? r->other : r->own;
    }
}

/* Return 0, or 1 + the number of the first instruction that is wrong, or names a wrong part or layer. */
number player_check(const struct player *p) {
    number n = p->n_words / 4;
    if (n < 1 || p->n_words % 4 || p->program[4 * (n - 1)] != OP_END) return most(1, n);
    for (number i = 0; i < n; i++) {
        const number *w = &p->program[4 * i];
        number op = w[0], of_layer = op == OP_SUBMIT || op == OP_OVERLAP ? w[3] : w[1];
        int fits = op >= 0 && op < N_OPS && (op != OP_END || i == n - 1);
        if (op == OP_PYTHON) {
            fits &= w[1] >= 0 && w[1] < p->n_stops;
        } else if (op == OP_WHOLE) {
            fits &= part_fits(p, w[1]);
            for (number k = 0; k < p->n_layers; k++) fits = fits && layer_fits(p, &p->layers[k]);
        } else if (op == OP_AHEAD) {
            fits = segment_fits(p, w[1], i);
        } else if (op == OP_RING) {
            fits = ring_fits(p);
        } else if (fits && op != OP_END) {
            fits = of_layer < p->n_layers && (of_layer >= 0 || (op == OP_SUBMIT && of_layer == -1));
            if (of_layer >= 0) fits = fits && layer_fits(p, &p->layers[of_layer]);
            if (op == OP_SUBMIT || op == OP_OVERLAP) {
                fits = fits && part_fits(p, w[1]) && (w[2] == -1 || part_fits(p, w[2]));
                fits = fits && (w[2] == -1 || p->parts[w[2]].end == p->parts[w[1]].end);
            }
            if (op == OP_OVERLAP || op == OP_HOST) fits = fits && p->layers[of_layer].host;
            if (op == OP_ARRIVE) fits = fits && w[2] >= 0 && w[2] < p->layers[of_layer].n_readers;
        }
        if (!fits) return 1 + i;
    }
    return 0;
}

/* Start the program from its beginning with the next `player_play`. */
void player_begin(struct player *p) {
    p->at = p->phase = p->done = p->n_events = 0;
    p->open = p->layer = p->known = -1;
    p->read_s = 0.0;
    memset(&p->counts, 0, sizeof p->counts);
    for (number i = 0; i < p->n_layers; i++) p->layers[i].waits = p->layers[i].n_pairs = 0;
}

/* Let the nodes of the open layer read their slots, or their own sources. For Python, between two calls. */
void player_point(struct player *p, number elsewhere) {
    if (p->open >= 0) point(&p->layers[p->open], p->layers[p->open].n_redirects, (int)elsewhere);
}

/* Fill a host graph with the `n` pairs. For measurements. */
void player_fill(const struct host *h, void *const *weights, float *const *scales, const int32_t *ids,
                 number n_used, const int32_t *pairs, number n) {
    fill_host(h, h->inputs, weights, scales, ids, n_used, pairs, n, 0);
}

/* Play until the end, a failure or a yield. */
number player_play(struct player *p) {
    for (;; p->at++) {
        if (4 * p->at >= p->n_words) return WRONG_PROGRAM;
        const number *w = &p->program[4 * p->at];
        struct layer *l = w[0] >= OP_READ && w[0] <= OP_HOST && w[0] != OP_OVERLAP ? &p->layers[w[1]] : NULL;
        number code = DONE;
        switch (w[0]) {
        case OP_END:
            return p->done == w[1] ? DONE : WRONG_PROGRAM;
        case OP_SUBMIT:
        case OP_OVERLAP: {
            const struct part *part = &p->parts[w[1]];
            l = w[3] >= 0 ? &p->layers[w[3]] : NULL;
            if (w[0] == OP_OVERLAP && !l->n_pairs) break;
            p->phase = 0;
            if (part->end == p->done) break;
            if (part->first != p->done && w[2] >= 0) part = &p->parts[w[2]];
            if (part->end < p->done || (p->open >= 0 && p->open != w[3])) return WRONG_PROGRAM;
            if (p->python_open || part->first != p->done) {
                p->until = part->end;
                return YIELD_SUBMIT; /* and play the instruction again */
            }
            p->status = submit(p, part);
            if (p->status) return FAILED;
            break;
        }
        case OP_WHOLE:
            if (!p->whole) break;
            if (p->parts[w[1]].first != p->done || p->open >= 0) return WRONG_PROGRAM;
            code = submit_whole(p, &p->parts[w[1]]);
            p->at = p->n_words / 4 - 2;
            break;
        case OP_READ:
            p->layer = w[1];
            if (p->done != l->at) return WRONG_PROGRAM;
            if (p->phase == 0 && p->clocked) {
                p->phase = 1;
                return YIELD_CLOCK;
            }
            if (p->phase < 2 && l->issues) { /* the device computes meanwhile */
                p->phase = 2;
                p->until = w[1];
                return YIELD_ISSUE;
            }
            p->phase = 0;
            if (p->known != w[1]) {
                read_back(p, l, l->ids_tensor, l->ids_at, 0, l->ids_bytes);
                code = take_ids(p, l, l->ids_at);
            } else {
                code = take_ids(p, l, (const int32_t *)(p->ahead->ids + p->ahead->ids_at[w[1]]));
            }
            p->known = -1;
            break;
        case OP_AHEAD:
            code = go_ahead(p, &p->ahead->segments[w[1]]);
            break;
        case OP_RING:
            if (p->bell) code = ring(p);
            break;
        case OP_RECORD:
            record(p, l);
            break;
        case OP_DIVIDE:
            if (p->layer != w[1] || p->done != l->at) return WRONG_PROGRAM;
            code = divide(p, l);
            break;
        case OP_ARRIVE:
            if (!l->waits || p->phase) {
                p->phase = 0;
                break;
            }
            p->phase = 1;
            p->until = w[2];
            return YIELD_WAIT;
        case OP_HOST:
            if (p->layer != w[1]) return WRONG_PROGRAM;
            if (p->phase == 0) {
                if (!l->n_pairs) break;
                p->counts.n_nodes_ahead += l->n_ahead;
                p->phase = 1;
                if (l->n_early) code = compute_host(p, l);
                if (code != DONE) return code;
            }
            if (p->n_arrived > p->n_late) return WRONG_PROGRAM;
            if (p->phase == 2 && p->n_arrived <= p->n_late_done) return WRONG_PROGRAM;
            if (p->n_arrived > p->n_late_done) code = compute_late(p, l);
            if (code != DONE) return code;
            p->phase = 2; /* Python waits for late experts */
            if (p->n_late_done < p->n_late) return YIELD_LATE;
            p->phase = 0;
            code = place(p, l);
            break;
        case OP_PYTHON:
            if (p->phase) {
                p->phase = 0;
                break;
            }
            p->phase = 1;
            p->until = w[1];
            return YIELD_STOP;
        }
        if (code != DONE) return code;
    }
}

/* Choose sides for the `ids` of a layer, as one of the program would. For tests. */
void player_divide(struct player *p, number layer) {
    count_rows(p, &p->layers[layer]);
    choose_kinds(p, &p->layers[layer]);
}

/* The sizes of the structs, by which Python checks its mirrors. */
void player_sizes(number *sizes) {
    number found[] = {sizeof(struct calls), sizeof(struct counts), sizeof(struct part), sizeof(struct redirect),
                      sizeof(struct view), sizeof(struct host), sizeof(struct costs), sizeof(struct layer),
                      sizeof(struct segment), sizeof(struct ahead), sizeof(struct bell), sizeof(struct ringing),
                      sizeof(struct event), sizeof(struct player)};
    memcpy(sizes, found, sizeof found);
}
