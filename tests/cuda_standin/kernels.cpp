// Kernels, which are counted and compute nothing, and captures, graphs and their instances.
#include "clock.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <unordered_map>

using namespace standin;

namespace standin {
cudaError_t refuse(cudaError_t error);
cudaError_t answer(cudaError_t error);

void count_kernel(const StreamPtr & stream, const char * name) {
    ++(stream->capture ? counters.captured : counters.launches);
    if (has_clock() && !stream->capture && submission) {
        submission->launched(1);
    } else if (has_clock() && !stream->capture) {
        stream->call(name, [] { spend(rates.kernel_s); });
    } else {
        stream->call(name, nullptr);
    }
}
}  // namespace standin

namespace {

const int most_shared_bytes = 227 << 10;
const int regs_per_thread   = 64;

struct Kernel {
    std::string      name;
    std::atomic<int> shared_bytes{48 << 10};  // that a launch may ask for
};

struct Kernels {
    std::mutex                                 mutex;
    std::unordered_map<const void *, Kernel *> by_address;
};

Kernels & kernels() {
    static Kernels * made = new Kernels;
    return *made;
}

// By the address of its host function, or by the handle that __cudaGetKernel returned.
Kernel * kernel_of(const void * function) {
    std::lock_guard<std::mutex> lock(kernels().mutex);
    const auto                  found = kernels().by_address.find(function);
    return found == kernels().by_address.end() ? nullptr : found->second;
}

cudaError_t launch(const void * function, dim3 grid, dim3 block, size_t shared, cudaStream_t handle) {
    const HostCall call(rates.launch_call_s);
    const Kernel * kernel = kernel_of(function);
    if (!kernel) {
        return refuse(cudaErrorInvalidDeviceFunction);
    }
    const auto n_threads = static_cast<uint64_t>(block.x) * block.y * block.z;
    if (n_threads == 0 || n_threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
        grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
        return refuse(cudaErrorInvalidConfiguration);
    }
    if (shared > static_cast<size_t>(kernel->shared_bytes)) {
        return refuse(cudaErrorInvalidValue);
    }
    const StreamPtr stream = stream_of(handle);
    if (stream->device != current_device()) {
        return refuse(cudaErrorInvalidResourceHandle);
    }
    if (forbids_legacy(*stream)) {
        return refuse(cudaErrorStreamCaptureImplicit);
    }
    trace("kernel", handle, 0, kernel->name.c_str());
    count_kernel(stream, "kernel");
    return cudaSuccess;
}

struct Configuration {
    dim3         grid, block;
    size_t       shared;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

// cudaGraph_t and cudaGraphExec_t both point to one.
GraphPtr & graph_of(void * handle) { return *static_cast<GraphPtr *>(handle); }

}  // namespace

extern "C" {

// -- what nvcc's code calls ------------------------------------------------------------------------

void ** __cudaRegisterFatBinary(void *) { return static_cast<void **>(std::calloc(1, sizeof(void *))); }
void    __cudaRegisterFatBinaryEnd(void **) {}
void    __cudaUnregisterFatBinary(void **) {}
void    __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

void __cudaRegisterFunction(void **, const char * function, char *, const char * name, int, uint3 *, uint3 *,
                            dim3 *, dim3 *, int *) {
    auto * kernel = new Kernel;
    kernel->name  = name;
    std::lock_guard<std::mutex> lock(kernels().mutex);
    kernels().by_address[function] = kernel;
    kernels().by_address[kernel]   = kernel;
}

cudaError_t __cudaGetKernel(cudaKernel_t * handle, const void * function) {
    Kernel * kernel = kernel_of(function);
    *handle         = reinterpret_cast<cudaKernel_t>(kernel);
    return kernel ? cudaSuccess : refuse(cudaErrorInvalidDeviceFunction);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st * stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 * grid, dim3 * block, size_t * shared, void * stream) {
    if (configurations.empty()) {
        return refuse(cudaErrorMissingConfiguration);
    }
    const Configuration & top            = configurations.back();
    *grid                                = top.grid;
    *block                               = top.block;
    *shared                              = top.shared;
    *static_cast<cudaStream_t *>(stream) = top.stream;
    configurations.pop_back();
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **, size_t shared,
                               cudaStream_t stream) {
    return launch(kernel, grid, block, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t * config, const void * function, void **) {
    return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void * function, dim3 grid, dim3 block, void **, size_t shared,
                                        cudaStream_t stream) {
    return launch(function, grid, block, shared, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * attributes, const void * function) {
    const Kernel * kernel = kernel_of(function);
    if (!kernel) {
        return refuse(cudaErrorInvalidDeviceFunction);
    }
    *attributes                           = {};
    attributes->maxThreadsPerBlock        = 1024;
    attributes->numRegs                   = regs_per_thread;
    attributes->ptxVersion                = 90;
    attributes->binaryVersion             = 90;
    attributes->maxDynamicSharedSizeBytes = kernel->shared_bytes;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void * function, cudaFuncAttribute attribute, int value) {
    Kernel * kernel = kernel_of(function);
    if (!kernel) {
        return refuse(cudaErrorInvalidDeviceFunction);
    }
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || value > most_shared_bytes) {
            return refuse(cudaErrorInvalidValue);
        }
        kernel->shared_bytes = value;
    }
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int * n_blocks, const void *, int n_threads,
                                                                   size_t shared, unsigned) {
    const int by_threads = 2048 / n_threads;
    const int by_regs    = 65536 / (regs_per_thread * n_threads);
    const int by_shared  = static_cast<int>((228 << 10) / (shared + 1024));
    *n_blocks            = std::max(0, std::min({by_threads, by_regs, by_shared, 32}));
    return cudaSuccess;
}

// -- captures and graphs ---------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    ++counters.captures;
    trace("begin capture", handle);
    const StreamPtr stream = stream_of(handle);
    if (stream->is_legacy) {
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    if (stream->capture) {
        return refuse(cudaErrorIllegalState);
    }
    begin_capture(stream, static_cast<CaptureMode>(mode));
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode * mode) {
    const auto before = static_cast<cudaStreamCaptureMode>(thread_mode);
    thread_mode       = static_cast<CaptureMode>(*mode);
    *mode             = before;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t * graph) {
    const CapturePtr capture = stream_of(handle)->capture;
    *graph                   = nullptr;
    if (!capture) {
        return refuse(cudaErrorIllegalState);
    }
    if (capture->mode != CaptureMode::relaxed && capture->thread != std::this_thread::get_id()) {
        return refuse(cudaErrorStreamCaptureWrongThread);
    }
    end_capture(capture);
    if (!capture->is_valid) {
        return refuse(cudaErrorStreamCaptureInvalidated);
    }
    *graph = reinterpret_cast<cudaGraph_t>(new GraphPtr(capture->graph));
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus * status) {
    const CapturePtr capture = stream_of(handle)->capture;
    *status = !capture            ? cudaStreamCaptureStatusNone
            : capture->is_valid ? cudaStreamCaptureStatusActive
                                : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t * instance, cudaGraph_t graph, unsigned long long) {
    const HostCall call(rates.graph_node_call_s * static_cast<double>(graph_of(graph)->nodes.size()));
    ++counters.instantiations;
    trace("instantiate", nullptr);
    *instance = nullptr;
    if (fails("instantiate")) {
        return refuse(cudaErrorMemoryAllocation);
    }
    *instance = reinterpret_cast<cudaGraphExec_t>(new GraphPtr(graph_of(graph)));
    return cudaSuccess;
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t instance, cudaGraph_t graph, cudaGraphExecUpdateResultInfo * info) {
    const auto &   before = graph_of(instance)->nodes;
    const auto &   after  = graph_of(graph)->nodes;
    const HostCall call(rates.graph_node_call_s * static_cast<double>(after.size()));
    const bool   is_same =
        std::equal(before.begin(), before.end(), after.begin(), after.end(),
                   [](const Node & a, const Node & b) { return a.name == b.name; });
    *info = {};
    if (!is_same) {
        ++counters.failed_updates;
        info->result = cudaGraphExecUpdateErrorTopologyChanged;
        return answer(cudaErrorGraphExecUpdateFailure);
    }
    ++counters.updates;
    info->result       = cudaGraphExecUpdateSuccess;
    graph_of(instance) = graph_of(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t handle) {
    const HostCall call(rates.graph_call_s);
    ++counters.graph_launches;
    trace("graph launch", handle);
    const GraphPtr  graph  = graph_of(instance);
    const StreamPtr stream = stream_of(handle);
    if (forbids_legacy(*stream)) {
        return refuse(cudaErrorStreamCaptureImplicit);
    }
    counters.graph_kernels += std::count_if(graph->nodes.begin(), graph->nodes.end(),
                                            [](const Node & node) { return node.name == "kernel"; });
    if (submission) {
        submission->launched(std::count_if(graph->nodes.begin(), graph->nodes.end(),
                                           [](const Node & node) { return !node.work; }));
    }
    stream->call("graph", [graph] {
        for (const Node & node : graph->nodes) {
            if (node.work) {
                node.work();
            }
        }
    });
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete &graph_of(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
    ++counters.instances_freed;
    delete &graph_of(instance);
    return cudaSuccess;
}

}  // extern "C"
