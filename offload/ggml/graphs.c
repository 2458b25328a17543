/* Answers what ggml asks about the nodes of a graph, and compares graphs that were built again.
 *
 * Drafts change the batch size in nearly every decode. libllama then builds its graph anew, and ggml's scheduler asks
 * each device some thousand times which operations and which memory it takes. These functions answer without Python.
 * They ask Python (`ask`) only about products with weights in our host memory, and remember its answers while
 * `remembers` is set.
 *
 * Like the player (offload/ggml/player.c), the file links against nothing but libc. Python passes the offsets of
 * fields in ggml's structs. Every field of a struct is 8 bytes wide. offload/ggml/native.py mirrors the structs.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t number;

/* Offsets in ggml's structs, and their sizes in bytes. */
struct layout {
    number tensor_bytes, buffer, type, ne, nb, op, src, n_src, view_src, buft, header_bytes, n_nodes, nodes, use_counts,
        hash_set, uid, device_bytes, stream_bytes, data, graph_compute, set_rows;
};

static struct layout at;

void graphs_use_layout(const struct layout *layout) { at = *layout; }

static char *pointer(const char *from, number offset) {
    char *found;
    memcpy(&found, from + offset, sizeof found);
    return found;
}

static int32_t int32(const char *from, number offset) {
    int32_t found;
    memcpy(&found, from + offset, sizeof found);
    return found;
}

static number dimension(const char *tensor, number of, number i) {
    number found;
    memcpy(&found, tensor + of + 8 * i, sizeof found);
    return found;
}

/* -- the library's log ---------------------------------------------------------------------------- */

static void (*log_to)(int level, const char *text, void *data);

void graphs_log_to(void (*to)(int, const char *, void *)) { log_to = to; }

/* Pass a line of the log on to Python, except those that CUDA's backend writes for each graph of each decode. */
void graphs_log(int level, const char *text, void *data) {
    static const char of_each_graph[] = "CUDA Graph id ";
    if (text && !strncmp(text, of_each_graph, sizeof of_each_graph - 1)) return;
    log_to(level, text, data);
}

/* -- what a device takes ------------------------------------------------------------------------ */

enum { N_KEY = 16, MOST_PROBES = 8, MOST_STEPS = 4 };

struct answer { number key[N_KEY]; number takes; }; /* key[0], the address of the weight, is 0 in a free entry */

struct host { char *types[2]; number product, experts; }; /* our types of memory; numbers of two operations */

struct answers { /* lies directly behind our copy of the device's struct */
    bool (*supports_op)(void *device, const char *node); /* of the inner device */
    bool (*supports_buft)(void *device, const char *type);
    void *inner;
    bool (*ask)(void *device, const char *node);
    char *memory; /* the device's own type of memory, if it has one */
    const struct host *host;
    number remembers;
    number is_sure; /* Python sets it if its answer holds for all nodes alike */
    struct answer *table;
    number n_table; /* a power of two */
    number n_asked;
    number is_direct; /* 1: graphs without streamed weights are computed as ggml built them */
    const volatile char *interrupt, *heeds; /* neither byte is 0: a signal ends the decode. May be NULL. */
    /* Attention of batches with fewer tokens runs on the CPU if its keys lie in memory of this type. */
    const char *cache_type;
    number attention, attention_batch;
    number only_cpu; /* 1: everything that reads memory of this type runs on the CPU */
};

static bool is_ours(const struct host *h, const char *type) { return type && (type == h->types[0] || type == h->types[1]); }

/* Whether the node multiplies with a weight in our host memory. */
static bool reads_host(const struct host *h, const char *node) {
    int32_t op = int32(node, at.op);
    if (op != h->product && op != h->experts) return false;
    const char *weight = pointer(node, at.src), *buffer = weight ? pointer(weight, at.buffer) : NULL;
    return buffer && is_ours(h, pointer(buffer, at.buft));
}

