"""Compiles a prepared graph to a program for the player (player.c)."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.graph import Graph
from offload.ggml.player import (
    Layer,
    Player,
    PlayerPart,
    RedirectEntry,
    Ringing,
    Segment,
    View,
    native,
)
from offload.ggml.tensor import Tensor
from offload.routing.routing import N_KEPT, RoutingGuess
from offload.schedule.schedule import Schedule
from offload.stream.cuts import CutStep, Stop
from offload.stream.doorbell import CannotRing, Doorbell, RingEntry
from offload.stream.layers_ahead import AheadEntry, AheadMemory, NotRepeatable, segments_of

END, SUBMIT, READ, RECORD, DIVIDE, ARRIVE, OVERLAP, HOST, PYTHON, WHOLE, AHEAD, RING = range(12)
_NAMES = (
    "end",
    "submit",
    "read",
    "record",
    "divide",
    "arrive",
    "overlap",
    "host",
    "python",
    "whole",
    "ahead",
    "ring",
)
_NONE = -1
_MOST_ISSUES = 8  # most times that a decode enqueues promoted experts


def played_of(steps: Sequence[CutStep], stops: Sequence[Stop]) -> list[CutStep]:
    """Return the steps that the player plays.

    These are all layers of experts, if no other weights need a stop. Otherwise Python has to stop
    for those, and the player plays only split layers. Python then plays the other layers too, so
    that neighbouring nodes are submitted together.
    """
    routed = [
        step
        for step in steps
        if step.split is not None
        or (step.ids is not None and step.need is None and step.n_tokens <= SMALL_BATCH)
    ]
    if sum(len(step.readers) for step in routed) == len(stops):
        return routed
    return [step for step in routed if step.split is not None]


class Likeliest:
    """For each group of weights, the missing expert that is likeliest to be used again."""

    def __init__(self, n_groups: int) -> None:
        self.experts = np.zeros(n_groups, np.int64)
        self.scores = np.full(n_groups, -1.0)  # scores of RoutingGuess; negative: no expert


class Program:
    """A program, with the structs and arrays that the player uses. Kept as long as its graph."""

    def __init__(
        self,
        graph: Graph,
        steps: Sequence[CutStep],
        stops: Sequence[Stop],
        schedule: Schedule,
        guess: RoutingGuess,
        likeliest: Likeliest,
    ) -> None:
        """Compile `graph`, which has these `steps` and `stops`. Raises DoesNotFit."""
        self.graph, self.stops = graph, stops
        self.steps = played_of(steps, stops)
        self.python_stops: dict[int, list[Stop]] = {}  # by number of the first of neighbours
        self.splits = any(step.split is not None for step in self.steps)
        self.is_whole = len(self.steps) == len(steps) and self._n_stops(steps) == len(stops)
        self.pools = {step.pool for step in self.steps}
        homes = [schedule.home(step.pool, step.group) for step in self.steps]
        self.may_be_whole = self.is_whole and min(homes) >= 0
        self.is_promoting = False  # True until the decode's promotions are chosen
        self.computed_on_cpu = True  # whether the CPU computed pairs in the last decode
        self.streamed = False  # whether split layers streamed experts in the last decode
        self._in_order = -1, False  # number of copies, and whether all experts were in order then
        self.is_split = np.array([step.split is not None for step in self.steps])
        self.known = [step for step in steps if step.need is not None]
        self._numbers = {id(step): n for n, step in enumerate(self.steps)}
        self._kept: list[Any] = []  # memory that the structs refer to
        self._parts: dict[tuple[int, int, int], int] = {}  # numbers of parts by (first, end, layer)
        self._made: list[tuple[Any, ...]] = []  # fields of the parts
        self._words: dict[int, tuple[Any, Any, Any]] = {}  # programs by number of layers per wait
        self.layers_per_wait = 1
        self._ahead: AheadEntry | None = None
        self._ring_program: _RingProgram | None = None
        self.is_ringing = False  # whether this decode runs without a wait of the host
        self.may_go_ahead = self.is_whole
        self.may_ring = self.is_whole and bool(self.is_split.all()) and _has_rest(graph, self.steps)
        layers = [_layer(step, schedule, guess, likeliest, self._kept) for step in self.steps]
        self.layers = (Layer * len(layers))(*layers)
        self.missed, self.n_tokens = self._field("missed"), self._field("n_tokens")
        self.groups = np.array([step.group for step in self.steps])
        self.pool_of = np.array([step.pool for step in self.steps])
        self.player = Player(
            layers=C.addressof(self.layers), n_layers=len(self.layers), n_stops=len(stops),
        )  # fmt: skip
        self._use(1)
        self.address = C.addressof(self.player)
        self.events: Any = ()  # memory for events, if there is a trace

    def __repr__(self) -> str:
        layers = f"{len(self.layers)} layers of {self.graph!r}"
        return f"Program({layers}, {int(self.is_split.sum())} split)"

    def _field(self, name: str) -> NDArray[Any]:
        """Return a field of all layers, as a view. All fields are 8 bytes wide."""
        kind = np.float64 if dict(Layer._fields_)[name] is C.c_double else np.int64
        values: NDArray[Any] = np.frombuffer(memoryview(self.layers).cast("B"), kind)
        return values.reshape(len(self.layers), -1)[:, getattr(Layer, name).offset // 8]

    def is_in_order(self, schedule: Schedule) -> bool:
        """True if all experts of all layers are in slots, in order."""
        if not self.may_be_whole or any(map(schedule.is_filling, self.pools)):
            return False
        n_copied = schedule.counters.streamed_experts
        if self._in_order[0] != n_copied:
            self._in_order = (
                n_copied,
                all(
                    schedule.is_in_order(step.pool, step.group, step.n_experts)
                    for step in self.steps
                ),
            )
        return self._in_order[1]

    @staticmethod
    def _n_stops(steps: Sequence[CutStep]) -> int:
        return sum(len(step.readers) for step in steps)

    def plays(self, steps: Iterable[CutStep]) -> bool:
        return all(id(step) in self._numbers for step in steps)

    def guessed(self) -> list[CutStep]:
        """Return the steps of layers that are not split and missed an expert in the last decode."""
        return [self.steps[i] for i in (self.missed * ~self.is_split).nonzero()[0].tolist()]

    def issue_before_layers(self) -> None:
        """Make the player return before each layer, so that copies that are due are enqueued."""
        for layer in self.layers:
            layer.issues = layer.issues or 1

    def promote_at_first_layer(self) -> None:
        """Choose promotions in the first layer, while the device computes the nodes before it."""
        self.is_promoting = self.computed_on_cpu
        if self.is_promoting:
            self.layers[0].issues = self.layers[0].issues or 1

    def spread(self, n_promoted: int) -> None:
        """Make the player return in certain layers, so that promoted experts are enqueued there.

        All are enqueued in the first layer, because this takes Python half as long. If the graph
        may need other copies, which would wait for them, they are spread evenly over some layers.
        """
        n, n_layers = min(n_promoted, 1), len(self.layers)
        if self.streamed or self.known or not self.is_split.all():
            n = min(n_promoted, _MOST_ISSUES)
        for i in range(n):
            self.layers[i * n_layers // n].issues = (i + 1) * n_promoted // n

    def ring(self, bell: Doorbell, memory: AheadMemory) -> bool:
        """Let the next decode run without a wait of the host. Return False if it cannot.

        Ids, rows and outputs of layers are moved to `memory`, where no other node overwrites them.
        """
        if not self.may_ring:
            return False
        if self._ring_program is None:
            try:
                self._ring_program = _RingProgram(self, RingEntry(self.graph, self.steps, memory))
            except (CannotRing, DoesNotFit):
                self.may_ring = False
                return False
        if not self.is_ringing:
            self.is_ringing = True
            self.graph.forget_uids()
            self.words = self._ring_program.words
            self._ring_program.use(self.player)
            self.check()
        self.player.bell = C.addressof(bell.struct)
        self.player.is_careful = self._ring_program.entry.is_careful()
        return True

    def failed(self) -> None:
        """Note that a decode failed."""
        if self._ring_program is not None:
            self._ring_program.entry.failed()

    def wait_every(self, n_layers: int, memory: AheadMemory) -> None:
        """Set the number of layers between two waits. Does nothing if the graph is not repeatable.

        Results are moved to `memory`, from which a repair reads them.
        """
        if self.is_ringing:
            self.is_ringing, self.player.bell = False, None
            self.graph.forget_uids()
            self._use(self.layers_per_wait)
        if n_layers == self.layers_per_wait or not self.may_go_ahead:
            return
        if self._ahead is None:
            try:
                self._ahead = AheadEntry(self.graph, self.steps, memory)
            except (NotRepeatable, DoesNotFit):
                self.may_go_ahead = False
                return
            self.graph.forget_uids()
            self._made.clear()  # parts get new uids, because results move
        self._use(n_layers)
        self.check()

    @property
    def moves(self) -> bool:
        """True if results move to memory of their own while the program is played."""
        return self._ahead is not None or self.is_ringing

    def _use(self, layers_per_wait: int) -> None:
        self.layers_per_wait = layers_per_wait
        if layers_per_wait not in self._words:
            self._words[layers_per_wait] = self._compile(layers_per_wait)
        self.words, segments, resume = self._words[layers_per_wait]
        for first, end, layer in [*self._parts][len(self._made) :]:
            self._made.append(self._part(first, end, layer))
        self.parts = (PlayerPart * len(self._made))(*[PlayerPart(*fields) for fields in self._made])
        player = self.player
        player.program, player.n_words = self.words.ctypes.data, self.words.size
        player.parts, player.n_parts = C.addressof(self.parts), len(self.parts)
        player.ahead = None
        if self._ahead is not None:
            player.ahead = C.addressof(self._ahead.struct)
            self._ahead.play(segments, resume)

    def check(self) -> None:
        """Raise DeviceFailed if the player refuses the program. Its scratch must be set."""
        wrong = native().check(self.address)
        if wrong:
            raise wrong_program(wrong - 1)

    def _part(self, first: int, end: int, layer: int) -> tuple[Any, ...]:
        if self._ahead is None or (layer == _NONE and first > 0):
            return first, end, *self.graph.entry(first, end)
        before: dict[int, Sequence[Tensor]] = {}
        if layer != _NONE:
            nodes = zip(self.steps[layer:], self._ahead.nodes[layer:], strict=True)
            before = {step.at: [node] for step, node in nodes if step.at < end}
        if first == 0:
            before[0] = [*self._ahead.copies, *before.get(0, ())]
        part = self.graph.with_nodes(first, end, before)
        self._kept.append(part)
        return first, end, *self.graph.entry_of(part)

    def compiled(self, part: Callable[[int, int], int]) -> list[tuple[int, int, int, int]]:
        """Return the instructions with a wait in each layer. `part` numbers the parts."""
        return self._instructions(1, part, [], [0] * len(self.steps))

    def _compile(self, layers_per_wait: int) -> tuple[Any, Any, Any]:
        """Return the instructions, the segments, and the position of READ of each layer."""
        segments: list[Segment] = []
        resume = [0] * len(self.steps)
        words = self._instructions(layers_per_wait, self._part_number, segments, resume)
        return (
            np.array(words, np.int64),
            (Segment * len(segments))(*segments),
            np.array(resume, np.int64),
        )

    def _instructions(
        self, layers_per_wait: int, part: Callable[[int, int], int], segments: list[Segment],
        resume: list[int],
    ) -> list[tuple[int, int, int, int]]:  # fmt: skip
        """Return the instructions. Fills `segments`, and the position of READ of each layer."""
        words: list[tuple[int, int, int, int]] = []
        ahead = {}
        if layers_per_wait > 1:
            ahead = dict(segments_of(len(self.steps), layers_per_wait))
        n_nodes = self.graph.n_nodes
        if self.may_be_whole:
            words.append((WHOLE, part(0, n_nodes), 0, 0))
        before = [0]  # possible first nodes of the next submission
        shown = _NONE  # layer whose nodes may not have been submitted
        for number, stop in enumerate(self.stops):
            step = stop.step
            if id(step) not in self._numbers:
                if shown != _NONE:
                    words += _submit(part, before, stop.at, shown)
                if not words or words[-1][0] != PYTHON:
                    words.append((PYTHON, number, 0, 0))
                    self.python_stops[number] = []
                self.python_stops[words[-1][1]].append(stop)
                before, shown = [stop.at], _NONE
            elif stop.nth == 0:
                assert isinstance(step, CutStep)
                layer = self._numbers[id(step)]
                if layer in ahead:
                    upto = ahead[layer]
                    end = self.steps[upto].at if upto < len(self.steps) else n_nodes
                    numbers = [self._part_number(first, end, layer) for first in before]
                    words.append((AHEAD, len(segments), 0, 0))
                    segments.append(Segment(numbers[0], [*numbers, _NONE][1], layer, upto, 0))
                words += _submit(part, before, step.at, shown)
                resume[layer] = len(words)
                words += [(op, layer, 0, 0) for op in (READ, RECORD, DIVIDE)]
                words += [(ARRIVE, layer, nth, 0) for nth in range(len(step.readers))]
                before, shown = [step.at], layer
                if step.split is not None:
                    words.append((OVERLAP, part(step.at, step.end), _NONE, layer))
                    words.append((HOST, layer, 0, 0))
                    before.append(step.end)
        if words[-1][0] != PYTHON:  # after the last stop, Python submits the rest
            words += _submit(part, before, n_nodes, shown)
        words.append((END, n_nodes, 0, 0))
        for segment in segments:
            segment.next = [*resume, len(words) - 1][segment.end]
        return words

    def _part_number(self, first: int, end: int, layer: int = _NONE) -> int:
        """Return the number of the part [first, end). `layer`: its first layer computed ahead."""
        return self._parts.setdefault((first, end, layer), len(self._parts))

    def listing(self, nth: int = 0) -> list[str]:
        """Return the instructions of the `nth` split layer, one a line, to be read by people."""
        parts = [f"nodes {first}-{end}" for first, end, _ in self._parts]
        lines: list[str] = []
        for op, a, b, _ in self.words.tolist():
            line = _NAMES[op]
            if op in (SUBMIT, OVERLAP):
                line += f" {parts[a]}" + (f" or {parts[b]}" if b != _NONE else "")
            elif op == ARRIVE:
                line += f" product {b}"
            lines.append(line)
            if op == READ and a == nth:
                lines = lines[-2:]  # keep the submission before it
            elif op == READ and a > nth:
                return lines[:-2]
        return lines[:-2]


def _submit(
    part: Callable[[int, int], int], before: Sequence[int], end: int, layer: int
) -> list[tuple[int, int, int, int]]:
    numbers = [part(first, end) for first in before if first < end]
    if not numbers:
        return []
    return [(SUBMIT, numbers[0], numbers[1] if len(numbers) > 1 else _NONE, layer)]


def _has_rest(graph: Graph, steps: Sequence[CutStep]) -> bool:
    """True if nodes that need the CPU's rows follow each layer's products."""
    ends = [*[step.at for step in steps[1:]], graph.n_nodes]
    return all(step.end < end for step, end in zip(steps, ends, strict=True))


class _RingProgram:
    """The instructions and parts of a program whose layers run without a wait of the host.

    Its parts are its own, because its results lie elsewhere than those of the other programs.
    """

    def __init__(self, program: Program, entry: RingEntry) -> None:
        self.entry = entry
        graph, steps = program.graph, program.steps
        self._kept: list[Graph] = []
        self._fields: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._graph = graph
        first = self._part(0, steps[0].at, last=entry.sending[0])
        ringing = []
        ends = [*[step.at for step in steps[1:]], graph.n_nodes]
        sending = [*entry.sending[1:], None]  # ids and rows of the next layer
        nodes = zip(steps, ends, entry.mapping, entry.places, sending, entry.arriving, strict=True)
        for step, end, mapping, place, of_next, arriving in nodes:
            products = self._part(step.at, step.end, mapping)
            rest = self._part(step.end, end, place.node, of_next)
            rows = place.device_row, place.host_row
            ringing.append(Ringing(products, rest, *rows, *arriving))
        words = program.compiled(self._plain_part)
        at = 1 if words[0][0] == WHOLE else 0
        words.insert(at, (RING, 0, 0, 0))
        self.words = np.array(words, np.int64)
        self._ringing = (Ringing * len(ringing))(*ringing)
        self._parts = (PlayerPart * len(self._fields))(
            *[PlayerPart(*fields) for fields in self._fields]
        )
        self._first = first

    def _plain_part(self, first: int, end: int) -> int:
        if (first, end) not in self._numbers:
            self._numbers[first, end] = self._part(first, end)
        return self._numbers[first, end]

    def _part(
        self, first: int, end: int, node: Tensor | None = None, last: Tensor | None = None
    ) -> int:
        """Return the number of a part of nodes [first, end), between `node` and `last`."""
        assert first < end, "the player refuses an empty part"
        own = {at: [one] for at, one in ((first, node), (end, last)) if one is not None}
        part = self._graph.with_nodes(first, end, own)
        self._kept.append(part)
        self._fields.append((first, end, *self._graph.entry_of(part)))
        return len(self._fields) - 1

    def use(self, player: Player) -> None:
        """Let the player play this program."""
        player.program, player.n_words = self.words.ctypes.data, self.words.size
        player.parts, player.n_parts = C.addressof(self._parts), len(self._parts)
        player.ahead = C.addressof(self.entry.struct)
        player.ringing, player.first_part = C.addressof(self._ringing), self._first


def wrong_program(instruction: int) -> DeviceFailed:
    """Return the error for a program that the player refuses or stops."""
    return DeviceFailed(
        f"the player stopped at instruction {instruction} of a graph's program, which is wrong; "
        "this is a bug: please report it, and use --device cpu meanwhile"
    )


def _layer(
    step: CutStep, schedule: Schedule, guess: RoutingGuess, likeliest: Likeliest, kept: list[Any]
) -> Layer:
    split, ids, slot_ids, record = step.split, step.ids, step.slot_ids, step.routing
    assert ids is not None
    assert slot_ids is not None
    slots, reason = schedule.pools[step.pool], schedule.copy_reasons(step.pool)
    slot_of = slots.of_group(step.group, step.n_experts)
    rank = schedule.rule.ranks(step.group)
    score = guess.scores(step.layer, step.n_experts, step.n_used)
    last = guess.last(step.layer, step.n_used)
    redirects, views = _reads(step, kept)
    kept += [last, split, slots, reason, slot_of, rank, score, record, likeliest]
    n_used, n_tokens, _, _ = ids.tensor.shape
    entry = Layer(
        layer=step.layer, cut=step.cut, at=step.at, last=step.last, n_experts=step.n_experts,
        n_used=n_used, n_tokens=n_tokens, n_slots=slots.n_slots, n_own_slots=slots.n_own,
        n_ahead=step.ahead.n_computing, n_readers=len(step.readers),
        ids_tensor=ids.tensor.address, ids_at=ids.position, ids_bytes=ids.size_bytes,
        ids_stride=ids.tensor.strides[1] // 4,
        slot_ids_tensor=slot_ids.tensor.address, slot_ids=slot_ids.position,
        slot_of=slot_of.ctypes.data, state=slots.state.buffer_info()[0],
        last_use=slots.last_use.buffer_info()[0], reason=reason.buffer_info()[0],
        rank=rank.buffer_info()[0], score=score.ctypes.data, by_token=last.ctypes.data,
        likeliest=likeliest.experts.ctypes.data + 8 * step.group,
        likeliest_score=likeliest.scores.ctypes.data + 8 * step.group, missed=1,
        n_redirects=len(redirects), n_reads=len(views), n_views=len(views),
        home=schedule.home(step.pool, step.group),
        redirects=C.addressof(redirects), views=C.addressof(views),
    )  # fmt: skip
    if split is not None:
        entry.may_repeat, entry.output = split.may_repeat, split.output.address
        entry.rows_tensor, entry.rows_to = split.inputs.address, split.read_to.address
        entry.rows_bytes = split.read_to.size_bytes
        entry.host = C.addressof(split.host.entry.struct)
        entry.weights = C.addressof(split.weights.entry.sources)
        entry.scale_tables = C.addressof(split.weights.entry.scales)
    if record is not None:
        entry.record, entry.n_record = record.rows.ctypes.data, N_KEPT
        entry.recorded = record.counts.ctypes.data
    return entry


def _reads(step: CutStep, kept: list[Any]) -> tuple[Any, Any]:
    """Return the sources that nodes read elsewhere, and the views of slots."""
    assert step.slot_ids is not None
    redirects, views, tensors, of_ids = [], [], [], []
    for reader in step.readers:
        for read in reader.reads:
            tensor, base, stride_bytes, axis = read.views.shifting()
            tensors.append(tensor)
            views.append(View(tensor.address, base, stride_bytes, axis))
            redirects.append(RedirectEntry(*read.redirect.entry, tensor.address))
        for redirect in reader.ids:
            of_ids.append(RedirectEntry(*redirect.entry, step.slot_ids.tensor.address))
    redirects += of_ids
    arrays = (RedirectEntry * len(redirects))(*redirects), (View * len(views))(*views)
    kept += [tensors, *arrays]
    return arrays
