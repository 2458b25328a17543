// Devices, memory, copies, streams and events, as far as ggml-cuda asks for them. Misuse is refused
// as the documentation of the CUDA runtime says.
#include "clock.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

using namespace standin;

namespace standin {

thread_local Submission * submission  = nullptr;
thread_local void *       last_stream = nullptr;

namespace {
thread_local cudaError_t last_error = cudaSuccess;
thread_local int         device     = 0;
}  // namespace

int current_device() { return device; }

cudaError_t refuse(cudaError_t error) {
    ++(error == cudaErrorMemoryAllocation ? counters.out_of_memory : counters.errors);
    return last_error = error;
}

// Not counted: a program finds out in this way whether a graph can be updated.
cudaError_t answer(cudaError_t error) { return last_error = error; }

void trace(const char * what, const void * stream, size_t bytes, const char * name) {
    static std::FILE * const file = [] {
        const char * path = std::getenv("STANDIN_TRACE");
        return path ? std::fopen(path, "w") : nullptr;
    }();
    if (file) {
        const size_t thread = std::hash<std::thread::id>()(std::this_thread::get_id());
        std::fprintf(file, "%lx %d %p %s %zu %s\n", thread, device, stream, what, bytes, name);
    }
}

namespace {

struct StreamHandle {
    StreamPtr stream;
    ~StreamHandle() { stream->close(); }
};

struct Event {
    int        device;
    Moment     moment;
    CapturePtr capture;  // the capture that it was recorded in
};

Event * event_of(cudaEvent_t handle) { return reinterpret_cast<Event *>(handle); }

}  // namespace

StreamPtr stream_of(void * handle) {
    last_stream = handle;
    if (handle == nullptr || handle == cudaStreamLegacy) {
        return legacy_stream(device);
    }
    if (handle == cudaStreamPerThread) {
        thread_local std::map<int, StreamHandle> own;
        StreamHandle &                           found = own[device];
        if (!found.stream) {
            found.stream = Stream::make(device, true);
        }
        return found.stream;
    }
    return static_cast<StreamHandle *>(handle)->stream;
}

namespace {

// -- copies ----------------------------------------------------------------------------------------

struct Rows {
    char *       to;
    size_t       to_pitch;
    const char * from;
    size_t       from_pitch, width, height;