/* Ask Python, or repeat its answer for an equal product with the same weight. */
static bool takes(struct answers *a, void *device, const char *node) {
    const char *weight = pointer(node, at.src), *rows = pointer(node, at.src + 8);
    /* A view is a tensor of the graph, so another one may lie at its address in the next graph. */
    bool known = a->remembers && a->n_table && rows && !pointer(weight, at.view_src);
    struct answer one = {{(number)(intptr_t)weight, int32(node, at.op), int32(node, at.type), int32(rows, at.type)}, 0};
    struct answer *place = NULL;
    if (known) {
        for (number i = 0; i < 4; i++) {
            one.key[4 + i] = dimension(node, at.ne, i);
            one.key[8 + i] = dimension(rows, at.ne, i);
            one.key[12 + i] = dimension(rows, at.nb, i);
        }
        uint64_t hash = 0;
        for (number i = 0; i < N_KEY; i++) hash = (hash ^ (uint64_t)one.key[i]) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
        for (uint64_t i = 0; i < MOST_PROBES; i++) {
            place = &a->table[(hash + i) & (uint64_t)(a->n_table - 1)];
            if (!place->key[0]) break;
            if (!memcmp(place->key, one.key, sizeof one.key)) return place->takes;
        }
    }
    a->n_asked++;
    a->is_sure = 0;
    one.takes = a->ask(device, node);
    if (known && a->is_sure) *place = one;
    if (!a->is_sure) a->is_direct = 0; /* Python ends the decode */
    return one.takes;
}

/* Whether the tensor is a part of the KV cache, or was made of one by up to `levels` steps, such as a cast. */
static bool is_cached(const struct answers *a, const char *tensor, int levels) {
    const char *whole = pointer(tensor, at.view_src), *buffer;
    whole = whole ? whole : tensor;
    buffer = pointer(whole, at.buffer);
    if (buffer) return pointer(buffer, at.buft) == a->cache_type;
    const char *source = pointer(whole, at.src);
    return levels && source && is_cached(a, source, levels - 1);
}

/* Whether the node reads a KV cache in RAM and is left to the CPU. */
static bool is_left_to_cpu(const struct answers *a, const char *node) {
    if (!a->cache_type) return false;
    if (int32(node, at.op) == a->attention) {
        const char *queries = pointer(node, at.src), *keys = pointer(node, at.src + 8);
        if (!queries || !keys || dimension(queries, at.ne, 1) >= a->attention_batch) return false;
        return is_cached(a, keys, a->only_cpu ? MOST_STEPS : 0);
    }
    for (number i = 0; a->only_cpu && i < at.n_src; i++) {
        const char *source = pointer(node, at.src + 8 * i);
        if (source && is_cached(a, source, 0)) return true;
    }
    return false;
}

bool graphs_supports_op(char *device, const char *node) {
    struct answers *a = (struct answers *)(device + at.device_bytes);
    if (is_left_to_cpu(a, node)) return false;
    if (a->host && reads_host(a->host, node)) return takes(a, device, node);
    return a->supports_op(a->inner, node);
}

bool graphs_supports_buft(char *device, const char *type) {
    const struct answers *a = (const struct answers *)(device + at.device_bytes);
    if (a->host && is_ours(a->host, type)) return true;
    if (a->memory) return type == a->memory;
    return a->supports_buft(a->inner, type);
}

/* Write the positions of up to `most` products with weights in our host memory, and return their number. Products of
 * no tokens do not count. */
number graphs_products(const char *graph, const struct host *h, number *positions, number most) {
    number n = 0, n_nodes = int32(graph, at.n_nodes);
    const char *nodes = pointer(graph, at.nodes);
    for (number i = 0; i < n_nodes && n < most; i++) {
        const char *node = pointer(nodes, 8 * i);
        if (!reads_host(h, node) || !dimension(node, at.ne, int32(node, at.op) == h->experts ? 2 : 1)) continue;
        positions[n++] = i;
    }
    return n;
}

/* -- graphs that Python need not see -------------------------------------------------------------- */

enum { ABORTED = 1 }; /* ggml's status of a computation that a signal ended */

struct stream { /* lies directly behind our copy of a stream's struct (ggml_backend) */
    int (*compute)(void *stream, char *graph); /* of the inner stream */
    void *inner;
    int (*python)(void *stream, char *graph);
    struct answers *answers;
    number n_direct; /* graphs that Python did not see */
    bool (*copy)(char *from, char *to, const char *source, char *target); /* the inner stream's, or NULL */
    bool (*copy_cache)(char *from, char *to, const char *source, char *target); /* Python's for caches, or NULL */
};

/* Compute a graph without streamed weights, or let Python do it. A graph without a uid may change. Python has to keep
 * what it computes. */
int graphs_compute(char *stream, char *graph) {
    struct stream *s = (struct stream *)(stream + at.stream_bytes);
    const struct answers *a = s->answers;
    number position;
    if (!a->is_direct || !pointer(graph, at.uid) || graphs_products(graph, a->host, &position, 1))
        return s->python(stream, graph);
    if (a->interrupt && *a->interrupt && *a->heeds) return ABORTED;
    s->n_direct++;
    return s->compute(s->inner, graph);
}

