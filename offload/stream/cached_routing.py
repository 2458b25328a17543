"""Lets the routers of small batches prefer experts that are in slots (`--route-cached`).

llama.cpp sorts the scores by which a router selects, and takes the first experts. In a copy of the
graph, our nodes come before that:

    scores   [n_experts, n_tokens]   what the router selects by: with its bias, with masked groups
    first    [n_kept, n_tokens]      the best experts of each token, which stay as they are
    lowered  [n_experts, n_tokens]   scores + penalties, then the scores of `first` again

The sort then reads `lowered`. The experts' weights are still computed from the router's own scores.
The penalties of all layers are uploaded before a decode, for the slots as they are then: all tokens
of a batch choose by the same table. The scores are copied and read back after the decode. The
numpy form (offload/schedule/cached_choice.py) counts by them what was kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from offload.alignment import aligned
from offload.decode import SMALL_BATCH
from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph, Product
from offload.ggml.rewriting import Scratch, fill_from_host, host_copy
from offload.ggml.tensor import Buffer, Tensor, new_tensor
from offload.plan.slot_layout import SlotLayout
from offload.schedule.cached_choice import ChoiceCounts, RouteOptions, Scores, penalties
from offload.schedule.schedule import Schedule
from offload.schedule.slots import NOWHERE, StreamCounters

_logger = logging.getLogger(__name__)

_FLOAT_BYTES = 4
_N_REGIONS = 4  # results of a site: the copy, the lowered scores, their order, the kept ones


@dataclass(frozen=True)
class _RouterSite:
    """A router in a graph: where its scores are sorted, and for whom.

    libllama may have built another graph in the same memory when the scores are read back. So their
    shape is kept here, and `sort` is read only while the graph is rewritten.
    """

    sort: Tensor
    at: int  # position of the sort in the graph
    group: int
    n_used: int
    n_experts: int
    n_tokens: int

    @property
    def scores(self) -> Tensor:
        found = self.sort.source(0)
        assert found is not None
        return found

    @property
    def size_bytes(self) -> int:
        return aligned(_FLOAT_BYTES * self.n_experts * self.n_tokens)


def _site(ids: Tensor, group: int, index_of: Callable[[Tensor], int | None]) -> _RouterSite | None:
    """Return the router that makes `ids`; None for another form, such as a table of tokens."""
    sort = ids.source(0)
    at = None if sort is None or not sort.is_op("ARGSORT") else index_of(sort)
    if sort is None or at is None:
        return None
    site = _RouterSite(sort, at, group, ids.shape[0], *sort.shape[:2])
    scores = site.scores
    is_plain = scores.type == "f32" and scores.is_contiguous and scores.shape[2:] == (1, 1)
    return site if is_plain else None


@dataclass(frozen=True)
class RoutedGraph:
    """The scores of a graph's routers, which are read back after it was computed."""

    sites: tuple[_RouterSite, ...]
    whole: Tensor  # the memory of all sites' scores

    def scores(self) -> list[tuple[_RouterSite, Scores]]:
        """Return each site's scores [n_tokens, n_experts], read from the device."""
        values, found, at = host_copy(self.whole), [], 0
        for site in self.sites:
            n = site.n_experts * site.n_tokens
            rows = values[at : at + n].reshape(site.n_tokens, site.n_experts)
            found.append((site, rows))
            at += site.size_bytes // _FLOAT_BYTES
        return found


