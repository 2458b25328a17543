"""Batch sizes whose layers are split: by measured times, with a way back. Pure.

What is compared is what whole decodes take, with layers split and by min-batch alone. A tie is
noise, and keeps what is: a size begins to be split where that is measurably faster, and ends where
it is slower at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

_PAYS = 0.97  # of the other's time: what takes longer than that is no reason to change
_TRIAL = 8  # decodes of a trial
_FIRST_TRIAL, _MOST_BETWEEN = 64, 1 << 14  # decodes before it


def split_sizes(
    old_s: Mapping[int, float],
    split_s: Mapping[int, float],
    most: int,
    before: Collection[int] = (),
) -> frozenset[int]:
    """The batch sizes up to `most` tokens whose layers are to be split.

    `old_s` and `split_s` are seconds of a decode by batch size, and lie on a line between measured
    sizes. No size below or above those that both were measured at is split. `before` were split so
    far.
    """
    sizes = sorted(set(old_s) & set(split_s))
    if not sizes:
        return frozenset()
    chosen = set()
    for n in range(sizes[0], min(most, sizes[-1]) + 1):
        ratio = _at(split_s, sizes, n) / _at(old_s, sizes, n)
        if ratio < (1.0 if n in before else _PAYS):
            chosen.add(n)
    return frozenset(chosen)


def _at(seconds: Mapping[int, float], sizes: Sequence[int], n: int) -> float:
    low = max(size for size in sizes if size <= n)
    high = min(size for size in sizes if size >= n)
    if low == high:
        return seconds[low]
    return seconds[low] + (seconds[high] - seconds[low]) * (n - low) / (high - low)


def words(chosen: Collection[int], old_s: Mapping[int, float], split_s: Mapping[int, float]) -> str:
    """The choice as a part of a sentence."""
    if not chosen:
        slower = [n for n in sorted(split_s) if n in old_s]
        if not slower:
            return "no layer is split: nothing was measured"
        return f"no layer is split: slower by measurement ({_times(slower[0], old_s, split_s)})"
    measured = [n for n in sorted(chosen) if n in old_s and n in split_s]
    how = f" ({_times(measured[0], old_s, split_s)})" if measured else ""
    return f"layers are split in batches of {_ranges(sorted(chosen))} tokens{how}"


def _times(n: int, old_s: Mapping[int, float], split_s: Mapping[int, float]) -> str:
    return f"at {n}: {split_s[n] * 1e3:.1f} ms split, {old_s[n] * 1e3:.1f} ms by --min-batch alone"


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in parts)


@dataclass
class _Size:
    """Times of one size's last decodes, in the way that is chosen and in a trial of the other."""

    split: bool
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TRIAL))
    trial_s: list[float] | None = None  # of the other way, while it is tried
    n_since: int = 0  # decodes since the last trial
    wait: int = _FIRST_TRIAL
    fresh: bool = True  # the next decode is the first of its way, which builds its graph


class Watch:
    """Compares both ways while serving, and goes over to the faster.

    Of each batch size a few decodes go the other way now and then, after 64 of the size at first
    and after twice as many each time that nothing changes: less than one decode in eight at first,
    one in two thousand in the end. The decode that follows a change builds a graph, and does not
    count.
    """

    def __init__(self, chosen: Collection[int]) -> None:
        self._chosen = frozenset(chosen)
        self._sizes: dict[int, _Size] = {}

    def splits(self, n_tokens: int) -> bool:
        """True if the next decode of so many tokens is to have its layers split."""
        size = self._sizes.get(n_tokens)
        if size is None:
            return n_tokens in self._chosen
        return size.split != (size.trial_s is not None)

    def prefers(self, n_tokens: int) -> bool:
        """True if batches of so many tokens are split when nothing is tried."""
        size = self._sizes.get(n_tokens)
        return n_tokens in self._chosen if size is None else size.split

    def took(self, n_tokens: int, seconds: float) -> bool:
        """A decode was done, in the way of `splits`; True if what `splits` says has changed."""
        size = self._sizes.setdefault(n_tokens, _Size(n_tokens in self._chosen))
        if size.fresh:
            size.fresh = False
            return False
        if size.trial_s is None:
            size.times_s.append(seconds)
            size.n_since += 1
            if size.n_since < size.wait or len(size.times_s) < _TRIAL:
                return False
            size.trial_s, size.fresh = [], True
            return True
        size.trial_s.append(seconds)
        if len(size.trial_s) < _TRIAL:
            return False
        return self._decide(size)

    def _decide(self, size: _Size) -> bool:
        assert size.trial_s is not None
        faster = median(size.trial_s) < _PAYS * median(size.times_s)
        trial_s, size.trial_s, size.n_since = size.trial_s, None, 0
        if not faster:
            size.wait, size.fresh = min(2 * size.wait, _MOST_BETWEEN), True
            return True
        size.split = not size.split
        size.times_s = deque(trial_s, maxlen=_TRIAL)
        size.wait = _FIRST_TRIAL
        return False
