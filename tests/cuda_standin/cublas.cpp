// The part of cuBLAS that ggml-cuda uses. Calls are counted and compute nothing; a handle takes the
// device memory that cuBLAS takes on Hopper.
#include "clock.hpp"

using namespace standin;

namespace {

const size_t workspace_bytes       = size_t{32} << 20;
const int    out_of_memory         = 3;  // CUBLAS_STATUS_ALLOC_FAILED

struct Handle {
    void * stream    = nullptr;
    void * workspace = nullptr;
};

}  // namespace

extern "C" {

int cublasCreate_v2(Handle ** handle) {
    void * workspace = fails("cublas") ? nullptr : device_alloc(current_device(), workspace_bytes);
    if (!workspace) {
        ++counters.out_of_memory;
        return out_of_memory;
    }
    *handle = new Handle{nullptr, workspace};
    return 0;
}

int cublasDestroy_v2(Handle * handle) {
    wait_for_device(current_device());
    device_free(handle->workspace);
    delete handle;
    return 0;
}

const char * cublasGetStatusString(int status) {
    return status == out_of_memory ? "the resource allocation failed" : "a status of the stand-in";
}

int cublasSetMathMode(Handle *, int) { return 0; }
int cublasSetWorkspace_v2(Handle *, void *, size_t) { return 0; }

int cublasSetStream_v2(Handle * handle, void * stream) {
    handle->stream = stream;
    return 0;
}

#define STANDIN_PRODUCT(name)                          \
    int name(Handle * handle, ...) {                   \
        const HostCall call(rates.launch_call_s);      \
        ++counters.cublas_calls;                       \
        count_kernel(stream_of(handle->stream), "kernel"); \
        return 0;                                      \
    }

STANDIN_PRODUCT(cublasSgemm_v2)
STANDIN_PRODUCT(cublasSgemmBatched)
STANDIN_PRODUCT(cublasSgemmStridedBatched)
STANDIN_PRODUCT(cublasGemmEx)
STANDIN_PRODUCT(cublasGemmBatchedEx)
STANDIN_PRODUCT(cublasGemmStridedBatchedEx)
STANDIN_PRODUCT(cublasStrsmBatched)

}  // extern "C"
