"""The computing process of a worker in which every write to a wrong place is noticed.

Each buffer of ggml's CPU backend, the client's too, lies between pages that cannot be accessed.
The bytes between a buffer and these pages have a known value. The weights cannot be written once
they are read. When a client has left, known values and weights are compared.
"""

from __future__ import annotations

import ctypes as C
import mmap
import zlib
from multiprocessing.connection import Connection
from typing import Any

from offload.ggml.hostbuffer import CpuBufferType
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library
from offload.worker import weights as weights_module
from offload.worker.device import WorkerDevice
from offload.worker.serving import WorkerOptions, serve_layers

BROKEN = "guard: "  # the beginning of an error of this process that shows a write elsewhere
_ALIGNMENT = 64
_KNOWN = 0xA5
_LIBC = C.CDLL(None, use_errno=True)
_LIBC.mmap.restype, _LIBC.mmap.argtypes = (
    C.c_void_p,
    (C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_long),
)
_LIBC.mprotect.argtypes = (C.c_void_p, C.c_size_t, C.c_int)
_LIBC.munmap.argtypes = (C.c_void_p, C.c_size_t)


class _Guards:
    """The buffers between guard pages, by their address: (mapping, mapped bytes, data, bytes)."""

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[int, int, int, int]] = {}
        self._pending = Pending()
        struct = abi.ggml_backend_buffer_type.from_address(CpuBufferType().address)
        self._kept = [
            guard(abi.PROTOTYPES[f"{of}.{entry}"], self._pending, None, function)
            for of, entry, function in (
                ("ggml_backend_buffer_type_i", "alloc_buffer", self._allocate),
                ("ggml_backend_buffer_i", "free_buffer", self._free),
            )
        ]
        struct.iface.alloc_buffer = self._kept[0][1]

    def _allocate(self, buffer_type: int, size: int) -> int:
        page, padded = mmap.PAGESIZE, -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        inner = -(-padded // page) * page
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        first = _LIBC.mmap(None, inner + 2 * page, 0, flags, -1, 0)
        if first in (None, C.c_void_p(-1).value):
            return 0
        _LIBC.mprotect(first + page, inner, mmap.PROT_READ | mmap.PROT_WRITE)
        data = first + page + inner - padded
        C.memset(first + page, _KNOWN, inner)
        buffer: int = library().ggml_backend_cpu_buffer_from_ptr(data, size)
        view = abi.ggml_backend_buffer.from_address(buffer)
        view.buft, view.iface.free_buffer = buffer_type, self._kept[1][1]
        self.buffers[buffer] = first, inner + 2 * page, data, size
        return buffer

    def _free(self, buffer: int) -> None:
        first, mapped, *_ = self.buffers.pop(buffer)
        _LIBC.munmap(first, mapped)

    def broken(self) -> bool:
        """True if a byte between a buffer and its guard pages has changed."""
        for first, mapped, data, size in self.buffers.values():
            inner = first + mmap.PAGESIZE
            end = first + mapped - mmap.PAGESIZE
            around = C.string_at(inner, data - inner) + C.string_at(data + size, end - data - size)
            if around.count(_KNOWN) != len(around):
                return True
        return False


def _write_protect(weights: Any) -> None:
    """Let no one write to the whole pages that weights fill."""
    page = mmap.PAGESIZE
    for tensor in weights._tensors.values():
        first = -(-tensor.position // page) * page
        end = (tensor.position + tensor.size_bytes) // page * page
        if end > first and _LIBC.mprotect(first, end - first, mmap.PROT_READ):
            raise OSError(C.get_errno(), "mprotect")


def _sum_of(weights: Any) -> int:
    found = 0
    for tensor in weights._tensors.values():
        found = zlib.crc32(C.string_at(tensor.position, tensor.size_bytes), found)
    return found


def serve_guarded(line: Connection, options: WorkerOptions, no_doorbell: str = "") -> None:
    """Do what serve_layers does, with guards."""
    guards = _Guards()
    sums: dict[int, int] = {}
    load = weights_module.NamedWeights.load
    spent = vars(WorkerDevice)["is_spent"].fget

    def loaded(self: Any, *arguments: Any) -> None:
        load(self, *arguments)
        _write_protect(self)
        sums[id(self)] = _sum_of(self)

    def checked(self: Any) -> bool:
        if guards.broken():
            raise RuntimeError(f"{BROKEN}bytes beside a buffer have changed")
        if sums[id(self._weights)] != _sum_of(self._weights):
            raise RuntimeError(f"{BROKEN}a weight has changed")
        return bool(spent(self))

    setattr(weights_module.NamedWeights, "load", loaded)  # noqa: B010
    setattr(WorkerDevice, "is_spent", property(checked))  # noqa: B010
    serve_layers(line, options, no_doorbell)
