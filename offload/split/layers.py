"""Executes split layers: the CPU's pairs of each while the device computes the others.

One synchronisation, that which the router's ids need anyway, also fetches the rows that the experts
read. After the split the device is given all its work. A device that computes while the host goes
on needs no other thread: the CPU's pairs are computed by the caller, when it comes to where their
rows are read. Where the device computes on the caller's thread (`sim`), a thread computes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph, Product
from offload.ggml.memory import HostRange
from offload.ggml.tensor import Tensor
from offload.ggml.threads import CpuTeam
from offload.plan.slot_layout import SlotLayout
from offload.split.form import Form, NoForm, find_form
from offload.split.host_graph import HostGraph, LayerWeights, layer_weights
from offload.split.placing import RowPlacer
from offload.split.promoting import ANY_NUMBER, PromotionBudget
from offload.split.spare import may_repeat
from offload.split.split import HOST
from offload.split.switch import ByCosts, HybridSwitch
from offload.streaming.counters import StreamCounters

_LEAST_PAIRS = 64


@dataclass(frozen=True)
class Pace:
    """Seconds that each expert of a split layer takes at least on either side, as `sim` asks."""

    device_s: float = 0.0
    host_s: float = 0.0

    def __bool__(self) -> bool:
        return self.device_s > 0 or self.host_s > 0


@dataclass(frozen=True)
class Hybrid:
    """All that an engine's executors need to split layers."""

    switch: HybridSwitch
    team: CpuTeam
    pace: Pace = Pace()


@dataclass(slots=True)
class HybridLayer:
    """A layer of one graph that is split each time the graph is computed."""

    weights: LayerWeights
    host: HostGraph
    placer: RowPlacer
    inputs: Tensor
    read_to: HostRange  # where its inputs are fetched to
    output: Tensor
    n_tokens: int
    shares: tuple[float, ...]  # of an expert's bytes in each product
    may_repeat: bool  # its tokens may name a slot twice (offload/split/spare.py)
    n_pairs: int = 0  # that the CPU computes, this time
    n_on_device: int = 0  # experts
    split_at_s: float = 0.0
    ends_s: float = 0.0  # when the device's products that began end, if it has a pace


@dataclass(frozen=True)
class _Known:
    """A layer as it was found, for all graphs in which its nodes do the same."""

    operations: tuple[int, ...]
    host: HostGraph
    placer: RowPlacer
    weights: LayerWeights


