"""The form in which a kept prompt is written to a file, on the disk or in RAM.

    magic, size of the head | head (JSON), tokens, CRC-32 | state, checkpoints, CRC-32

The head has a hash of all that the state depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO
from zlib import crc32

import numpy as np
from pydantic import TypeAdapter, ValidationError

from offload.sequences.sequences import Checkpoint
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.prompt_index import Entry

MOST_HEAD_BYTES = 1 << 20
_FORMAT = 1
_MAGIC = b"sopromp1"
_START = struct.Struct("<8sI")
_CRC = struct.Struct("<I")
_PIECE_BYTES = 16 << 20  # written between two reports of progress


@dataclass(frozen=True)
class SavedCheckpoint:
    length: int
    state_bytes: int
    row_floats: int  # 0: no row


@dataclass(frozen=True)
class Head:
    """The beginning of a written prompt. `key` is `key_of` what the state depends on."""

    key: str
    n_tokens: int
    state_bytes: int
    checkpoints: tuple[SavedCheckpoint, ...]

    @property
    def payload_bytes(self) -> int:
        parts = (c.state_bytes + 4 * c.row_floats for c in self.checkpoints)
        return self.state_bytes + sum(parts) + _CRC.size

    def entry(self, name: str) -> Entry:
        lengths = {c.length for c in self.checkpoints} | {self.n_tokens}
        return Entry(name, self.n_tokens, tuple(sorted(lengths)))


_HEADS: TypeAdapter[Head] = TypeAdapter(Head)


class Unusable(Exception):
    """A file that is damaged, or of something else."""


def key_of(made_by: Mapping[str, str]) -> str:
    """Return a hash of all that a state depends on, by name, and of this format."""
    named = json.dumps({**made_by, "format": _FORMAT}, sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def write_prompt(
    file: BinaryIO, key: str, prompt: StoredPrompt, on_written: Callable[[float], None]
) -> Head:
    """Write a prompt at the file's position. `on_written` gets the share that is written.

    Raises OSError.
    """
    saved = tuple(
        SavedCheckpoint(c.length, len(c.state), 0 if c.row is None else c.row.size)
        for c in prompt.checkpoints
    )
    head = Head(key, len(prompt.tokens), len(prompt.state), saved)
    raw = _HEADS.dump_json(head)
    begin = _START.pack(_MAGIC, len(raw)) + raw + array("i", prompt.tokens).tobytes()
    parts: list[bytes] = [prompt.state]
    for checkpoint in prompt.checkpoints:
        parts.append(checkpoint.state)
        if checkpoint.row is not None:
            parts.append(checkpoint.row.astype(np.float32).tobytes())
    file.write(begin + _CRC.pack(crc32(begin)))
    found = done = 0
    for piece in _pieces(parts):
        found = crc32(piece, found)
        file.write(piece)
        done += len(piece)
        on_written(done / head.payload_bytes)
    file.write(_CRC.pack(found))
    on_written(1.0)
    return head


def _pieces(parts: Sequence[bytes]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), _PIECE_BYTES):
            yield view[at : at + _PIECE_BYTES]


def _exactly(file: BinaryIO, n_bytes: int) -> bytes:
    """Read `n_bytes`, with one read if the system allows. Raises Unusable at the file's end."""
    parts: list[bytes] = []
    while n_bytes:
        part = os.read(file.fileno(), n_bytes)
        if not part:
            raise Unusable("it ends too early")
        parts.append(part)
        n_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_head(file: BinaryIO, key: str, size_bytes: int) -> tuple[Head, array[int]]:
    """Read the head and the tokens of a prompt at the file's position, of `size_bytes` in all.

    `file` is not buffered. Raises OSError, and Unusable for a prompt that is not whole or has
    another key.
    """
    start = _exactly(file, _START.size)
    magic, n_bytes = _START.unpack(start)
    if magic != _MAGIC or n_bytes > MOST_HEAD_BYTES:
        raise Unusable("it is no prompt of this format")
    raw = _exactly(file, n_bytes)
    try:
        head = _HEADS.validate_json(raw)
    except ValidationError:
        raise Unusable("its head is damaged") from None
    sizes = (head.n_tokens, head.state_bytes, *(c.state_bytes for c in head.checkpoints))
    begin_bytes = _START.size + n_bytes + 4 * head.n_tokens + _CRC.size
    if min(sizes) < 0 or size_bytes != begin_bytes + head.payload_bytes:
        raise Unusable("its size differs from what its head says")
    text = _exactly(file, 4 * head.n_tokens)
    (expected,) = _CRC.unpack(_exactly(file, _CRC.size))
    if crc32(text, crc32(start + raw)) != expected or head.key != key:
        raise Unusable("its head is damaged, or of another model")
    tokens = array("i")
    tokens.frombytes(text)
    return head, tokens


def read_payload(file: BinaryIO, head: Head, tokens: array[int]) -> StoredPrompt:
    """Read the state and the checkpoints after the head. Raises OSError, Unusable, MemoryError."""
    state = _exactly(file, head.state_bytes)
    found = crc32(state)
    checkpoints = []
    for saved in head.checkpoints:
        part, raw_row = _exactly(file, saved.state_bytes), _exactly(file, 4 * saved.row_floats)
        found = crc32(raw_row, crc32(part, found))
        row = np.frombuffer(raw_row, np.float32).reshape(1, -1) if saved.row_floats else None
        checkpoints.append(Checkpoint(saved.length, part, row=row))
    (expected,) = _CRC.unpack(_exactly(file, _CRC.size))
    if found != expected:
        raise Unusable("its checksum does not match")
    return StoredPrompt(tuple(tokens), state, tuple(checkpoints))
