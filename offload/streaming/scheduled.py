"""Executes the schedule: runs a graph between its cuts while the next weights are being copied.

The schedule decides (offload/schedule), a copier copies (offload/streaming/copy.py), and this
file drives both through one graph:

    for each cut:   issue what may be copied now
                    experts of a layer met first: compute up to here, read the router's ids, tell
                    the schedule what is needed of gate, up and down together
                    not all there yet? compute up to here meanwhile, then wait for the copies
                    point the node at its slots; go on without submitting while the next is ready

Nodes are submitted in as few computations as that allows, so that the backend can fuse neighbours.
A node's sources are restored as soon as its part was submitted: backends read them at submission.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.ggml import tensor
from offload.ggml.arena import Arena, DeviceMemory
from offload.ggml.graph import Cut, CutList
from offload.ggml.library.lib import library
from offload.ggml.pydevice import Backend
from offload.ggml.router import ids_like, read_router
from offload.plan.placement import ArenaPlan, Shape
from offload.schedule.coalesce import Span, coalesce
from offload.schedule.commands import Copy, Need
from offload.schedule.predict import Routing, whole_is_better
from offload.schedule.schedule import Schedule
from offload.streaming.copy import Copier, Transfer
from offload.streaming.counters import StreamCounters
from offload.trace import COMPUTE, NO_TRACE, Trace


@dataclass(slots=True)
class Step:
    """A cut with all that stays the same every time its graph is computed."""

    index: int
    cut: Cut
    weight: int  # its number among the streamed weights
    arena: int
    layer: int
    n_experts: int  # 0: dense
    n_tokens: int
    n_used: int
    whole: bool
    group: tuple[int, ...]  # steps that share this one's router ids, itself included
    first_of_group: bool
    need: Need | None  # known before the graph runs: dense and whole weights
    ids_offset: int = 0
    ids_view: Any = None  # a tensor at ids_offset of the device's memory for remapped ids
    missed: bool = True  # whether something had to be copied for it the last time


@dataclass(slots=True)
class _Run:
    """Where the computation of one graph stands."""

    cut_list: CutList
    steps: list[Step]
    done: int = 0  # nodes submitted
    open_cuts: list[int] = field(default_factory=list)  # entered, not yet submitted
    patched: list[tuple[int, int, int]] = field(default_factory=list)  # node, source, original
    kept: list[Any] = field(default_factory=list)  # what submitted nodes refer to
    # router ids -> the choice of every token, and the distinct experts, as plain lists
    chosen: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)


class ScheduledExecutor:
    """Runs graphs with cuts on one inner backend, copies overlapped with computation."""

    def __init__(
        self,
        buft: int,
        backend: Backend,
        arenas: Sequence[ArenaPlan],
        schedule: Schedule,
        copier: Copier,
        layer_of_weight: Mapping[str, int],
        trace: Trace = NO_TRACE,
        *,
        prefetch: bool = True,
    ) -> None:
        self._lib = library()
        self._buft, self._backend = buft, backend
        self._plans = {plan.shape: i for i, plan in enumerate(arenas)}
        self._arena_plans = tuple(arenas)
        self._arenas: list[Arena | None] = [None] * len(arenas)
        self.schedule, self.copier, self._trace = schedule, copier, trace
        self._prefetch = prefetch
        self._routing = Routing()
        self._layers = layer_of_weight
        self._weights: dict[int, int] = {}  # tensor address -> number
        self._sources: list[int] = []  # number -> tensor address
        self._steps: dict[int, tuple[CutList, list[Step]]] = {}
        self._ids_memory: DeviceMemory | None = None
        self._tickets: dict[tuple[int, int], Any] = {}
        self._fence_uses: list[int] = []
        self._fences: list[Any] = []
        self._last_use = 0
        self._first_use = 1  # of this graph: what was used before is complete
        self._kept: list[Any] = []
        self.counters = StreamCounters()

    def close(self) -> None:
        self.copier.close()
        for arena in self._arenas:
            if arena is not None:
                arena.close()
        if self._ids_memory is not None:
            self._ids_memory.close()

    # -- one graph -------------------------------------------------------------------------------

    def compute(self, cut_list: CutList) -> int:
        """Run the whole graph; a ggml_status. Raises DeviceFailed when a copy failed."""
        run = _Run(cut_list, self._steps_of(cut_list))
        self.counters.graphs += 1
        self.copier.begin()
        if not self.copier.tickets_survive:
            self._tickets.clear()
        self._kept = []
        self._fence_uses.clear()
        self._fences.clear()
        self._first_use = self._last_use + 1
        try:
            self._announce(run)
            for step in run.steps:
                status = self._advance(run, step)
                if status:
                    break
            else:
                status = self._submit(run, cut_list.n_nodes)
            if status:
                self._recover(run)
            self._kept = run.kept  # the device may still refer to it when this returns
            self._count()
            return status
        except BaseException:
            self._recover(run)
            raise

    def _count(self) -> None:
        decided = self.schedule.counters
        for name in ("hits", "misses", "evictions", "prefetched_used", "prefetched_wasted"):
            setattr(self.counters, name, getattr(decided, name))

    def _recover(self, run: _Run) -> None:
        self._restore(run)
        self._lib.ggml_backend_synchronize(self._backend.inner)
        self.schedule.abort()
        self.copier.abandon()

    def _announce(self, run: _Run) -> None:
        """Tell the schedule what is known and what is guessed before anything runs."""
        schedule = self.schedule
        schedule.begin(len(run.steps))
        for step in run.steps:
            if step.need is not None:
                schedule.need(step.need)
            elif self._prefetch and step.missed:
                guess = self._routing.predict(step.layer, step.n_tokens)
                if guess:
                    pieces = tuple((step.weight, expert) for expert in guess)
                    schedule.predict(Need(step.index, step.arena, pieces))

    def _advance(self, run: _Run, step: Step) -> int:
        """Bring the graph to just behind this step's node being ready to be submitted."""
        self._enqueue(self.schedule.issue(step.index))
        status = 0
        if step.need is None and step.first_of_group:
            status = self._submit(run, step.cut.index)
            if status:
                return status
            self._read_router(run, step)
            self._enqueue(self.schedule.issue(step.index))
        if not self.schedule.ready(step.index):
            status = self._submit(run, step.cut.index)
            if status:
                return status
        entered = self.schedule.enter(step.index)
        self._last_use = entered.use
        step.missed = entered.misses > 0 or bool(entered.waits)
        self._enqueue(entered.issued)
        if entered.waits:
            self._wait(step, entered.waits)
        self.counters.cuts += 1
        run.open_cuts.append(step.index)
        self._point(run, step, entered.slots)
        return 0

    # -- copies ----------------------------------------------------------------------------------

    def _enqueue(self, commands: Sequence[Any]) -> None:
        copies = [command for command in commands if isinstance(command, Copy)]
        if not copies:
            return
        # One ticket for each cut's pieces: the gate need not wait for up, down and the guesses.
        for (_, reason), group in itertools.groupby(copies, key=lambda c: (c.cut, c.reason)):
            of_cut = list(group)
            for span in coalesce(of_cut):
                self._copy_span(span, reason)
            ticket = self.copier.mark()
            for copy in of_cut:
                self._tickets[copy.piece] = ticket

    def _copy_span(self, span: Span, reason: str) -> None:
        source = tensor.at(self._sources[span.weight])
        arena = self._arena(span.pool, self._sources[span.weight])
        size = arena.slot_bytes
        transfer = Transfer(
            arena.slots(span.slot, span.n),
            0,
            source.data + span.expert * size,
            span.n * size,
            *self._described(span, reason),
        )
        self.copier.copy(transfer, self._fence_after(span.after))
        self.counters.copies += 1
        self.counters.streamed_bytes += transfer.size_bytes
        self.counters.streamed_experts += span.n

    def _described(self, span: Span, reason: str) -> tuple[str, dict[str, int | str]]:
        if not self._trace:
            return "", {}
        weight = tensor.name_of(self._sources[span.weight])
        pieces = f"{span.expert}" if span.n == 1 else f"{span.expert}-{span.expert + span.n - 1}"
        layer = self._layers.get(weight, -1)
        return f"{weight} {pieces}", {
            "layer": layer,
            "piece": pieces,
            "reason": reason,
            "graph": self.counters.graphs,
        }

    def _fence_after(self, use: int | None) -> Any:
        """The first fence of this graph at or behind the use `use`; earlier graphs are complete."""
        if use is None or use < self._first_use:
            return None
        # A slot that is let go of was submitted, so its fence exists.
        return self._fences[bisect.bisect_left(self._fence_uses, use)]

    def _wait(self, step: Step, pieces: Sequence[tuple[int, int]]) -> None:
        tickets = {self._tickets[piece] for piece in pieces if piece in self._tickets}
        start_s = time.perf_counter()
        for ticket in sorted(tickets):
            self.copier.wait(ticket)
        if self._trace:
            self._trace.add(COMPUTE, "wait for copies", start_s, time.perf_counter(),
                            layer=step.layer, pieces=len(pieces), cause="copy")  # fmt: skip

    # -- computation -----------------------------------------------------------------------------

    def _submit(self, run: _Run, end: int) -> int:
        """Submit the nodes up to `end`, then let go of what they used."""
        status = 0
        if end > run.done:
            start_s = time.perf_counter()
            part = run.cut_list.part(run.done, end)
            status = self._lib.ggml_backend_graph_compute_async(self._backend.inner, part)
            if self._trace:
                layer = run.steps[run.open_cuts[-1]].layer if run.open_cuts else -1
                self._trace.add(COMPUTE, f"nodes {run.done}-{end}", start_s,
                                time.perf_counter(), layer=layer)  # fmt: skip
            run.done = end
        self._restore(run)
        if run.open_cuts:
            self._fence_uses.append(self._last_use)
            self._fences.append(self.copier.fence())
            for cut in run.open_cuts:
                self.schedule.leave(cut)
            run.open_cuts.clear()
        return int(status)

    def _restore(self, run: _Run) -> None:
        for node, index, original in run.patched:
            tensor.set_source(node, index, original)
        run.patched.clear()

    def _point(self, run: _Run, step: Step, slots: Sequence[int]) -> None:
        """Point the step's node at its slots, and at ids that mean those slots."""
        arena = self._arena(step.arena, step.cut.weight)
        if not step.n_experts:
            target = arena.slots(slots[0], 1)
        elif step.whole:
            target = arena.slots(slots[0], step.n_experts)
        else:
            target = arena.whole
            ids, experts = run.chosen[step.cut.ids]
            slot_of = dict(zip(experts, slots, strict=True))
            remapped = np.array([slot_of[expert] for expert in ids], np.int32)
            self._patch(run, step, 2, self._upload(run, step, remapped))
        self._patch(run, step, 0, target)

    def _patch(self, run: _Run, step: Step, index: int, target: Any) -> None:
        run.kept.append(target)
        run.patched.append((step.cut.node, index, tensor.source(step.cut.node, index)))
        tensor.set_source(step.cut.node, index, tensor.address_of(target))

    def _read_router(self, run: _Run, step: Step) -> None:
        """Read the ids that a layer's router chose, and tell the schedule what its cuts need."""
        start_s = time.perf_counter()
        raw = read_router(step.cut.ids, self._backend.inner)
        ids = raw.ravel().tolist()
        experts = sorted(set(ids))
        run.chosen[step.cut.ids] = ids, experts
        for index in step.group:
            other = run.steps[index]
            pieces = tuple((other.weight, expert) for expert in experts)
            self.schedule.need(Need(index, other.arena, pieces))
        if any(run.steps[index].missed for index in step.group):
            self._routing.observe(step.layer, raw)
        self.counters.router_reads += 1
        if self._trace:
            self._trace.add(COMPUTE, "read router ids", start_s, time.perf_counter(),
                            layer=step.layer, experts=len(experts), cause="ids")  # fmt: skip

    def _upload(self, run: _Run, step: Step, ids: NDArray[np.int32]) -> Any:
        view = step.ids_view
        if view is None:
            memory = self._ids_memory
            assert memory is not None
            assert memory.buffer is not None
            at = memory.base + step.ids_offset
            view = step.ids_view = ids_like(step.cut.ids, memory.buffer, at)
        run.kept.append(ids)  # an asynchronous copy may read it until the graph is complete
        self._lib.ggml_backend_tensor_set_async(
            self._backend.inner, tensor.address_of(view), ids.ctypes.data, 0, ids.nbytes
        )
        return view

    # -- what stays the same between graphs --------------------------------------------------------

    def _arena(self, index: int, weight: int) -> Arena:
        arena = self._arenas[index]
        if arena is None:
            plan = self._arena_plans[index]
            arena = Arena(self._buft, weight, plan.n_slots, plan.slot_bytes)
            self._arenas[index] = arena
        return arena

    def _steps_of(self, cut_list: CutList) -> list[Step]:
        kept = self._steps.get(id(cut_list))
        if kept is not None and kept[0] is cut_list:
            return kept[1]
        steps = [self._step(i, cut) for i, cut in enumerate(cut_list.cuts)]
        groups: dict[int, list[int]] = {}
        for step in steps:
            if step.need is None:
                groups.setdefault(step.cut.ids, []).append(step.index)
        for members in groups.values():
            for index in members:
                steps[index].group = tuple(members)
            steps[members[0]].first_of_group = True
        self._place_ids(steps)
        if len(self._steps) > 64:
            self._steps.clear()
        self._steps[id(cut_list)] = cut_list, steps
        return steps

    def _step(self, index: int, cut: Cut) -> Step:
        weight = self._weights.get(cut.weight)
        if weight is None:
            weight = self._weights[cut.weight] = len(self._sources)
            self._sources.append(cut.weight)
        view = tensor.at(cut.weight)
        experts = cut.kind == "experts"
        shape: Shape = (
            self._lib.ggml_type_name(view.type).decode(),
            int(view.ne[0]),
            int(view.ne[1]),
            0 if experts else int(view.ne[2]),
        )
        arena = self._plans[shape]
        layer = self._layers.get(tensor.name_of(cut.weight), -1)
        if not experts:
            need = Need(index, arena, ((weight, 0),))
            return Step(index, cut, weight, arena, layer, 0, 0, 0, False, (), False, need)
        ids = tensor.at(cut.ids)
        n_experts, n_used, n_tokens = int(view.ne[2]), int(ids.ne[0]), int(ids.ne[1])
        n_slots = self._arena_plans[arena].n_slots
        whole, _ = whole_is_better(n_tokens, n_used, n_experts, n_slots)
        pieces = tuple((weight, expert) for expert in range(n_experts))
        known = Need(index, arena, pieces, contiguous=True) if whole else None
        return Step(index, cut, weight, arena, layer, n_experts, n_tokens, n_used, whole, (),
                    False, known)  # fmt: skip

    def _place_ids(self, steps: list[Step]) -> None:
        """Room on the device for every step's remapped ids: none is reused within a graph."""
        offset = 0
        for step in steps:
            if step.need is None:
                step.ids_offset = offset
                offset += (4 * step.n_used * step.n_tokens + 255) & ~255
        if offset and (self._ids_memory is None or self._ids_memory.size_bytes < offset):
            if self._ids_memory is not None:
                self._lib.ggml_backend_synchronize(self._backend.inner)
                self._ids_memory.close()
                self._steps.clear()  # their views point into what is gone
            self._ids_memory = DeviceMemory(self._buft, max(offset, 1 << 20), "expert ids")
