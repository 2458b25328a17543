"""Handles of host memory: ranges of it, objects that allocate it, and pinning for a GPU."""

from __future__ import annotations

import bisect
import contextlib
import ctypes as C
import mmap
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from numa import sys
from numa.errors import PlacementRefused
from numa.memory import PlacedMemory
from offload.errors import DoesNotFit
from offload.ggml.library import abi
from offload.ggml.library.lib import library

copy_bytes = C.memmove  # (destination address, source address, n bytes); releases the GIL


class HostRange:
    """Bytes of host memory. Keeps `owner` alive, and does not free the memory itself.

    `address` is for this package alone.
    """

    __slots__ = ("_owner", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int, owner: object = None) -> None:
        self.address, self.size_bytes, self._owner = address, size_bytes, owner

    @classmethod
    def of_mapping(cls, mapping: mmap.mmap) -> HostRange:
        """Return all of a mapping, which may be read-only or unreadable."""
        return cls(int(np.frombuffer(mapping, np.uint8).ctypes.data), len(mapping), mapping)

    @classmethod
    def of_placed(cls, memory: PlacedMemory) -> HostRange:
        """Return all of a memory whose pages `numa` places, up to the end of the last page."""
        return cls(memory.address, memory.mapped_bytes, memory)

    def part(self, start_bytes: int, size_bytes: int) -> HostRange:
        """Return a part of the range. Raises ValueError if the part is not inside."""
        if start_bytes < 0 or size_bytes < 0 or start_bytes + size_bytes > self.size_bytes:
            raise ValueError(
                f"[{start_bytes}, {start_bytes + size_bytes}) is not in {self.size_bytes} bytes"
            )
        return HostRange(self.address + start_bytes, size_bytes, self._owner)

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes themselves, not a copy. The array is valid while the memory is held."""
        return np.ctypeslib.as_array((C.c_uint8 * self.size_bytes).from_address(self.address))

    def resident_bytes(self) -> int:
        """Return the bytes of the range's pages that are in memory (mincore). Raises OSError.

        The range must begin on a page. For a file that the user neither owns nor may write, the
        kernel reports all pages.
        """
        page_bytes = resource.getpagesize()
        answers = np.zeros(-(-self.size_bytes // page_bytes), np.uint8)
        if _mincore(self.address, self.size_bytes, answers.ctypes.data) != 0:
            raise OSError(C.get_errno(), "mincore")
        return page_bytes * int((answers & 1).sum())

    def give_back(self) -> None:
        """Return the range's pages to the kernel. They are read as zeros afterwards."""
        sys.advise(self.address, self.size_bytes, sys.MADV_DONTNEED)

    def move_to(self, target: HostRange) -> None:
        """Move the range's pages to another range of the same size, without copying them.

        This range has no pages afterwards. Raises PlacementRefused if the kernel cannot do it.
        """
        sys.move_pages(self.address, target.address, self.size_bytes)

    def map_again(self) -> None:
        """Return the pages to the kernel, and make the range part of the mappings around it.

        A range to which pages were moved is a mapping of its own. Raises PlacementRefused.
        """
        sys.map_again(self.address, self.size_bytes)

    def use_small_pages(self) -> None:
        """Let the kernel use no huge pages here, so that small parts can be given back."""
        with contextlib.suppress(PlacementRefused):  # a kernel without huge pages
            sys.advise(self.address, self.size_bytes, sys.MADV_NOHUGEPAGE)

    def __repr__(self) -> str:
        return f"<HostRange {self.size_bytes} bytes>"


class HostMemory(Protocol):
    """Allocates and frees page-aligned host memory."""

    def allocate(self, size_bytes: int) -> HostRange: ...

    def free(self, memory: HostRange) -> None: ...


class AnonymousMemory:
    """Allocates zeroed memory from the kernel, and returns it to the kernel when freed."""

    _MAPPED = {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ | mmap.PROT_WRITE}  # noqa: RUF012

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def allocate(self, size_bytes: int) -> HostRange:
        try:
            mapping = mmap.mmap(-1, size_bytes, **self._MAPPED)
        except OSError as e:
            raise DoesNotFit(
                f"{size_bytes / 2**30:.1f} GiB of host memory for streamed weights could not be "
                f"had ({e.strerror}); use --mmap to keep them in the page cache"
            ) from e
        made = HostRange.of_mapping(mapping)
        self._mappings[made.address] = mapping
        return made

    def free(self, memory: HostRange) -> None:
        self._mappings.pop(memory.address).close()


