"""Computes how many experts a compute buffer holds between prompts. Pure.

Plans and runs use the same functions. docs/flow.md describes how slots are lent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from offload.decode import SMALL_BATCH
from offload.plan.slot_layout import SlotPool
from offload.times.machine import Real
from offload.units import plural

_ALIGNMENT = 256  # strictest alignment of any device's buffers, in bytes


@dataclass(frozen=True)
class BufferSizes:
    """The expected sizes of a context's compute buffer."""

    n_tokens: int  # of the largest ubatch
    size_bytes: int
    small_bytes: int  # its first bytes, which graphs of small batches use


@dataclass(frozen=True)
class SlotTail:
    """A pool whose slots are continued in a compute buffer of `buffer_bytes` behind them."""

    pool: SlotPool  # joined
    buffer_bytes: int

    @property
    def own_bytes(self) -> int:
        """Bytes before the buffer, which begins at the first aligned byte behind the own slots."""
        return -(-self.pool.size_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def n_lent(self) -> int:
        """Number of slots that lie in the buffer, or begin before it and end in it."""
        whole = (self.own_bytes + self.buffer_bytes) // self.pool.slot_bytes
        return max(0, min(whole, self.pool.most_counted) - self.pool.n_slots)

    def n_touched(self, first_bytes: int) -> int:
        """Return the number of lent slots that have one of the buffer's first bytes."""
        if not first_bytes:
            return 0
        end = -(-(self.own_bytes + first_bytes) // self.pool.slot_bytes)
        return min(max(0, end - self.pool.n_slots), self.n_lent)

    def n_open(self, first_bytes: int) -> int:
        """Return the number of lent slots that may hold experts beside graphs of `first_bytes`.

        Slots that no expert is left for are not counted.
        """
        n = self.n_lent - self.n_touched(first_bytes)
        return max(0, min(n, self.pool.n_pieces - self.pool.n_slots))


@dataclass(frozen=True)
class Lending:
    """The pool that is continued in a compute buffer, or why none is."""

    at: int = 0  # the pool's number
    pool: SlotPool | None = None  # joined; None: no pool is
    reason: str = ""


def lending_of(pools: Iterable[SlotPool], least_slots: Iterable[int], n_tokens: int) -> Lending:
    """Return how the largest pool of experts is continued in a compute buffer.

    `least_slots`: slots that each pool needs. `n_tokens`: tokens of the largest ubatch.
    """
    pools = tuple(pools)
    missing = [pool.n_pieces - pool.n_slots if pool.n_experts else 0 for pool in pools]
    if not any(missing):
        return Lending(reason="each streamed expert has a slot of its own")
    if n_tokens <= SMALL_BATCH:
        return Lending(reason=f"buffers of {plural(n_tokens, 'token')} are too small")
    at = missing.index(max(missing))
    joined = pools[at].joined()
    if not joined.joined_bytes:
        return Lending(reason="the matrices of an expert cannot lie one after another")
    joined = replace(joined, n_slots=pools[at].size_bytes // joined.joined_bytes)
    if joined.n_slots < tuple(least_slots)[at]:
        return Lending(reason="the slots have no room for padding")
    return Lending(at, joined)


def n_lent_slots(pools: Iterable[SlotPool], lent_bytes: Real) -> Real:
    """Return the number of slots that `lent_bytes` hold if all pools' experts stream."""
    experts = [pool for pool in pools if pool.n_experts]
    if not experts:
        return 0
    joined_bytes = max(experts, key=lambda pool: pool.n_pieces).joined().joined_bytes
    return lent_bytes // joined_bytes if joined_bytes else 0