/* -- caches in RAM that are copied ahead --------------------------------------------------------- */

/* The rows of caches that this thread's CPU backends wrote last. Each layer's keys and values are tensors of their own. */
enum { MOST_CACHES = 4096, MOST_BACKENDS = 64 };
static _Thread_local struct written { const char *cache; number first, last; } all_written[MOST_CACHES];

/* The CPU backends whose graphs are watched, with their own functions. */
static struct { char *backend; int (*compute)(char *backend, char *graph); } watched[MOST_BACKENDS];
static const char *cache_memory; /* the type of memory in which caches lie */

static struct written *written_of(const char *cache) {
    uint64_t hash = ((uintptr_t)cache >> 4) * 0x9e3779b97f4a7c15u >> 32;
    for (uint64_t i = 0; i < 64; i++) {
        struct written *found = &all_written[(hash + i) % MOST_CACHES];
        if (!found->cache || found->cache == cache) return found;
    }
    return NULL;
}

/* Write the first and the last row of the cache that were written last. Returns 0 if that is unknown. */
number graphs_written(const char *cache, number *rows) {
    const struct written *found = written_of(cache);
    if (!found || !found->cache || found->first < 0) return 0;
    rows[0] = found->first, rows[1] = found->last;
    return 1;
}

static void note_written(const char *node) {
    const char *cache = pointer(node, at.view_src), *rows = pointer(node, at.src + 8);
    const char *buffer = cache ? pointer(cache, at.buffer) : NULL;
    if (!buffer || !rows || pointer(buffer, at.buft) != cache_memory) return;
    struct written *found = written_of(cache);
    if (!found) return;
    const char *data = pointer(rows, at.data);
    number n = dimension(rows, at.ne, 0), step = dimension(rows, at.nb, 0);
    *found = (struct written){cache, n > 0 && data ? INT64_MAX : -1, -1};
    for (number i = 0; data && i < n; i++) {
        number row = step == 8 ? dimension(data, 0, i) : int32(data, 4 * i);
        if (row < found->first) found->first = row;
        if (row > found->last) found->last = row;
    }
}

/* Compute a graph of a CPU backend, and note the rows of caches that it writes. */
int graphs_compute_on_cpu(char *backend, char *graph) {
    number n_nodes = int32(graph, at.n_nodes);
    const char *nodes = pointer(graph, at.nodes);
    for (number i = 0; i < n_nodes; i++) {
        const char *node = pointer(nodes, 8 * i);
        if (int32(node, at.op) == at.set_rows) note_written(node);
    }
    for (number i = 0; i < MOST_BACKENDS; i++)
        if (watched[i].backend == backend) return watched[i].compute(backend, graph);
    return -1; /* not reached: a backend is watched before it gets this function */
}

/* Note from now on which rows this CPU backend writes. The backend frees its struct, so an entry may be of an old one. */
static void watch_rows(char *backend, const char *type) {
    int (*compute)(char *, char *);
    memcpy(&compute, backend + at.graph_compute, sizeof compute);
    if (compute == graphs_compute_on_cpu) return;
    cache_memory = type;
    for (number i = 0; i < MOST_BACKENDS; i++) {
        if (watched[i].backend && watched[i].backend != backend) continue;
        watched[i].backend = backend, watched[i].compute = compute;
        compute = graphs_compute_on_cpu;
        memcpy(backend + at.graph_compute, &compute, sizeof compute);
        return;
    }
}

/* Forget a CPU backend whose context is freed. */
void graphs_unwatch_rows(char *backend) {
    for (number i = 0; i < MOST_BACKENDS; i++)
        if (watched[i].backend == backend) watched[i].backend = NULL;
}

/* Copy an input of a graph to the stream `to`, if that need not wait. Python copies caches in RAM. */
bool graphs_copy(char *from, char *to, const char *source, char *target) {
    struct stream *s = (struct stream *)(to + at.stream_bytes);
    if (s->copy_cache && s->answers->cache_type && is_cached(s->answers, source, 0)) {
        watch_rows(from, s->answers->cache_type);
        return s->copy_cache(from, to, source, target);
    }
    return s->copy && s->copy(from, to, source, target);
}

/* -- where graphs are allocated ------------------------------------------------------------------ */