class ReservedAddresses(AnonymousMemory):
    """Allocates addresses without memory. Reading them is a fault, and terabytes cost nothing."""

    _MAPPED = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "prot": 0}  # noqa: RUF012


_mincore = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_size_t, C.c_void_p, use_errno=True)(
    ("mincore", C.CDLL(None))
)


class HasAddress(Protocol):
    """A handle of something that the library knows by its address."""

    @property
    def address(self) -> int: ...


# Copies read pinned (page-locked) memory without a bounce buffer. CUDA's backend pins memory if
# GGML_CUDA_REGISTER_HOST is in the environment. It asks for read-only pages, which some devices
# refuse. CUDA is then asked for pages without that flag. Drivers refuse to pin 512 GiB at once, so
# memory is pinned in pieces. No copy may cross a border between two pieces.
MOST_AT_ONCE_BYTES = 8 << 30  # pinned in a few seconds
_REGISTER = b"ggml_backend_register_host_buffer"
_UNREGISTER = b"ggml_backend_unregister_host_buffer"
_register_type = C.CFUNCTYPE(C.c_bool, C.c_void_p, C.c_size_t)
_unregister_type = C.CFUNCTYPE(None, C.c_void_p)

Register = Callable[[int, int], bool]  # (address, bytes) -> True if it is pinned now
# Addresses at which one pinned piece ends and the next begins, in the whole process; ascending.
_borders: list[int] = []


@dataclass(frozen=True)
class PinResult:
    """The result of pinning: `ok` if the memory is pinned, and the `reason`: how, or why not."""

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
        self._pinned: dict[int, list[HostRange]] = {}  # pinned ranges by address

    def _entry(self, lib: Any, name: bytes, prototype: Any) -> Any:
        address = lib.ggml_backend_reg_get_proc_address(self._registry, name)
        return prototype(address) if address else None

    @property
    def can_pin(self) -> bool:
        """True if the backend has functions to pin memory and to unpin it."""
        return self._register is not None and self._unregister is not None

    def pin(
        self, memory: HostRange, on_progress: Callable[[float], object] = lambda _: None
    ) -> PinResult:
        """Page-lock a range, all of it or nothing. A refusal is a result, not an error.

        `on_progress` receives the pinned share, 0 to 1. Nothing stays pinned if it raises.

        Child processes do not inherit the range. Pages that a device reads cannot be shared, so a
        child would have to copy them. The reason of a refusal names the memory-lock limit if that
        may be the cause. A low limit does not stop the attempt, because NVIDIA's driver does not
        count against it.
        """
        if not self.can_pin:
            return PinResult(False, f"the {self.backend_name} backend cannot pin memory of ours")
        with contextlib.suppress(PlacementRefused):  # an old kernel refuses for others' memory
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
        """Unpin the range. Does nothing if it is not pinned."""
        pieces = self._pinned.pop(memory.address, [])
        for piece in pieces:
            self._unregister(piece.address)
        for piece in pieces[1:]:
            _borders.remove(piece.address)
        if pieces:
            with contextlib.suppress(PlacementRefused):
                sys.advise(memory.address, memory.size_bytes, sys.MADV_DOFORK)


def pieces_of(address: int, size_bytes: int) -> list[tuple[int, int]]:
    """Split a copy from host memory at the borders. Returns (offset, bytes) of each part."""
    if not _borders:
        return [(0, size_bytes)]
    first = bisect.bisect_right(_borders, address)
    last = bisect.bisect_left(_borders, address + size_bytes)
    cuts = [0, *(border - address for border in _borders[first:last]), size_bytes]
    return [(start, stop - start) for start, stop in zip(cuts, cuts[1:], strict=False)]


def plain_register(maps: Path = Path("/proc/self/maps")) -> Register | None:
    """Return cudaHostRegister without the read-only flag, or None if no CUDA runtime is loaded."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libcudart.so" in line}
    if not paths:
        return None
    runtime = C.CDLL(min(paths))  # already loaded, so this only finds it
    portable = 1  # cudaHostRegisterPortable

    def register(address: int, size_bytes: int) -> bool:
        call = runtime.cudaHostRegister
        call.argtypes, call.restype = [C.c_void_p, C.c_size_t, C.c_uint], C.c_int
        if call(address, size_bytes, portable) == 0:
            return True
        runtime.cudaGetLastError()  # clears the error, or the next kernel launch reports it
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
