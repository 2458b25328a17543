// The virtual time of nodes, by their bytes and operations.
#include "costs.hpp"

#include "ggml.h"
#include "ggml_functions.hpp"

#include <algorithm>
#include <cstring>
#include <set>

namespace standin {

namespace {

double row_bytes(const ggml_tensor * t) {
    static const auto bytes_of_row = BASE(ggml_row_size);
    return static_cast<double>(bytes_of_row(t->type, t->ne[0]));
}

// The bytes of all elements, without gaps between rows.
double bytes(const ggml_tensor * t) {
    return row_bytes(t) * static_cast<double>(t->ne[1]) * static_cast<double>(t->ne[2]) *
           static_cast<double>(t->ne[3]);
}

double elements(const ggml_tensor * t) {
    return static_cast<double>(t->ne[0]) * static_cast<double>(t->ne[1]) * static_cast<double>(t->ne[2]) *
           static_cast<double>(t->ne[3]);
}

double used_experts(const ggml_tensor * ids) {
    std::set<int32_t> used;
    for (int64_t token = 0; token < ids->ne[1]; ++token) {
        const char * row = static_cast<const char *>(ids->data) + static_cast<size_t>(token) * ids->nb[1];
        for (int64_t i = 0; i < ids->ne[0]; ++i) {
            used.insert(*reinterpret_cast<const int32_t *>(row + static_cast<size_t>(i) * ids->nb[0]));
        }
    }
    return static_cast<double>(used.size());
}

double roofline_s(double n_bytes, double n_operations) {
    return std::max(n_bytes / rates.vram_bytes_per_s, n_operations / rates.flops);
}

}  // namespace

bool has_kernel(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE: case GGML_OP_RESHAPE: case GGML_OP_VIEW: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
            return false;
        default:
            return elements(node) > 0;
    }
}

double cost_s(const ggml_tensor * node) {
    const ggml_tensor * const * src     = node->src;
    const double                outputs = elements(node);
    switch (node->op) {
        case GGML_OP_MUL_MAT:
            return roofline_s(bytes(src[0]) + bytes(src[1]) + bytes(node),
                              2 * outputs * static_cast<double>(src[0]->ne[0]));
        case GGML_OP_MUL_MAT_ID: {
            const double of_one_expert = row_bytes(src[0]) * static_cast<double>(src[0]->ne[1]);
            return roofline_s(used_experts(src[2]) * of_one_expert + bytes(src[1]) + bytes(node),
                              2 * outputs * static_cast<double>(src[0]->ne[0]));
        }
        case GGML_OP_FLASH_ATTN_EXT: {
            // Kernels skip the part of the cache that the mask hides from all tokens of a tile. So a token
            // reads the tokens before this batch, and half of the batch on average.
            const double n_tokens = static_cast<double>(src[0]->ne[1]);
            const double n_cached = static_cast<double>(src[1]->ne[1]);
            const double n_read   = n_cached > n_tokens ? n_cached - n_tokens / 2 : n_cached / 2;
            const double n_heads  = static_cast<double>(src[0]->ne[2] * src[0]->ne[3]);
            return std::max((bytes(src[0]) + bytes(src[1]) + bytes(src[2]) + bytes(node)) / rates.vram_bytes_per_s,
                            2 * n_tokens * n_heads * n_read * static_cast<double>(src[1]->ne[0] + src[2]->ne[0]) /
                                rates.attention_flops);
        }
        default:
            // The rate of products was seen in whole prompts, so it contains the time of all other kernels.
            return 0;
    }
}

bool may_be_pinned(const ggml_tensor * node, const ggml_tensor * used) {
    switch (node->op) {
        case GGML_OP_SET_ROWS: return used == node->src[0] || used == node->src[1];
        case GGML_OP_GET_ROWS: return used == node->src[0] || used == node->src[1] || used == node;
        default: return false;
    }
}

