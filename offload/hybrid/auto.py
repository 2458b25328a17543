"""The sizes of batches whose layers are split: those at which whole decodes were measured faster.

Single products mislead: caches, copies under way and memory that both sides read change what a
decode takes. So decodes of running text are timed both ways, and between sizes that were timed the
gain is on a line over the logarithm of the size. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

_SIZES = (1, 8, 64, 2, 16, 4, 32)  # tokens, those that tell most first
_PAYS = 1.03  # times the speed: less is noise

# (tokens, True if layers are split) -> typical seconds of a decode
Timer = Callable[[int, bool], float]


@dataclass(frozen=True)
class Choice:
    """Sizes that are not split, and the gains that say so: times the speed, by tokens."""

    unsplit: frozenset[int]
    gains: Mapping[int, float]

    def words(self, n_most: int) -> str:
        """As a part of a sentence, for batches of up to `n_most` tokens."""
        split = [n for n in range(1, n_most + 1) if n not in self.unsplit]
        gains = ", ".join(f"{gain:.2f} x at {n}" for n, gain in sorted(self.gains.items()))
        if not split:
            return f"no layers are split: it was not faster ({gains})"
        return f"layers of batches of {_ranges(split)} tokens are split ({gains})"


def choose_sizes(
    decode_s: Timer, n_most: int, spent_s: Callable[[], float], most_s: float
) -> Choice:
    """Time sizes up to `n_most` tokens both ways until `most_s` is spent, one token at least."""
    gains: dict[int, float] = {}
    for n in dict.fromkeys(min(size, n_most) for size in _SIZES):
        if gains and spent_s() >= most_s:
            break
        gains[n] = decode_s(n, False) / decode_s(n, True)
    return Choice(frozenset(range(1, n_most + 1)) - _paying(gains, n_most), gains)


def _paying(gains: Mapping[int, float], n_most: int) -> set[int]:
    sizes = sorted(gains)
    known = [math.log(n) for n in sizes], [math.log(gains[n]) for n in sizes]
    wanted = np.log(np.arange(1, n_most + 1))
    return {n for n, gain in enumerate(np.interp(wanted, *known), 1) if gain >= math.log(_PAYS)}


def _ranges(numbers: Collection[int]) -> str:
    """3, 4, 5, 9 as "3 to 5 and 9"."""
    groups = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [n for _, n in group]
        groups.append(str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}")
    return " and ".join(groups)
