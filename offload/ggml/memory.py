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


def bytes_at(address: int, n: int) -> NDArray[np.uint8]:
    """The memory itself as an array; whoever owns the memory must keep it."""
    return np.ctypeslib.as_array((C.c_uint8 * n).from_address(address))
