"""Decides which batches have split layers, and which splitter divides their experts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.schedule.division import HIT, HOST, STREAMED, Split, SplitCosts, split_pairs

# `stay`, `all_on_device` or a `ByCosts`, which the player knows, too. It is called for prompts:
# (ids [n_tokens, n_used], resident [n_experts]) -> HIT, STREAMED or HOST for each expert. Resident
# experts are HIT. Values for unused experts have no meaning.
Splitter = Callable[[NDArray[np.int32], NDArray[np.bool_]], NDArray[np.uint8]]


def stay(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Assign hits to the device and all other experts to the CPU, so that nothing is copied."""
    return np.where(resident, np.uint8(HIT), np.uint8(HOST))


def all_on_device(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Assign all experts to the device, so that missing ones are copied."""
    return np.where(resident, np.uint8(HIT), np.uint8(STREAMED))


@dataclass(frozen=True, eq=False)
class ByCosts:
    """A splitter that divides experts so that, by these costs, the slower side ends soonest."""

    costs: SplitCosts

    def __call__(self, ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
        return self.split(ids, resident).kind

    def split(
        self,
        ids: NDArray[np.int32],
        resident: NDArray[np.bool_],
        rows: NDArray[np.intp] | None = None,
    ) -> Split:
        """Return the division with its expected times. Arguments: as in `split_pairs`."""
        return split_pairs(ids, resident, self.costs, rows)


@dataclass
class HybridSwitch:
    """The state of splitting, shared by the streaming devices and their executors."""

    splitter: Splitter = stay
    by_device: dict[int, Splitter] = field(default_factory=dict)  # other splitters, by device
    declined: str = ""  # reason why no layer of this model is split; found in the first graph
    is_active: bool = True  # False while other ways are measured
    unsplit: frozenset[int] = frozenset()  # batch sizes for which min-batch alone decides
    rings: bool = True  # False: the host waits for the device in each split layer

    @contextmanager
    def splitting(self, splitter: Splitter) -> Iterator[None]:
        """Split layers by `splitter` inside the context, even if splitting is off outside it."""
        before = self.splitter, self.by_device, self.is_active
        self.splitter, self.by_device, self.is_active = splitter, {}, True
        try:
            yield
        finally:
            self.splitter, self.by_device, self.is_active = before

    def splitter_of(self, nth: int) -> Splitter:
        """Return the splitter of the `nth` device."""
        return self.by_device.get(nth, self.splitter)

    def splits(self, n_tokens: int) -> bool:
        """True if layers of a batch of `n_tokens` are split, whatever min-batch is."""
        return (
            self.is_active
            and 0 < n_tokens <= SMALL_BATCH  # 0 tokens: the last layer, if no logits are wanted
            and not self.declined
            and n_tokens not in self.unsplit
        )

    def shares_prompts(self, n_tokens: int) -> bool:
        """True if device and CPU share the layers of a prompt's batch, in passes.

        They do if the splitter can divide any number of tokens, which `stay` cannot: a prompt would
        leave most experts to the CPU.
        """
        is_on = self.is_active and self._divides and not self.declined
        return is_on and n_tokens > SMALL_BATCH

    @property
    def _divides(self) -> bool:
        return self.splitter is not stay or bool(self.by_device)

    @property
    def circumstances(self) -> Hashable:
        """A key that changes when `splits` or `shares_prompts` may answer otherwise than before."""
        return self.is_active, self.declined, self.unsplit, self._divides

    @property
    def sizes(self) -> list[int]:
        """Sizes of batches whose layers are split, ascending."""
        return [n for n in range(1, SMALL_BATCH + 1) if self.splits(n)]
