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
_LEAST_COMPARED, _FIRST_SHARE = 3, 1 / 3
_TRIAL = 8  # decodes of a trial
_FIRST_TRIAL, _MOST_BETWEEN = 64, 1 << 14  # decodes before it
_MOST_SPENT = 2.0  # of what a trial's decodes take in the chosen way


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


def n_to_compare(n_tokens: int, one_s: float, most_s: float, lead_tokens: int) -> int:
    """Decodes of `n_tokens` to time each way, and as many before them untimed.

    As many as hold `lead_tokens`, or fewer where a decode of one token takes `one_s` and those of
    one token both ways would take more than a third of `most_s`: further sizes want time, too.
    """
    affordable = int(_FIRST_SHARE * most_s / (4 * one_s))
    return max(_LEAST_COMPARED, min(lead_tokens // n_tokens, affordable))


def words(chosen: Collection[int], old_s: Mapping[int, float], split_s: Mapping[int, float]) -> str:
    """The choice as a part of a sentence."""
    if not chosen:
        slower = [n for n in sorted(split_s) if n in old_s]
        if not slower:
            return "no layer is split: nothing was measured"
        return f"no layer is split: not faster by measurement ({_times(slower[0], old_s, split_s)})"
    measured = [n for n in sorted(chosen) if n in old_s and n in split_s]
    how = f" ({_times(measured[0], old_s, split_s)})" if measured else ""
    return f"layers are split in batches of {ranges(sorted(chosen))} tokens{how}"


def _times(n: int, old_s: Mapping[int, float], split_s: Mapping[int, float]) -> str:
    return f"at {n}: {split_s[n] * 1e3:.1f} ms split, {old_s[n] * 1e3:.1f} ms by --min-batch alone"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours together: "1 to 3, 8"."""
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
    spent_s: float = 0.0  # in the trial, its first decode included
    n_since: int = 0  # decodes since the last trial
    wait: int = field(default_factory=lambda: _FIRST_TRIAL)
    n_changes: int = 0
    fresh: bool = True  # the next decode is the first of its way, which builds its graph


@dataclass(frozen=True)
class Change:
    """A size of batches went over to the other way, by the typical times of both."""

    n_tokens: int
    split: bool  # from now on
    split_s: float
    old_s: float

    @property
    def words(self) -> str:
        layers = "layers are split" if self.split else "no layer is split"
        found = _times(self.n_tokens, {self.n_tokens: self.old_s}, {self.n_tokens: self.split_s})
        tokens = "1 token" if self.n_tokens == 1 else f"{self.n_tokens} tokens"
        return f"{layers} in batches of {tokens} from now on, faster while answering ({found})"


class Watch:
    """Compares both ways while serving, and goes over to the faster.

    Of each batch size a few decodes go the other way now and then, after 64 of the size at first
    and after twice as many each time that nothing changes, or that a change is taken back: less
    than one decode in eight at first, one in two thousand in the end. A trial that has taken twice
    the time of as many decodes of the chosen way is over, so that a way that is slower by far
    costs little. The decode that follows a change builds a graph, and is not compared.
    """

    def __init__(self, chosen: Collection[int]) -> None:
        self._chosen = frozenset(chosen)
        self._sizes: dict[int, _Size] = {}
        self.last_change: Change | None = None

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
        is_trial, is_fresh, size.fresh = size.trial_s is not None, size.fresh, False
        if is_trial:
            size.spent_s += seconds
        if not is_fresh:
            times = size.times_s if size.trial_s is None else size.trial_s
            times.append(seconds)
        if is_trial:
            return self._judge(n_tokens, size)
        size.n_since += not is_fresh
        if size.n_since < size.wait or len(size.times_s) < _TRIAL:
            return False
        size.trial_s, size.spent_s, size.fresh = [], 0.0, True
        return True

    def _judge(self, n_tokens: int, size: _Size) -> bool:
        assert size.trial_s is not None
        chosen_s = median(size.times_s)
        if len(size.trial_s) < _TRIAL and size.spent_s < _MOST_SPENT * _TRIAL * chosen_s:
            return False
        trial_s, size.trial_s, size.n_since = size.trial_s, None, 0
        if len(trial_s) < _TRIAL or median(trial_s) >= _PAYS * chosen_s:
            size.wait, size.fresh = min(2 * size.wait, _MOST_BETWEEN), True
            return True
        size.split = not size.split
        size.times_s = deque(trial_s, maxlen=_TRIAL)
        size.wait = min(2 * size.wait, _MOST_BETWEEN) if size.n_changes else _FIRST_TRIAL
        size.n_changes += 1
        both = (median(trial_s), chosen_s)
        self.last_change = Change(n_tokens, size.split, *(both if size.split else both[::-1]))
        return False
