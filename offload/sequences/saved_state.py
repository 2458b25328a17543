"""The bytes of a saved sequence: the library's states of its parts, and a follower's data. Pure.

A state of many tokens is saved and loaded in parts, so that other requests decode in between. Each
part is a state that the library made of a range of positions. The form is

    part, part, ..., [data of the follower, its size, "own rows"], table of parts, "in parts"

or, if a sequence is saved at once, one state without a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from struct import Struct
from typing import NamedTuple

PART_BYTES = 8 << 20  # of a part; copying it takes a few milliseconds
MOST_HEAD_BYTES = 8 << 10  # by which a part is larger than its cells: about 40 for each layer

_OWN_END = Struct("<Q8s")  # bytes of the follower's data
_OWN_MAGIC = b"own rows"
_PART = Struct("<QQ")  # bytes of a part, and the tokens up to its end
_END = Struct("<Q8s")  # number of parts
_MAGIC = b"in parts"


class SavedParts(NamedTuple):
    """The states of a sequence's parts, and the data of a follower (b"": it has none).

    `ends`: tokens of the sequence up to the end of each part. Empty for a state of the whole
    sequence, which is the only part.
    """

    parts: Sequence[bytes | memoryview]
    ends: tuple[int, ...]
    own: bytes


def whole_of(state: bytes, own: bytes) -> bytes:
    """Return the form of a sequence that was saved at once."""
    return b"".join((state, _own_words(own))) if own else state


def end_of(parts: Sequence[bytes], ends: Sequence[int], own: bytes) -> bytes:
    """Return what follows the parts."""
    rows = [_PART.pack(len(part), end) for part, end in zip(parts, ends, strict=True)]
    return b"".join((_own_words(own), *rows, _END.pack(len(rows), _MAGIC)))


def parted(state: bytes, parts: Sequence[bytes] = ()) -> SavedParts:
    """Return the parts of a saved sequence. `parts`: those that are kept apart from `state`."""
    rows, start = _table(state)
    if not rows:
        whole, own = _without_own(state)
        return SavedParts((whole,), (), own)
    at = [0, *accumulate(n_bytes for n_bytes, _ in rows)]
    n_own_bytes = start - (0 if parts else at[-1])
    if n_own_bytes < 0 or (parts and [len(part) for part in parts] != [n for n, _ in rows]):
        return SavedParts((state,), (), b"")  # damaged, so the library refuses it
    own = _without_own(state[start - n_own_bytes : start])[1]
    ends = tuple(end for _, end in rows)
    if parts:
        return SavedParts(parts, ends, own)
    view = memoryview(state)
    return SavedParts([view[a:b] for a, b in pairwise(at)], ends, own)


def is_in_parts(state: bytes) -> bool:
    """True if a saved sequence has several parts."""
    return len(_table(state)[0]) > 1


def _own_words(own: bytes) -> bytes:
    return b"".join((own, _OWN_END.pack(len(own), _OWN_MAGIC))) if own else b""


def _table(state: bytes) -> tuple[list[tuple[int, int]], int]:
    """Return (bytes, end) of each part, and where the table begins; [] if there is none."""
    end = len(state) - _END.size
    if end < 0:
        return [], 0
    n_parts, magic = _END.unpack_from(state, end)
    start = end - n_parts * _PART.size
    if magic != _MAGIC or start < 0:
        return [], 0
    return [*_PART.iter_unpack(state[start:end])], start


def _without_own(saved: bytes) -> tuple[bytes, bytes]:
    """Return what comes before the follower's data, and that data; b"" if there is none."""
    end = len(saved) - _OWN_END.size
    if end < 0:
        return saved, b""
    n_bytes, magic = _OWN_END.unpack_from(saved, end)
    if magic != _OWN_MAGIC or n_bytes > end:
        return saved, b""
    return saved[: end - n_bytes], saved[end - n_bytes : end]
