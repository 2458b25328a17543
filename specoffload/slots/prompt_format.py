"""The form in which a kept prompt is written to a file, on the disk or in RAM.

    magic, size of the head | head (JSON), tokens, seal | state, checkpoints, seal

The head has a hash of all that the state depends on. A seal is an HMAC of what precedes it, so only
a program with the same secret can write or change a prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from pydantic import TypeAdapter, ValidationError

from offload.sequences.sequences import Checkpoint
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.prompt_index import IndexedPrompt

MOST_HEAD_BYTES = 1 << 20
_FORMAT = 2
_UNSEALED_FORMAT = 1  # had checksums, which anybody can write
_MAGIC = b"sopromp2"
_START = struct.Struct("<8sI")
_SEAL = "sha256"
_SEAL_BYTES = 32
_PIECE_BYTES = 16 << 20  # written between two reports of progress


@dataclass(frozen=True)
class SavedCheckpoint:
    """The description of a written checkpoint, which is its state and then its row."""

    length: int
    state_bytes: int
    row_floats: int  # 0: no row
    is_asked: bool = False

    @staticmethod
    def of(checkpoint: Checkpoint) -> SavedCheckpoint:
        row = checkpoint.row
        n_floats = 0 if row is None else row.size
        n_bytes = len(checkpoint.state)
        return SavedCheckpoint(checkpoint.length, n_bytes, n_floats, checkpoint.is_asked)

    @staticmethod
    def parts(checkpoint: Checkpoint) -> Iterator[bytes]:
        """Yield the bytes to write: `n_bytes` in all."""
        yield checkpoint.state
        if checkpoint.row is not None:
            yield checkpoint.row.astype(np.float32).tobytes()

    @property
    def n_bytes(self) -> int:
        return self.state_bytes + 4 * self.row_floats

    def checkpoint(self, raw: bytes) -> Checkpoint:
        """Return the checkpoint that was written as the bytes `raw`."""
        state, floats = raw[: self.state_bytes], raw[self.state_bytes :]
        row = np.frombuffer(floats, np.float32).reshape(1, -1) if self.row_floats else None
        return Checkpoint(self.length, state, row=row, is_asked=self.is_asked)


@dataclass(frozen=True)
class Head:
    """The beginning of a written prompt. `key` is `key_of` what the state depends on.

    `salt`: whose prompt it is (`GenerateOptions.cache_salt`).
    """

    key: str
    n_tokens: int
    state_bytes: int
    checkpoints: tuple[SavedCheckpoint, ...]
    salt: str = ""

    @property
    def payload_bytes(self) -> int:
        return self.state_bytes + sum(c.n_bytes for c in self.checkpoints) + _SEAL_BYTES

    def entry(self, name: str) -> IndexedPrompt:
        lengths = {c.length for c in self.checkpoints} | {self.n_tokens}
        return IndexedPrompt(name, self.n_tokens, tuple(sorted(lengths)), self.salt)


_HEADS: TypeAdapter[Head] = TypeAdapter(Head)


class Unusable(Exception):
    """A file that is damaged, or of something else."""


def key_of(made_by: Mapping[str, str]) -> str:
    """Return a hash of all that a state depends on, by name, and of this format."""
    return _hash_of(made_by, _FORMAT)


def unsealed_key_of(made_by: Mapping[str, str]) -> str:
    """Return what `key_of` was in the format before, whose prompts are not read any more."""
    return _hash_of(made_by, _UNSEALED_FORMAT)


def _hash_of(made_by: Mapping[str, str], version: int) -> str:
    named = json.dumps({**made_by, "format": version}, sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def write_prompt(
    file: BinaryIO,
    key: str,
    prompt: StoredPrompt,
    on_written: Callable[[float], None],
    secret: bytes = b"",
) -> Head:
    """Write a prompt at the file's position. `on_written` gets the share that is written.

    `secret` makes the seals. Without one they are checksums, for files that nobody else can open.
    Raises OSError.
    """
    saved = tuple(map(SavedCheckpoint.of, prompt.checkpoints))
    parts = [*prompt.pieces]
    head = Head(key, len(prompt.tokens), sum(map(len, parts)), saved, prompt.salt)
    begin = _begin_of(head, array("i", prompt.tokens))
    seal = hmac.new(secret, begin, _SEAL)
    file.write(begin + seal.digest())
    for checkpoint in prompt.checkpoints:
        parts += SavedCheckpoint.parts(checkpoint)
    done = 0
    for piece in _pieces(parts):
        seal.update(piece)
        file.write(piece)
        done += len(piece)
        on_written(done / head.payload_bytes)
    file.write(seal.digest())
    on_written(1.0)
    return head


def _begin_of(head: Head, tokens: array[int]) -> bytes:
    """Return what precedes the first seal."""
    raw = _HEADS.dump_json(head)
    return _START.pack(_MAGIC, len(raw)) + raw + tokens.tobytes()


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


def read_head(
    file: BinaryIO, key: str, size_bytes: int, secret: bytes = b""
) -> tuple[Head, array[int]]:
    """Read the head and the tokens of a prompt at the file's position, of `size_bytes` in all.

    `file` is not buffered. Raises OSError, and Unusable for a prompt that is not whole, has another
    key, or was sealed with another secret.
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
    counts = (count for c in head.checkpoints for count in (c.state_bytes, c.row_floats))
    begin_bytes = _START.size + n_bytes + 4 * head.n_tokens + _SEAL_BYTES
    if (
        min((head.n_tokens, head.state_bytes, *counts)) < 0
        or size_bytes != begin_bytes + head.payload_bytes
    ):
        raise Unusable("its size differs from what its head says")
    text = _exactly(file, 4 * head.n_tokens)
    expected = _exactly(file, _SEAL_BYTES)
    seal = hmac.digest(secret, start + raw + text, _SEAL)
    if not hmac.compare_digest(seal, expected) or head.key != key:
        raise Unusable("its head is damaged, of another model, or sealed by somebody else")
    tokens = array("i")
    tokens.frombytes(text)
    return head, tokens


def read_payload(
    file: BinaryIO, head: Head, tokens: array[int], secret: bytes = b""
) -> StoredPrompt:
    """Read the state and the checkpoints after the head. Raises OSError, Unusable, MemoryError."""
    begin = _begin_of(head, tokens)
    seal = hmac.new(secret, begin, _SEAL)
    state = _exactly(file, head.state_bytes)
    seal.update(state)
    checkpoints = []
    for saved in head.checkpoints:
        raw = _exactly(file, saved.n_bytes)
        seal.update(raw)
        checkpoints.append(saved.checkpoint(raw))
    if not hmac.compare_digest(seal.digest(), _exactly(file, _SEAL_BYTES)):
        raise Unusable("its seal does not match: it is damaged, or somebody else changed it")
    return StoredPrompt(tuple(tokens), state, tuple(checkpoints), head.salt)
