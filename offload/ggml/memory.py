"""Addresses of Python-owned memory and raw copies, for code that may not use ctypes itself."""

from __future__ import annotations

import ctypes as C
import mmap

import numpy as np
from numpy.typing import NDArray

copy = C.memmove  # (destination address, source address, n bytes); releases the GIL


def address_of_mapping(mapping: mmap.mmap) -> int:
    """Where a mapping lies. The mapping must be kept, and closed only when nothing uses it."""
    holder = C.c_char.from_buffer(mapping)
    address = C.addressof(holder)
    del holder  # else the mapping could never be closed
    return address


def address_of_readable(mapping: mmap.mmap) -> int:
    """The same for a mapping that may not be written, or not even read."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def bytes_at(address: int, n: int) -> NDArray[np.uint8]:
    """The memory itself as an array; whoever owns the memory must keep it."""
    return np.ctypeslib.as_array((C.c_uint8 * n).from_address(address))


def n_resident_pages(address: int, size_bytes: int) -> int:
    """How many pages of a mapped range are in memory (mincore); `address` is page aligned.

    Of a file that is neither owned nor writable the kernel says that all are. Raises OSError.
    """
    n_pages = -(-size_bytes // mmap.PAGESIZE)
    answers = np.zeros(n_pages, np.uint8)
    if _mincore(address, size_bytes, answers.ctypes.data) != 0:
        raise OSError(C.get_errno(), "mincore")
    return int((answers & 1).sum())


_mincore = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_size_t, C.c_void_p, use_errno=True)(
    ("mincore", C.CDLL(None))
)
