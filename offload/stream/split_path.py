"""Finds split layers, and promotes experts. The player (offload/stream/play.py) runs the layers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offload.ggml.graph import Graph, Product
from offload.ggml.tensor import Tensor
from offload.ggml.threads import CpuTeam
from offload.plan.slot_layout import SlotLayout
from offload.schedule.pair_rows import small_batch_pairs
from offload.schedule.slots import FREE, CutNeed
from offload.schedule.splitter import ByCosts, Splitter
from offload.stream.cpu_side import (
    HostGraph,
    LayerWeights,
    RowPlacer,
    SplitLayer,
    layer_weights,
)
from offload.stream.cuts import CutStep
from offload.stream.forms import ExpertForm, NoForm, find_form
from offload.stream.program import Likeliest, Program
from offload.stream.slot_ids import may_repeat
from offload.stream.stream_parts import StreamParts
from offload.stream.ways_in_use import WaysInUse

_RECURS = 1.01  # recent uses above which a missing expert replaces a cached one
_ANY_NUMBER = 1 << 30
_MOST_FOREIGN = 128  # host graphs and placers that foreign graphs may take memory for
_WAITING_SHARE = 0.04  # share of the decodes' time that may be spent waiting for promotions


@dataclass(frozen=True)
class Hybrid:
    """The objects that a device's executors share to split layers.

    `ways` and `team` are shared by all devices of an engine. `nth` is the device's number.
    `is_foreign`: graphs come from clients, which may compute a layer otherwise in each graph.
    """

    ways: WaysInUse
    team: CpuTeam
    nth: int = 0
    is_foreign: bool = False


@dataclass(frozen=True)
class _LayerAnalysis:
    """The analysis of a layer, valid for all graphs with the same nodes."""

    operations: tuple[int, ...]
    host: HostGraph
    weights: LayerWeights


class PromotionBudget:
    """Decides how many promoted experts a decode may copy in the time that its link is idle.

    If the idle time is too short for one copy, a copy makes the decode wait for the remaining time.
    A share of the decodes' time is saved up to pay for such waits. Otherwise the cache would never
    change. At most one copy's time is saved up, so that waits do not come in bursts.
    """

    def __init__(self, waiting_share: float = _WAITING_SHARE) -> None:
        self._share = waiting_share
        self._saved_s = 0.0
        self._price_s = 0.0  # seconds to pay for each copy that `most` allowed last

    def most(self, step_s: float, idle_s: float, copy_s: float) -> int:
        """Return the number of copies of `copy_s` seconds that the next decode may make.

        The split layers of the last decode took `step_s` seconds, and the link was idle for
        `idle_s` of them.
        """
        self._price_s = 0.0
        if copy_s <= 0.0:
            return _ANY_NUMBER
        self._saved_s = min(self._saved_s + self._share * step_s, copy_s)
        if idle_s >= copy_s:
            return min(int(idle_s / copy_s), _ANY_NUMBER)
        price_s = copy_s - max(0.0, idle_s)
        if self._saved_s < price_s:
            return 0
        self._price_s = price_s
        return 1

    def spend(self, n: int) -> None:
        """Subtract the price of `n` copies from the saved time."""
        self._saved_s -= n * self._price_s


class SplitPath:
    """Finds the split layers of one executor's graphs, and promotes experts into free slots."""

    def __init__(self, hybrid: Hybrid, parts: StreamParts, likeliest: Likeliest) -> None:
        self._likeliest = likeliest
        self.ways, self.team = hybrid.ways, hybrid.team
        self._nth, self._is_foreign = hybrid.nth, hybrid.is_foreign
        self._stream, self._schedule, self._copies = parts.stream, parts.schedule, parts.copies
        self._counters = parts.counters
        self._graphs: dict[object, HostGraph] = {}  # largest graph by form's key
        # All host graphs and placers, because prepared graphs refer to them.
        self._made: list[HostGraph | RowPlacer] = []
        self._known: dict[int, _LayerAnalysis] = {}  # layers by group
        self._random = np.random.default_rng(0)  # for measuring
        self._step_s = self._idle_s = 0.0  # expected times of layers since the last `promote`
        self._promotions = PromotionBudget()

    @property
    def splitter(self) -> Splitter:
        """The splitter that divides the layers of this device now."""
        return self.ways.now.splitter_of(self._nth)

    @property
    def device_bytes(self) -> int:
        return sum(made.size_bytes for made in self._made if isinstance(made, RowPlacer))

    def close(self) -> None:
        for made in self._made:
            made.close()

    # -- when a graph is first seen ----------------------------------------------------------------

    def find(
        self, graph: Graph, products: Sequence[Product], layout: SlotLayout
    ) -> dict[Tensor, SplitLayer]:
        """Return the layers to split, by their routers' ids.

        If one has an unknown form, no layer of the model is ever split, and `Ways.declined` says
        why. If graphs are foreign, only this graph's layers are not split.
        """
        places, ways = layout.places(), self.ways.now
        members: dict[Tensor, list[Product]] = {}
        for product in products:
            if product.ids is not None and ways.splits(product.n_tokens):
                members.setdefault(product.ids, []).append(product)
        if not members:
            return {}
        operations = graph.operations()
        layers: dict[Tensor, SplitLayer] = {}
        for ids, of_layer in members.items():
            number, _ = places[of_layer[0].weight.name]
            group = layout.groups[number]
            try:
                if len(of_layer) != len(group.names):
                    raise NoForm("some of its products are not computed on the device")
                layers[ids] = self._layer(graph, of_layer, operations, number, group.layer)
            except NoForm as reason:
                if not self._is_foreign:
                    self.ways.decline(f"layer {group.layer} is not split: {reason}")
                return {}
        return layers

    def _layer(
        self, graph: Graph, products: list[Product], operations: list[int], group: int, layer: int
    ) -> SplitLayer:
        first, down = products[0], products[-1]
        between = tuple(operations[first.index : down.index + 1])
        assert first.ids is not None
        n_used, n_tokens, _, _ = first.ids.shape
        # A foreign graph's form and weights are its own. They must not reach other clients.
        known = None if self._is_foreign else self._known.get(group)
        if known is None or known.operations != between or known.host.most < n_used * n_tokens:
            form = find_form(graph, products)
            host = self._graph_of(form, n_used * n_tokens)
            weights = known.weights if known is not None else layer_weights(form, layer)
            known = self._known[group] = _LayerAnalysis(between, host, weights)
        inputs = first.node.source(1)
        assert inputs is not None
        return SplitLayer(
            known.weights, known.host, inputs, known.host.inputs_of(n_tokens), down.node, n_tokens,
            may_repeat(n_tokens, [product.weight.type for product in products]),
        )  # fmt: skip

    def _graph_of(self, form: ExpertForm, n_pairs: int) -> HostGraph:
        pair_graph = self._graphs.get(form.key)
        if pair_graph is not None and pair_graph.most >= n_pairs:
            return pair_graph
        if self._is_foreign and len(self._made) >= _MOST_FOREIGN:
            raise NoForm("clients have sent too many forms of layers")
        most = max(small_batch_pairs(form.pairs.n_used), n_pairs)
        host = HostGraph(form, most, self._stream.device)
        self._made.append(host)
        self._made.append(RowPlacer(host, self._stream.device))
        self._graphs[form.key] = host
        return host

    # -- before a graph runs -----------------------------------------------------------------------

    def choose_order(self, steps: Sequence[CutStep]) -> None:
        """Let whole layers be in any slots if that saves copies.

        In order, they would overwrite slots that hold experts of split layers.
        """
        by_pool: dict[int, list[CutStep]] = {}
        for step in steps:
            if step.either:
                by_pool.setdefault(step.pool, []).append(step)
        for pool, whole in by_pool.items():
            groups = {step.group for step in whole}
            in_order = not self._schedule.saves_out_of_order(pool, groups, whole[0].n_experts)
            for step in whole:
                assert step.need is not None
                step.in_order = in_order
                step.need = step.need._replace(contiguous=in_order)
            self._counters.layers_out_of_order += 0 if in_order else len(whole)

    def see_arrivals(self) -> None:
        """Let this graph use the promoted experts whose copies are complete."""
        for pool, slots in self._schedule.pools.items():
            for group in slots.loading:
                self._copies.see_arrivals(pool, group)

    def expect(self, step_s: float, idle_s: float) -> None:
        """Add up layers' expected times, and the link's idle time in them, for `promote`."""
        self._step_s += step_s
        self._idle_s += idle_s

    def promote(self, program: Program) -> None:
        """Copy experts for later graphs, so that the CPU does not have to compute them again.

        For each layer with missing experts in the last decode, pick the missing expert most likely
        to be used again, or any missing expert while slots are free. Copy the likeliest ones first,
        as many as the link has time for. Copy nothing if this graph needs copies itself.
        """
        missed = (program.missed * program.is_split).nonzero()[0]
        if not len(missed):
            return
        schedule, most = self._schedule, _ANY_NUMBER
        if isinstance(self.splitter, ByCosts):
            copy_s = self.splitter.costs.copy_s
            most = self._promotions.most(self._step_s, self._idle_s, copy_s)
        self._step_s = self._idle_s = 0.0
        if not most or not all(schedule.ready(step.cut) for step in program.known):
            return
        groups = program.groups[missed]
        scores = self._likeliest.scores[groups]
        least = _RECURS / program.n_tokens[missed]
        for pool in program.pools:
            if schedule.pools[pool].counts[FREE]:
                least[program.pool_of[missed] == pool] = 0.0
        order = np.argsort(-scores, kind="stable")
        promotions: list[CutNeed] = []
        for i in order[(scores > least)[order]].tolist():
            step = program.steps[missed[i]]
            piece = step.group, int(self._likeliest.experts[step.group])
            if piece not in schedule.pools[step.pool].where:
                promotions.append(CutNeed(step.cut, step.pool, (piece,)))
                if len(promotions) == most:
                    break
        self._promotions.spend(len(promotions))
        schedule.promote(promotions)
        program.spread(len(promotions))

    # -- for measuring -----------------------------------------------------------------------------

    def host_s(self, layer: SplitLayer, n_all: int, n_experts: int, n_rows: int) -> float:
        """Return the CPU's seconds for `n_experts` of the layer's `n_all` experts.

        Each of them computes `n_rows` rows.

        Each call picks random experts, so that their weights are in no cache. Raises DeviceFailed.
        """
        experts = self._random.choice(n_all, n_experts, replace=False)
        self._copies.read(layer.weights.layer, experts.tolist())
        ids = np.repeat(experts.astype(np.int32), n_rows)[: layer.host.most, None]
        layer.host.fill(layer.weights, ids, np.arange(len(ids)))
        self.team.choose(n_rows)
        start_s = time.perf_counter()
        layer.host.compute(self.team.stream, layer.weights.layer)
        return time.perf_counter() - start_s
