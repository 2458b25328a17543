"""Min-batch: the number of tokens from which streamed weights are computed on the device. Pure.

Verification and prefill have separate thresholds. With many experts, streaming may lose to the CPU
at every verification batch and still win in prefill. The cost table (offload/times/table.py) sets
both. If nothing was timed, ik_llama.cpp's rule sets them (docs/background.md, min-batch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.decode import SMALL_BATCH

NEVER = 1 << 30
_RULE_TOKENS = 32  # tokens by which ik_llama.cpp's rule multiplies the ratio of all to used experts
_KINDS = {"experts": "experts", "dense": "dense weights"}
_STEP = 1.05  # ratio between prefill sizes at which times are compared


@dataclass(frozen=True)
class MinBatch:
    """The number of tokens from which a streamed weight's product runs on the device.

    Below that number the CPU computes the product in place. `prefill_experts` and `prefill_dense`
    are for batches above `SMALL_BATCH` tokens; None: the same threshold. `swapped` are batch sizes
    that take the other way than the threshold on experts says, since that was faster while serving.
    """

    experts: int = 32
    dense: int = 32
    prefill_experts: int | None = None
    prefill_dense: int | None = None
    swapped: frozenset[int] = frozenset()

    def streams(self, n_tokens: int, *, experts: bool) -> bool:
        first = self.experts if experts else self.dense
        prefill = self.prefill_experts if experts else self.prefill_dense
        if n_tokens > SMALL_BATCH and prefill is not None:
            first = prefill
        if experts and n_tokens in self.swapped:
            return n_tokens < first
        return n_tokens >= first

    def words(self, kinds: Sequence[str] = ("experts", "dense")) -> str:
        """Return a clause for messages: the thresholds of these kinds of weights."""
        words = {
            "experts": _words(self.experts, self.prefill_experts),
            "dense": _words(self.dense, self.prefill_dense),
        }
        return "; ".join(f"{_KINDS[kind]} {words[kind]}" for kind in kinds)


def by_device(
    value: MinBatch, crossovers: Sequence[int | None], streamed_bytes: Sequence[int]
) -> list[MinBatch]:
    """Return the thresholds of each device, from those that were measured for all together.

    `crossovers` are the tokens from which the machine model expects streaming to pay on each device
    (None: never). A device's copies take a time that hardly depends on the tokens, and the CPU's
    products take one that grows with them. So the crossover of all together is the mean of the
    devices' own, weighted by their streamed bytes, and each device's threshold is the measured one
    in proportion. A threshold at an end of its range says only that the crossover lies outside, so
    it stays the same for all devices. So does every threshold if a device has no crossover.
    """
    known = [n for n in crossovers if n is not None]
    total = sum(streamed_bytes)
    if len(known) < len(crossovers) or not total:
        return [value] * len(crossovers)
    mean = sum(n * size for n, size in zip(known, streamed_bytes, strict=True)) / total
    return [_scaled(value, n / mean) for n in known]


def _scaled(value: MinBatch, factor: float) -> MinBatch:
    """Return the thresholds on experts times `factor`. Swapped sizes are computed as before."""
    experts, prefill = value.experts, value.prefill_experts
    if 1 < experts <= SMALL_BATCH:
        experts = min(max(1, round(experts * factor)), SMALL_BATCH + 1)
    if prefill is not None and SMALL_BATCH + 1 < prefill < NEVER:
        prefill = max(SMALL_BATCH + 1, round(prefill * factor))
    plain = replace(value, experts=experts, prefill_experts=prefill, swapped=frozenset())
    swapped = {
        n for n in value.swapped if value.streams(n, experts=True) != plain.streams(n, experts=True)
    }
    return replace(plain, swapped=frozenset(swapped))


def _words(first: int, prefill: int | None) -> str:
    if prefill is None or (prefill <= SMALL_BATCH + 1 and first <= SMALL_BATCH):
        return _from(first)
    if first > SMALL_BATCH:
        return "in no batch" if prefill >= NEVER else f"{_from(prefill)}, which only prompts have"
    sizes = f"{first} to {SMALL_BATCH}" if first < SMALL_BATCH else f"{SMALL_BATCH}"
    verify = f"in batches of {sizes} tokens"
    return verify if prefill >= NEVER else f"{verify}, and in those of {prefill} or more"


def _from(first: int) -> str:
    if first >= NEVER:
        return "in no batch"
    return "in all batches" if first <= 1 else f"in batches of {first} tokens or more"


@dataclass(frozen=True)
class Regime:
    """Batches of `first` to `last` tokens, which have a threshold of their own."""

    first: int
    last: int

    def sizes(self) -> list[int]:
        """Return the batch sizes at which times are compared, both ends included."""
        out, n = [], self.first
        while n < self.last:
            out.append(n)
            n = max(n + 1, int(n * _STEP)) if n >= SMALL_BATCH else n + 1
        return [*out, self.last]


def regimes(n_most: int) -> tuple[Regime, ...]:
    """Return the regimes of verification and of prefill, for batches of up to `n_most` tokens."""
    verify = Regime(1, min(SMALL_BATCH, n_most))
    return (verify, Regime(SMALL_BATCH + 1, n_most)) if n_most > SMALL_BATCH else (verify,)


def rule(n_experts: int, n_used: int) -> int:
    """Return ik_llama.cpp's threshold: 32 tokens times the ratio of all experts to used ones.

    For models without experts, it returns llama.cpp's threshold of 32 tokens.
    """
    return math.ceil(_RULE_TOKENS * n_experts / n_used) if n_experts and n_used else _RULE_TOKENS


def by_rule(n_experts: int, n_used: int) -> MinBatch:
    """Return the thresholds to use if nothing is timed."""
    return MinBatch(rule(n_experts, n_used), _RULE_TOKENS)
