"""Runs split layers: finds them, chooses a side for each expert, and promotes experts.

The synchronisation that fetches the router's ids also fetches the rows that the experts read. After
the division the device gets all its work. If the device computes asynchronously, the caller's
thread computes the CPU's pairs before it submits the nodes that read the results. `sim` with a
`Pace` computes on the caller's thread, so another thread computes the CPU's pairs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import Stream
from offload.ggml.graph import Graph, Product
from offload.ggml.hostbuffer import ExpertProvider
from offload.ggml.tensor import Tensor
from offload.ggml.threads import CpuTeam
from offload.plan.slot_layout import SlotLayout
from offload.routing import RoutingGuess
from offload.schedule.schedule import Schedule
from offload.schedule.slots import FREE, NOWHERE, CutNeed, StreamCounters
from offload.split.cpu_side import (
    ExpertForm,
    HostGraph,
    LayerWeights,
    NoForm,
    RowPlacer,
    SplitLayer,
    find_form,
    layer_weights,
)
from offload.split.division import HOST
from offload.split.switch import ByCosts, HybridSwitch
from offload.streaming.copy_queue import CopyQueue
from offload.streaming.cuts import CutStep
from offload.streaming.slot_ids import may_repeat, other_slots

_LEAST_PAIRS = 64  # least number of pairs that a host graph has room for
_RECURS = 1.01  # recent uses above which a missing expert replaces a cached one
_ANY_NUMBER = 1 << 30
_WAITING_SHARE = 0.04  # share of the decodes' time that may be spent waiting for promotions


@dataclass(frozen=True)
class Pace:
    """The least seconds that an expert takes on either side, to simulate slow ones with `sim`."""

    device_s: float = 0.0
    host_s: float = 0.0

    def __bool__(self) -> bool:
        return self.device_s > 0 or self.host_s > 0


@dataclass(frozen=True)
class Hybrid:
    """The objects that an engine's executors share to split layers."""

    switch: HybridSwitch
    team: CpuTeam
    pace: Pace = Pace()


@dataclass(frozen=True, slots=True)
class Sided:
    """The side of each used expert of a layer."""

    rows: NDArray[np.intp]  # number of tokens that use each expert [n_experts]
    on_device: NDArray[np.intp]
    on_host: NDArray[np.intp]
    missed: bool  # True if the CPU computes some experts that are not in slots


