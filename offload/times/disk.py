"""Computes what a model larger than memory reads from the disk, and what that costs. Pure.

A decode waits for the experts that its layers choose and that are in neither slots nor memory. So
the time of these reads is added to the time of computing. Batches that use half of the experts or
more, as prompts do, read the next layer while one is computed. So such a batch takes the time of
reading or computing, whichever is longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from offload.times.decodes import AHEAD_SHARE
from offload.times.hits import Sharing, kept_hits
from offload.times.machine import Real
from offload.times.table import CostTable
from offload.times.work import ModelWork
from offload.units import rate_words

_MORE_GIB = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # amounts of memory that advice names
_MORE_PART = 4  # part of what is missing that advice names at least
_GIB = 1 << 30


@dataclass(frozen=True)
class DiskUse:
    """Reads of a model whose streamed experts have `memory_bytes` of memory.

    Numbers may be arrays, for many plans at once.
    """

    work: ModelWork
    sharing: Sharing
    memory_bytes: Real
    bytes_per_s: float

    @property
    def n_layers(self) -> Real:
        """Number of layers whose experts stream."""
        return self.work.n_expert_layers - self.sharing.n_resident

    @property
    def all_bytes(self) -> Real:
        return self.n_layers * self.work.n_experts * self.work.expert.size_bytes

    def share(self, more_bytes: float = 0.0, n_tokens: Real = 1) -> Real:
        """Return the share of the experts that a batch finds in slots or in memory.

        `more_bytes`: memory that is added.
        """
        n_slots = self.sharing.searched_by(n_tokens).n_slots
        slot_bytes = n_slots * self.work.expert.size_bytes
        held_bytes = self.memory_bytes + more_bytes + slot_bytes
        share = np.clip(held_bytes / np.maximum(self.all_bytes, 1.0), 0.0, 1.0)
        return np.where(self.all_bytes > 0, share, 1.0)[()]

    def disk_bytes(self, n_tokens: Real, more_bytes: float = 0.0) -> Real:
        """Return the bytes that a batch of `n_tokens` is expected to read."""
        if not self.work.n_experts:
            return 0.0
        pieces, share = self.work.union(n_tokens), self.share(more_bytes, n_tokens)
        missing = pieces * (1.0 - kept_hits(self.work, share, pieces))
        return self.n_layers * missing * self.work.expert.size_bytes

    def disk_s(self, n_tokens: Real = 1, more_bytes: float = 0.0) -> Real:
        """Return the seconds in which the disk reads for a batch of `n_tokens`."""
        return self.disk_bytes(n_tokens, more_bytes) / self.bytes_per_s

    def with_reads(self, seconds: Real, n_tokens: int) -> Real:
        """Return the seconds of a batch that computes for `seconds`, with its reads."""
        read_s = self.disk_s(n_tokens)
        is_ahead = self.work.union(n_tokens) >= AHEAD_SHARE * self.work.n_experts
        return np.where(is_ahead, np.maximum(seconds, read_s), seconds + read_s)[()]

    def table(self, computing: CostTable) -> CostTable:
        """Return the costs of batches with reads from the disk. `computing`: costs without them.

        No batch takes longer than a larger one: it needs fewer experts. Its reads are begun ahead
        by guesses if it uses too few experts for the next layer's to be read without guessing.
        """
        ways = {}
        for way, entries in computing.ways.items():
            sizes = sorted(entries, reverse=True)
            times = accumulate((self.with_reads(entries[n].seconds, n) for n in sizes), min)
            ways[way] = {
                n: replace(entries[n], seconds=s) for n, s in sorted(zip(sizes, times, strict=True))
            }
        return replace(computing, ways=ways)

    def prompt_s(self, n_prompt: int, n_ubatch: Real) -> Real:
        """Return the seconds of reading for a prompt of `n_prompt` tokens."""
        whole, rest = np.divmod(n_prompt, n_ubatch)
        rest_s = np.where(rest > 0, self.disk_s(np.maximum(rest, 1)), 0.0)
        return (whole * self.disk_s(n_ubatch) + rest_s)[()]

    @property
    def more_bytes(self) -> int:
        """An amount of memory worth adding: about a quarter of what is missing."""
        missing_gib = (1.0 - self.share()) * self.all_bytes / _GIB
        fitting = (gib for gib in _MORE_GIB if gib >= missing_gib / _MORE_PART)
        return next(fitting, _MORE_GIB[-1]) * _GIB

    def words(self, n_ubatch: int) -> str:
        """Return sentences on what answers and prompts read, and on the bound that follows."""
        read, more = self.disk_bytes(1), self.more_bytes
        if not read:
            return "Answers are expected to read nothing from the disk."
        most, with_more = 1 / self.disk_s(), self.disk_s(more_bytes=more)
        better = rate_words(_rounded(1 / with_more)) if with_more else "no such limit"
        at_most = rate_words(_rounded(most))
        return (
            f"A token reads {read / _GIB:.2g} GiB at {self.bytes_per_s / 1e9:.2g} GB/s, so answers "
            f"have at most {at_most} ({better} with {more >> 30} GiB more memory). "
            f"Prompts read {self.disk_bytes(n_ubatch) / _GIB:.3g} GiB for every {n_ubatch} tokens "
            "(--ubatch-size)."
        )


def _rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"
