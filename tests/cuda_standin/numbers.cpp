// Numbers: behind the kernels of each graph, which compute nothing, the same graph is queued for
// ggml-cpu, on the same memory and in the same CUDA stream.
//
// The library is preloaded, so that its ggml_backend_cuda_reg is found before ggml-cuda's. It wraps
// the graph_compute of each backend.
#include "costs.hpp"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml_functions.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <unordered_map>

using namespace standin;

namespace {

// The most tokens of a product that get a kernel which computes pair by pair, on any NVIDIA card (the smallest number of
// mmvq.cu's get_mmvq_mmid_max_batch). Products of more tokens, and with weights that are not quantised, look for an
// expert only once in a token's ids (mmid.cu's mm_ids_helper, and ggml_cuda_mul_mat_id where it reads ids back).
int most_pairwise_tokens(ggml_type type) {
    static const auto is_quantised = BASE(ggml_is_quantized);
    if (!is_quantised(type)) {
        return 0;
    }
    switch (type) {
        case GGML_TYPE_IQ1_S: case GGML_TYPE_IQ1_M: case GGML_TYPE_IQ4_NL: case GGML_TYPE_Q4_0: case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0: case GGML_TYPE_Q5_1:
            return 6;
        case GGML_TYPE_IQ2_XS: case GGML_TYPE_IQ2_XXS: case GGML_TYPE_IQ4_XS: case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K:
            return 5;
        case GGML_TYPE_IQ2_S: case GGML_TYPE_IQ3_S: case GGML_TYPE_IQ3_XXS: case GGML_TYPE_MXFP4: case GGML_TYPE_NVFP4:
        case GGML_TYPE_Q2_K: case GGML_TYPE_Q3_K: case GGML_TYPE_Q6_K: case GGML_TYPE_Q8_0:
            return 4;
        default:
            return 8;
    }
}

// What a GPU's kernels take for granted of a product's ids. ggml-cpu computes right what they would write elsewhere.
void check_ids(const ggml_tensor * node) {
    const ggml_tensor * weights = node->src[0];
    const ggml_tensor * ids     = node->src[2];
    const bool          may_repeat = ids->ne[1] <= most_pairwise_tokens(weights->type);
    const auto at = [&](int64_t token, int64_t i) {
        return *reinterpret_cast<const int32_t *>(static_cast<const char *>(ids->data) + token * ids->nb[1] + i * ids->nb[0]);
    };
    const char * wrong = nullptr;
    int64_t      where = 0;
    for (int64_t token = 0; token < ids->ne[1] && !wrong; ++token) {
        for (int64_t i = 0; i < ids->ne[0] && !wrong; ++i) {
            where = token;
            if (at(token, i) < 0 || at(token, i) >= weights->ne[2]) {
                wrong = "names an expert out of range";
            }
            for (int64_t k = 0; k < i && !may_repeat; ++k) {
                if (at(token, k) == at(token, i)) {
                    wrong = "names an expert twice";
                }
            }
        }
    }
    if (wrong && counters.bad_ids++ < 10) {
        std::fprintf(stderr, "stand-in: %s: token %lld of %lld %s, of %lld\n", node->name, static_cast<long long>(where),
                     static_cast<long long>(ids->ne[1]), wrong, static_cast<long long>(weights->ne[2]));
    }
}

// The numbers of such rows are known when the graph is computed.
void check_rows(const ggml_tensor * node) {
    size_t n_bad = 0;
    if (spans_memories(node)) {
        pinned_rows(node, n_bad);
    }
    if (n_bad && counters.bad_addresses++ < 10) {
        std::fprintf(stderr, "stand-in: %zu rows of a GET_ROWS are in no memory of the device\n", n_bad);
    }
}

// A copy of a graph's nodes and of the tensors they read, made when the graph is submitted. Kernels
// get their parameters then, too: a program may write its next graph over these structs at once.
class CopiedGraph {
  public:
    explicit CopiedGraph(const ggml_cgraph & graph) {
        for (int i = 0; i < graph.n_nodes; ++i) {
            nodes_.push_back(copy(graph.nodes[i]));
        }
        for (auto * node : nodes_) {
            for (auto & source : node->src) {
                source = source ? copy(source) : nullptr;
            }
        }
        graph_.size = graph.n_nodes;
        // ggml-cpu fuses no nodes whose number of uses it does not find.
        graph_.visited_hash_set = {1, &used_, &key_};
        graph_.use_counts       = &n_uses_;
    }

