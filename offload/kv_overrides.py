"""Values of a model's metadata that the user sets in place of the file's (`--override-kv`). Pure.

The grammar is llama.cpp's: `KEY=TYPE:VALUE`, several separated by commas
(`string_parse_kv_override` in common/common.cpp).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Scalar = str | int | float | bool

FLAG = "--override-kv"
MOST_BYTES = 127  # longest key, and longest text, that the library's structure holds
_INT = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_MOST_INT = (1 << 63) - 1
_BOOLS = {"true": True, "false": False}
_QUOTED_MARKS = ',"\r\n'  # a part with one of these is written in quotes
_KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True)
class KvOverride:
    """A key of the metadata, and the value that it gets. The value's type is the library's."""

    key: str
    value: Scalar

    @property
    def kind(self) -> str:
        """llama.cpp's name of the value's type."""
        return kind_of(self.value)

    @property
    def shown_value(self) -> str:
        """The value as the flag takes it."""
        return str(self.value).lower() if isinstance(self.value, bool) else str(self.value)

    def __str__(self) -> str:
        return f"{self.key}={self.kind}:{self.shown_value}"


def words_of(overrides: Sequence[KvOverride]) -> str:
    """Return the value of the flag that asks for these overrides."""
    return ",".join(map(_quoted, map(str, overrides)))


def override_flags(overrides: Sequence[KvOverride]) -> tuple[str, ...]:
    """Return the arguments that ask for these overrides; () for none."""
    return (FLAG, words_of(overrides)) if overrides else ()


def _quoted(part: str) -> str:
    if not any(mark in part for mark in _QUOTED_MARKS):
        return part
    return '"{}"'.format(part.replace('"', '""'))


def read_overrides(text: str) -> tuple[KvOverride, ...]:
    """Read `KEY=TYPE:VALUE,...`. Parts with commas or line breaks are quoted. Raises ValueError."""
    try:
        parts = [part for part in next(csv.reader([text]), []) if part]
    except csv.Error as e:
        raise ValueError(f"{text!r:.80} cannot be read ({e}): put text in quotes") from None
    if not parts:
        raise ValueError("must be KEY=TYPE:VALUE, as in qwen3moe.expert_used_count=int:4")
    return tuple(map(read_override, parts))


def read_override(part: str) -> KvOverride:
    """Read one `KEY=TYPE:VALUE`, as `str` writes it. Raises ValueError."""
    key, equals, typed = part.partition("=")
    kind, colon, value = typed.partition(":")
    if not (key and equals and colon and kind in _KINDS):
        raise ValueError(
            f"{part!r} must be KEY=TYPE:VALUE, and TYPE must be one of {', '.join(_KINDS)}"
        )
    if len(key.encode()) > MOST_BYTES or "\0" in part:
        raise ValueError(f"the key {key!r:.80} must have at most {MOST_BYTES} bytes, none zero")
    return KvOverride(key, _READERS[kind](part, value))


def _read_int(part: str, value: str) -> int:
    if _INT.fullmatch(value) is None or not -_MOST_INT - 1 <= int(value) <= _MOST_INT:
        raise ValueError(f"the value of {part!r} must be a whole number of 64 bits")
    return int(value)


def _read_float(part: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the value of {part!r} must be a finite number")
    return number


def _read_bool(part: str, value: str) -> bool:
    if value not in _BOOLS:
        raise ValueError(f"the value of {part!r} must be true or false")
    return _BOOLS[value]


def _read_str(part: str, value: str) -> str:
    if len(value.encode()) > MOST_BYTES:
        raise ValueError(f"the text of {part!r:.80} must have at most {MOST_BYTES} bytes")
    return value


_READERS: Mapping[str, Callable[[str, str], Scalar]] = {
    "int": _read_int,
    "float": _read_float,
    "bool": _read_bool,
    "str": _read_str,
}


def kind_of(value: Scalar) -> str:
    """Return llama.cpp's name of a value's type."""
    return next(kind for kind, python_type in _KINDS.items() if type(value) is python_type)
