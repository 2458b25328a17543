"""Runs a layer's passes: gives their experts slots, waits for copies, and submits the launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from offload.ggml.backend import Device
from offload.ggml.graph import Graph
from offload.ggml.rewriting import Scratch
from offload.ggml.tensor import new_tensor
from offload.plan.slot_layout import SlotLayout
from offload.routing.routing import expected_union
from offload.schedule.batch import slot_range
from offload.schedule.passes import AHEAD_OF_ROUTER, Launch, PairOrder, passes_of
from offload.schedule.slots import NOWHERE, CutNeed
from offload.streaming.cut_graph import CutGraph
from offload.streaming.passes import PassStep, without_forms
from offload.streaming.slot_ids import IdExchange
from offload.streaming.stream_parts import StreamParts
from offload.trace.trace import COMPUTE

_LEAST_BYTES = 1 << 20


class PassRunner:
    """Runs the passes of one executor."""

    def __init__(self, parts: StreamParts, layout: SlotLayout, ids: IdExchange) -> None:
        self._stream, self._schedule, self._copies = parts.stream, parts.schedule, parts.copies
        self._counters, self._trace = parts.counters, parts.trace
        self._layout, self._ids = layout, ids
        device: Device = parts.stream.device
        self._scratch = Scratch(device, "rows of pairs", _LEAST_BYTES)
        self._tables = Scratch(device, "tables of pairs", _LEAST_BYTES)

    @property
    def device_bytes(self) -> int:
        return self._scratch.device_bytes + self._tables.device_bytes

    def close(self) -> None:
        self._scratch.close()
        self._tables.close()

    def prepare(self, graph: Graph, steps: Sequence[PassStep]) -> Graph:
        """Return the graph without what `steps` compute in passes. Raises DoesNotFit."""
        scratch = self._scratch.reserve(max(step.scratch_bytes for step in steps))
        self._tables.reserve(max(step.tables_bytes for step in steps))
        return without_forms(graph, steps, scratch, self._stream.device)

    def announce(self, steps: Sequence[PassStep]) -> None:
        """Let the link copy a layer's first experts before the layer's router has run.

        Large batches use nearly all experts, so hardly a copy is in vain. Experts that were used
        most come first.
        """
        schedule = self._schedule
        for step in steps:
            used = expected_union(step.n_tokens, step.n_used, step.n_experts)
            if used < AHEAD_OF_ROUTER * step.n_experts:
                continue
            slots = schedule.pools[step.pool].of_group(step.group, step.n_experts)
            missing = (slots == NOWHERE).nonzero()[0].tolist()
            ranks = schedule.rule.ranks(step.group, step.n_experts - 1)
            missing.sort(key=lambda expert: -ranks[expert])
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
        pairs = PairOrder(self._ids.read(step), step.n_experts)
        slots = schedule.pools[step.pool]
        passes = passes_of(
            pairs.rows,
            slots.of_group(step.group, step.n_experts),
            slots.loading.get(step.group, ()),
            step.n_group,
        )
        for cut, experts in enumerate(passes, step.cut):
            pieces = tuple([(step.group, expert) for expert in experts])
            schedule.need(CutNeed(cut, step.pool, pieces, ring=step.ring))
        offset = 0
        for cut, experts in enumerate(passes, step.cut):
            status, offset = self._pass(running, step, cut, experts, pairs, offset)
            if status:
                return status
        used = pairs.rows.nonzero()[0].tolist()
        schedule.scanned([(step.group, expert) for expert in used])
        copies.enqueue(schedule.issue(step.cut + step.n_cuts - 1))
        return 0

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
        for launch in launches:  # before the copies, because a device has one engine for both
            first, at, offset = self._send(running, step, launch, offset)
            placed.append((launch, first, at))
        copies.enqueue([*issued, *entered.issued])
        if entered.waits:
            tickets = copies.tickets_of(entered.waits)
            copies.wait(tickets, copies.kinds[step.group], step.layer)
        status = 0
        for launch, first, at in placed:
            status = status or self._launch(step, launch, first, at)
        self._counters.cuts += 1
        self._counters.passes += 1
        copies.fence([open_step.use for open_step in running.open])
        schedule.leave(cut)
        return status, offset

    def _send(
        self, running: CutGraph, step: PassStep, launch: Launch, offset: int
    ) -> tuple[tuple[int, int], int, int]:
        """Upload a launch's tables. Return the slots that it sees, and the tables' first and end.

        Reading the layer's ids has waited for all uploads of earlier layers.
        """
        assert step.graph is not None
        n_slots = self._layout.pools[step.pool].n_slots
        seen = slot_range((int(launch.slots[0]), int(launch.slots[-1])), n_slots, step.slots_seen)
        if seen[1] > step.most_slots:
            first = int(launch.slots[0])
            seen = first, int(launch.slots[-1]) + 1 - first
        step.slots_seen = seen
        tables = step.graph.tables(launch, step.n_used, seen[0], step.scales)
        buffer = self._tables.reserve(0)
        if offset + tables.nbytes > buffer.size_bytes:  # launches of few pairs each
            self._stream.synchronize()
            offset = 0
        whole = new_tensor("i8", (buffer.size_bytes, 1, 1, 1), (buffer, 0))
        self._stream.send(whole, offset, tables)
        running.sent.append((whole, tables))
        return seen, offset, offset + tables.nbytes

    def _launch(self, step: PassStep, launch: Launch, seen: tuple[int, int], at: int) -> int:
        assert step.graph is not None
        for source, views in zip(step.graph.sources, step.views.values(), strict=True):
            source.to(views.of(*seen))
        step.graph.point(len(launch.pairs), self._tables.reserve(0), at)
        start_s = time.perf_counter()
        status = self._stream.compute(step.graph.graph)
        if self._trace:
            self._trace.add(COMPUTE, f"{len(launch.pairs)} pairs", start_s, time.perf_counter(),
                            layer=step.layer)  # fmt: skip
        return status
