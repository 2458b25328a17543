// Calls of libcuda that do what calls of the CUDA runtime do: streams and events. values.cpp has the calls that
// the runtime lacks.
//
// A device has one context, its primary one. A thread's current context is its current device.
#include "standin.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>

using namespace standin;

namespace {

thread_local std::vector<int> pushed;  // devices that were current before contexts were pushed

// The runtime's errors have the numbers of the driver's, as far as the stand-in gives them.
CUresult driver(cudaError_t error) { return static_cast<CUresult>(error); }

CUcontext context_of(int number) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(number) + 1); }

}  // namespace

extern "C" {

CUresult cuDeviceGet(CUdevice * found, int number) {
    *found = number;
    return number >= 0 && number < n_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int * version) {
    *version = driver_version();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int * n) {
    *n = n_devices();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char * name, int size, CUdevice) {
    std::snprintf(name, size, "%s", device_name);
    return CUDA_SUCCESS;
}

// Virtual memory management, for which 0 is answered, is not supported.
CUresult cuDeviceGetAttribute(int * value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = compute_capability() / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = compute_capability() % 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char ** text) {
    *text = "an error of the stand-in";
    return CUDA_SUCCESS;
}

#define STANDIN_LACKS(name, ...) CUresult name(__VA_ARGS__) { return CUDA_ERROR_NOT_SUPPORTED; }
STANDIN_LACKS(cuMemAddressFree, CUdeviceptr, size_t)
STANDIN_LACKS(cuMemAddressReserve, CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)
STANDIN_LACKS(cuMemCreate, CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)
STANDIN_LACKS(cuMemGetAllocationGranularity, size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags)
STANDIN_LACKS(cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)
STANDIN_LACKS(cuMemRelease, CUmemGenericAllocationHandle)
STANDIN_LACKS(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)
STANDIN_LACKS(cuMemUnmap, CUdeviceptr, size_t)
#undef STANDIN_LACKS

CUresult cuDevicePrimaryCtxRetain(CUcontext * context, CUdevice number) {
    *context = context_of(number);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }

CUresult cuCtxPushCurrent(CUcontext context) {
    int now = 0;
    cudaGetDevice(&now);
    pushed.push_back(now);
    return driver(cudaSetDevice(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1));
}

CUresult cuCtxPopCurrent(CUcontext * context) {
    int now = 0;
    cudaGetDevice(&now);
    if (pushed.empty()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context) {
        *context = context_of(now);
    }
    const int before = pushed.back();
    pushed.pop_back();
    return driver(cudaSetDevice(before));
}

CUresult cuStreamCreate(CUstream * stream, unsigned flags) { return driver(cudaStreamCreateWithFlags(stream, flags)); }

CUresult cuStreamDestroy(CUstream stream) { return driver(cudaStreamDestroy(stream)); }

CUresult cuStreamSynchronize(CUstream stream) { return driver(cudaStreamSynchronize(stream)); }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return driver(cudaStreamWaitEvent(stream, event, flags));
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return driver(cudaEventRecord(event, stream)); }

// A stream of the stand-in never fails, so only whether its work is over is told.
CUresult cuStreamQuery(CUstream stream) { return stream_of(stream)->is_over() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }

}  // extern "C"
