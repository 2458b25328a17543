"""The CPU's part of layers that are computed in passes, in large batches.

A thread computes the CPU's pairs in blocks, while the device computes its passes and the link
copies. On devices whose kernels use pinned memory, one kernel writes the rows that a block needs
there, and another one reads the block's results. On other devices the rows of all tokens are copied
to pinned memory, and the results are copied to the device (offload/stream/pass_runner.py). There
the device gathers no rows, because it would need tables of them. A card takes copies to it in
order, so these tables would come behind all experts that are copied ahead of the router.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import Device, Stream
from offload.ggml.threads import CpuTeam
from offload.plan.slot_layout import SlotPool
from offload.schedule.division import seconds_at
from offload.schedule.pair_rows import prompt_host_pairs
from offload.schedule.passes import (
    Launch,
    RowsWay,
    host_blocks,
    host_experts,
    in_order_of_use,
    soonest_host_experts,
)
from offload.schedule.slots import StreamCounters
from offload.schedule.splitter import ByCosts, Splitter
from offload.stream.copying import GraphEvents
from offload.stream.cpu_side import HostGraph, LayerWeights, layer_weights
from offload.stream.forms import ExpertForm
from offload.stream.passes import PassGraph
from offload.stream.split_path import Hybrid


class HostThread:
    """A thread that computes the chosen pairs of a host graph, and counts the seconds.

    Meanwhile the caller's thread submits the many launches of the device's pairs.
    """

    def __init__(self, team: CpuTeam, counters: StreamCounters) -> None:
        self._team, self._counters = team, counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pairs")  # starts at first use
        self._blocks: deque[Future[int]] = deque()

    def start(self, part: CpuPart, waits: Sequence[Callable[[], None]]) -> None:
        """Compute a part block by block, each one after its wait."""
        self.abandon()  # a part of a layer that failed
        for block, wait in zip(part.blocks, waits, strict=True):
            self._blocks.append(self._thread.submit(self._compute, part, block, wait))

    def _compute(self, part: CpuPart, block: slice, wait: Callable[[], None]) -> int:
        wait()
        start_s = time.perf_counter()
        part.host.choose(part.weights, part.experts[block], part.rows[block], block.start)
        status = part.host.compute(self._team.stream, part.weights.layer)
        self._counters.host_s += time.perf_counter() - start_s
        return status

    def join(self) -> int:
        """Wait until the next block is computed. Returns a ggml_status. Raises DeviceFailed."""
        status = self._blocks[0].result()  # after an interrupt, `abandon` still waits for it
        self._blocks.popleft()
        return status

    def abandon(self) -> None:
        """After a failure, wait for the block that is computed, and drop the others."""
        while self._blocks:
            block = self._blocks.pop()  # the last one first, so that no further one begins
            if not block.cancel():
                block.exception()

    def close(self) -> None:
        self.abandon()
        self._thread.shutdown()


_LEAST_RATIO = 1.25  # ratio of copying time to the device's computing time from which sharing pays

# No link is slower. Costs that say so keep experts in RAM, and say nothing of rows.
_LEAST_LINK_BYTES_PER_S = 100e6


def rows_way(form: ExpertForm, copy_s: float, *, in_blocks: bool) -> RowsWay:
    """Return the way of a layer's rows, over a link that copies an expert in `copy_s`.

    `in_blocks`: as for `RowsWay.over`.
    """
    if copy_s <= 0.0:
        return RowsWay()
    expert_bytes = sum(product.weight.strides[2] for product in form.products)
    rate = max(_LEAST_LINK_BYTES_PER_S, expert_bytes / copy_s)
    n_in, *others = form.inputs.shape
    n_rows, n_out = int(np.prod(others)), form.down.node.shape[0]
    return RowsWay.over(rate, n_rows, 4 * n_in, 4 * n_out, in_blocks=in_blocks)


@dataclass
class CpuPart:
    """The CPU's pairs of one layer."""

    experts: NDArray[np.int32]  # each pair's expert
    pairs: NDArray[np.int32]  # indices into the batch's ids
    rows: NDArray[np.int32]  # each pair's row among those in the host graph's memory
    host: HostGraph
    weights: LayerWeights
    blocks: Sequence[slice]  # pairs of each block

    def gather(
        self, graph: PassGraph, stream: Stream, events: GraphEvents
    ) -> tuple[list[Callable[[], None]], int]:
        """Let kernels write the needed rows to pinned memory, those of the first block first.

        The device must be able to use this memory. Returns a wait for the rows of each block, and a
        ggml_status.
        """
        host, n_before, status = self.host, 0, 0
        waits: list[Callable[[], None]] = []
        wanted, self.rows = in_order_of_use(self.rows, host.n_rows)
        host.want(wanted)
        for block in self.blocks:
            n_rows = int(self.rows[: block.stop].max()) + 1
            if n_rows > n_before and not status:
                rows_at = host.inputs_at + host.row_bytes * n_before
                numbers_at = host.wanted_at + 4 * n_before
                graph.gather_to(host.results, numbers_at, rows_at, n_rows - n_before)
                status = stream.compute(graph.gathering)
            waits.append(events.record(stream).synchronize)
            n_before = n_rows
        return waits, status

    def place(self, graph: PassGraph, block: slice, stream: Stream) -> int:
        """Let a kernel read a block's results and write them to their places.

        Returns a ggml_status.
        """
        host, first = self.host, block.start
        rows_at = host.header_bytes + 4 * host.n_out * first
        graph.read_from(host.results, 4 * first, rows_at, block.stop - first)
        return stream.compute(graph.placing_read)

    def launches(self, block: slice, most: int) -> Iterator[tuple[int, Launch]]:
        """Yield a block's pairs, at most `most` at once: the number of the first one, and them."""
        for first in range(block.start, block.stop, most):
            some = slice(first, min(first + most, block.stop))
            slots = np.zeros_like(self.experts[some])
            yield first, Launch(self.pairs[some], self.experts[some], slots)


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
        weights = self._weights_of(form, group, layer)
        return CpuPart(experts, pairs, rows, host, weights, self._blocks(form, experts))

    def _blocks(self, form: ExpertForm, experts: NDArray[np.int32]) -> list[slice]:
        """Return the blocks of pairs. `experts`: each pair's expert."""
        splitter = self.splitter
        if isinstance(splitter, ByCosts):
            way = rows_way(form, splitter.costs.copy_s, in_blocks=False)
            if way.is_in_one(len(experts)):
                return [slice(0, len(experts))]
        starts = np.flatnonzero(np.diff(experts, prepend=-1))
        return host_blocks(np.diff(starts, append=len(experts)))

    def _weights_of(self, form: ExpertForm, group: int, layer: int) -> LayerWeights:
        """Return the weights of a layer. All graphs of a model have the same ones."""
        weights = self._weights.get(group)
        if weights is None:
            weights = self._weights[group] = layer_weights(form, layer)
        return weights

    def experts(
        self, form: ExpertForm, ids: NDArray[np.int32], rows: NDArray[np.intp],
        resident: NDArray[np.bool_], coming: Collection[int] = (), *, in_blocks: bool = False,
    ) -> list[int]:  # fmt: skip
        """Return the experts that the CPU computes, those with the fewest pairs first.

        `ids` [n_tokens, n_used]: each token's experts. `rows` [n_experts]: each expert's pairs.
        `resident` [n_experts]: True for experts in slots. `coming`: experts whose copies are under
        way. They stay on the device. `in_blocks`: as for `RowsWay.over`.
        """
        splitter = self.splitter
        if not isinstance(splitter, ByCosts):
            return host_experts(splitter(ids, resident), rows, resident, coming)
        way = rows_way(form, splitter.costs.copy_s, in_blocks=in_blocks)
        return soonest_host_experts(rows, resident, coming, splitter.costs, way)

    def start(self, part: CpuPart, waits: Sequence[Callable[[], None]]) -> None:
        """Let the thread compute each block of pairs when its wait has returned.

        The rows of these pairs must be in the host graph's memory then.
        """
        self._hybrid.team.choose(len(part.pairs))
        self._thread.start(part, waits)

    def join(self) -> int:
        """Wait until the next block is computed. Returns a ggml_status. Raises DeviceFailed."""
        return self._thread.join()

    def abandon(self) -> None:
        """After a failure, wait for the thread and ignore its result."""
        self._thread.abandon()