    // Stops before each product with experts, whose ids may be results of this graph. Returns the
    // virtual time of the nodes, if there is a clock.
    Costs compute(int begin, int end) {
        Costs costs;
        while (begin < end) {
            int next = begin + 1;
            while (next < end && nodes_[next]->op != GGML_OP_MUL_MAT_ID && !is_skipped(nodes_[next])) {
                ++next;
            }
            if (nodes_[begin]->op == GGML_OP_MUL_MAT_ID) {
                check_ids(nodes_[begin]);
            }
            for (int i = begin; i < next; ++i) {
                check_rows(nodes_[i]);
            }
            for (int i = begin; i < next && has_clock(); ++i) {
                if (has_kernel(nodes_[i])) {
                    costs.kernels_s.push_back(cost_s(nodes_[i]));
                    add_over_link(nodes_[i], costs);
                }
            }
            if (is_skipped(nodes_[begin])) {
                write_zeros(nodes_[begin]);
                ++begin;
            }
            if (begin < next) {
                compute_part(begin, next);
            }
            begin = next;
        }
        return costs;
    }

    // The first MUL_MAT_ID from `begin` on that reads this address; -1 if there is none.
    int reader_of(const void * address, int begin) const {
        for (int i = begin; i < size(); ++i) {
            for (const auto * source : nodes_[i]->src) {
                if (source && source->data == address && nodes_[i]->op == GGML_OP_MUL_MAT_ID) {
                    return i;
                }
            }
        }
        return -1;
    }

    int size() const { return static_cast<int>(nodes_.size()); }

  private:
    void compute_part(int begin, int end) {
        graph_.nodes              = nodes_.data() + begin;
        graph_.n_nodes            = end - begin;
        static const auto   plan  = CPU(ggml_graph_plan);
        static const auto   run   = CPU(ggml_graph_compute);
        ggml_cplan          cplan = plan(&graph_, 1, nullptr);
        std::vector<uint8_t> work(cplan.work_size);
        cplan.work_data = work.data();
        if (run(&graph_, &cplan) != GGML_STATUS_SUCCESS) {
            std::fprintf(stderr, "stand-in: ggml-cpu failed\n");
            std::abort();
        }
    }

    ggml_tensor * copy(ggml_tensor * tensor) {
        ggml_tensor *& made = made_[tensor];
        if (!made) {
            tensors_.push_back(*tensor);
            made           = &tensors_.back();
            made->buffer   = nullptr;  // ggml-cpu would look there for repacked weights
            made->extra    = nullptr;
            made->view_src = nullptr;
        }
        return made;
    }

    std::deque<ggml_tensor>                          tensors_;  // a deque keeps addresses
    std::vector<ggml_tensor *>                       nodes_;
    std::unordered_map<ggml_tensor *, ggml_tensor *> made_;
    ggml_cgraph                                      graph_{};
    ggml_bitset_t                                    used_   = 0;
    ggml_tensor *                                    key_    = nullptr;
    int32_t                                          n_uses_ = 0;
};

struct GraphSubmission : Submission {
    std::shared_ptr<CopiedGraph> graph;
    StreamPtr                    stream;
    std::vector<Launch>          launches;      // those after the last node that was queued
    int                          n_queued = 0;  // nodes that ggml-cpu will compute
    int                          n_read   = 0;  // nodes whose ids were read back

    GraphSubmission(const ggml_cgraph & of, StreamPtr stream)
        : graph(std::make_shared<CopiedGraph>(of)), stream(std::move(stream)) {}

    // ggml-cuda's general MUL_MAT_ID reads its ids back in the middle of a graph: they have to be
    // computed by then.
    void before_read(const void * device_address) override {
        const int reader = graph->reader_of(device_address, n_read);
        if (reader >= 0) {
            queue_to(reader);
            n_read = reader + 1;
        }
    }

    void launched(size_t n_kernels) override { launches.push_back({host_now_s(), n_kernels}); }