/* The buffer in which a scheduler allocates its graphs. Its free bytes may be used for other data between prompts.
 * ggml calls `reset` before it places the tensors of a graph, and `init_tensor` for each tensor, before it writes the
 * graph's inputs. */
struct computing {
    char *buffer; /* ggml's struct of the buffer; NULL if there is none */
    char *base;   /* the buffer's first byte */
    int (*init_tensor)(char *buffer, char *tensor); /* the backend's own functions, or NULL */
    void (*reset)(char *buffer);
    size_t (*alloc_size)(char *buffer, const char *tensor);
    void (*before)(char *buffer); /* called before the tensors of a graph are placed, if `is_lent` */
    number is_lent;
    number end, touched; /* end of the graph's tensors in bytes, and the largest end since Python has read it */
    struct computing *next;
};

static struct computing *all_computing; /* changed only while contexts are opened and closed, under Python's lock */

void graphs_watch(struct computing *c) {
    c->next = all_computing;
    all_computing = c;
}

void graphs_unwatch(struct computing *c) {
    for (struct computing **at = &all_computing; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            return;
        }
}

static struct computing *computing_in(const char *buffer) {
    struct computing *c = all_computing;
    while (c && c->buffer != buffer) c = c->next;
    return c;
}

void *graphs_base(char *buffer) {
    struct computing *c = computing_in(buffer);
    return c ? c->base : NULL;
}

void graphs_reset(char *buffer) {
    struct computing *c = computing_in(buffer);
    if (!c) return;
    if (c->is_lent) c->before(buffer);
    c->end = 0;
    if (c->reset) c->reset(buffer);
}

int graphs_init_tensor(char *buffer, char *tensor) {
    struct computing *c = computing_in(buffer);
    if (!c) return 0;
    if (!pointer(tensor, at.view_src)) {
        number end = pointer(tensor, at.data) - c->base + (number)c->alloc_size(buffer, tensor);
        if (end > c->end) c->end = end;
        if (end > c->touched) c->touched = end;
    }
    return c->init_tensor ? c->init_tensor(buffer, tensor) : 0;
}

/* -- snapshots of graphs ------------------------------------------------------------------------ */

/* A snapshot: this struct, the addresses of all tensors that were read (the nodes first), the numbers of nodes that
 * read each of them, the graph's own struct, and the structs of the tensors. */
struct snapshot { number n_bytes, n_nodes, n_tensors; };

static number padded(number n_bytes) { return (n_bytes + 7) / 8 * 8; }

static number snapshot_bytes(number n_tensors) {
    return (number)sizeof(struct snapshot) + 8 * n_tensors + padded(4 * n_tensors) + padded(at.header_bytes) +
           n_tensors * at.tensor_bytes;
}

/* Return the number of nodes that read a tensor, in all parts of the graph, or -1 (ggml_node_get_use_count). */
static int32_t n_uses(const char *graph, const char *tensor) {
    const char *set = graph + at.hash_set, *counts = pointer(graph, at.use_counts);
    uint64_t size = (uint64_t)pointer(set, 0);
    const char *used = pointer(set, 8), *keys = pointer(set, 16);
    if (!size || !counts) return -1;
    for (uint64_t n = 0, i = ((uintptr_t)tensor >> 4) % size; n < size; n++, i = i + 1 < size ? i + 1 : 0) {
        if (!((uint32_t)int32(used, 4 * (number)(i >> 5)) >> (i & 31) & 1)) return -1;
        if (pointer(keys, 8 * (number)i) == tensor) return int32(counts, 4 * (number)i);
    }
    return -1;
}

struct tensors { const char **found, **table; number n, most, n_table; };

/* Add a tensor if it is new. Returns 0 if there is no memory. */
static int add(struct tensors *t, const char *tensor) {
    if (2 * t->n >= t->n_table) {
        number n_table = t->n_table ? 4 * t->n_table : 8192;
        const char **table = calloc((size_t)n_table, sizeof *table);
        const char **found = realloc(t->found, (size_t)(n_table / 2 + 1) * sizeof *found);
        if (found) t->found = found;
        if (!table || !found) {
            free(table);
            return 0;
        }
        free(t->table);
        t->table = table, t->n_table = n_table;
        for (number i = 0; i < t->n; i++) {
            uint64_t k = ((uintptr_t)t->found[i] >> 4) * 0x9e3779b97f4a7c15u >> 20;
            while (table[k & (uint64_t)(n_table - 1)]) k++;
            table[k & (uint64_t)(n_table - 1)] = t->found[i];
        }
    }
    uint64_t k = ((uintptr_t)tensor >> 4) * 0x9e3779b97f4a7c15u >> 20, mask = (uint64_t)(t->n_table - 1);
    for (; t->table[k & mask]; k++)
        if (t->table[k & mask] == tensor) return 1;
    t->table[k & mask] = t->found[t->n++] = tensor;
    return 1;
}