bool spans_memories(const ggml_tensor * node) {
    static const auto bytes_of = BASE(ggml_nbytes);
    if (node->op != GGML_OP_GET_ROWS || elements(node) == 0) {
        return false;
    }
    const char * begin    = static_cast<const char *>(node->src[0]->data);
    const char * last     = begin + bytes_of(node->src[0]) - 1;
    const bool   on_device[] = {device_of(begin, 1) >= 0, device_of(last, 1) >= 0};
    return on_device[0] != on_device[1] && (on_device[0] || is_pinned(begin, 1)) && (on_device[1] || is_pinned(last, 1));
}

size_t pinned_rows(const ggml_tensor * node, size_t & n_bad) {
    const ggml_tensor * rows    = node->src[0];
    const ggml_tensor * numbers = node->src[1];
    const auto          size    = static_cast<size_t>(row_bytes(rows));
    size_t              n       = 0;
    for (int64_t i = 0; i < numbers->ne[0]; ++i) {
        const char * number = static_cast<const char *>(numbers->data) + static_cast<size_t>(i) * numbers->nb[0];
        const int64_t row   = *reinterpret_cast<const int32_t *>(number);
        const char * at     = static_cast<const char *>(rows->data) + row * static_cast<int64_t>(rows->nb[1]);
        const bool   is_on_host = is_pinned(at, size);
        n += is_on_host;
        n_bad += !is_on_host && device_of(at, size) < 0;
    }
    return n;
}

void add_over_link(const ggml_tensor * node, Costs & costs) {
    if (node->op != GGML_OP_SET_ROWS && node->op != GGML_OP_GET_ROWS) {
        return;
    }
    // GET_ROWS reads only the rows that it gathers.
    const ggml_tensor * rows = node->src[0];
    const double of_rows = node->op == GGML_OP_SET_ROWS ? bytes(rows) : row_bytes(rows) * elements(node->src[1]);
    if (spans_memories(node)) {
        size_t       n_bad = 0;
        const size_t n     = pinned_rows(node, n_bad);
        costs.read_bytes += row_bytes(rows) * static_cast<double>(n);
        costs.n_followed += n > 0 && is_pinned(node->src[1]->data, 1);
    } else {
        costs.read_bytes += is_pinned(rows->data, 1) ? of_rows : 0;
    }
    costs.read_bytes += is_pinned(node->src[1]->data, 1) ? bytes(node->src[1]) : 0;
    costs.written_bytes += node->op == GGML_OP_GET_ROWS && is_pinned(node->data, 1) ? bytes(node) : 0;
}

void take_time(int device, const std::vector<Launch> & launches, const Costs & costs) {
    const std::vector<double> & costs_s = costs.kernels_s;
    size_t n_kernels = 0, n_begun = 0, next = 0;
    for (const Launch & launch : launches) {
        n_kernels += launch.n_kernels;
    }
    const double began_s = launches.empty() ? *stream_now_s : std::max(*stream_now_s, launches.front().at_s);
    // Some kernels compute several nodes, and some nodes need several kernels. Which ones is not known
    // here, so nodes are given to kernels evenly, in their order.
    for (const Launch & launch : launches) {
        *stream_now_s = std::max(*stream_now_s, launch.at_s);
        for (size_t i = 0; i < launch.n_kernels; ++i) {
            spend(rates.kernel_s);
            for (++n_begun; next * n_kernels < n_begun * costs_s.size(); ++next) {
                spend(costs_s[next]);
            }
        }
    }
    for (; next < costs_s.size(); ++next) {
        spend(costs_s[next]);
    }
    spend(costs.n_followed * rates.mapped_s);
    if (costs.read_bytes > 0) {
        access_over_link(device, Direction::to_device, costs.read_bytes);
    }
    if (costs.written_bytes > 0) {
        access_over_link(device, Direction::to_host, costs.written_bytes);
    }
    note("graph", device, began_s, *stream_now_s, n_kernels);
}

bool is_skipped(const ggml_tensor * node) {
    if (!skips_products() || std::strncmp(node->name, "ffn_moe_logits", 14) == 0) {
        return false;
    }
    return node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_FLASH_ATTN_EXT;
}

void write_zeros(const ggml_tensor * node) {
    static const auto bytes_of = BASE(ggml_nbytes);
    std::memset(node->data, 0, bytes_of(node));
}

}  // namespace standin
