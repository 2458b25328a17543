"""Print as JSON which thread of ggml reads which page of a weight. test_numa_partition.py runs it.

The weight's pages are absent. userfaultfd reports the thread of the first access to each page. ggml
finds memory nodes by folders, so the caller mounts two folders. The probe needs Linux 6.1 and the
right to mount. It tests neither speed nor placement.

Usage: python numa_partition_probe.py N_THREADS QUANT N_IN N_ROWS N_MATRICES N_TOKENS routed|dense
"""

import ctypes
import fcntl
import json
import os
import struct
import sys
import threading

import llama_cpp

from numa.memory import PlacedMemory
from numa.place import PAGE_BYTES

# linux/userfaultfd.h
_NEW, _API, _REGISTER, _ZERO = 0xAA00, 0xC018AA3F, 0xC020AA00, 0xC020AA04
_FEATURE_THREAD_ID = 1 << 8
_MODE_MISSING = 1
_PAGE_FAULT = 0x12

# ggml.h: enum ggml_type.
_TYPES = {"f32": 0, "q8_0": 8, "q4_k": 12}
_F32, _I32 = 0, 26

_lib = llama_cpp.llama_cpp._lib


def _function(name: str, result: object, *arguments: object) -> ctypes._CFuncPtr:
    function = getattr(_lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


_P, _I, _I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
ggml_init = _function("ggml_init", _P, _InitParams)
ggml_new_tensor_2d = _function("ggml_new_tensor_2d", _P, _P, _I, _I64, _I64)
ggml_new_tensor_3d = _function("ggml_new_tensor_3d", _P, _P, _I, _I64, _I64, _I64)
ggml_mul_mat = _function("ggml_mul_mat", _P, _P, _P, _P)
ggml_mul_mat_id = _function("ggml_mul_mat_id", _P, _P, _P, _P, _P)
ggml_new_graph = _function("ggml_new_graph", _P, _P)
ggml_build_forward_expand = _function("ggml_build_forward_expand", None, _P, _P)
ggml_graph_compute_with_ctx = _function("ggml_graph_compute_with_ctx", _I, _P, _P, _I)
ggml_get_data = _function("ggml_get_data", _P, _P)
ggml_nbytes = _function("ggml_nbytes", ctypes.c_size_t, _P)
ggml_numa_init = _function("ggml_numa_init", None, _I)
ggml_is_numa = _function("ggml_is_numa", ctypes.c_bool)


class Watch:
    """Records (page address, thread id) at the first access to each absent page of a range."""

    def __init__(self, address: int, size_bytes: int) -> None:
        with open("/dev/userfaultfd", "rb") as device:
            self.fd = fcntl.ioctl(device, _NEW, os.O_CLOEXEC)
        fcntl.ioctl(self.fd, _API, struct.pack("QQQ", 0xAA, _FEATURE_THREAD_ID, 0))
        fcntl.ioctl(self.fd, _REGISTER, struct.pack("QQQQ", address, size_bytes, _MODE_MISSING, 0))
        self.faults: list[tuple[int, int]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            message = os.read(self.fd, 32)
            event, _, address, tid = struct.unpack("B7xQQI4x", message)
            if event == _PAGE_FAULT:
                page = address // PAGE_BYTES * PAGE_BYTES
                self.faults.append((page, tid))
                fcntl.ioctl(self.fd, _ZERO, struct.pack("QQQq", page, PAGE_BYTES, 0, 0))


def main() -> None:
    n_threads, quant = int(sys.argv[1]), sys.argv[2]
    n_in, n_rows, n_matrices, n_tokens = (int(word) for word in sys.argv[3:7])
    routed = sys.argv[7] == "routed"
    # The strategy "disabled": ggml counts nodes and leaves affinities alone.
    ggml_numa_init(0)
    with PlacedMemory(256 << 20) as memory:
        context = ggml_init(_InitParams(memory.size_bytes, memory.address, False))
        tensor = ggml_new_tensor_3d(context, _TYPES[quant], n_in, n_rows, n_matrices)
        weight, n_bytes = int(ggml_get_data(tensor)), int(ggml_nbytes(tensor))
        # Watch whole pages only. The weight shares its first and last page with ggml's own data.
        first = -(-weight // PAGE_BYTES) * PAGE_BYTES
        size = (weight + n_bytes - first) // PAGE_BYTES * PAGE_BYTES
        if routed:
            tokens = ggml_new_tensor_3d(context, _F32, n_in, 1, n_tokens)
            # Every token chooses every expert, so each expert has n_tokens rows.
            ids = ggml_new_tensor_2d(context, _I32, n_matrices, n_tokens)
            values = (ctypes.c_int32 * (n_matrices * n_tokens))(*[*range(n_matrices)] * n_tokens)
            ctypes.memmove(ggml_get_data(ids), values, ctypes.sizeof(values))
            product = ggml_mul_mat_id(context, tensor, tokens, ids)
        else:
            tokens = ggml_new_tensor_3d(context, _F32, n_in, n_tokens, n_matrices)
            product = ggml_mul_mat(context, tensor, tokens)
        graph = ggml_new_graph(context)
        ggml_build_forward_expand(graph, product)
        watch = Watch(first, size)
        before = os.listdir("/proc/self/task")
        ggml_graph_compute_with_ctx(context, graph, n_threads)
        # Workers start in the order of their numbers; the calling thread is number 0.
        new = sorted(int(tid) for tid in set(os.listdir("/proc/self/task")) - set(before))
        team = (threading.get_native_id(), *new)
        for tid in team:
            os.sched_setaffinity(tid, {min(os.sched_getaffinity(0))})
        ggml_graph_compute_with_ctx(context, graph, n_threads)
        answer = {
            "affinities": [sorted(os.sched_getaffinity(tid)) for tid in team],
            "is_numa": bool(ggml_is_numa()),
            "first_bytes": first - weight,
            "n_pages": size // PAGE_BYTES,
            "n_team": len(team),
            "reads": [(page - weight, team.index(tid)) for page, tid in watch.faults],
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
