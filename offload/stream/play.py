"""Plays compiled graphs with the native player, and does the steps that it leaves to Python."""

from __future__ import annotations

import ctypes as C
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.errors import DeviceFailed
from offload.ggml import player as api
from offload.ggml.backend import wrong_id
from offload.ggml.cuda_driver import is_cuda
from offload.ggml.graph import Graph
from offload.ggml.library.interrupt import watched_byte
from offload.ggml.library.lib import library
from offload.ggml.player import Calls, PlayerEvent, native
from offload.ggml.rewriting import read_rows
from offload.ggml.tensor import TENSOR
from offload.ggml.threads import check
from offload.routing.routing import N_TOKEN_ROWS
from offload.schedule.cache import Lrfu
from offload.schedule.division import Split
from offload.schedule.from_disk import split_from_disk, stay_late
from offload.schedule.slots import StreamCounters
from offload.schedule.splitter import ByCosts, all_on_device, stay
from offload.stream.bell_use import BELLS
from offload.stream.cut_graph import CutGraph, Stops
from offload.stream.cuts import CutStep, Stop, waits_once
from offload.stream.doorbell import CannotRing, Doorbell, RingChoice
from offload.stream.entries import CostEntry
from offload.stream.layers_ahead import AheadMemory, Waits
from offload.stream.program import AHEAD, Program, wrong_program
from offload.stream.split_path import SplitPath
from offload.stream.stream_parts import RoutingParts, StreamParts
from offload.trace.trace import COMPUTE, CPU

_EVENTS = 8  # most events of a layer
_SPLITTERS: dict[object, int] = {stay: api.STAY, all_on_device: api.ALL_ON_DEVICE}
_SUMMED = [name for name, _ in api.PlayerCounts._fields_ if hasattr(StreamCounters, name)]


@functools.cache
def calls() -> Calls:
    """Return the functions of ggml that all players call."""
    lib, fields = library(), TENSOR
    functions = (
        lib.ggml_backend_graph_compute_async, lib.ggml_backend_tensor_set_async,
        lib.ggml_backend_tensor_get_async, lib.ggml_backend_synchronize,
        lib.ggml_backend_cpu_set_n_threads, lib.ggml_backend_cpu_set_threadpool,
    )  # fmt: skip
    pointers = [C.cast(function, C.c_void_p).value for function in functions]
    parameters = fields.op_params.offset + fields.op_params.size - 4
    return Calls(
        *pointers, fields.ne.offset, fields.nb.offset, fields.data.offset, fields.buffer.offset,
        parameters,
    )  # fmt: skip