    size_t to_size() const { return (height - 1) * to_pitch + width; }
    size_t from_size() const { return (height - 1) * from_pitch + width; }
    void   copy() const {
        for (size_t row = 0; row < height; ++row) {
            std::memmove(to + row * to_pitch, from + row * from_pitch, width);
        }
    }
};

// While a graph is submitted, ggml-cpu does the work. It counts as a kernel of that graph.
void queue_unless_submitting(Stream & stream, const char * name, Work work) {
    if (!submission) {
        stream.call(name, std::move(work));
        return;
    }
    stream.call(name, nullptr);
    if (!stream.capture) {
        submission->launched(1);
    }
}

cudaError_t copy_to_device(Rows rows, Stream & stream, void * handle, bool is_pinned) {
    const size_t bytes = rows.width * rows.height;
    ++counters.h2d;
    counters.h2d_bytes += bytes;
    trace("h2d", handle, bytes, is_pinned ? "pinned" : "pageable");
    if (is_pinned || stream.capture) {
        // Nothing reads the weights of products that are skipped.
        const bool is_unread = skips_products() && is_registered(rows.from);
        const Work copied    = is_unread ? Work([] {}) : Work([rows] { rows.copy(); });
        stream.call("h2d", on_engine(Direction::to_device, stream, handle, bytes, is_pinned, copied));
        return cudaSuccess;
    }
    // Pageable bytes are taken before the call returns.
    ++counters.pageable;
    auto staged = std::make_shared<std::vector<char>>(rows.from, rows.from + rows.from_size());
    rows.from   = staged->data();
    if (has_clock()) {
        host_wait_until(host_now_s() + static_cast<double>(bytes) / rates.staging_bytes_per_s);
    }
    stream.call("h2d", on_engine(Direction::to_device, stream, handle, bytes, is_pinned,
                                 [rows, staged] { rows.copy(); }));
    return cudaSuccess;
}

cudaError_t copy_to_host(Rows rows, Stream & stream, void * handle, bool is_pinned) {
    const size_t bytes = rows.width * rows.height;
    ++counters.d2h;
    counters.d2h_bytes += bytes;
    trace("d2h", handle, bytes, is_pinned ? "pinned" : "pageable");
    if (submission) {
        submission->before_read(rows.from);
    }
    stream.call("d2h", on_engine(Direction::to_host, stream, handle, bytes, is_pinned, [rows] { rows.copy(); }));
    if (!is_pinned && !stream.capture) {
        ++counters.pageable;
        stream.mark().wait_on_host();
        host_wait_until(host_now_s() + static_cast<double>(bytes) / rates.staging_bytes_per_s);
    }
    return cudaSuccess;
}

cudaError_t copy(Rows rows, cudaMemcpyKind kind, void * handle) {
    const HostCall call(rates.copy_call_s);
    const StreamPtr stream = stream_of(handle);
    if (rows.width == 0 || rows.height == 0) {
        return cudaSuccess;
    }
    if (forbids_legacy(*stream)) {
        return refuse(cudaErrorStreamCaptureImplicit);
    }
    const bool is_to   = device_of(rows.to, 1) >= 0;
    const bool is_from = device_of(rows.from, 1) >= 0;
    if (kind == cudaMemcpyDefault) {
        kind = is_to ? (is_from ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                     : (is_from ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
    }
    if (is_to != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) ||
        is_from != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) ||
        (is_to && device_of(rows.to, rows.to_size()) < 0) ||
        (is_from && device_of(rows.from, rows.from_size()) < 0)) {
        return refuse(cudaErrorInvalidValue);
    }
    if (kind == cudaMemcpyDeviceToDevice) {
        ++counters.d2d;
        trace("d2d", handle, rows.width * rows.height);
        const double bytes  = static_cast<double>(rows.width * rows.height);
        const bool   is_one = device_of(rows.to, 1) == device_of(rows.from, 1);
        queue_unless_submitting(*stream, "d2d", [rows, bytes, is_one] {
            rows.copy();
            spend(is_one ? rates.kernel_s + 2 * bytes / rates.vram_bytes_per_s
                         : rates.copy_s + bytes / rates.link_bytes_per_s);
        });
        return cudaSuccess;
    }
    // Host memory has to be pinned as a whole or not at all.
    const char * host = is_to ? rows.from : rows.to;
    const size_t size = is_to ? rows.from_size() : rows.to_size();
    const bool   whole = is_pinned(host, size);
    if (!whole && (is_pinned(host, 1) || is_pinned(host + size - 1, 1))) {
        return refuse(cudaErrorInvalidValue);
    }
    return is_to ? copy_to_device(rows, *stream, handle, whole) : copy_to_host(rows, *stream, handle, whole);
}

bool is_device(int number) { return number >= 0 && number < n_devices(); }

}  // namespace
}  // namespace standin

extern "C" {

// -- devices ---------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int * n) {
    const bool is_old = driver_version() / 1000 < CUDART_VERSION / 1000;
    *n                = is_old ? 0 : n_devices();
    return is_old ? refuse(cudaErrorInsufficientDriver) : cudaSuccess;
}

cudaError_t cudaGetDevice(int * number) {
    *number = device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
    if (!is_device(number)) {
        return refuse(cudaErrorInvalidDevice);
    }
    device = number;
    return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }

