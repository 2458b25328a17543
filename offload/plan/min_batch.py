"""The number of tokens from which streaming beats the CPU: decided from both sides' times. Pure.

Both sides are timed as whole decodes, so that what they share cancels out, and what an estimate of
bytes ÷ bandwidth leaves out (router reads, cache hits, overlap) counts. Verification and prefill
are decided apart: a model of many experts may lose at every verification batch and win in prefill.
Where a size would take too long to time, both sides are extended from smaller ones; where nothing
could be timed, ik_llama.cpp's rule holds (docs/background.md, min-batch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

VERIFY_MOST = 64  # tokens of the largest verification batch: larger ones are prefill
NEVER = 1 << 30
_PAYS = 0.97  # streaming must be this much faster: a tie is noise, and the CPU needs no copies
_RULE_TOKENS = 32  # ik_llama.cpp's, per expert that a token does not use
_STEP = 1.05  # between prefill sizes that are looked at
_COMPUTING = 1e-4  # of what streams, that computing one more token takes on the device

Share = Callable[[int], float]


@dataclass(frozen=True)
class MinBatch:
    """The number of tokens from which a streamed weight's product runs on the device.

    Below it the CPU computes the product in place, at native speed. `prefill_...` are for batches
    above `VERIFY_MOST` tokens; None: the same.
    """

    experts: int = 32
    dense: int = 32
    prefill_experts: int | None = None
    prefill_dense: int | None = None

    def streams(self, n_tokens: int, *, experts: bool) -> bool:
        """True if the device computes a streamed product of so many tokens."""
        first = self.experts if experts else self.dense
        prefill = self.prefill_experts if experts else self.prefill_dense
        if n_tokens > VERIFY_MOST and prefill is not None:
            first = prefill
        return n_tokens >= first

    def words(self, kinds: Sequence[str] = ("experts", "dense")) -> str:
        """Of these kinds, as a part of a sentence: "experts from 8 tokens on, dense never"."""
        words = {
            "experts": _words(self.experts, self.prefill_experts),
            "dense": _words(self.dense, self.prefill_dense),
        }
        return ", ".join(f"{kind} {words[kind]}" for kind in kinds)


def _words(first: int, prefill: int | None) -> str:
    if prefill is None or (prefill <= VERIFY_MOST + 1 and first <= VERIFY_MOST):
        return _from(first)
    if first > VERIFY_MOST:
        return f"{_from(prefill)} (verification by the CPU)"
    return f"{_from(first)} up to {VERIFY_MOST}, in prefill {_from(prefill)}"


def _from(first: int) -> str:
    return "never" if first >= NEVER else f"from {first} tokens on"


Side = Literal["cpu", "streamed"]
SIDES: tuple[Side, Side] = ("cpu", "streamed")


@dataclass
class Times:
    """Seconds of a decode by batch size: with the CPU's products, and with streamed ones."""

    cpu: dict[int, float] = field(default_factory=dict)
    streamed: dict[int, float] = field(default_factory=dict)

    def of(self, side: Side) -> dict[int, float]:
        return self.cpu if side == "cpu" else self.streamed


@dataclass(frozen=True)
class Regime:
    """Batches of `first` to `last` tokens, whose threshold is decided on its own."""

    first: int
    last: int

    def sizes(self) -> list[int]:
        """Sizes worth looking at, both ends included."""
        out, n = [], self.first
        while n < self.last:
            out.append(n)
            n = max(n + 1, int(n * _STEP)) if n >= VERIFY_MOST else n + 1
        return [*out, self.last]


def regimes(n_most: int) -> tuple[Regime, ...]:
    """Verification, and prefill up to `n_most` tokens, the ubatch."""
    verify = Regime(1, min(VERIFY_MOST, n_most))
    return (verify, Regime(VERIFY_MOST + 1, n_most)) if n_most > VERIFY_MOST else (verify,)


def rule(n_experts: int, n_used: int) -> int:
    """ik_llama.cpp's: 32 tokens per expert of which one is used; llama.cpp's 32 where all are."""
    return math.ceil(_RULE_TOKENS * n_experts / n_used) if n_experts and n_used else _RULE_TOKENS


def expert_share(n_experts: int, n_used: int) -> Share:
    """The share of a layer's experts that n tokens need, each `n_used` of `n_experts` at random."""
    unused = 1.0 - n_used / n_experts
    return lambda n: 1.0 - unused**n


def dense_share(_: int) -> float:
    """Of dense weights every batch needs all."""
    return 1.0


def by_rule(n_experts: int, n_used: int) -> MinBatch:
    """The thresholds of a machine on which nothing is timed."""
    return MinBatch(rule(n_experts, n_used), _RULE_TOKENS)


def threshold(times: Times, regime: Regime, share: Share, guess: int) -> int:
    """The smallest size of the regime from which on streaming pays at every size; its first where
    it always does, `NEVER` where it never does. `guess` holds where nothing was timed."""
    if not (times.cpu and times.streamed):
        return max(guess, regime.first) if guess <= regime.last else NEVER
    found = NEVER
    timed = {n for side in SIDES for n in times.of(side) if regime.first <= n <= regime.last}
    for n in sorted({*regime.sizes(), *timed}, reverse=True):
        streamed_s = expected_s(times, "streamed", n, share)
        if streamed_s > _PAYS * expected_s(times, "cpu", n, share):
            break
        found = n
    return found


def expected_s(times: Times, side: Side, n: int, share: Share) -> float:
    """Seconds at n tokens: on the line between the timed sizes around it, beyond them on that
    through the last two. The CPU's time grows with the tokens, that of streaming with the share of
    the weights that they need."""

    def needed(size: int) -> float:
        return share(size) + _COMPUTING * size

    if side == "streamed":
        return _on_line([(needed(size), s) for size, s in times.streamed.items()], needed(n))
    if len(times.cpu) == 1:
        # Reading experts grows with their share, computing with the tokens: something between.
        ((size, s),) = times.cpu.items()
        return s * math.sqrt(max(1.0, n / size) * max(1.0, needed(n) / needed(size)))
    return _on_line([(float(size), s) for size, s in times.cpu.items()], n)


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    known = sorted(points)
    if len(known) == 1:
        return known[0][1] * max(1.0, x / known[0][0])
    low, high = known[-2], known[-1]
    for left, right in zip(known, known[1:], strict=False):
        if x <= right[0]:
            low, high = left, right
            break
    slope = (high[1] - low[1]) / (high[0] - low[0])
    if x > high[0]:
        return high[1] + max(0.0, slope) * (x - high[0])
    return low[1] + slope * (x - low[0])


def choose(times: Mapping[str, Times], n_most: int, n_experts: int, n_used: int) -> MinBatch:
    """The thresholds by the times of each kind, "experts" and "dense"; by rule where there are
    none. `n_most` is the ubatch."""
    guesses = by_rule(n_experts, n_used)
    found: dict[str, list[int]] = {}
    for kind, guess in (("experts", guesses.experts), ("dense", guesses.dense)):
        share = share_of(kind, n_experts, n_used)
        found[kind] = [
            threshold(times.get(kind, Times()), regime, share, guess) for regime in regimes(n_most)
        ]
    experts, dense = found["experts"], found["dense"]
    return MinBatch(
        experts[0],
        dense[0],
        experts[1] if len(experts) > 1 else None,
        dense[1] if len(dense) > 1 else None,
    )


def share_of(kind: str, n_experts: int, n_used: int) -> Share:
    """The share of what streams of a kind that a batch needs."""
    return expert_share(n_experts, n_used) if kind == "experts" and n_experts else dense_share
