"""Parses sizes, rates and times as people write them: 64MiB, 2GB/s, 20us. Writes them, too."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]*)\s*$")
_BYTES = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


_LEAST_BARE = 1 << 20  # least size without a unit; a smaller number probably lacks its unit


def parse_bytes(text: str) -> int:
    """Return the bytes of `64MiB`, `1.5GB`, `8G` (binary) or `4194304`.

    Raises ValueError for any other text, and for a number below 1 MiB without a unit. The message
    quotes the text.
    """
    n_bytes, unit = _bytes(text)
    if not unit and not n_bytes:
        raise ValueError(f"{text} is no size: write one such as 8GiB")
    if not unit and n_bytes < _LEAST_BARE:
        raise ValueError(f"{text} would be {n_bytes} bytes; write {text.strip()}GiB for GiB")
    return n_bytes


def _bytes(text: str) -> tuple[int, str]:
    number, unit = _split(text)
    if unit.lower() not in _BYTES:
        raise ValueError(f"{text!r} is not a size: write 64MiB, 8GB or a number of bytes")
    return int(number * _BYTES[unit.lower()]), unit


def parse_rate(text: str) -> float:
    """Return the bytes per second of `2GB/s` or `800MB/s`. Raises ValueError, quoting the text."""
    size, slash, per = text.partition("/")
    if slash and per.strip().lower() != "s":
        raise ValueError(f"{text!r} is not a rate: write 2GB/s")
    rate = float(_bytes(size)[0])
    if rate <= 0:
        raise ValueError(f"{text!r} is not a rate: it must be above 0")
    return rate


def parse_seconds(text: str) -> float:
    """Return the seconds of `20us` or `1.5ms`. Raises ValueError, quoting the text."""
    number, unit = _split(text)
    if unit not in _SECONDS:
        raise ValueError(f"{text!r} is not a time: write 20us or 1ms")
    return number * _SECONDS[unit]


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if not match:
        raise ValueError(f"{text!r} is not a number with a unit")
    return float(match[1]), match[2]


def size_words(n_bytes: float) -> str:
    """Return a size in GiB, or in MiB or KiB if it would be 0.0 in the larger unit."""
    if n_bytes / 2**30 >= 0.05 or not n_bytes:
        return f"{n_bytes / 2**30:.1f} GiB"
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes / 2**20 >= 0.05 else f"{n_bytes / 2**10:.1f} KiB"


def milliseconds(seconds: float) -> str:
    """Return a time with its unit, with as many digits as tell close times apart: 0.42 ms."""
    ms = seconds * 1e3
    return f"{ms:.{2 if ms < 10 else 1 if ms < 100 else 0}f} ms"


def plural(n: int, noun: str) -> str:
    """A number with its noun, such as "1 token" or "2 tokens"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def rate_words(speed: str) -> str:
    """A speed in tokens/s with its unit, such as "1 token/s" or "40 to 100 tokens/s"."""
    return f"{speed} token/s" if speed == "1" else f"{speed} tokens/s"