    void queue_to(int end) {
        if (end > n_queued) {
            const double at_s = launches.empty() ? host_now_s() : launches.front().at_s;
            const auto   work = [graph = graph, device = stream->device, begin = n_queued, end,
                               launches = std::move(launches)] {
                take_time(device, launches, graph->compute(begin, end));
            };
            stream->push(work, at_s);
            launches.clear();
            n_queued = end;
        }
    }
};

ggml_status (*cuda_compute)(ggml_backend_t, ggml_cgraph *);
ggml_backend_t (*cuda_init)(ggml_backend_dev_t, const char *);

// A kernel that gets an address outside of its device's memory ends a real CUDA context. Pinned memory is mapped there.
void check(const ggml_tensor * node, const ggml_tensor * used, int device) {
    static const auto name_of  = BASE(ggml_op_name);
    static const auto bytes_of = BASE(ggml_nbytes);
    const size_t      size     = bytes_of(used);
    if (may_be_pinned(node, used) && (is_pinned(used->data, size) || (used == node->src[0] && spans_memories(node)))) {
        return;
    }
    if (size && device_of(used->data, size) != device && counters.bad_addresses++ < 10) {
        std::fprintf(stderr, "stand-in: %s %s: %s (%p, %zu bytes) is not in the memory of device %d\n",
                     name_of(node->op), node->name, used->name, used->data, size, device);
    }
}

void check(const ggml_cgraph & graph, int device) {
    const ggml_op nothing[] = {GGML_OP_NONE, GGML_OP_RESHAPE, GGML_OP_VIEW, GGML_OP_PERMUTE, GGML_OP_TRANSPOSE};
    for (int i = 0; i < graph.n_nodes; ++i) {
        const ggml_tensor * node     = graph.nodes[i];
        const bool          is_empty = std::count(node->ne, node->ne + GGML_MAX_DIMS, 0) > 0;
        if (is_empty || std::count(std::begin(nothing), std::end(nothing), node->op)) {
            continue;
        }
        check(node, node, device);
        for (const auto * source : node->src) {
            if (source) {
                check(node, source, device);
            }
        }
    }
}

// A graph with the uid of the one before is taken to be the same: ggml-cuda replays what it captured.
// So it has to be: its nodes, and what ggml-cuda compares of their sources.
void check_uid(ggml_backend_t backend, const ggml_cgraph & graph) {
    static std::mutex                                                    mutex;
    static std::map<std::pair<void *, void *>, std::pair<uint64_t, size_t>> known;
    std::string                                                          bytes;
    const auto add = [&](const auto & value) {
        bytes.append(reinterpret_cast<const char *>(&value), sizeof(value));
    };
    for (int i = 0; i < graph.n_nodes; ++i) {
        add(*graph.nodes[i]);
        for (const auto * source : graph.nodes[i]->src) {
            if (source) {
                add(source->data);
                add(source->ne);
                add(source->nb);
            }
        }
    }
    const size_t                found = std::hash<std::string>()(bytes);
    std::lock_guard<std::mutex> lock(mutex);
    auto &                      last = known[{backend->context, graph.nodes[0]}];
    if (graph.uid && graph.uid == last.first && found != last.second && counters.stale_uids++ < 10) {
        std::fprintf(stderr, "stand-in: a graph of %d nodes changed and kept its uid\n", graph.n_nodes);
    }
    last = {graph.uid, found};
}

std::mutex                                   mutex;
std::unordered_map<const void *, void *> &   handles = *new std::unordered_map<const void *, void *>;

// By a backend's context, which its copies share. A backend's stream is the one that it records
// events in.
void learn_stream(ggml_backend_t backend) {
    const auto event = backend->device->iface.event_new(backend->device);
    backend->iface.event_record(backend, event);
    backend->device->iface.event_free(backend->device, event);
    std::lock_guard<std::mutex> lock(mutex);
    handles[backend->context] = last_stream;
}

StreamPtr stream_of_backend(ggml_backend_t backend) {
    std::lock_guard<std::mutex> lock(mutex);
    return stream_of(handles.at(backend->context));
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    std::unique_ptr<GraphSubmission> submitted;
    {
        const HostCall call;
        submitted = std::make_unique<GraphSubmission>(*graph, stream_of_backend(backend));
        check(*graph, submitted->stream->device);
        if (graph->n_nodes) {
            check_uid(backend, *graph);
        }
    }
    submission               = submitted.get();
    const ggml_status status = cuda_compute(backend, graph);
    submission               = nullptr;
    const HostCall call;
    if (status == GGML_STATUS_SUCCESS) {
        submitted->queue_to(submitted->graph->size());
    }
    return status;
}

ggml_backend_t init(ggml_backend_dev_t device, const char * params) {
    ggml_backend_t backend = cuda_init(device, params);
    if (backend) {
        cuda_compute                 = backend->iface.graph_compute;
        backend->iface.graph_compute = compute;
        learn_stream(backend);
    }
    return backend;
}

}  // namespace

// ggml_backend_graph_compute_async, for the lab. Under a clock that skips products, a CPU backend computes nothing:
// it takes `host_expert_s` for each pair of a token and an expert, whatever processor this is.
extern "C" ggml_status standin_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    static const auto run = BASE(ggml_backend_graph_compute_async);
    if (backend->iface.graph_compute == compute || !has_clock() || !skips_products()) {
        return run(backend, graph);
    }
    const HostCall call;
    double         n_pairs = 0;
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_MUL_MAT_ID) {
            n_pairs = std::max(n_pairs, static_cast<double>(node->src[2]->ne[0] * node->src[2]->ne[1]));
        }
    }
    host_wait_until(host_now_s() + rates.host_graph_s + n_pairs * rates.host_expert_s);
    return GGML_STATUS_SUCCESS;
}

extern "C" ggml_backend_reg_t ggml_backend_cuda_reg(void) {
    static ggml_backend_reg_t registry = [] {
        auto found = find<ggml_backend_reg_t (*)()>("libggml-cuda", "ggml_backend_cuda_reg")();
        for (size_t i = 0; i < found->iface.get_device_count(found); ++i) {
            ggml_backend_dev_t device  = found->iface.get_device(found, i);
            cuda_init                  = device->iface.init_backend;
            device->iface.init_backend = init;
        }
        return found;
    }();
    return registry;
}
