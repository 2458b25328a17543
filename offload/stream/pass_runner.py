"""Runs a layer's passes: gives their experts slots, waits for copies, and submits the launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from offload.alignment import power_of_two
from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph
from offload.ggml.rewriting import Scratch
from offload.ggml.tensor import new_tensor
from offload.plan.slot_layout import SlotLayout, SlotPool
from offload.plan.working import LEAST_BYTES
from offload.routing.routing import expected_union
from offload.schedule.batch import slot_range
from offload.schedule.passes import (
    AHEAD_OF_ROUTER,
    Launch,
    PairOrder,
    passes_of,
)
from offload.schedule.slots import NOWHERE, CutNeed
from offload.schedule.splitter import Splitter
from offload.stream.copying import GraphEvents
from offload.stream.cut_graph import CutGraph
from offload.stream.passes import PassStep, PinnedLaunch, without_forms
from offload.stream.prompt_side import CpuPart, PromptSide
from offload.stream.slot_ids import IdExchange
from offload.stream.stream_parts import StreamParts
from offload.trace.trace import COMPUTE


class PassRunner:
    """Runs the passes of one executor."""

    def __init__(
        self,
        parts: StreamParts,
        layout: SlotLayout,
        ids: IdExchange,
        most_tokens: int = 0,
        cpu: PromptSide | None = None,
        *,
        reads_pinned: bool = False,
    ) -> None:
        """With `cpu`, the CPU computes a part of each layer. None: the device computes all.

        `most_tokens`: tokens of the largest batch, for which memory is taken at once; 0: unknown.
        `reads_pinned`: the device's kernels read tables and results from pinned host memory, and
        write the rows that the CPU needs there.
        """
        self._cpu = cpu
        # Number of experts to copy, by rounded number of tokens and layer. Layer None: the last.
        self._n_copied: dict[tuple[int, int | None], int] = {}
        self._divided_by: Splitter | None = None  # which gave `_n_copied`
        self._after: dict[int, PassStep] = {}  # by cut: the next layer, which is not announced yet
        self.is_alone = True  # False: other devices compute parts of the same graph
        self._stream, self._schedule, self._copies = parts.stream, parts.schedule, parts.copies
        self._counters, self._trace = parts.counters, parts.trace
        self._layout, self._ids, self._most_tokens = layout, ids, most_tokens
        device: Device = parts.stream.device
        self._scratch = Scratch(device, "rows of pairs", LEAST_BYTES)
        self._tables = Scratch(device, "tables of pairs", LEAST_BYTES)
        self._pinned_tables: PinnedLaunch | None = None  # None: tables are copied
        # Copied tables have a stream of their own. Behind a pass on the computing stream, they
        # would only be ready after that pass, and then wait for all copies that are ready by then.
        self._side: Stream | None = None
        self._reads_pinned = reads_pinned
        # The rows of the CPU's pairs come on another one, so that no tables wait for them.
        self._fetching: Stream | None = None
        if device.has_async_and_events and not device.backend.waits_between_graphs:
            self._side = device.open()
            self._fetching = device.open() if cpu is not None else None
            self._events = GraphEvents(device)

    @property
    def device_bytes(self) -> int:
        return self._scratch.device_bytes + self._tables.device_bytes

    def shares(self, n_tokens: int) -> bool:
        """True if the CPU computes a part of prompts' batches of this size.

        Devices that compute a prompt's ubatches at the same time do not share them with the CPU.
        """
        return self._cpu is not None and self.is_alone and self._cpu.shares(n_tokens)

    def _regime(self, step: PassStep, layer: int | None) -> tuple[int, int | None]:
        """Return a key for `_n_copied`. Forget what another splitter gave."""
        splitter = None if self._cpu is None else self._cpu.splitter
        if splitter != self._divided_by:
            self._n_copied.clear()
            self._divided_by = splitter
        return power_of_two(step.n_tokens), layer

    def should_share(self, pool: SlotPool, n_tokens: int) -> bool:
        """True if sharing pays although whole layers of the pool fit the slots."""
        return self._cpu is not None and self.shares(n_tokens) and self._cpu.pays(pool, n_tokens)

    def abandon(self) -> None:
        """After a failure, wait for what the CPU computes, and for kernels that use its memory."""
        if self._cpu is not None:
            self._cpu.abandon()
        self._wait_for_sides()

    def _wait_for_sides(self) -> None:
        """Wait for the kernels and copies that use the CPU's pinned memory."""
        for stream in (self._side, self._fetching):
            if stream is not None:
                stream.synchronize()

    def close(self) -> None:
        self._wait_for_sides()
        if self._cpu is not None:
            self._cpu.close()
        if self._side is not None:
            self._events.close()
            self._side.close()
            if self._fetching is not None:
                self._fetching.close()
            self._side = self._fetching = None
        self._scratch.close()
        if self._pinned_tables is not None:
            self._pinned_tables.close()
            self._pinned_tables = None
        self._tables.close()

    def prepare(self, graph: Graph, steps: Sequence[PassStep]) -> Graph:
        """Return the graph without what `steps` compute in passes. Raises DoesNotFit."""
        n = max(self._most_tokens, *(step.n_tokens for step in steps))
        scratch = self._scratch.reserve(max(step.scratch_bytes(n) for step in steps))
        self._reserve_tables(max(step.tables_bytes(n) for step in steps))
        return without_forms(graph, steps, scratch, self._stream.device)

    def _reserve_tables(self, size_bytes: int) -> None:
        """Take memory for the tables of a layer's launches. Raises DoesNotFit."""
        before = self._tables.reserve(0) if self._pinned_tables is not None else None
        tables = self._tables.reserve(size_bytes)
        if not self._reads_pinned or tables is before:
            return
        if self._pinned_tables is not None:
            self._pinned_tables.close()
            self._pinned_tables = None
        pinned = self._stream.device.pinned_memory(tables.size_bytes + PinnedLaunch.MORE_BYTES)
        if pinned is not None:
            self._pinned_tables = PinnedLaunch(tables, pinned)

    def announce(self, steps: Sequence[PassStep]) -> None:
        """Let the link copy a layer's first experts before the layer's router has run.

        Large batches use nearly all experts, so few copies are wasted. Experts that were used most
        come first. A layer that the CPU shares is announced when the layer before has been divided.
        Copies for it would otherwise come before those that the layer before turns out to need, for
        which both sides would then wait.
        """
        self._after.clear()
        before: PassStep | None = None
        for step in steps:
            if before is not None and self._is_shared(step):
                self._after[before.cut] = step
            else:
                self._predict(step)
            before = step

    def _is_shared(self, step: PassStep) -> bool:
        return step.is_whole and self.shares(step.n_tokens)

    def _predict(self, step: PassStep) -> None:
        schedule = self._schedule
        used = expected_union(step.n_tokens, step.n_used, step.n_experts)
        if used < AHEAD_OF_ROUTER * step.n_experts:
            return
        slots = schedule.pools[step.pool].of_group(step.group, step.n_experts)
        missing = (slots == NOWHERE).nonzero()[0].tolist()
        ranks = schedule.rule.ranks(step.group, step.n_experts - 1)
        missing.sort(key=lambda expert: -ranks[expert])
        if self._is_shared(step):
            # The CPU will compute the others, so copies of them would be wasted.
            last = self._n_copied.get(self._regime(step, None), 0)
            missing = missing[: self._n_copied.get(self._regime(step, step.layer), last)]
        pieces = tuple([(step.group, expert) for expert in missing])
        schedule.predict(CutNeed(step.cut, step.pool, pieces, ring=step.ring))

    def compute(
        self, running: CutGraph, step: PassStep, submit: Callable[[CutGraph, int], int]
    ) -> int:
        """Compute a layer's experts. `submit(running, end)` submits nodes. Return a ggml_status."""
        schedule, copies = self._schedule, self._copies
        copies.enqueue(schedule.issue(step.cut))
        status = submit(running, step.at)
        if status:
            return status
        ids = np.ascontiguousarray(self._ids.read(step))
        if self._side is not None:
            self._events.recycle()  # reading the ids has waited for them
        start_s = time.perf_counter()
        pairs = PairOrder(ids, step.n_experts)
        slots = schedule.pools[step.pool]
        slot_of = slots.of_group(step.group, step.n_experts)
        n_arrived = copies.see_arrivals(step.pool, step.group)
        coming = set(slots.loading.get(step.group, ()))
        is_ready = slot_of != NOWHERE
        is_ready[list(coming)] = False
        part = self._cpu_part(step, ids, pairs, is_ready, coming, n_arrived)
        rows = pairs.rows
        if part is not None:
            rows = rows.copy()
            rows[np.unique(part.experts)] = 0
        passes = passes_of(rows, slot_of, coming, step.n_group)
        self._count(rows, pairs.rows, is_ready)
        for cut, experts in enumerate(passes, step.cut):
            pieces = tuple([(step.group, expert) for expert in experts])
            schedule.need(CutNeed(cut, step.pool, pieces, ring=step.ring))
        offset = 0
        if part is not None:
            status = self._start_cpu(step, part)
            if status:
                return status
        for cut, experts in enumerate(passes, step.cut):
            status, offset = self._pass(running, step, cut, experts, pairs, offset)
            if status:
                return status
        used = pairs.rows.nonzero()[0].tolist()
        schedule.scanned([(step.group, expert) for expert in used])
        following = self._after.pop(step.cut, None)
        if following is not None:
            self._predict(following)
        # The link copies the next layer's experts while the CPU computes. Where the CPU's results
        # are copied, they would come behind these experts.
        is_read = part is not None and self._reads(part)
        if is_read:
            copies.enqueue(schedule.issue(step.cut + step.n_cuts - 1))
        if part is not None:
            status = self._place(running, step, part, offset)
            self._counters.split_layers += 1
            self._counters.split_s += time.perf_counter() - start_s
        if not is_read:
            copies.enqueue(schedule.issue(step.cut + step.n_cuts - 1))
        return status

    def _count(
        self, on_device: NDArray[np.intp], rows: NDArray[np.intp], there: NDArray[np.bool_]
    ) -> None:
        """Count the pairs by who computes them. `on_device`, `rows`: pairs of each expert."""
        if self._cpu is None:
            return
        n_all, n_device, n_hit = (int(n.sum()) for n in (rows, on_device, on_device[there]))
        self._counters.n_pairs_hit += n_hit
        self._counters.n_pairs_streamed += n_device - n_hit
        self._counters.n_pairs_host += n_all - n_device

    # -- the CPU's part ----------------------------------------------------------------------------

    def _cpu_part(
        self,
        step: PassStep,
        ids: NDArray[np.int32],
        pairs: PairOrder,
        is_ready: NDArray[np.bool_],
        coming: Collection[int],
        n_arrived: int,
    ) -> CpuPart | None:
        """Return the pairs that the CPU computes, or None if the device computes all.

        `is_ready` [n_experts]: experts in slots. `coming`: experts whose copies are under way. The
        device computes both. `n_arrived`: experts in slots whose copies were under way.
        """
        if self._cpu is None or not step.is_whole or not self.shares(step.n_tokens):
            return None
        divided = partial(
            self._cpu.experts, step.form, ids, pairs.rows, is_ready, in_blocks=self._reads_pinned
        )
        experts = divided(coming)
        # As many experts are copied ahead of the next router as this one should have found missing.
        # What was copied ahead of this one must not decide it, or too many would stay too many.
        n_missing = n_arrived + int(((pairs.rows > 0) & ~is_ready).sum())
        n_copied = n_missing - len(divided(()) if coming else experts)
        for layer in (step.layer, None):
            self._n_copied[self._regime(step, layer)] = n_copied
        if not experts:
            return None
        chosen = pairs.pairs_of(experts)
        of_pairs = ids.ravel()[chosen]
        return self._cpu.part(step.form, step.group, step.layer, chosen, of_pairs)

    def _start_cpu(self, step: PassStep, part: CpuPart) -> int:
        """Fetch rows, and let the CPU compute each block of its pairs when their rows are there.

        Reading this layer's ids has waited for the kernels that read the last layer's numbers.
        Returns a ggml_status.
        """
        assert step.graph is not None
        assert self._cpu is not None
        part.host.place(part.pairs)
        stream, n_blocks, status = self._fetching, len(part.blocks), 0
        if stream is None:
            self._stream.fetch(step.graph.rows, part.host.inputs_of(step.n_tokens))
            self._stream.synchronize()
            waits: list[Callable[[], None]] = [lambda: None] * n_blocks
        else:
            stream.wait(self._events.record(self._stream))
            if self._reads(part):
                waits, status = part.gather(step.graph, stream, self._events)
            else:
                stream.fetch(step.graph.rows, part.host.inputs_of(step.n_tokens))
                waits = [stream.synchronize] * n_blocks
        self._cpu.start(part, waits)
        return status

    def _reads(self, part: CpuPart) -> bool:
        """True if a kernel reads the CPU's results over the link. Otherwise they are copied."""
        return self._reads_pinned and part.host.is_pinned and self._side is not None

    def _place(self, running: CutGraph, step: PassStep, part: CpuPart, offset: int) -> int:
        """Write the CPU's results to their places, block by block. Return a ggml_status.

        A kernel reads the results over the link if it can. A copy would come behind all experts
        that the device's one engine copies for the next layers, and the next router behind it. The
        kernel has a stream of its own, so that it does not wait for passes, which write other rows.
        """
        assert step.graph is not None
        assert self._cpu is not None
        reading = self._side if self._reads(part) else None
        for block in part.blocks:
            status = self._cpu.join()
            if not status and reading is not None:
                status = part.place(step.graph, block, reading)
            elif not status:
                status, offset = self._place_copied(running, step, part, block, offset)
            if status:
                return status
        if reading is not None:
            self._stream.wait(self._events.record(reading))
        return 0

    def _place_copied(
        self, running: CutGraph, step: PassStep, part: CpuPart, block: slice, offset: int
    ) -> tuple[int, int]:
        """Copy a block of results, with tables from `offset` on.

        Returns a ggml_status and the next offset.
        """
        assert step.graph is not None
        status = 0
        for first, launch in part.launches(block, step.most_pairs):
            if status:
                break
            n = len(launch.pairs)
            if first and self._stream.device.backend.waits_between_graphs:
                self._stream.synchronize()  # the copy may overtake the last launch
            at = self._room(offset, step.form.pairs.table_bytes(n))
            offset = self._upload(running, step, launch, 0, at)
            step.graph.point(n, self._tables.reserve(0), at)
            self._stream.put(step.graph.results, part.host.results_of(first, n))
            status = self._stream.compute(step.graph.placing)
        # Reading the next layer's ids waits for these copies, so its results may overwrite them.
        return status, offset

    # -- one pass ----------------------------------------------------------------------------------

    def _pass(
        self, running: CutGraph, step: PassStep, cut: int, experts: Sequence[int],
        pairs: PairOrder, offset: int,
    ) -> tuple[int, int]:  # fmt: skip
        """Compute one pass, with tables from `offset` on. Return a status and the next offset."""
        schedule, copies = self._schedule, self._copies
        issued = schedule.issue(cut)
        entered = schedule.enter(cut)
        copies.last_use = entered.use
        launches = pairs.launches(experts, entered.slots, step.most_pairs, step.most_slots)
        placed = []
        status = 0
        for launch in launches:  # tables before experts: one engine of the device copies both
            first, at, offset, sent = self._send(running, step, launch, offset)
            status = status or sent
            placed.append((launch, first, at))
        if self._side is not None and self._pinned_tables is None:
            self._stream.wait(self._events.record(self._side))
        copies.enqueue([*issued, *entered.issued])
        if entered.waits:
            tickets = copies.tickets_of(entered.waits)
            copies.wait(tickets, copies.kinds[step.group], step.layer)
        for launch, first, at in placed:
            status = status or self._launch(step, launch, first, at)
        self._counters.cuts += 1
        self._counters.passes += 1
        copies.fence([open_step.use for open_step in running.open])
        schedule.leave(cut)
        return status, offset

    def _send(
        self, running: CutGraph, step: PassStep, launch: Launch, offset: int
    ) -> tuple[tuple[int, int], int, int, int]:
        """Upload a launch's tables.

        Returns the slots that it sees, the tables' first and end, and a ggml_status.

        Reading the layer's ids has waited for all uploads of earlier layers.
        """
        assert step.graph is not None
        n_slots = self._schedule.pools[step.pool].n_slots
        seen = slot_range((int(launch.slots[0]), int(launch.slots[-1])), n_slots, step.slots_seen)
        if seen[1] > step.most_slots:
            first = int(launch.slots[0])
            seen = first, int(launch.slots[-1]) + 1 - first
        step.slots_seen = seen
        at = self._room(offset, step.form.pairs.table_bytes(len(launch.pairs)))
        if self._pinned_tables is None:
            return seen, at, self._upload(running, step, launch, seen[0], at, self._side), 0
        tables = step.graph.tables(launch, step.n_used, seen[0], step.scales)
        self._pinned_tables.fill(tables, at)
        status = self._stream.compute(self._pinned_tables.graph)
        return seen, at, at + tables.nbytes, status

    def _room(self, offset: int, size_bytes: int) -> int:
        """Return where tables of `size_bytes` go: to `offset`, or to the start if that is full."""
        if offset + size_bytes <= self._tables.reserve(0).size_bytes:
            return offset
        self._stream.synchronize()  # launches had few pairs each, so the tables took more room
        return 0

    def _upload(
        self, running: CutGraph, step: PassStep, launch: Launch, first_slot: int, offset: int,
        stream: Stream | None = None,
    ) -> int:  # fmt: skip
        """Upload a launch's tables to an offset, on the computing stream unless `stream` is given.

        Returns their end.
        """
        assert step.graph is not None
        tables = step.graph.tables(launch, step.n_used, first_slot, step.scales)
        buffer = self._tables.reserve(0)
        whole = new_tensor("i8", (buffer.size_bytes, 1, 1, 1), (buffer, 0))
        (stream or self._stream).send(whole, offset, tables)
        running.sent.append((whole, tables))
        return offset + tables.nbytes

    def _launch(self, step: PassStep, launch: Launch, seen: tuple[int, int], at: int) -> int:
        assert step.graph is not None
        for source, views in zip(step.graph.sources, step.views.values(), strict=True):
            source.to(views.of(*seen))
        step.graph.point(len(launch.pairs), self._tables.reserve(0), at)
        start_s = time.perf_counter()
        status = self._stream.compute(step.graph.graph)
        if self._stream.device.backend.waits_between_graphs:
            self._stream.synchronize()  # the next graph may free memory that this one still uses
        if self._trace.is_on:
            self._trace.add(COMPUTE, f"{len(launch.pairs)} pairs", start_s, time.perf_counter(),
                            layer=step.layer)  # fmt: skip
        return status
