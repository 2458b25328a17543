"""Describes split layers to the player: the CPU's graphs (offload/stream/cpu_side.py) and costs."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.ggml.graph import Graph
from offload.ggml.player import BY_COSTS, Player, PlayerCosts, PlayerHost, native
from offload.ggml.rewriting import HostRows, SharedDim
from offload.ggml.tensor import Buffer, Redirect, Tensor
from offload.schedule.division import SplitCosts


class WeightsEntry:
    """The sources of a layer's host graph, and the scales of its experts."""

    def __init__(self, sources: Sequence[Tensor], scales: Sequence[NDArray[np.float32]]) -> None:
        self.sources = _pointers(source.address for source in sources)
        self.scales = _pointers(scale.ctypes.data for scale in scales)
        self._kept = sources, scales


class HostEntry:
    """A graph that computes pairs of the CPU, and the graph that places their rows."""

    def __init__(
        self, graph: Graph, count: SharedDim, sources: Sequence[Redirect],
        scales: Sequence[HostRows], ids: HostRows, places: HostRows, inputs: HostRows,
        rows: HostRows, rows_per_token: int, down: Tensor,
    ) -> None:  # fmt: skip
        """`count`: the number of pairs. `down`: the tensor of the graph's results.

        `inputs`: rows as read from the device, gathered in `rows`. `places` gets each pair's place
        in the batch.
        """
        most, n_in = rows.array.shape
        self._kept: list[Any] = [
            _pointers(count.addresses),
            _pointers(redirect.entry[0] for redirect in sources),
            _pointers(scale.memory.address for scale in scales),
        ]
        counts, of_sources, of_scales = map(C.addressof, self._kept)
        self.struct = PlayerHost(
            graph=graph.address, most=most, row_bytes=4 * n_in, rows_per_token=rows_per_token,
            n_counts=len(count.addresses), n_sources=len(sources), n_scales=len(scales),
            ids=ids.memory.address, places=places.memory.address, inputs=inputs.memory.address,
            rows=rows.memory.address, counts=counts, sources=of_sources, scales=of_scales,
            down=down.address,
        )  # fmt: skip

    def place_by(
        self, graph: Graph, staging: Tensor, results: Buffer, header_bytes: int, row_bytes: int,
        n_rows: SharedDim, n_into: SharedDim, into: Tensor, node: Tensor,
    ) -> None:  # fmt: skip
        """Place rows by `graph`, whose `node` sets `n_rows` rows of `staging` in `into`."""
        entry, counts = self.struct, [_pointers(n_rows.addresses), _pointers(n_into.addresses)]
        entry.staging, entry.results = staging.address, results.base
        entry.placing, entry.into, entry.set_rows = graph.address, into.address, node.address
        entry.header_bytes, entry.out_bytes = header_bytes, row_bytes
        entry.n_out_counts, entry.n_into_counts = map(len, counts)
        entry.out_counts, entry.into_counts = map(C.addressof, counts)
        self._kept += [graph, staging, counts]

    def fill(
        self, weights: WeightsEntry, ids: NDArray[np.int32], pairs: NDArray[np.integer]
    ) -> None:
        """Choose the pairs to compute next. `pairs`: indices into `ids` [n_tokens, n_used]."""
        ids, chosen = np.ascontiguousarray(ids), pairs.astype(np.int32)
        native().fill(
            C.addressof(self.struct), C.addressof(weights.sources), C.addressof(weights.scales),
            ids.ctypes.data, ids.shape[1], chosen.ctypes.data, len(chosen),
        )  # fmt: skip


def _pointers(of: Iterable[int]) -> Any:
    """Return an array of pointers with these values, of at least one. The caller keeps it."""
    values = [*of]
    return (C.c_void_p * max(1, len(values)))(*values)


class CostEntry:
    """The tables of costs, for layers of up to `n_experts` experts."""

    def __init__(self, costs: SplitCosts, n_experts: int) -> None:
        self.costs = costs
        tables = costs.tables(SMALL_BATCH, n_experts)
        arrays = [
            np.ascontiguousarray(values, np.float64)
            for values in (tables.by_rows_s, tables.work.ravel(), tables.copies_s, tables.idle)
        ]
        by_rows_s, work, copies_s, idle = self._kept = arrays
        self.struct = PlayerCosts(
            len(work), tables.n_ends, by_rows_s.shape[1], copies_s.shape[1],
            by_rows_s.ctypes.data, work.ctypes.data, copies_s.ctypes.data, idle.ctypes.data,
            tables.idle_fixed_s, costs.copy_s,
        )  # fmt: skip
        self.ends = np.zeros(len(work) * (n_experts + 1))

    def give(self, player: Player) -> None:
        """Let a player divide layers by these costs."""
        player.costs, player.ends = C.addressof(self.struct), self.ends.ctypes.data
        player.splitter, player.most_lines = BY_COSTS, self.struct.n_lines
