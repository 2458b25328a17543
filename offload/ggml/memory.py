"""Host memory behind handles: ranges of it, and who provides it for our buffer types."""

from __future__ import annotations

import ctypes as C
import mmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from numa.memory import PlacedMemory
from offload.errors import DoesNotFit

copy_bytes = C.memmove  # (destination address, source address, n bytes); releases the GIL


class HostRange:
    """Bytes of host memory. `owner` is kept alive with it; who gives the memory back is elsewhere.

    `address` is for this package alone.
    """

    __slots__ = ("_owner", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int, owner: object = None) -> None:
        self.address, self.size_bytes, self._owner = address, size_bytes, owner

    @classmethod
    def of_mapping(cls, mapping: mmap.mmap) -> HostRange:
        """All of a mapping, which may be read-only or not even readable."""
        return cls(int(np.frombuffer(mapping, np.uint8).ctypes.data), len(mapping), mapping)

    @classmethod
    def of_placed(cls, memory: PlacedMemory) -> HostRange:
        """All of a memory whose pages `numa` places, up to the last page."""
        return cls(memory.address, memory.mapped_bytes, memory)

    def part(self, start_bytes: int, size_bytes: int) -> HostRange:
        """Raises ValueError for a part that is not inside."""
        if start_bytes < 0 or size_bytes < 0 or start_bytes + size_bytes > self.size_bytes:
            raise ValueError(
                f"[{start_bytes}, {start_bytes + size_bytes}) is not in {self.size_bytes} bytes"
            )
        return HostRange(self.address + start_bytes, size_bytes, self._owner)

    def array(self) -> NDArray[np.uint8]:
        """The memory itself, not a copy; valid while it is held."""
        return np.ctypeslib.as_array((C.c_uint8 * self.size_bytes).from_address(self.address))

    def n_resident_pages(self) -> int:
        """The number of its pages that are in memory (mincore); the range begins on a page.

        Of a file that is neither owned nor writable the kernel says that all are. Raises OSError.
        """
        answers = np.zeros(-(-self.size_bytes // mmap.PAGESIZE), np.uint8)
        if _mincore(self.address, self.size_bytes, answers.ctypes.data) != 0:
            raise OSError(C.get_errno(), "mincore")
        return int((answers & 1).sum())

    def __repr__(self) -> str:
        return f"<HostRange {self.size_bytes} bytes>"


class HostMemory(Protocol):
    """Provides page-aligned host memory, and takes it back."""

    def allocate(self, size_bytes: int) -> HostRange: ...

    def free(self, memory: HostRange) -> None: ...


class AnonymousMemory:
    """Zeroed memory from the kernel; given back when freed."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def allocate(self, size_bytes: int) -> HostRange:
        try:
            mapping = mmap.mmap(-1, size_bytes)
        except OSError as e:
            raise DoesNotFit(
                f"{size_bytes / 2**30:.1f} GiB of host memory for streamed weights could not be "
                f"had ({e.strerror}); use --mmap to keep them in the page cache"
            ) from e
        return _kept(mapping, self._mappings)

    def free(self, memory: HostRange) -> None:
        self._mappings.pop(memory.address).close()


class ReservedAddresses:
    """Address space without memory behind it: reading it is a fault, and terabytes cost nothing."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def allocate(self, size_bytes: int) -> HostRange:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        return _kept(mapping, self._mappings)

    def free(self, memory: HostRange) -> None:
        self._mappings.pop(memory.address).close()


def _kept(mapping: mmap.mmap, mappings: dict[int, mmap.mmap]) -> HostRange:
    made = HostRange.of_mapping(mapping)
    mappings[made.address] = mapping
    return made


_mincore = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_size_t, C.c_void_p, use_errno=True)(
    ("mincore", C.CDLL(None))
)