class CachedRouting:
    """Rewrites the graphs of one device's first stream, and counts what the routers chose."""

    def __init__(
        self, options: RouteOptions, device: Device, supports: Callable[[Tensor], bool]
    ) -> None:
        """`supports(node)` returns True if the device computes a node."""
        self.options = options
        self.is_on = False  # True: small batches prefer cached experts. Graphs are rewritten anyway
        self.counts = ChoiceCounts()
        self.n_unchanged = 0  # routers of streamed layers whose graph has an unknown form
        self._supports = supports
        self._scratch = Scratch(device, "routers' scores")
        self._tables = Scratch(device, "penalties of missing experts")
        self._table: Buffer | None = None  # the penalties of all groups [n_groups, n_experts]
        self._penalties: Scores = np.zeros((0, 0), np.float32)
        self._cached = np.zeros((0, 0), np.bool_)  # experts in slots before this decode, by group
        self._computed: RoutedGraph | None = None  # the last graph, if it has to be read back
        self._counts_now = False  # True: this decode prefers cached experts

    def turn_on(self) -> None:
        """Prefer cached experts in small batches from now on."""
        self.is_on = True

    @property
    def counters(self) -> StreamCounters:
        """The counts since the engine was opened."""
        counts = self.counts
        return StreamCounters(
            routed_choices=counts.n_choices, routed_kept=counts.n_kept,
            routed_hits=counts.n_cached, routed_own_hits=counts.n_own_cached,
        )  # fmt: skip

    @property
    def device_bytes(self) -> int:
        return self._scratch.device_bytes + self._tables.device_bytes

    def close(self) -> None:
        self._scratch.close()
        self._tables.close()

    # -- when a graph is first seen ----------------------------------------------------------------

    def rewrite(
        self, graph: Graph, products: Sequence[Product], layout: SlotLayout
    ) -> tuple[Graph, RoutedGraph | None]:
        """Return the graph to compute instead, and what to read back; None: it is unchanged."""
        self._allocate(layout)
        sites = self._sites(graph, products, layout)
        if not sites:
            return graph, None
        n_bytes = sum(site.size_bytes for site in sites)
        buffer = self._scratch.reserve(_N_REGIONS * n_bytes)
        before: dict[int, Sequence[Tensor]] = {}
        replaced: dict[int, Tensor] = {}
        offset = 0
        for site in sites:
            places = [(buffer, offset + i * n_bytes) for i in range(_N_REGIONS)]
            *nodes, sort = self._nodes(site, places)
            if not all(map(self._supports, (*nodes, sort))):
                self._leave_unchanged(len(sites))
                return graph, None
            before[site.at], replaced[site.at] = nodes, sort
            offset += site.size_bytes
        whole = new_tensor("f32", (n_bytes // _FLOAT_BYTES, 1, 1, 1), (buffer, 0))
        return graph.inserting(before, replaced), RoutedGraph(tuple(sites), whole)

    def _allocate(self, layout: SlotLayout) -> None:
        """Make the table of penalties, all 0, and the memory for scores, if the layout is new.

        The first decode is a warm-up, before slots get the memory that is free after it. Raises
        DoesNotFit.
        """
        n_experts = max((pool.n_experts for pool in layout.pools), default=0)
        shape = len(layout.groups), n_experts
        if self._penalties.shape != shape:
            self._penalties = np.zeros(shape, np.float32)
            self._table = self._tables.reserve(max(1, self._penalties.nbytes))
            self._upload()
            all_bytes = len(layout.groups) * aligned(_FLOAT_BYTES * n_experts * SMALL_BATCH)
            self._scratch.reserve(_N_REGIONS * all_bytes)

    def _sites(
        self, graph: Graph, products: Sequence[Product], layout: SlotLayout
    ) -> list[_RouterSite]:
        places, index_of = layout.places(), graph.positions()
        by_ids: dict[Tensor, _RouterSite | None] = {}
        for product in products:
            ids = product.ids
            if ids is not None and ids not in by_ids and 0 < product.n_tokens <= SMALL_BATCH:
                by_ids[ids] = _site(ids, places[product.weight.name][0], index_of)
        sites = [site for site in by_ids.values() if site is not None]
        self._leave_unchanged(len(by_ids) - len(sites))
        return sites

    def _leave_unchanged(self, n_routers: int) -> None:
        """Count routers that choose as the model does, and warn of the first ones."""
        if n_routers and not self.n_unchanged:
            _logger.warning(
                "--route-cached has no effect on %d layers: their experts are not chosen by a sort "
                "of scores that it can change",
                n_routers,
            )
        self.n_unchanged += n_routers

    def _nodes(self, site: _RouterSite, places: Sequence[tuple[Buffer, int]]) -> list[Tensor]:
        """Return the nodes before the sort, and the sort that reads their result."""
        scores, sort = site.scores, site.sort
        n_experts, n_tokens, _, _ = scores.shape
        n_kept = min(self.options.n_kept, site.n_used)
        row_bytes = _FLOAT_BYTES * n_experts
        all_bytes = row_bytes * n_tokens
        copied = new_tensor("f32", scores.shape, places[0], "CONT", [scores])
        assert self._table is not None
        at = site.group * self._penalties.shape[1] * _FLOAT_BYTES
        penalty = new_tensor("f32", (n_experts, 1, 1, 1), (self._table, at))
        lowered = new_tensor("f32", scores.shape, places[1], "ADD", [scores, penalty])
        last = sort.computing("ARGSORT", [lowered])
        if not n_kept:
            return [copied, lowered, last]
        own = sort.alike(at=places[2], sources=[scores])
        first = own.viewed(
            (n_kept, n_tokens, 1, 1), (_FLOAT_BYTES, row_bytes, all_bytes, all_bytes)
        )
        column = (1, n_experts, n_tokens, 1)
        strides = (_FLOAT_BYTES, _FLOAT_BYTES, row_bytes, all_bytes)
        rows = copied.viewed(column, strides, "RESHAPE")
        kept = new_tensor("f32", (1, n_kept, n_tokens, 1), places[3], "GET_ROWS", [rows, first])
        shown = lowered.viewed(column, strides, "RESHAPE")
        restored = shown.computing("SET_ROWS", [kept, first, shown])
        return [copied, own, first, rows, kept, lowered, shown, restored, last]

    # -- a decode ----------------------------------------------------------------------------------

    def begin(
        self, schedule: Schedule, layout: SlotLayout, stream: Stream, *, is_small: bool
    ) -> None:
        """Upload the penalties for the slots as they are now; 0 if the batch is a prompt.

        Waits for `stream` if they change, since earlier graphs may still read them.
        """
        self._computed = None
        self._counts_now = self.is_on and is_small
        self._allocate(layout)
        found = np.zeros_like(self._penalties)
        if self._counts_now:
            self._cached = np.zeros(found.shape, np.bool_)
            for number, group in enumerate(layout.groups):
                if n_experts := layout.pools[group.pool].n_experts:
                    slots = schedule.pools[group.pool].of_group(number, n_experts)
                    self._cached[number, :n_experts] = slots != NOWHERE
            for number, ranges in self.counts.ranges.items():
                found[number] = penalties(self._cached[number], ranges.mean, self.options.strength)
        if not np.array_equal(found, self._penalties):
            stream.synchronize()
            self._penalties = found
            self._upload()

    def computing(self, routed: RoutedGraph, stream: Stream) -> None:
        """Note that a graph is about to be computed, whose scores are read back later.

        Graphs use the same memory in turn, so an earlier graph of this decode is read back now.
        """
        self.finish(stream)
        if self._counts_now:
            self._computed = routed

    def finish(self, stream: Stream) -> None:
        """Read back the scores of the last graph, and count its choices. Waits for the device."""
        routed, self._computed = self._computed, None
        if routed is None:
            return
        stream.synchronize()
        for site, scores in routed.scores():
            n_experts = scores.shape[1]
            self.counts.see(
                site.group, scores, self._penalties[site.group, :n_experts],
                self._cached[site.group, :n_experts], self.options.n_kept, site.n_used,
            )  # fmt: skip

    def _upload(self) -> None:
        assert self._table is not None
        if n := self._penalties.size:
            fill_from_host(new_tensor("f32", (n, 1, 1, 1), (self._table, 0)), self._penalties)
