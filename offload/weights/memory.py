"""Plain anonymous host memory for streamed weights."""

from __future__ import annotations

import mmap

from offload.errors import DoesNotFit
from offload.ggml.memory import address_of_mapping


class AnonymousMemory:
    """Zeroed, page-aligned memory from the kernel; given back when freed."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def allocate(self, size_bytes: int) -> int:
        try:
            mapping = mmap.mmap(-1, size_bytes)
        except OSError as e:
            raise DoesNotFit(
                f"{size_bytes / 2**30:.1f} GiB of host memory for streamed weights could not be "
                f"had ({e.strerror}); use --mmap to keep them in the page cache"
            ) from e
        address = address_of_mapping(mapping)
        self._mappings[address] = mapping
        return address

    def free(self, address: int) -> None:
        self._mappings.pop(address).close()
