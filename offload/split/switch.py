"""The batches whose layers are split between the CPU and the device, and who splits them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.split.division import HIT, HOST, STREAMED, Split, SplitCosts, split_pairs

# (ids [n_tokens, n_used], resident [n_experts]) -> HIT, STREAMED or HOST of each expert. HIT is for
# residents alone; of experts that nobody uses it may say anything.
Splitter = Callable[[NDArray[np.int32], NDArray[np.bool_]], NDArray[np.uint8]]

MOST_TOKENS = 64  # largest batch that is split: larger ones use nearly all experts of a layer


def stay(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Hits on the device and all others on the CPU: nothing is copied while somebody waits."""
    return np.where(resident, np.uint8(HIT), np.uint8(HOST))


def all_on_device(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Nothing on the CPU, as far as slots reach: what is missing is copied."""
    return np.where(resident, np.uint8(HIT), np.uint8(STREAMED))


@dataclass(frozen=True, eq=False)
class ByCosts:
    """A splitter: what these costs expect to end first."""

    costs: SplitCosts

    def __call__(self, ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
        return self.split(ids, resident).kind

    def split(
        self,
        ids: NDArray[np.int32],
        resident: NDArray[np.bool_],
        rows: NDArray[np.intp] | None = None,
    ) -> Split:
        """With the times that are expected; `rows` as in `split_pairs`."""
        return split_pairs(ids, resident, self.costs, rows)


@dataclass
class HybridSwitch:
    """Shared by the device, which takes products for it, and the executors that split layers."""

    splitter: Splitter = stay
    declined: str = ""  # why no layer of this model is split; found at its first graph
    is_active: bool = True  # off while others are measured
    unsplit: frozenset[int] = frozenset()  # sizes of batches that go by min-batch alone

    @contextmanager
    def splitting(self, splitter: Splitter) -> Iterator[None]:
        """Split layers by `splitter` for a while, also if they are not split otherwise."""
        before = self.splitter, self.is_active
        self.splitter, self.is_active = splitter, True
        try:
            yield
        finally:
            self.splitter, self.is_active = before

    def splits(self, n_tokens: int) -> bool:
        """True if layers of such a batch are split, whatever its min-batch."""
        return (
            self.is_active
            and 0 < n_tokens <= MOST_TOKENS  # 0: of the last layer, where no logits are wanted
            and not self.declined
            and n_tokens not in self.unsplit
        )

    @property
    def sizes(self) -> list[int]:
        """Sizes of batches whose layers are split, ascending."""
        return [n for n in range(1, MOST_TOKENS + 1) if self.splits(n)]