/* Find the graph's nodes and what they read, directly or through up to `levels` - 2 other tensors. */
static int find(struct tensors *t, const char *graph, number levels) {
    number n_nodes = int32(graph, at.n_nodes), from = 0;
    const char *nodes = pointer(graph, at.nodes);
    for (number i = 0; i < n_nodes; i++)
        if (!add(t, pointer(nodes, 8 * i))) return 0;
    for (number level = 1; level < levels; level++) {
        number end = t->n;
        for (number i = from; i < end; i++) {
            const char *tensor = t->found[i], *viewed = pointer(tensor, at.view_src);
            if (viewed && !add(t, viewed)) return 0;
            for (number s = 0; s < at.n_src; s++) {
                const char *source = pointer(tensor, at.src + 8 * s);
                if (source && !add(t, source)) return 0;
            }
        }
        from = end;
    }
    return 1;
}

/* Return a snapshot of all data that preparing a graph reads, or NULL if there is no memory. */
struct snapshot *graphs_snapshot(const char *graph, number levels) {
    struct tensors t = {0};
    struct snapshot *made = NULL;
    if (find(&t, graph, levels)) made = malloc((size_t)snapshot_bytes(t.n));
    if (made) {
        *made = (struct snapshot){snapshot_bytes(t.n), int32(graph, at.n_nodes), t.n};
        char *addresses = (char *)(made + 1), *uses = addresses + 8 * t.n, *header = uses + padded(4 * t.n);
        char *structs = header + padded(at.header_bytes);
        memset(uses, 0, (size_t)padded(4 * t.n));
        memset(header, 0, (size_t)padded(at.header_bytes));
        memcpy(header, graph, (size_t)at.header_bytes);
        for (number i = 0; i < t.n; i++) {
            int32_t n = n_uses(graph, t.found[i]);
            memcpy(addresses + 8 * i, &t.found[i], 8);
            memcpy(uses + 4 * i, &n, 4);
            memcpy(structs + i * at.tensor_bytes, t.found[i], (size_t)at.tensor_bytes);
        }
    }
    free(t.found);
    free(t.table);
    return made;
}

/* Whether a snapshot of the graph would equal this one. The nodes come first: graphs of other batch sizes differ there.
 * If all structs are equal, the tensors that they name are the same, too. */
bool graphs_match(const char *graph, const struct snapshot *s) {
    const char *addresses = (const char *)(s + 1), *uses = addresses + 8 * s->n_tensors;
    const char *header = uses + padded(4 * s->n_tensors), *structs = header + padded(at.header_bytes);
    if (int32(graph, at.n_nodes) != s->n_nodes || memcmp(header, graph, (size_t)at.header_bytes)) return false;
    if (s->n_nodes && memcmp(addresses, pointer(graph, at.nodes), (size_t)(8 * s->n_nodes))) return false;
    for (number i = 0; i < s->n_tensors; i++)
        if (memcmp(structs + i * at.tensor_bytes, pointer(addresses, 8 * i), (size_t)at.tensor_bytes)) return false;
    for (number i = 0; i < s->n_tensors; i++)
        if (int32(uses, 4 * i) != n_uses(graph, pointer(addresses, 8 * i))) return false;
    return true;
}

void graphs_forget(struct snapshot *snapshot) { free(snapshot); }

/* -- pointers that move while a graph is submitted ----------------------------------------------- */

struct move { void **pointer; void *there, *back; };

void graphs_move(const struct move *moves, number n, number there) {
    for (number i = 0; i < n; i++) *moves[i].pointer = there ? moves[i].there : moves[i].back;
}

/* The sizes of the structs, by which Python checks its mirrors. */
void graphs_sizes(number *sizes) {
    number found[] = {sizeof(struct layout), sizeof(struct answer), sizeof(struct host), sizeof(struct answers),
                      sizeof(struct stream), sizeof(struct snapshot), sizeof(struct move), sizeof(struct computing)};
    memcpy(sizes, found, sizeof found);
}
