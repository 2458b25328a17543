"""Page-locked memory: registers host memory of ours with a GPU backend, so that copies overlap.

CUDA's backend does it only where GGML_CUDA_REGISTER_HOST is in the environment, and asks for
read-only pages, which some devices refuse; then CUDA is asked for plain ones. Memory is registered
in pieces: drivers refuse 512 GiB at once, and progress is told after each piece. No copy may reach
over a border between two: `pieces_of` cuts one.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes as C
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numa import sys
from numa.errors import PlacementRefused
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange
from offload.ggml.tensor import HasAddress

MOST_AT_ONCE_BYTES = 8 << 30  # a few seconds
_REGISTER = b"ggml_backend_register_host_buffer"
_UNREGISTER = b"ggml_backend_unregister_host_buffer"
_register_type = C.CFUNCTYPE(C.c_bool, C.c_void_p, C.c_size_t)
_unregister_type = C.CFUNCTYPE(None, C.c_void_p)

Register = Callable[[int, int], bool]  # (address, bytes) -> True if it is pinned now
# Where one registered piece ends and the next begins, of all memory that is pinned in this process.
_borders: list[int] = []


@dataclass(frozen=True)
class PinResult:
    """True if the memory is pinned; else `reason` says why not."""

    ok: bool
    reason: str


class Pinner:
    """Pins memory for a device (the real one, not our wrapper of it)."""

    def __init__(self, device: HasAddress, most_at_once_bytes: int = MOST_AT_ONCE_BYTES) -> None:
        lib = library()
        device_struct = abi.ggml_backend_device.from_address(device.address)
        get_name = abi.PROTOTYPES["ggml_backend_reg_i.get_name"]
        self._registry = device_struct.reg
        registry = abi.ggml_backend_reg.from_address(self._registry)
        name = C.string_at(get_name(registry.iface.get_name)(self._registry)).decode()
        self.backend_name = name
        self._register = self._entry(lib, _REGISTER, _register_type)
        self._unregister = self._entry(lib, _UNREGISTER, _unregister_type)
        self._most_at_once_bytes = most_at_once_bytes
        self._pinned: dict[int, list[HostRange]] = {}  # by address

    def _entry(self, lib: Any, name: bytes, prototype: Any) -> Any:
        address = lib.ggml_backend_reg_get_proc_address(self._registry, name)
        return prototype(address) if address else None

    @property
    def can_pin(self) -> bool:
        """True if the backend offers it at all."""
        return self._register is not None and self._unregister is not None

    def pin(
        self, memory: HostRange, on_progress: Callable[[float], object] = lambda _: None
    ) -> PinResult:
        """Page-lock a range, all of it or nothing. A refusal is a result, not an error.

        `on_progress` is told the share that is pinned. Nothing stays pinned if it raises.

        Children of this process do not get the range: they would have to copy it, since pages that
        a device reads cannot be shared. The memory-lock limit is told where it may be the cause;
        NVIDIA's driver does not count against it, so it does not keep us from asking.
        """
        if not self.can_pin:
            return PinResult(False, f"the {self.backend_name} backend cannot pin memory of ours")
        with contextlib.suppress(PlacementRefused):  # memory of others, on an old kernel
            sys.advise(memory.address, memory.size_bytes, sys.MADV_DONTFORK)
        for register in (self._register, plain_register()):
            if register is not None and self._pin_pieces(memory, register, on_progress):
                n = len(self._pinned[memory.address])
                pieces = f" in {n} pieces" if n > 1 else ""
                return PinResult(True, f"pinned by the {self.backend_name} backend{pieces}")
        with contextlib.suppress(PlacementRefused):
            sys.advise(memory.address, memory.size_bytes, sys.MADV_DOFORK)
        return PinResult(
            False,
            f"the {self.backend_name} backend refused to pin {memory.size_bytes / 2**30:.1f} GiB "
            f"({_likely_cause(memory.size_bytes)})",
        )

    def _pin_pieces(
        self, memory: HostRange, register: Register, on_progress: Callable[[float], object]
    ) -> bool:
        step = self._most_at_once_bytes
        pieces = [
            memory.part(start, min(step, memory.size_bytes - start))
            for start in range(0, memory.size_bytes, step)
        ]
        done: list[HostRange] = []
        try:
            for piece in pieces:
                on_progress(len(done) / len(pieces))
                if not register(piece.address, piece.size_bytes):
                    break
                done.append(piece)
        finally:
            if len(done) < len(pieces):
                for piece in done:
                    self._unregister(piece.address)
        if len(done) < len(pieces):
            return False
        self._pinned[memory.address] = done
        for piece in done[1:]:
            bisect.insort(_borders, piece.address)
        return True

    def unpin(self, memory: HostRange) -> None:
        """Give the range back; nothing for one that is not pinned."""
        pieces = self._pinned.pop(memory.address, [])
        for piece in pieces:
            self._unregister(piece.address)
        for piece in pieces[1:]:
            _borders.remove(piece.address)
        if pieces:
            with contextlib.suppress(PlacementRefused):
                sys.advise(memory.address, memory.size_bytes, sys.MADV_DOFORK)


def pieces_of(address: int, size_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the parts of a copy from host memory that cross no border; mostly one."""
    if not _borders:
        return [(0, size_bytes)]
    first = bisect.bisect_right(_borders, address)
    last = bisect.bisect_left(_borders, address + size_bytes)
    cuts = [0, *(border - address for border in _borders[first:last]), size_bytes]
    return [(start, stop - start) for start, stop in zip(cuts, cuts[1:], strict=False)]


def plain_register(maps: Path = Path("/proc/self/maps")) -> Register | None:
    """cudaHostRegister without the read-only flag; None where no CUDA runtime is loaded."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libcudart.so" in line}
    if not paths:
        return None
    runtime = C.CDLL(min(paths))  # it is loaded already: this only finds it
    portable = 1  # cudaHostRegisterPortable

    def register(address: int, size_bytes: int) -> bool:
        call = runtime.cudaHostRegister
        call.argtypes, call.restype = [C.c_void_p, C.c_size_t, C.c_uint], C.c_int
        if call(address, size_bytes, portable) == 0:
            return True
        runtime.cudaGetLastError()  # else the next kernel launch would report it
        return False

    return register


def _likely_cause(size_bytes: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < size_bytes:
        return (
            f"the memory-lock limit is {limit / 2**20:.0f} MiB: raise it with ulimit -l; "
            "or the driver has no room"
        )
    return "the driver has no room, or GGML_CUDA_REGISTER_HOST was unset behind the first load"
