"""The splitters, which divide the experts of a layer between device and CPU. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.schedule.division import HIT, HOST, STREAMED, Split, SplitCosts, split_pairs

# `stay`, `all_on_device` or a `ByCosts`. Only prompts call it, because the player has a twin of
# each in C. (ids [n_tokens, n_used], resident [n_experts]) -> HIT, STREAMED or HOST for each
# expert. Resident experts are HIT. Values for unused experts have no meaning.
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