@dataclass(frozen=True)
class _Known:
    """The analysis of a layer, valid for all graphs with the same nodes."""

    operations: tuple[int, ...]
    host: HostGraph
    placer: RowPlacer
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
    """Runs the split layers of one executor."""

    def __init__(
        self,
        hybrid: Hybrid,
        stream: Stream,
        schedule: Schedule,
        copies: CopyQueue,
        counters: StreamCounters,
    ) -> None:
        self.switch, self._team, self._pace = hybrid.switch, hybrid.team, hybrid.pace
        self._stream, self._schedule, self._copies = stream, schedule, copies
        self._counters = counters
        self._graphs: dict[object, tuple[HostGraph, RowPlacer]] = {}  # largest graph by form's key
        # All host graphs and placers, because prepared graphs refer to them.
        self._made: list[HostGraph | RowPlacer] = []
        self._known: dict[int, _Known] = {}  # layers by group
        self._thread: ThreadPoolExecutor | None = None
        if self._pace:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="experts")
        self._running: Future[int] | None = None
        self._random = np.random.default_rng(0)  # for measuring
        self._step_s = self._idle_s = 0.0  # expected times of layers since the last `promote`
        self._promotions = PromotionBudget()

    @property
    def device_bytes(self) -> int:
        return sum(made.size_bytes for made in self._made if isinstance(made, RowPlacer))

    def close(self) -> None:
        self.abandon()
        if self._thread is not None:
            self._thread.shutdown()
        for made in self._made:
            made.close()

    # -- when a graph is first seen ----------------------------------------------------------------

    def find(
        self, graph: Graph, products: Sequence[Product], layout: SlotLayout
    ) -> dict[Tensor, SplitLayer]:
        """Return the layers to split, by their routers' ids.

        If one has an unknown form, no layer of the model is ever split, and `switch.declined` says
        why.
        """
        places = layout.places()
        members: dict[Tensor, list[Product]] = {}
        for product in products:
            if product.ids is not None and self.switch.splits(product.n_tokens):
                members.setdefault(product.ids, []).append(product)
        if not members:
            return {}
        operations = graph.operations()
        found: dict[Tensor, SplitLayer] = {}
        for ids, of_layer in members.items():
            number, _ = places[of_layer[0].weight.name]
            group = layout.groups[number]
            try:
                if len(of_layer) != len(group.names):
                    raise NoForm("some of its products are not computed on the device")
                found[ids] = self._layer(graph, of_layer, operations, number, group.layer)
            except NoForm as reason:
                self.switch.declined = f"layer {group.layer} is not split: {reason}"
                return {}
        return found

    def _layer(
        self, graph: Graph, products: list[Product], operations: list[int], group: int, layer: int
    ) -> SplitLayer:
        first, down = products[0], products[-1]
        between = tuple(operations[first.index : down.index + 1])
        assert first.ids is not None
        n_used, n_tokens, _, _ = first.ids.shape
        known = self._known.get(group)
        if known is None or known.operations != between or known.host.most < n_used * n_tokens:
            form = find_form(graph, products)
            host, placer = self._graph_of(form, n_used * n_tokens)
            weights = known.weights if known is not None else layer_weights(form, layer)
            known = self._known[group] = _Known(between, host, placer, weights)
        inputs = first.node.source(1)
        assert inputs is not None
        n_bytes = [product.weight.size_bytes for product in products]
        return SplitLayer(
            known.weights, known.host, known.placer, inputs, known.host.inputs_of(n_tokens),
            down.node, n_tokens, tuple(n / sum(n_bytes) for n in n_bytes),
            may_repeat(n_tokens, [product.weight.type for product in products]),
        )  # fmt: skip

    def _graph_of(self, form: ExpertForm, n_pairs: int) -> tuple[HostGraph, RowPlacer]:
        found = self._graphs.get(form.key)
        if found is not None and found[0].most >= n_pairs:
            return found
        most = max(_LEAST_PAIRS, 1 << (n_pairs - 1).bit_length())
        host = HostGraph(form, most, self._stream.device)
        self._made.append(host)
        placer = RowPlacer(host, self._stream.device)
        self._made.append(placer)
        self._graphs[form.key] = host, placer
        return host, placer

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

    def promote(self, steps: Sequence[CutStep], guess: RoutingGuess) -> None:
        """Copy experts for later graphs, so that the CPU does not have to compute them again.

        For each layer with missing experts, pick the missing expert most likely to be used again,
        or any missing expert while slots are free. Copy the likeliest ones first, as many as the
        link has time for. Copy nothing if this graph needs copies itself.
        """
        missed = [step for step in steps if step.split is not None and step.missed]
        if not missed:
            return
        schedule, most = self._schedule, _ANY_NUMBER
        if isinstance(self.switch.splitter, ByCosts):
            copy_s = self.switch.splitter.costs.copy_s
            most = self._promotions.most(self._step_s, self._idle_s, copy_s)
        self._step_s = self._idle_s = 0.0
        if not most or any(s.need is not None and not schedule.ready(s.cut) for s in steps):
            return
        found: list[tuple[float, int, CutStep]] = []
        for step in missed:
            slots = schedule.pools[step.pool]
            there = slots.of_group(step.group, step.n_experts) != NOWHERE
            expert, score = guess.likeliest(step.layer, there)
            if score > (0.0 if slots.counts[FREE] else _RECURS / step.n_tokens):
                found.append((score, expert, step))
        found.sort(key=lambda one: -one[0])
        promotions = [
            CutNeed(step.cut, step.pool, ((step.group, expert),))
            for _, expert, step in found[:most]
        ]
        self._promotions.spend(len(promotions))
        schedule.promote(promotions)

    # -- one layer ---------------------------------------------------------------------------------

    def read_missing(self, experts: ExpertProvider, step: CutStep, ids: NDArray[np.int32]) -> None:
        """Read the experts of `ids` into memory that are neither in slots nor in memory."""
        resident = self._resident(step)
        used = np.unique(ids)
        experts.need(step.layer, used[~resident[used]].tolist())

    def divide(self, step: CutStep, layer: SplitLayer, ids: NDArray[np.int32]) -> Sided:
        """Choose a side for each expert of `ids` [n_tokens, n_used], and prepare the CPU's pairs.

        If another thread computes them, it starts now. Call it after the layer's inputs were
        fetched. The device gets no more experts than there are slots.
        """
        rows = np.bincount(ids.ravel(), minlength=step.n_experts)
        used = rows.nonzero()[0]
        resident = self._resident(step)
        kinds = self._kinds(step, ids, rows, resident)
        there, host = resident.take(used), kinds.take(used) == HOST
        on_host = used[host]
        counters = self._counters
        layer.n_on_device, layer.n_pairs = len(used) - len(on_host), 0
        layer.split_at_s = time.perf_counter()
        n_hit = int(rows.take(used[there > host]).sum())
        if len(on_host):
            pairs = (kinds.take(ids.ravel()) == HOST).nonzero()[0]
            layer.n_pairs = len(pairs)
            layer.host.fill(layer.weights, ids, pairs)
            self._team.choose(layer.n_tokens)
            if self._thread is not None:
                self._running = self._thread.submit(self._compute, layer, len(on_host))
        counters.split_layers += 1
        counters.n_pairs_hit += n_hit
        counters.n_pairs_host += layer.n_pairs
        counters.n_pairs_streamed += ids.size - layer.n_pairs - n_hit
        return Sided(rows, used[~host], on_host, bool(np.count_nonzero(host > there)))

    def _kinds(
        self, step: CutStep, ids: NDArray[np.int32], rows: NDArray[np.intp],
        resident: NDArray[np.bool_],
    ) -> NDArray[np.uint8]:  # fmt: skip
        """Return HIT, STREAMED or HOST for each expert."""
        splitter, n_slots = self.switch.splitter, self._schedule.pools[step.pool].n_slots
        if isinstance(splitter, ByCosts):
            found = splitter.split(ids, resident, rows)
            kinds = found.kind
            self._step_s += max(found.cpu_s, found.device_s)
            self._idle_s += found.idle_s
        else:
            kinds = splitter(ids, resident)
        if ids.size > n_slots:
            chosen = np.flatnonzero((rows > 0) & (kinds != HOST))
            if len(chosen) > n_slots:
                hits_first = chosen[np.argsort(~resident[chosen], kind="stable")]
                kinds = kinds.copy()
                kinds[hits_first[n_slots:]] = HOST
        return kinds

    def _resident(self, step: CutStep) -> NDArray[np.bool_]:
        """Return True for each expert whose copy into a slot is complete [n_experts]."""
        slots, group = self._schedule.pools[step.pool], step.group
        resident: NDArray[np.bool_] = slots.of_group(group, step.n_experts) != NOWHERE
        for expert in tuple(slots.loading.get(group, ())):
            if self._copies.has_arrived((group, expert)):
                self._schedule.arrived(step.pool, (group, expert))
            else:
                resident[expert] = False
        return resident

    def spare_slots(
        self, step: CutStep, layer: SplitLayer, slots: Sequence[int], n_host: int
    ) -> list[int]:
        """Return slots that the device reads for the CPU's pairs.

        The device computes those pairs too, with any expert. Their results are overwritten.
        """
        if layer.may_repeat:
            return [slots[0] if slots else 0] * n_host
        n_slots = self._schedule.pools[step.pool].n_slots
        return other_slots(slots, min(n_host, step.n_used), n_slots) if n_host else []

    def began(self, layer: SplitLayer, nth: int) -> None:
        """Extend the device's simulated end time by a layer's `nth` product, if there is a pace.

        Call it when the copies for that product have arrived.
        """
        if self._pace:
            took_s = layer.shares[nth] * layer.n_on_device * self._pace.device_s
            layer.ends_s = max(layer.ends_s, time.perf_counter()) + took_s

    def has_to_end(self, layer: SplitLayer) -> bool:
        """True if `finish` has something to do."""
        return layer.n_pairs > 0 or bool(self._pace)

    def finish(self, layer: SplitLayer) -> int:
        """Compute and place the CPU's rows, after the device got its work. Returns a ggml_status.

        Raises DeviceFailed.
        """
        if self._pace:
            _wait_until(layer.ends_s)
        if not layer.n_pairs:
            return 0
        running, self._running = self._running, None
        status = running.result() if running is not None else self._compute(layer)
        status = status or layer.placer.place(
            self._stream, layer.n_pairs, layer.output, layer.weights.layer
        )
        self._counters.split_s += time.perf_counter() - layer.split_at_s
        return status

    def _compute(self, layer: SplitLayer, n_experts: int = 0) -> int:
        start_s = time.perf_counter()
        status = layer.host.compute(self._team.stream, layer.weights.layer)
        _wait_until(start_s + n_experts * self._pace.host_s)
        self._counters.host_s += time.perf_counter() - start_s
        return status

    def abandon(self) -> None:
        """After a failure, wait for the thread that computes pairs, and ignore its result."""
        running, self._running = self._running, None
        if running is not None:
            running.exception()

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
        self._team.choose(n_rows)
        start_s = time.perf_counter()
        layer.host.compute(self._team.stream, layer.weights.layer)
        _wait_until(start_s + n_experts * self._pace.host_s)
        return time.perf_counter() - start_s

    def wait_for_device(self, start_s: float, n_experts: int) -> None:
        """Sleep until a device with a pace would have computed `n_experts` since `start_s`."""
        _wait_until(start_s + n_experts * self._pace.device_s)


def _wait_until(moment_s: float) -> None:
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
