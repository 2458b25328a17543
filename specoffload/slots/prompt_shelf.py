"""Keeps the prompts of a closed model in RAM, in a file without a name that its processes share.

The server of several models makes one for each. An engine process that closes writes its prompts
there, and the model's next process takes them. The file has

    end of the last whole prompt | prompt, its size | prompt, its size | ...

The newest prompt comes first, so that the oldest ones can be cut off. If a process is killed while
it writes, the prompts before stay.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO, TypeVar

_SIZE = struct.Struct("<Q")
_WhatWasRead = TypeVar("_WhatWasRead")


class PromptShelf:
    """The file. It can be passed to a process that is spawned. One process at a time uses it."""

    def __init__(self, handle: int | None = None) -> None:
        """`handle`: a descriptor of a shelf's file, which this one closes. None: a new file.

        Raises OSError.
        """
        self._handle = -1
        self._handle = os.memfd_create("prompts") if handle is None else handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._handle),)

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    @property
    def size_bytes(self) -> int:
        """Bytes of RAM that the prompts take."""
        return max(0, self._end - _SIZE.size)

    @property
    def _end(self) -> int:
        raw = os.pread(self._handle, _SIZE.size, 0)
        return int(_SIZE.unpack(raw)[0]) if len(raw) == _SIZE.size else _SIZE.size

    def _cut(self, end: int) -> None:
        os.pwrite(self._handle, _SIZE.pack(end), 0)
        os.ftruncate(self._handle, end)

    def append(self, write: Callable[[BinaryIO], object]) -> None:
        """Let `write` write a prompt after the others, as the oldest one. Raises what it raises."""
        start = self._end
        with os.fdopen(os.dup(self._handle), "r+b") as file:
            file.seek(start)
            write(file)
            end = file.tell()
            file.write(_SIZE.pack(end - start))
        os.pwrite(self._handle, _SIZE.pack(end + _SIZE.size), 0)

    def take_oldest(self, read: Callable[[BinaryIO, int], _WhatWasRead]) -> _WhatWasRead | None:
        """Return what `read` makes of the oldest prompt, and drop that prompt. None: there is none.

        `read` gets an unbuffered file at the prompt's beginning, and the prompt's size in bytes.
        Raises what it raises, and OSError. The prompt is dropped in every case.
        """
        start, n_bytes = self._oldest()
        if not n_bytes:
            return None
        try:
            with os.fdopen(os.dup(self._handle), "rb", buffering=0) as file:
                os.lseek(file.fileno(), start, os.SEEK_SET)
                return read(file, n_bytes)
        finally:
            self._cut(start)

    def drop_oldest(self) -> None:
        """Drop the oldest prompt, if there is one."""
        start, n_bytes = self._oldest()
        if n_bytes:
            self._cut(start)

    def clear(self) -> None:
        os.ftruncate(self._handle, 0)

    def _oldest(self) -> tuple[int, int]:
        """Return where the oldest prompt begins, and its bytes; (0, 0) if there is none."""
        end = self._end - _SIZE.size
        if end <= _SIZE.size:
            return 0, 0
        n_bytes = int(_SIZE.unpack(os.pread(self._handle, _SIZE.size, end))[0])
        return end - n_bytes, n_bytes


def _received(duplicate: Any) -> PromptShelf:
    return PromptShelf(duplicate.detach())
