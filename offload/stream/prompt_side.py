"""The CPU's part of layers that are computed in passes, in large batches.

The rows of all tokens are copied to pinned memory. A thread gathers those of the CPU's pairs and
computes them, while the device computes its passes and the link copies. Then the results are copied
to the device, which writes them to their places (offload/stream/pass_runner.py). If the device
gathered the rows, it would need tables of them. A card takes copies to it in order, so these tables
would come behind all experts that are copied ahead of the router, and the CPU would stand still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import Device
from offload.ggml.threads import CpuTeam
from offload.plan.slot_layout import SlotPool
from offload.schedule.division import seconds_at
from offload.schedule.pair_rows import prompt_host_pairs
from offload.schedule.passes import RowsWay, host_experts, soonest_host_experts
from offload.schedule.slots import StreamCounters
from offload.schedule.splitter import ByCosts, Splitter
from offload.stream.cpu_side import HostGraph, LayerWeights, layer_weights
from offload.stream.forms import ExpertForm
from offload.stream.split_path import Hybrid


class HostThread:
    """A thread that computes the chosen pairs of a host graph, and counts the seconds.

    Meanwhile the caller's thread submits the many launches of the device's pairs.
    """

    def __init__(self, team: CpuTeam, counters: StreamCounters) -> None:
        self._team, self._counters = team, counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pairs")  # starts at first use
        self._running: Future[int] | None = None

    def start(self, host: HostGraph, layer: int, wait: Callable[[], None]) -> None:
        """Compute the pairs that `host` was told, which are of `layer`, after `wait`."""
        self._running = self._thread.submit(self._compute, host, layer, wait)

    def _compute(self, host: HostGraph, layer: int, wait: Callable[[], None]) -> int:
        wait()
        start_s = time.perf_counter()
        status = host.compute(self._team.stream, layer)
        self._counters.host_s += time.perf_counter() - start_s
        return status

    def join(self) -> int:
        """Wait until the pairs are computed. Returns a ggml_status. Raises DeviceFailed."""
        running, self._running = self._running, None
        return running.result() if running is not None else 0

    def abandon(self) -> None:
        """After a failure, wait for the computation and ignore its result."""
        running, self._running = self._running, None
        if running is not None:
            running.exception()

    def close(self) -> None:
        self.abandon()
        self._thread.shutdown()


_LEAST_RATIO = 1.25  # ratio of copying time to the device's computing time from which sharing pays

# No link is slower. Costs that say so keep experts in RAM, and say nothing of rows.
_LEAST_LINK_BYTES_PER_S = 100e6


def rows_way(form: ExpertForm, copy_s: float) -> RowsWay:
    """Return the way of a layer's rows, over a link that copies an expert in `copy_s`."""
    if copy_s <= 0.0:
        return RowsWay()
    expert_bytes = sum(product.weight.strides[2] for product in form.products)
    rate = max(_LEAST_LINK_BYTES_PER_S, expert_bytes / copy_s)
    inputs_bytes = 4 * int(np.prod(form.inputs.shape))
    return RowsWay.over(rate, inputs_bytes, 4 * form.down.node.shape[0])


@dataclass
class CpuPart:
    """The CPU's pairs of one layer."""

    experts: NDArray[np.int32]  # each pair's expert
    pairs: NDArray[np.int32]  # indices into the batch's ids
    rows: NDArray[np.int32]  # each pair's row among those of the tokens
    host: HostGraph
    weights: LayerWeights


class PromptSide:
    """Divides and computes the CPU's pairs of one executor's passes."""

    def __init__(self, hybrid: Hybrid, device: Device, counters: StreamCounters) -> None:
        self._hybrid, self._device = hybrid, device
        self._graphs: dict[object, HostGraph] = {}
        self._weights: dict[int, LayerWeights] = {}  # by group
        self._thread = HostThread(hybrid.team, counters)

    def close(self) -> None:
        self._thread.close()
        for graph in self._graphs.values():
            graph.close()

    @property
    def splitter(self) -> Splitter:
        """The splitter that divides the layers of this device now."""
        return self._hybrid.ways.now.splitter_of(self._hybrid.nth)

    def shares(self, n_tokens: int) -> bool:
        """True if the CPU computes a part of batches of this size."""
        return not self._hybrid.is_foreign and self._hybrid.ways.now.shares_prompts(n_tokens)

    def pays(self, pool: SlotPool, n_tokens: int) -> bool:
        """True if copies are expected to take longer than the device's products.

        Otherwise copies are hidden behind products, and gathering pairs would only add work.
        """
        splitter = self.splitter
        if not isinstance(splitter, ByCosts):
            return True
        costs, n_experts = splitter.costs, pool.n_experts
        rows = np.array([-(-n_tokens * pool.n_used // n_experts)])
        missing = n_experts * (1.0 - pool.n_slots / pool.n_pieces)
        device_s = n_experts * float(seconds_at(costs.device_s, rows)[0])
        return missing * costs.copy_s > _LEAST_RATIO * device_s

    def part(
        self, form: ExpertForm, group: int, layer: int, pairs: NDArray[np.int32],
        experts: NDArray[np.int32],
    ) -> CpuPart:  # fmt: skip
        """Return the CPU's part of a layer: `pairs`, and the expert of each. Raises DoesNotFit."""
        host = self._graphs.get(form.key)
        by_pair, n_tokens = form.inputs.shape[1:3]
        n_rows = by_pair * n_tokens
        if host is None or host.most < len(pairs) or host.n_rows < n_rows:
            most = prompt_host_pairs(len(pairs))
            if host is not None:
                most, n_rows = max(most, host.most), max(n_rows, host.n_rows)
                host.close()
            host = self._graphs[form.key] = HostGraph(form, most, self._device, n_rows)
        rows = pairs if by_pair > 1 else pairs // form.ids.shape[0]
        return CpuPart(experts, pairs, rows, host, self._weights_of(form, group, layer))

    def _weights_of(self, form: ExpertForm, group: int, layer: int) -> LayerWeights:
        """Return the weights of a layer. All graphs of a model have the same ones."""
        weights = self._weights.get(group)
        if weights is None:
            weights = self._weights[group] = layer_weights(form, layer)
        return weights

    def experts(
        self, form: ExpertForm, ids: NDArray[np.int32], rows: NDArray[np.intp],
        resident: NDArray[np.bool_], coming: Collection[int] = (),
    ) -> list[int]:  # fmt: skip
        """Return the experts that the CPU computes, those with the fewest pairs first.

        `ids` [n_tokens, n_used]: each token's experts. `rows` [n_experts]: each expert's pairs.
        `resident` [n_experts]: True for experts in slots. `coming`: experts whose copies are under
        way. They stay on the device.
        """
        splitter = self.splitter
        if not isinstance(splitter, ByCosts):
            return host_experts(splitter(ids, resident), rows, resident, coming)
        way = rows_way(form, splitter.costs.copy_s)
        return soonest_host_experts(rows, resident, coming, splitter.costs, way)

    def start(self, part: CpuPart, wait: Callable[[], None]) -> None:
        """Let the thread compute the pairs when `wait` has returned.

        The tokens' rows must be in the host graph's memory then.
        """
        part.host.choose(part.weights, part.experts, part.rows)
        self._hybrid.team.choose(len(part.pairs))
        self._thread.start(part.host, part.weights.layer, wait)

    def join(self) -> int:
        """Wait until the pairs are computed. Returns a ggml_status. Raises DeviceFailed."""
        return self._thread.join()

    def abandon(self) -> None:
        """After a failure, wait for the thread and ignore its result."""
        self._thread.abandon()