class GraphPlayer:
    """Plays the programs of one executor."""

    def __init__(
        self, parts: StreamParts, routing: RoutingParts, split: SplitPath | None = None
    ) -> None:
        """`split` is None if no layer is split."""
        self._native, self._calls = native(), calls()
        self._host, self._stream, self._schedule = parts.host, parts.stream, parts.schedule
        self._copies, self._counters, self._trace = parts.copies, parts.counters, parts.trace
        self._guess, self._recorder = routing.guess, routing.recorder
        self._likeliest, self._split = routing.likeliest, split
        # Nanoseconds that reading the thread's clock takes, which count as ggml's. If not 0, the
        # seconds in ggml's functions are added up in `native_s`.
        self.clock_ns = 0
        self.native_s = 0.0
        self._costs: CostEntry | None = None
        most_slots = max((pool.n_slots for pool in parts.schedule.pools.values()), default=0)
        most, n_used = routing.most_experts, routing.n_used
        n_groups = len(routing.likeliest.experts)
        self._memory = AheadMemory(parts.stream.device, n_groups, most, most_slots)
        self._waits: dict[int, Waits] = {}  # by number of tokens in a batch
        self._ring_choices: dict[int, RingChoice] = {}  # the same
        self._bell: Doorbell | None = None  # opened when it is first needed
        self._may_ring = split is not None and is_cuda(parts.stream.device)
        self._most_pairs, self._most_experts = SMALL_BATCH * n_used, most
        self._ids = np.zeros(self._most_pairs, np.int32)
        self._rows, self._used, self._experts = np.zeros((3, most), np.int32)
        self._resident, self._kinds = np.zeros(most, np.bool_), np.zeros(most, np.uint8)
        self._late = np.zeros(most, np.int32)
        self._late_pairs = np.zeros(self._most_pairs, np.int32)
        self._groups: deque[list[int]] = deque()  # groups of late experts, each read at once
        self._scratch = [np.zeros(most + 2 * n_used, np.int32) for _ in range(3)]
        self._doing: dict[int, Callable[[Stops, Program, CutGraph], int]] = {
            api.YIELD_SUBMIT: self._submit, api.YIELD_STOP: self._stop,
            api.YIELD_CLOCK: self._clock, api.YIELD_NEED: self._need, api.YIELD_WAIT: self._wait,
            api.YIELD_ISSUE: self._issue, api.YIELD_FETCH: self._fetch,
            api.YIELD_LATE: self._wait_late,
        }  # fmt: skip

    @property
    def device_bytes(self) -> int:
        return self._memory.device_bytes

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()
        self._memory.close()

    def compile(self, graph: Graph, steps: Sequence[CutStep], stops: Sequence[Stop]) -> Program:
        """Return the program of a prepared graph. Raises DoesNotFit."""
        program = Program(graph, steps, stops, self._schedule, self._guess, self._likeliest)
        rule, player = self._schedule.rule, program.player
        assert isinstance(rule, Lrfu), "the player has a twin of this rule alone"
        player.calls = C.addressof(self._calls)
        player.half_life, player.rule_used, player.rule_scan = (
            rule.half_life,
            rule.n_used,
            rule.n_scan,
        )
        player.decay, player.most_token_rows = self._guess.decay, N_TOKEN_ROWS
        slots, shown, order = (array.ctypes.data for array in self._scratch)
        player.ids, player.rows, player.used = (
            array.ctypes.data for array in (self._ids, self._rows, self._used)
        )
        player.resident, player.kinds = self._resident.ctypes.data, self._kinds.ctypes.data
        player.experts, player.slots = self._experts.ctypes.data, slots
        player.shown, player.order = shown, order
        player.late, player.late_pairs = self._late.ctypes.data, self._late_pairs.ctypes.data
        player.most_pairs, player.most_experts = self._most_pairs, self._most_experts
        if self._trace.is_on:
            events = (PlayerEvent * (_EVENTS * (1 + len(program.layers))))()
            player.events, player.most_events = C.addressof(events), len(events)
            program.events = events
            self._trace.totals["program"] = "\n".join(program.listing())
        program.check()
        return program

    # -- per decode --------------------------------------------------------------------------------

    def run(self, program: Program, running: CutGraph, stops: Stops, *, clocked: bool) -> int:
        """Play the program. Return a ggml_status. Raises DeviceFailed, DoesNotFit, BrokenOff."""
        start_s = time.perf_counter()
        self._arm(program, clocked)
        self._native.begin(program.address)
        self._read_ahead(program.steps[0], is_before=True)
        if program.moves:
            self._native.move(program.address, 1)
        try:
            code, status = self._play(program, running, stops)
        finally:
            if program.moves:
                self._native.move(program.address, 0)
        if status or code != api.DONE:
            program.failed()
        if status:
            return status
        self._count(program, time.perf_counter() - start_s)
        return self._ended(program, code)

    def _play(self, program: Program, running: CutGraph, stops: Stops) -> tuple[int, int]:
        """Return the player's last code, and the status of Python's part."""
        player, schedule, play = program.player, self._schedule, self._native.play
        while True:
            player.use = schedule.n_uses
            code = play(program.address)
            schedule.n_uses = self._copies.last_use = player.use
            running.done = player.done
            if running.open:
                stops.leave(running)
            if player.n_events:
                self._tell(program)
            if code < api.YIELD_SUBMIT:
                return int(code), 0
            status = self._doing[code](stops, program, running)
            if status:
                return int(code), status

    def _arm(self, program: Program, clocked: bool) -> None:
        """Set the player's fields that may differ between two decodes."""
        player = program.player
        player.stream, player.interrupt = self._stream.address, watched_byte()
        player.rule_skipped = self._schedule.rule.skipped
        player.recording = self._recorder is not None and self._recorder.is_on
        player.clocked, player.clock_ns, player.python_open = clocked, self.clock_ns, 0
        player.from_disk = self._host.experts is not None
        token_rows = self._guess.rows
        player.whole = not clocked and program.is_in_order(self._schedule)
        player.token_rows, player.n_token_rows = token_rows.ctypes.data, len(token_rows)
        if self._split is not None and program.splits:
            self._arm_split(program, self._split)
        needs_python = clocked or player.from_disk
        if not player.whole:
            if not needs_python and self._rings(program):
                return
            n = 1
            if program.may_go_ahead and not needs_python:
                n = self._seen(program).choose(len(program.layers))
            program.wait_every(n, self._memory)

    def _rings(self, program: Program) -> bool:
        """Let the decode run without a wait of the host, if it can and if that pays."""
        streams = program.player.splitter not in {api.STAY, api.BY_COSTS}
        if BELLS.why_not or not self._may_ring or not program.may_ring or streams:
            return False
        assert self._split is not None
        if not self._split.ways.now.rings or not self._choice(program).pays:
            return False
        if self._bell is None:
            try:
                self._bell = Doorbell(self._stream.device)
            except CannotRing as e:
                BELLS.refuse(f"{self._stream.device.name}: {e}")
                return False
        if not program.ring(self._bell, self._memory):
            return False
        assert self._bell.watchdog is not None
        self._bell.watchdog.begin()
        return True

    def _choice(self, program: Program) -> RingChoice:
        return self._ring_choices.setdefault(int(program.layers[0].n_tokens), RingChoice())

    def _seen(self, program: Program) -> Waits:
        n_tokens = int(program.layers[0].n_tokens)
        waits = self._waits.get(n_tokens)
        if waits is None:
            is_async = self._stream.device.has_async_and_events
            waits = self._waits[n_tokens] = Waits(is_async=is_async)
        return waits

    def _arm_split(self, program: Program, split: SplitPath) -> None:
        player, team, splitter = program.player, split.team, split.splitter
        team.choose(program.layers[0].n_tokens)
        player.cpu = team.stream.address
        for i, pool in enumerate(team.pools):
            player.n_threads[i], player.pools[i] = pool.n_threads, pool.address
        player.chosen = team.chosen
        if isinstance(splitter, ByCosts):
            if self._costs is None or self._costs.costs is not splitter.costs:
                self._costs = CostEntry(splitter.costs, self._most_experts)
            self._costs.give(player)
        else:
            player.splitter = _SPLITTERS[splitter]

    def _count(self, program: Program, decode_s: float) -> None:
        player = program.player
        counts, counters = player.counts, self._counters
        for name in _SUMMED:
            setattr(counters, name, getattr(counters, name) + getattr(counts, name))
        if self._split is not None and program.splits:
            self._split.expect(counts.step_s, counts.idle_s)
            self._split.team.chosen = player.chosen
        program.computed_on_cpu = counts.n_pairs_host > 0
        program.streamed = counts.n_pairs_streamed > 0
        self.native_s += counts.native_s
        if self._may_ring and program.may_ring and not player.whole:
            self._choice(program).saw(
                len(program.layers), counts.left_s, decode_s, rang=counts.layers_rung > 0
            )
        if program.may_go_ahead and not player.whole and not counts.layers_rung:
            self._seen(program).saw(
                len(program.layers), counts.layers_missed, counts.layers_repeated,
                counts.n_between, counts.between_s, decode_s,
            )  # fmt: skip

    def _ended(self, program: Program, code: int) -> int:
        player = program.player
        status, layer = int(player.status), program.layers[player.layer].layer
        if code == api.DONE:
            return 0
        if code == api.FAILED:
            return status
        if code == api.FAILED_ON_CPU:
            return check(status, f"computing experts of layer {layer} on the CPU")
        if code == api.FAILED_TO_PLACE:
            return check(status, f"placing experts' rows of layer {layer}")
        if code == api.DRIVER_FAILED:
            raise _driver_failed(self._stream.device.name, layer, status)
        if code == api.WRONG_ID:
            step = program.steps[player.layer]
            assert step.ids is not None
            raise wrong_id(step.ids.tensor.name, status, step.n_experts)
        raise wrong_program(player.at)

    def _tell(self, program: Program) -> None:
        """Add the player's events to the trace."""
        player, add = program.player, self._trace.add
        for event in program.events[: player.n_events]:
            times = event.start_s, event.end_s
            if event.kind == api.SUBMITTED:
                add(COMPUTE, f"nodes {event.a}-{event.b}", *times, layer=event.layer)
            elif event.kind == api.READ_IDS:
                add(COMPUTE, "read router ids", *times, layer=event.layer, cause="ids")
            elif event.kind == api.COMPUTED:
                add(CPU, f"experts of {event.a} pairs", *times, layer=event.layer)
        player.n_events = 0

    # -- yields ------------------------------------------------------------------------------------

    def _submit(self, stops: Stops, program: Program, running: CutGraph) -> int:
        return self._submit_to(stops, program, running, program.player.until)

    def _submit_to(self, stops: Stops, program: Program, running: CutGraph, end: int) -> int:
        player = program.player
        running.is_shifted = player.open >= 0
        self._native.point(program.address, 1)
        try:
            status = stops.submit(running, end)
        finally:
            self._native.point(program.address, 0)
            running.is_shifted = False
        if player.open >= 0 and program.layers[player.open].last < end:
            player.open = -1
        self._see(program, running)
        return status

    @staticmethod
    def _see(program: Program, running: CutGraph) -> None:
        player = program.player
        player.done = running.done
        player.python_open = bool(running.redirected) or not program.plays(running.open)

    def _stop(self, stops: Stops, program: Program, running: CutGraph) -> int:
        self._copies.fence([step.use for step in running.open])  # behind what the player submitted
        status = stops.stop(running, program.python_stops[program.player.until])
        self._see(program, running)
        return status

    def _clock(self, stops: Stops, program: Program, running: CutGraph) -> int:
        stops.reach(program.layers[program.player.layer].layer)
        return 0

    def _issue(self, stops: Stops, program: Program, running: CutGraph) -> int:
        layer = program.layers[program.player.layer]
        if program.is_promoting and self._split is not None:
            program.is_promoting = False
            self._split.promote(program)
        self._copies.fence([step.use for step in running.open])  # behind what the player submitted
        if program.words[program.player.at][0] == AHEAD:
            self._copies.fence_all()  # these layers' uses of slots are not counted yet
        cut = program.layers[program.player.until].cut
        self._copies.enqueue(self._schedule.issue(cut, int(layer.issues)))
        layer.issues = 0
        return 0

    @staticmethod
    def _expect(program: Program, split: Split) -> NDArray[np.uint8]:
        """Add a division's expected seconds to the counts. Returns the kind of each expert."""
        counts = program.player.counts
        counts.step_s += max(split.cpu_s, split.device_s)
        counts.idle_s += split.idle_s
        return split.kind

    def _fetch(self, stops: Stops, program: Program, running: CutGraph) -> int:
        number = program.player.layer
        layer, step = program.layers[number], program.steps[number]
        used = np.unique(self._ids[: layer.n_tokens * layer.n_used])
        if self._host.experts is not None:
            self._host.experts.decided(step.layer, used.tolist())
        if self._host.next_experts is not None:
            self._host.next_experts.judge(step.layer, used.tolist())
        if step.split is not None and layer.waits:
            self._divide_late(program, used[~self._resident[used]].tolist())
            layer.waits = 0
        if not layer.waits:
            self._read_ahead(step)
        return 0

    def _divide_late(self, program: Program, missing: Sequence[int]) -> None:
        """Begin to read a split layer's missing experts, and divide the layer.

        The CPU computes experts that are read late. If it is better to have all experts first, or
        if the splitter cannot divide late experts, waits for them instead. The player then divides
        the layer as usual.
        """
        layer, memory = program.layers[program.player.layer], self._host.experts
        assert self._split is not None
        assert memory is not None
        number, splitter = int(layer.layer), self._split.splitter
        self._groups.clear()
        self._groups += memory.begin(number, missing)
        late = [expert for group in self._groups for expert in group]
        ids = self._ids[: layer.n_tokens * layer.n_used].reshape(layer.n_tokens, layer.n_used)
        resident, kinds = self._resident[: layer.n_experts], None
        if late and isinstance(splitter, ByCosts):
            read_s = memory.read_s(number)
            division = split_from_disk(ids, resident, late, splitter.costs, read_s)
            if division is not None:
                kinds = self._expect(program, division)
        elif late and splitter is stay:
            kinds = stay_late(resident, late)
        if kinds is None:
            memory.wait(number, late)
            return
        self._kinds[: layer.n_experts] = kinds
        self._late[: len(late)] = late
        program.player.n_late, program.player.phase = len(late), api.IS_DIVIDED

    def _wait_late(self, stops: Stops, program: Program, running: CutGraph) -> int:
        """Wait until the next late experts have been read."""
        player, memory = program.player, self._host.experts
        assert memory is not None
        layer = int(program.layers[player.layer].layer)
        group = self._groups.popleft()
        memory.wait(layer, group)
        n = len(group)
        while self._groups and all(memory.is_there(layer, e) for e in self._groups[0]):
            n += len(self._groups.popleft())
        player.n_arrived += n
        return 0

    def _read_ahead(self, step: CutStep, *, is_before: bool = False) -> None:
        """Begin to read experts from the disk that the next layers are likely to use.

        Experts that have slots are not read. The next layers are those after `step`, whose ids have
        been read. `is_before`: nothing of `step` has been computed, so it counts as a next layer.
        """
        following, groups = self._host.next_experts, self._copies.expert_groups
        if following is None:
            return

        def has_slot(layer: int, expert: int) -> bool:
            group, pool = groups[layer]
            return (group, expert) in self._schedule.pools[pool].where

        layers, rows = [*groups], step.rows
        at = layers.index(step.layer) - is_before
        if at >= 0 and is_before:
            return  # the graph begins in the middle of the model
        following.read_ahead(
            layers, at, self._guess, step.n_tokens,
            lambda: None if rows is None else read_rows(rows), has_slot,
        )  # fmt: skip

    def _need(self, stops: Stops, program: Program, running: CutGraph) -> int:
        number = program.player.layer
        layer, step = program.layers[number], program.steps[number]
        experts = self._experts[: layer.n_on_device + layer.n_on_host].tolist()
        elsewhere = [(step.group, expert) for expert in experts[layer.n_on_device :]]
        self._copies.computed()  # the ids have just been read

        def send() -> None:
            if step.split is None:
                layer.missed = step.missed
            if self._native.send(program.address) != api.DONE:
                raise wrong_program(program.player.at)

        stops.take_slots(running, step, experts[: layer.n_on_device], elsewhere, send)
        program.player.use = self._schedule.n_uses
        layer.waits = bool(step.waits)
        if step.split is None:
            self._read_ahead(step)
        if step.waits and waits_once(step, self._schedule.depth):
            self._copies.wait(step.waits, step.kinds, step.layer)
            layer.waits = 0
        return 0

    def _wait(self, stops: Stops, program: Program, running: CutGraph) -> int:
        step = program.steps[program.player.layer]
        reader = step.readers[program.player.until]
        status = self._submit_to(stops, program, running, reader.index)
        self._copies.wait(step.waits, (reader.kind,), step.layer)
        return status


def _driver_failed(device: str, layer: int, error: int) -> DeviceFailed:
    if error == api.BROKEN:
        return DeviceFailed(
            f"{device} and the host waited for each other in layer {layer}. From now on, split "
            "layers wait as with SPECOFFLOAD_WITHOUT=doorbell; ask again, and report this please"
        )
    return DeviceFailed(f"{device}: CUDA's driver refused a call in layer {layer} (error {error})")