// The figures of an H100.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp * prop, int number) {
    if (!is_device(number)) {
        return refuse(cudaErrorInvalidDevice);
    }
    *prop = {};
    std::snprintf(prop->name, sizeof(prop->name), "%s", device_name);
    prop->totalGlobalMem              = total_bytes();
    prop->sharedMemPerBlock           = 48 << 10;
    prop->sharedMemPerBlockOptin      = 227 << 10;
    prop->sharedMemPerMultiprocessor  = 228 << 10;
    prop->reservedSharedMemPerBlock   = 1024;
    prop->regsPerBlock                = 65536;
    prop->regsPerMultiprocessor       = 65536;
    prop->warpSize                    = 32;
    prop->maxThreadsPerBlock          = 1024;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->maxBlocksPerMultiProcessor  = 32;
    const int block[]                 = {1024, 1024, 64};
    const int grid[]                  = {0x7fffffff, 65535, 65535};
    std::copy_n(block, 3, prop->maxThreadsDim);
    std::copy_n(grid, 3, prop->maxGridSize);
    prop->totalConstMem                     = 64 << 10;
    prop->major                             = compute_capability() / 10;
    prop->minor                             = compute_capability() % 10;
    prop->multiProcessorCount               = 132;
    prop->canMapHostMemory                  = 1;
    prop->concurrentKernels                 = 1;
    prop->asyncEngineCount                  = 3;
    prop->unifiedAddressing                 = 1;
    prop->memoryBusWidth                    = 5120;
    prop->l2CacheSize                       = 50 << 20;
    prop->managedMemory                     = 1;
    prop->canUseHostPointerForRegisteredMem = 1;
    prop->cooperativeLaunch                 = 1;
    prop->hostRegisterSupported             = 1;
    prop->hostRegisterReadOnlySupported     = 1;
    prop->textureAlignment                  = 512;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attribute, int number) {
    cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, number) != cudaSuccess) {
        return cudaErrorInvalidDevice;
    }
    switch (attribute) {
        case cudaDevAttrCooperativeLaunch: *value = prop.cooperativeLaunch; break;
        case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = prop.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = prop.sharedMemPerBlock; break;
        case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
        case cudaDevAttrWarpSize: *value = prop.warpSize; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
        case cudaDevAttrHostRegisterReadOnlySupported: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char * id, int size, int number) {
    std::snprintf(id, size, "0000:%02x:00.0", number + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int * can, int number, int peer) {
    *can = is_device(number) && is_device(peer) && number != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    return is_device(peer) && peer != device ? cudaSuccess : refuse(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceSynchronize(void) {
    const HostCall call;
    ++counters.device_syncs;
    if (forbids_device_sync(device)) {
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    wait_for_device(device);
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t error = last_error;
    last_error              = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char * cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidDeviceFunction: return "invalid device function";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorHostMemoryAlreadyRegistered:
            return "part or all of the requested memory range is already mapped";
        case cudaErrorHostMemoryNotRegistered:
            return "pointer does not correspond to a registered memory region";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureImplicit:
            return "operation would make the legacy stream depend on a capturing blocking stream";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        default: return "an error that the stand-in has no text for";
    }
}

// -- memory ----------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void ** address, size_t size) {
    const HostCall call;
    ++counters.mallocs;
    trace("malloc", nullptr, size);
    if (forbids_unsafe()) {
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    *address = size && !fails("malloc") ? device_alloc(device, size) : nullptr;
    return *address || !size ? cudaSuccess : refuse(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocManaged(void ** address, size_t size, unsigned) { return cudaMalloc(address, size); }

cudaError_t cudaFree(void * address) {
    const HostCall call;
    trace("free", nullptr);
    if (!address) {
        return cudaSuccess;
    }
    if (forbids_unsafe()) {
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    wait_for_device(std::max(0, device_of(address, 1)));
    return device_free(address) ? cudaSuccess : refuse(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t * free, size_t * total) {
    const HostCall call;
    *free  = free_bytes(device);
    *total = total_bytes();
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void ** address, size_t size, unsigned) {
    const HostCall call;
    ++counters.host_allocs;
    trace("host alloc", nullptr, size);
    if (forbids_unsafe()) {
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    *address = fails("host_alloc") ? nullptr : pinned_alloc(size);
    return *address ? cudaSuccess : refuse(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void ** address, size_t size) { return cudaHostAlloc(address, size, 0); }

cudaError_t cudaFreeHost(void * address) {
    const HostCall call;
    if (forbids_unsafe()) {
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    wait_for_device(device);
    return !address || pinned_free(address) ? cudaSuccess : refuse(cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void * address, size_t size, unsigned) {
    const HostCall call;
    ++counters.host_registers;
    trace("host register", nullptr, size);
    if (forbids_unsafe()) {
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    if (!address || !size) {
        return refuse(cudaErrorInvalidValue);
    }
    if (fails("host_register")) {
        return refuse(cudaErrorMemoryAllocation);
    }
    return pin(address, size) ? cudaSuccess : refuse(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void * address) {
    const HostCall call;
    if (forbids_unsafe()) {
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    wait_for_device(device);
    return unpin(address) ? cudaSuccess : refuse(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void ** on_device, void * host, unsigned) {
    *on_device = host;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy({static_cast<char *>(to), size, static_cast<const char *>(from), size, size, 1}, kind, stream);
}

cudaError_t cudaMemcpyPeerAsync(void * to, int to_device, const void * from, int from_device, size_t size,
                                cudaStream_t stream) {
    if (device_of(to, size) != to_device || device_of(from, size) != from_device) {
        return refuse(cudaErrorInvalidValue);
    }
    ++counters.peer_copies;
    // The copy is between two graphs, each of which computes its own numbers: never left out.
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) {
        return refuse(cudaErrorInvalidPitchValue);
    }
    return copy({static_cast<char *>(to), to_pitch, static_cast<const char *>(from), from_pitch, width, height},
                kind, stream);
}

cudaError_t cudaMemsetAsync(void * address, int value, size_t size, cudaStream_t handle) {
    const HostCall call(rates.copy_call_s);
    const StreamPtr stream = stream_of(handle);
    if (size && device_of(address, size) < 0) {
        return refuse(cudaErrorInvalidValue);
    }
    if (forbids_legacy(*stream)) {
        return refuse(cudaErrorStreamCaptureImplicit);
    }
    ++counters.memsets;
    trace("memset", handle, size);
    queue_unless_submitting(*stream, "memset", [=] {
        std::memset(address, value, size);
        spend(rates.kernel_s + static_cast<double>(size) / rates.vram_bytes_per_s);
    });
    return cudaSuccess;
}

cudaError_t cudaMemset(void * address, int value, size_t size) {
    return cudaMemsetAsync(address, value, size, nullptr);
}

// -- streams and events ----------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned flags) {
    const HostCall call;
    const bool is_blocking = !(flags & cudaStreamNonBlocking);
    *stream = reinterpret_cast<cudaStream_t>(new StreamHandle{Stream::make(device, is_blocking)});
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const HostCall call;
    delete reinterpret_cast<StreamHandle *>(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    const HostCall call;
    ++counters.stream_syncs;
    trace("stream sync", handle);
    const StreamPtr stream = stream_of(handle);
    if (stream->capture) {
        stream->capture->is_valid = false;
        return refuse(cudaErrorStreamCaptureUnsupported);
    }
    if (forbids_legacy(*stream)) {
        return refuse(cudaErrorStreamCaptureImplicit);
    }
    static const bool ignored = is_ignored("stream_syncs");
    if (!ignored) {
        stream->mark().wait_on_host();
    }
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(new Event{device, {}, nullptr});
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event_of(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    const HostCall call(rates.event_call_s);
    ++counters.event_records;
    trace("event record", stream_handle);
    const StreamPtr stream = stream_of(stream_handle);
    Event *         event  = event_of(handle);
    if (event->device != stream->device) {
        return refuse(cudaErrorInvalidResourceHandle);
    }
    event->capture = stream->capture;
    event->moment  = stream->capture ? Moment{} : stream->mark();
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
    const HostCall call(rates.event_call_s);
    ++counters.event_waits;
    trace("event wait", stream_handle);
    static const bool ignored = is_ignored("waits");
    const StreamPtr   stream  = stream_of(stream_handle);
    const Event *     event   = event_of(handle);
    if (event->capture) {
        stream->capture = event->capture;  // this stream is captured, too
    } else if (!ignored && event->moment.point.stream && event->moment.point.stream != stream) {
        const Moment moment = event->moment;
        stream->call("wait", [moment] { moment.wait_in_stream(); });
    }
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    const HostCall call;
    ++counters.event_syncs;
    trace("event sync", nullptr);
    const Event * event = event_of(handle);
    if (event->capture) {
        return refuse(cudaErrorCapturedEvent);
    }
    static const bool ignored = is_ignored("event_syncs");
    if (!ignored) {
        event->moment.wait_on_host();
    }
    return cudaSuccess;
}

}  // extern "C"
