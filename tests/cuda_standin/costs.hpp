// The virtual time of a graph's nodes, and nodes that are not computed at all.
#pragma once
#include "clock.hpp"

struct ggml_tensor;

namespace standin {

// A launch of one kernel, or of a graph of kernels, at a virtual time.
struct Launch {
    double at_s;
    size_t n_kernels;
};

bool has_kernel(const ggml_tensor * node);

// Seconds of a product or of attention: those of its bytes or those of its operations, whichever are
// more. Other nodes take no time beside their kernels'. Ids of experts must have been computed.
double cost_s(const ggml_tensor * node);

// True if kernels may find this tensor of a node in pinned memory: what GET_ROWS and SET_ROWS read, and the result of
// GET_ROWS. Other kernels would go there by mistake.
bool may_be_pinned(const ggml_tensor * node, const ggml_tensor * used);

// True for a GET_ROWS whose source begins in device memory and ends in pinned memory, or the other way round. Its
// kernel may touch the rows that it gathers, and nothing between the two.
bool spans_memories(const ggml_tensor * node);

// Returns how many rows such a node gathers from pinned memory, and adds to `n_bad` those that lie in neither.
size_t pinned_rows(const ggml_tensor * node, size_t & n_bad);

// The virtual time of computed nodes, and the bytes of pinned memory that their kernels read and write.
struct Costs {
    std::vector<double> kernels_s;  // of each node that has a kernel
    double              read_bytes = 0, written_bytes = 0;
    int                 n_followed = 0;  // reads of rows whose numbers had to be read over the link first
};

// Adds the bytes that a node's kernel reads and writes over the link.
void add_over_link(const ggml_tensor * node, Costs & costs);

// Lets the running stream take the time of the launched kernels, which compute these nodes.
void take_time(int device, const std::vector<Launch> & launches, const Costs & costs);

// With STANDIN_SKIP=products, products and attention yield zeros, except those of routers. So shapes
// of real models take little time, and tokens choose experts by their embeddings.
bool is_skipped(const ggml_tensor * node);
void write_zeros(const ggml_tensor * node);

}  // namespace standin