class HybridExecutor:
    """The CPU's side of split layers, of one executor."""

    def __init__(self, hybrid: Hybrid, device: Device, counters: StreamCounters) -> None:
        self.switch, self._team, self._pace = hybrid.switch, hybrid.team, hybrid.pace
        self._device, self._counters = device, counters
        self._graphs: dict[object, tuple[HostGraph, RowPlacer]] = {}  # by form, the largest
        self._made: list[HostGraph | RowPlacer] = []  # graphs that were prepared refer to all
        self._known: dict[int, _Known] = {}  # by group
        self._thread: ThreadPoolExecutor | None = None
        if self._pace:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="experts")
        self._running: Future[int] | None = None
        self._random = np.random.default_rng(0)  # of what is measured
        self._step_s = self._idle_s = 0.0  # expected of layers since `most_promotions`; the link's
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
        self._made.clear()
        self._graphs.clear()
        self._known.clear()

    # -- preparing a graph -------------------------------------------------------------------------

    def layers_of(
        self, graph: Graph, products: Sequence[Product], layout: SlotLayout
    ) -> dict[Tensor, HybridLayer]:
        """The layers to split, by the ids of their router. Where one has an unknown form, no layer
        of the model is ever split, for the reason that the switch has from then on."""
        places = layout.places()
        members: dict[Tensor, list[Product]] = {}
        for product in products:
            if product.ids is not None and self.switch.splits(product.n_tokens):
                members.setdefault(product.ids, []).append(product)
        if not members:
            return {}
        operations = graph.operations()
        found: dict[Tensor, HybridLayer] = {}
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
    ) -> HybridLayer:
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
        return HybridLayer(
            known.weights, known.host, known.placer, inputs, known.host.inputs_of(n_tokens),
            down.node, n_tokens, tuple(n / sum(n_bytes) for n in n_bytes),
            may_repeat(n_tokens, [product.weight.type for product in products]),
        )  # fmt: skip

    def _graph_of(self, form: Form, n_pairs: int) -> tuple[HostGraph, RowPlacer]:
        key = form.key
        found = self._graphs.get(key)
        if found is not None and found[0].most >= n_pairs:
            return found
        most = max(_LEAST_PAIRS, 1 << (n_pairs - 1).bit_length())
        host = HostGraph(form, most, self._device)
        self._made.append(host)
        placer = RowPlacer(host, self._device)
        self._made.append(placer)
        self._graphs[key] = host, placer
        return host, placer

    # -- one layer ---------------------------------------------------------------------------------

    def split(
        self, ids: NDArray[np.int32], rows: NDArray[np.intp], resident: NDArray[np.bool_],
        n_slots: int,
    ) -> NDArray[np.uint8]:  # fmt: skip
        """HIT, STREAMED or HOST of each expert of `ids`; no more on the device than have slots.

        `rows`: [n_experts], how often `ids` name each.
        """
        splitter = self.switch.splitter
        if isinstance(splitter, ByCosts):
            found = splitter.split(ids, resident, rows)
            kinds = found.kind
            self._step_s += max(found.cpu_s, found.device_s)
            self._idle_s += found.idle_s
        else:
            kinds = splitter(ids, resident)
        if ids.size <= n_slots:
            return kinds
        chosen = np.flatnonzero((rows > 0) & (kinds != HOST))
        if len(chosen) > n_slots:
            hits_first = chosen[np.argsort(~resident[chosen], kind="stable")]
            kinds = kinds.copy()
            kinds[hits_first[n_slots:]] = HOST
        return kinds

    def begin(
        self, layer: HybridLayer, ids: NDArray[np.int32], rows: NDArray[np.intp],
        hits: NDArray[np.intp], kinds: NDArray[np.uint8], n_on_device: int, n_on_host: int,
    ) -> None:  # fmt: skip
        """A layer is split, with so many experts on either side; its inputs were fetched.

        `hits`: experts that the device computes without a copy.
        """
        counters = self._counters
        layer.n_on_device, layer.n_pairs = n_on_device, 0
        layer.split_at_s = time.perf_counter()
        counters.split_layers += 1
        if n_on_host:
            pairs = (kinds.take(ids.ravel()) == HOST).nonzero()[0]
            layer.n_pairs = len(pairs)
        n_hit = int(rows.take(hits).sum())
        counters.n_pairs_hit += n_hit
        counters.n_pairs_host += layer.n_pairs
        counters.n_pairs_streamed += ids.size - layer.n_pairs - n_hit
        if not n_on_host:
            return
        layer.host.fill(layer.weights, ids, pairs)
        self._team.choose(layer.n_tokens)
        if self._thread is not None:
            self._running = self._thread.submit(self._compute, layer, n_on_host)

    def most_promotions(self) -> int:
        """Experts that may be copied for later during the next graph, if it goes as the layers that
        were split since the last call. Without costs as many as are worth it."""
        step_s, idle_s = self._step_s, self._idle_s
        self._step_s = self._idle_s = 0.0
        splitter = self.switch.splitter
        if not isinstance(splitter, ByCosts):
            return ANY_NUMBER
        return self._promotions.most(step_s, idle_s, splitter.costs.copy_s)

    def promoted(self, n: int) -> None:
        """So many are copied, of those that `most_promotions` allowed."""
        self._promotions.spend(n)

    def began(self, layer: HybridLayer, nth: int) -> None:
        """The copies that a layer's `nth` product waits for are there."""
        if self._pace:
            took_s = layer.shares[nth] * layer.n_on_device * self._pace.device_s
            layer.ends_s = max(layer.ends_s, time.perf_counter()) + took_s

    def has_to_end(self, layer: HybridLayer) -> bool:
        """True if `finish` has something to do."""
        return layer.n_pairs > 0 or bool(self._pace)

    def _compute(self, layer: HybridLayer, n_experts: int = 0) -> int:
        start_s = time.perf_counter()
        status = layer.host.compute(self._team.stream, layer.weights.layer)
        _wait_until(start_s + n_experts * self._pace.host_s)
        self._counters.host_s += time.perf_counter() - start_s
        return status

    def finish(self, layer: HybridLayer, stream: Stream) -> int:
        """The device has been given its work: put the CPU's rows beside its own. A ggml_status.

        Raises DeviceFailed.
        """
        if self._pace:
            _wait_until(layer.ends_s)
        if not layer.n_pairs:
            return 0
        running, self._running = self._running, None
        status = running.result() if running is not None else self._compute(layer)
        status = status or layer.placer.place(
            stream, layer.n_pairs, layer.output, layer.weights.layer
        )
        self._counters.split_s += time.perf_counter() - layer.split_at_s
        return status

    def host_s(self, layer: HybridLayer, n_all: int, n_experts: int, n_rows: int) -> float:
        """Seconds of so many experts of the layer's `n_all`, of so many rows each.

        Others each time, as a decode finds them: not in a cache. Raises DeviceFailed.
        """
        experts = self._random.choice(n_all, n_experts, replace=False)
        ids = np.repeat(experts.astype(np.int32), n_rows)[: layer.host.most, None]
        layer.host.fill(layer.weights, ids, np.arange(len(ids)))
        self._team.choose(n_rows)
        start_s = time.perf_counter()
        layer.host.compute(self._team.stream, layer.weights.layer)
        _wait_until(start_s + n_experts * self._pace.host_s)
        return time.perf_counter() - start_s

    def wait_for_device(self, start_s: float, n_experts: int) -> None:
        """Return no sooner than a device with a pace has computed so many experts."""
        _wait_until(start_s + n_experts * self._pace.device_s)

    def abandon(self) -> None:
        """After a failure: return when nothing is under way."""
        running, self._running = self._running, None
        if running is not None:
            running.exception()


def _wait_until(moment_s: float) -> None:
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
