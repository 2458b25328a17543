"""The fields of a GGUF header by their places in the file, and what may be wrong with each.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _FLOATS = 8, 9, {6: "<f", 12: "<d"}
_U32, _U64 = 4, 10


@dataclass(frozen=True)
class Field:
    """Bytes `at` to `at + size` of a file hold a value of GGUF's type `kind`, of the key or tensor
    called `name`."""

    name: str
    at: int
    size: int
    kind: int


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, kind: int, name: str) -> tuple[Field, int]:
        size = _SIZES[kind]
        field = Field(name, self.at, size, kind)
        value = int.from_bytes(self.data[self.at : self.at + size], "little")
        self.at += size
        return field, value

    def text(self, name: str) -> tuple[Field, str]:
        _, n = self.number(_U64, name)
        field = Field(name, self.at, n, _STRING)
        text = self.data[self.at : self.at + n].decode("utf-8", "replace")
        self.at += n
        return field, text


def fields_of(data: bytes) -> list[Field]:
    """Every field of a header; of an array its type, its length, and its first and last element."""
    return list(_fields(_Reader(data)))


def _fields(reader: _Reader) -> Iterator[Field]:
    yield Field("magic", 0, 4, _U32)
    reader.at = 4
    yield reader.number(_U32, "version")[0]
    field, n_tensors = reader.number(_U64, "number of tensors")
    yield field
    field, n_kv = reader.number(_U64, "number of keys")
    yield field
    for _ in range(n_kv):
        field, key = reader.text("key")
        yield Field(f"{key}, its name", field.at, field.size, _STRING)
        field, kind = reader.number(_U32, f"{key}, its type")
        yield field
        yield from _value(reader, kind, key)
    for _ in range(n_tensors):
        field, name = reader.text("tensor")
        yield Field(f"{name}, its name", field.at, field.size, _STRING)
        field, n_dims = reader.number(_U32, f"{name}, number of dimensions")
        yield field
        for i in range(n_dims):
            yield reader.number(_U64, f"{name}, dimension {i}")[0]
        yield reader.number(_U32, f"{name}, its type")[0]
        yield reader.number(_U64, f"{name}, its offset")[0]


def _value(reader: _Reader, kind: int, key: str) -> Iterator[Field]:
    if kind == _STRING:
        start = reader.at
        field, _ = reader.text(key)
        yield Field(f"{key}, its length", start, 8, _U64)
        yield field
    elif kind == _ARRAY:
        field, element = reader.number(_U32, f"{key}, type of its elements")
        yield field
        field, n = reader.number(_U64, f"{key}, number of its elements")
        yield field
        for i in range(n):
            elements = list(_value(reader, element, f"{key}[{i}]"))
            if i in (0, n - 1):
                yield from elements
    else:
        yield reader.number(kind, key)[0]


def mutated(rng: Random, data: bytes, field: Field) -> bytes:
    """The file with another value in that field, or cut there."""
    if rng.random() < 0.05:
        return data[: field.at + rng.randrange(field.size + 1)]
    before, after = data[: field.at], data[field.at + field.size :]
    if field.kind == _STRING:
        return before + _text(rng, data[field.at : field.at + field.size]) + after
    return before + _number(rng, data[field.at : field.at + field.size], field.kind) + after


def _text(rng: Random, old: bytes) -> bytes:
    """Of the same length, which stands before it."""
    if not old:
        return old
    at = rng.randrange(len(old))
    changed = (
        old[:at] + bytes([rng.choice((0, 0x80, 0xFF, 0x41, rng.randrange(256)))]) + old[at + 1 :]
    )
    words = rng.choice((b"\0", b"\xff", b"x", b"%s", b"gpt2", b"bert", b"{{ 1/0 }}")) * len(old)
    return rng.choice((changed, words[: len(old)]))


def _number(rng: Random, old: bytes, kind: int) -> bytes:
    size = len(old)
    if kind in _FLOATS:
        value = rng.choice(
            (0.0, -1.0, 1e30, -1e30, 1e-30, float("nan"), float("inf"), rng.uniform(-9, 9))
        )
        return struct.pack(_FLOATS[kind], value)
    was = int.from_bytes(old, "little")
    most = (1 << (8 * size)) - 1
    value = rng.choice(
        (0, 1, 2, 3, 5, was + 1, was - 1, 2 * was, was // 2, most, most // 2, most // 2 + 1, 1000)
        + (rng.randrange(most + 1), was ^ (1 << rng.randrange(8 * size)), was * 1000, 17, 255)
    )
    return (value & most).to_bytes(size, "little")
