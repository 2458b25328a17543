"""Describes the costs of a split to the player."""

from __future__ import annotations

import ctypes as C

import numpy as np

from offload.player.native import BY_COSTS, Costs, Player
from offload.split.division import SplitCosts
from offload.split.switch import MOST_TOKENS


class CostEntry:
    """The tables of costs, for layers of up to `n_experts` experts."""

    def __init__(self, costs: SplitCosts, n_experts: int) -> None:
        self.costs = costs
        tables = costs.tables(MOST_TOKENS, n_experts)
        arrays = [
            np.ascontiguousarray(values, np.float64)
            for values in (tables.by_rows_s, tables.work.ravel(), tables.copies_s, tables.idle)
        ]
        by_rows_s, work, copies_s, idle = self._kept = arrays
        self.struct = Costs(
            len(work), tables.n_ends, by_rows_s.shape[1], copies_s.shape[1],
            by_rows_s.ctypes.data, work.ctypes.data, copies_s.ctypes.data, idle.ctypes.data,
            tables.idle_fixed_s, costs.copy_s,
        )  # fmt: skip
        self.ends = np.zeros(len(work) * (n_experts + 1))

    def give(self, player: Player) -> None:
        """Let a player divide layers by these costs."""
        player.costs, player.ends = C.addressof(self.struct), self.ends.ctypes.data
        player.splitter, player.most_lines = BY_COSTS, self.struct.n_lines
