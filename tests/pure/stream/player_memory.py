"""A player with all its memory, on a device that is made up. It needs no library of ggml.

Each array lies between guard bytes, except with AddressSanitizer, which has its own. The device's
ids, the tables and all numbers may be wrong. Arrays have the sizes that the structs name.
"""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.ggml import player as api
from offload.ggml.player import (
    Bell,
    Calls,
    Layer,
    Player,
    PlayerAhead,
    PlayerEvent,
    PlayerHost,
    PlayerPart,
    RedirectEntry,
    Ringing,
    Segment,
    View,
    native,
)  # fmt: skip
from offload.schedule.division import SplitCosts
from offload.stream.entries import CostEntry
from offload.stream.layers_ahead import segments_of

END, SUBMIT, READ, RECORD, DIVIDE, ARRIVE, OVERLAP, HOST, PYTHON, WHOLE, AHEAD, RING = range(12)
TOKEN_ROWS = 20
GUARD_BYTES = 0 if os.environ.get("PLAYER_SANITIZERS") else 64
_GUARD = 0xA5
_MOST = 100_000  # elements that an array is given at most
_TENSOR_BYTES, _NE, _NB, _DATA, _BUFFER, _PARAMETERS = 96, 0, 32, 64, 72, 80
_COMPUTE = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p)
_MOVE = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_void_p, C.c_size_t, C.c_size_t)
_ONE = C.CFUNCTYPE(None, C.c_void_p)
_COUNT = C.CFUNCTYPE(None, C.c_void_p, C.c_int)
_POOL = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p)
_EVENT = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p, C.c_uint)
_RECORD = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p)
_WORD = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_uint64, C.c_uint32, C.c_uint)
_QUERY = C.CFUNCTYPE(C.c_int, C.c_void_p)
Change = tuple[str, int, int]  # (name of a number, which of them, its wrong value)


class Memory:
    """Arrays between guard bytes."""

    def __init__(self) -> None:
        self._arrays: list[tuple[NDArray[np.uint8], int]] = []

    def array(self, kind: Any, *shape: int) -> NDArray[Any]:
        """Return an array of zeros. Sizes below 0 and above _MOST are cut."""
        shape = tuple(min(max(n, 0), _MOST) for n in shape)
        n_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        whole = np.full(n_bytes + 2 * GUARD_BYTES, _GUARD, np.uint8)
        self._arrays.append((whole, n_bytes))
        found: NDArray[Any] = whole[GUARD_BYTES : GUARD_BYTES + n_bytes].view(kind).reshape(shape)
        found[...] = 0
        return found

    def tensor(self) -> int:
        """Return the address of a tensor."""
        return int(self.array(np.uint8, _TENSOR_BYTES).ctypes.data)

    def assert_guarded(self) -> None:
        for whole, n_bytes in self._arrays:
            assert (whole[:GUARD_BYTES] == _GUARD).all()
            assert (whole[GUARD_BYTES + n_bytes :] == _GUARD).all()


@dataclass
class Sizes:
    """Sizes of a layer, for which it has memory. They need not fit each other."""

    n_experts: int
    n_used: int
    n_tokens: int
    n_slots: int
    rows_per_token: int
    may_repeat: int = 0
    n_readers: int = 2
    row_bytes: int = 12
    n_record: int = 3
    is_split: bool = True


def some_sizes(rng: Random) -> Sizes:
    n_used = rng.randint(1, 4)
    n_experts = rng.randint(n_used, 12)
    n_slots = rng.randint(n_used, n_experts) if n_experts % 4 else n_experts
    return Sizes(
        n_experts, n_used, rng.choice((1, 1, 2, 5)), n_slots,
        rng.choice((1, n_used)), rng.randint(0, 1), rng.randint(1, 3),
        is_split=n_experts % 4 > 0,
    )  # fmt: skip


def program(
    layers: Sequence[Sizes], *, whole: bool, layers_per_wait: int = 1
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return the instructions, parts and segments of a graph with these layers, and one stop."""
    ahead = dict(segments_of(len(layers), layers_per_wait)) if layers_per_wait > 1 else {}
    segments: list[list[int]] = []
    n_nodes = 4 * len(layers) + 2
    parts: list[list[int]] = []

    def part(first: int, end: int) -> int:
        if [first, end] not in parts:
            parts.append([first, end])
        return parts.index([first, end])

    words, before, shown = [[PYTHON, 0, 0, 0]], [0], -1
    for n, sizes in enumerate(layers):
        at, end = 4 * n + 2, 4 * n + 4
        if n in ahead:
            until = 4 * ahead[n] + 2  # the end of the graph, if no layer is left
            numbers = [part(first, until) for first in before]
            words.append([AHEAD, len(segments), 0, 0])
            segments.append([numbers[0], [*numbers, -1][1], n, ahead[n], 0])
        numbers = [part(first, at) for first in before]
        words.append([SUBMIT, numbers[0], numbers[1] if len(numbers) > 1 else -1, shown])
        words += [[op, n, 0, 0] for op in (READ, RECORD, DIVIDE)]
        words += [[ARRIVE, n, nth, 0] for nth in range(min(max(sizes.n_readers, 0), 3))]
        before, shown = [at], n
        if sizes.is_split:
            words += [[OVERLAP, part(at, end), -1, n], [HOST, n, 0, 0]]
            before.append(end)
    numbers = [part(first, n_nodes) for first in before]
    words.append([SUBMIT, numbers[0], numbers[1] if len(numbers) > 1 else -1, shown])
    if whole:
        words.insert(0, [WHOLE, part(0, n_nodes), 0, 0])
    words.append([END, n_nodes, 0, 0])
    for segment in segments:
        segment[4] = [*resume_of(words), len(words) - 1][segment[3]]
    return words, parts, segments


ROWS = (40, 3), (0, -1)  # numbers of the first rows: those of results are fetched, or all are set


def ringing(n_layers: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return more parts of `program`, for layers without a wait, and each layer's numbers: of its
    parts among these, and of the first rows of its output and of the CPU's results. The first part
    comes before the layers."""
    parts = [[0, 2]]
    for n in range(n_layers):
        parts += [[4 * n + 2, 4 * n + 4], [4 * n + 4, min(4 * n + 6, 4 * n_layers + 2)]]
    return parts, [[2 * n + 1, 2 * n + 2, *ROWS[n % 2]] for n in range(n_layers)]


def resume_of(words: Sequence[Sequence[int]]) -> list[int]:
    """Return the position of the instruction READ of each layer."""
    return [at for at, word in enumerate(words) if word[0] == READ]


class Machine:
    """A player, its memory, and what stands in for the device and for Python."""

    def __init__(
        self,
        layers: Sequence[Sizes],
        rng: Random,
        changes: Sequence[Change] = (),
        costs: SplitCosts | None = None,
        *,
        whole: bool = False,
        layers_per_wait: int = 1,
        rings: bool = False,
    ) -> None:
        """`rings`: the layers run without a wait of the host. All of them have to be split."""
        self.memory, self.sizes, self.rng, self.kept = Memory(), layers, rng, list[Any]()
        self.wrong = list(changes)
        self.ids: dict[int, NDArray[np.int32]] = {}  # what the device gives, by a tensor's address
        self.statuses: list[int] = []  # of the next computations
        self.block = 0  # the tensor with all layers' ids
        self.errors: list[int] = []  # of the driver's next calls
        self.is_silent = False  # whether the device writes no word
        self.waited_for = 0  # the last answer that the second stream was told to wait for
        self.n_computed_while_waiting = 0  # computations enqueued before that answer
        words, parts, segments = program(layers, whole=whole, layers_per_wait=layers_per_wait)
        self.n_nodes = words[-1][1]
        n_parts = len(parts)
        if rings:
            words.insert(1 + whole, [RING, 0, 0, 0])
            more, numbers = ringing(len(layers))
            parts += more
            for segment in segments:
                segment[4] += 1
        resume = resume_of(words)
        self._change("words", words)
        self._change("parts", parts)
        self.words, self.parts = self.memory.array(np.int64, len(words), 4), self._parts(parts)
        self.words[...] = words
        self.tables = [self._tables(sizes) for sizes in layers]
        self.layers = (Layer * len(layers))(
            *[self._layer(n, sizes) for n, sizes in enumerate(layers)]
        )
        for name, which, value in self._named("layer."):
            setattr(self.layers[which % len(layers)], name, value)
        self.player = self._player(costs)
        if segments:
            self._change("segments", segments)
            self.player.ahead = self._keep(self._ahead(segments, resume))
        if rings:
            if not segments:
                self.player.ahead = self._keep(self._ahead([], resume))
            numbers = [[n_parts + a, n_parts + b, *of_rows] for a, b, *of_rows in numbers]
            self._change("ringing", numbers)
            arriving = [(layer.ids_at, layer.rows_to) for layer in self.layers]
            rows = (Ringing * len(numbers))(
                *[Ringing(*row, *there) for row, there in zip(numbers, arriving, strict=True)]
            )
            self.player.ringing, self.player.first_part = self._keep(rows), n_parts
            self.player.is_careful = rng.randint(0, 1)
            self.bell = self._bell()
            self.player.bell = self._keep(self.bell)
            for name, _, value in self._named("player."):
                setattr(self.player, name, value)
        self.address = C.addressof(self.player)

    def _named(self, start: str) -> Iterator[Change]:
        for name, which, value in self.wrong:
            if name.startswith(start):
                yield name.removeprefix(start), which, value

    def _change(self, name: str, rows: list[list[int]]) -> None:
        for _, which, value in self._named(name):
            row, column = divmod(which, len(rows[0]))
            rows[row % len(rows)][column] = value

    def _keep(self, kept: Any) -> int:
        self.kept.append(kept)
        return C.addressof(kept)

    def _new(self, kind: Any, *shape: int) -> int:
        return int(self.memory.array(kind, *shape).ctypes.data)

    def _pointers(self, values: Sequence[int]) -> int:
        array = self.memory.array(np.uint64, len(values))
        array[...] = values
        return int(array.ctypes.data)

    def _parts(self, rows: list[list[int]]) -> Any:
        uid = self._new(np.uint64, 1)
        return (PlayerPart * len(rows))(
            *[PlayerPart(*row, self._new(np.uint8, 8), uid, 7) for row in rows]
        )

    def _tables(self, sizes: Sizes) -> dict[str, NDArray[Any]]:
        new, n, n_slots = self.memory.array, sizes.n_experts, sizes.n_slots
        found = {
            "slot_of": new(np.int32, n), "state": new(np.int32, n_slots),
            "last_use": new(np.int64, n_slots), "reason": new(np.int8, n_slots),
            "rank": new(np.float64, n), "score": new(np.float32, n),
            "recorded": new(np.int64, 2),
        }  # fmt: skip
        slots = [*range(len(found["state"]))]
        self.rng.shuffle(slots)
        there = self.rng.sample([*range(len(found["slot_of"]))], min(len(slots), max(0, n)))
        found["slot_of"][...] = -1
        for expert in there[: self.rng.randint(0, len(there))]:
            found["slot_of"][expert] = slots.pop()
        found["state"][...] = [self.rng.choice((0, 1, 2, 2, 2, 3)) for _ in found["state"]]
        for name, which, value in self._named("table."):
            if name in found and len(found[name]):
                found[name][which % len(found[name])] = np.int64(value).astype(found[name].dtype)
        return found

    def _layer(self, number: int, sizes: Sizes) -> Layer:
        new, n_used, n_tokens = self._new, sizes.n_used, sizes.n_tokens
        n_pairs = min(max(n_used, 0), 300) * min(max(n_tokens, 0), 300)
        n_rows = n_pairs if sizes.rows_per_token > 1 else n_tokens
        stride = n_used + self.rng.randint(0, 2)
        ids_bytes = 4 * max(0, (min(n_tokens, 300) - 1) * stride + n_used)
        rows_bytes = max(0, min(n_rows, _MOST)) * 12
        ids_tensor, views = self.memory.tensor(), (View * 2)()
        given = self.memory.array(np.int32, ids_bytes // 4)
        n_chosen = max(0, min(n_used, sizes.n_experts))
        for t in range(0, len(given) - n_chosen + 1, max(1, stride)):
            given[t : t + n_chosen] = self.rng.sample(range(max(1, sizes.n_experts)), n_chosen)
        for _, which, value in self._named("ids"):
            if len(given):
                given[which % len(given)] = np.int64(value).astype(np.int32)
        self.ids[ids_tensor] = given
        C.c_uint64.from_address(ids_tensor + _DATA).value = ids_tensor
        redirects = (RedirectEntry * 2)()
        for view, redirect in zip(views, redirects, strict=True):
            view.tensor, view.base, view.stride, view.axis = self.memory.tensor(), 4096, 16, 2
            redirect.source, redirect.own, redirect.other = new(np.uint64, 1), 8, 16
        for name, which, value in self._named("view."):
            setattr(views[which % 2], name, value)
        tables = self.tables[number]
        rows_to = new(np.uint8, rows_bytes)
        return Layer(
            layer=number, cut=number, at=4 * number + 2, last=4 * number + 3,
            n_experts=sizes.n_experts, n_used=n_used, n_tokens=n_tokens, n_slots=sizes.n_slots,
            n_own_slots=sizes.n_slots,
            may_repeat=sizes.may_repeat, n_ahead=1, n_readers=sizes.n_readers,
            ids_tensor=ids_tensor, ids_at=new(np.uint8, ids_bytes), ids_bytes=ids_bytes,
            ids_stride=stride, rows_tensor=self.memory.tensor(), rows_to=rows_to,
            rows_bytes=rows_bytes, slot_ids_tensor=self.memory.tensor(),
            slot_ids=new(np.int32, n_pairs), by_token=new(np.int16, TOKEN_ROWS, n_used),
            likeliest=new(np.int64, 1), likeliest_score=new(np.float64, 1),
            record=new(np.int16, sizes.n_record, n_used),
            n_record=sizes.n_record, n_redirects=2, n_views=2,
            n_reads=self.rng.randint(0, 2), home=max(-1, sizes.n_slots - sizes.n_experts),
            redirects=self._keep(redirects),
            views=self._keep(views),
            host=self._keep(self._host(sizes, n_pairs, rows_to)) if sizes.is_split else None,
            weights=self._pointers([1, 2]), output=self.memory.tensor(), missed=1,
            scale_tables=self._pointers([new(np.float32, sizes.n_experts)]),
            issues=self.rng.randint(0, 1),
            **{name: array.ctypes.data for name, array in tables.items()},
        )  # fmt: skip

    def _host(self, sizes: Sizes, n_pairs: int, inputs: int) -> PlayerHost:
        new = self._new
        most = n_pairs + self.rng.randint(0, 3)
        host = PlayerHost(
            graph=new(np.uint8, 8), most=most, row_bytes=sizes.row_bytes,
            rows_per_token=sizes.rows_per_token, n_counts=2, n_sources=2, n_scales=1,
            ids=new(np.int32, most), places=new(np.int32, most), inputs=inputs,
            rows=new(np.uint8, most, sizes.row_bytes), staging=self.memory.tensor(),
            counts=self._pointers([new(np.int64, 1), new(np.int64, 1)]),
            sources=self._pointers([new(np.uint64, 1), new(np.uint64, 1)]),
            scales=self._pointers([new(np.float32, most)]), placing=new(np.uint8, 8),
            header_bytes=16, out_bytes=8, n_out_counts=1, n_into_counts=1,
            out_counts=self._pointers([new(np.int64, 1)]),
            into_counts=self._pointers([new(np.int64, 1)]),
            into=self.memory.tensor(), set_rows=self.memory.tensor(), down=self.memory.tensor(),
        )  # fmt: skip
        for name, _, value in self._named("host."):
            setattr(host, name, value)
        # No other struct names the size of this memory.
        host.results = new(np.uint8, host.header_bytes + most * host.out_bytes)
        return host

    def _ahead(self, segments: list[list[int]], resume: list[int]) -> PlayerAhead:
        n, new = len(self.layers), self.memory.array
        sizes = [(layer.ids_bytes, min(max(layer.n_experts, 0), _MOST)) for layer in self.layers]
        places = np.cumsum([(0, 0), *sizes], axis=0)
        tables = {"ids_at": places[:-1, 0], "table_at": places[:-1, 1], "resume": resume}
        for name, values in tables.items():
            tables[name] = new(np.int64, n)
            tables[name][...] = values
            for _, which, value in self._named(f"ahead.{name}"):
                tables[name][which % n] = value
        ids_bytes, n_table = places[-1].tolist()
        n_taken = min(max((layer.n_slots for layer in self.layers), default=0), _MOST)
        entries = (Segment * len(segments))(*[Segment(*row) for row in segments])
        self.moved = (RedirectEntry * 1)(RedirectEntry(self._new(np.uint64, 1), 8, 16))
        self.block = self.memory.tensor()
        return PlayerAhead(
            segments=self._keep(entries), n_segments=len(segments), moved=C.addressof(self.moved),
            n_moved=1, ids_tensor=self.block, ids=self._new(np.uint8, ids_bytes),
            ids_bytes=ids_bytes, table_tensor=self.memory.tensor(),
            table=self._new(np.int32, n_table), there=self._new(np.uint8, n_table),
            taken=self._new(np.uint8, n_taken), n_table=n_table, n_taken=n_taken,
            **{name: values.ctypes.data for name, values in tables.items()},
        )  # fmt: skip

    def _player(self, costs: SplitCosts | None) -> Player:
        new, most = self._new, max(1, min(_MOST, max(s.n_experts for s in self.sizes)))
        pairs = SMALL_BATCH * 12
        self.kinds = self.memory.array(np.uint8, most)
        n_tokens = self.rng.choice((0, min(max(self.sizes[0].n_tokens, 0), SMALL_BATCH)))
        self.token_rows = self.memory.array(np.int64, n_tokens)
        self.token_rows[...] = [self.rng.randrange(TOKEN_ROWS) for _ in self.token_rows]
        for _, which, value in self._named("token_rows"):
            if n_tokens:
                self.token_rows[which % n_tokens] = value
        self.resident = self.memory.array(np.uint8, most)
        self.rows, self.late = (self.memory.array(np.int32, most) for _ in range(2))
        player = Player(
            calls=self._keep(self._calls()), stream=new(np.uint8, 8), cpu=new(np.uint8, 8),
            program=self.words.ctypes.data, n_words=self.words.size,
            parts=C.addressof(self.parts), n_parts=len(self.parts),
            layers=C.addressof(self.layers), n_layers=len(self.layers), n_stops=1,
            recording=1, clocked=self.rng.randint(0, 1),
            clock_ns=self.rng.randint(0, 1), splitter=self.rng.choice((0, 1)),
            from_disk=self.rng.randint(0, 1),
            token_rows=self.token_rows.ctypes.data, n_token_rows=n_tokens,
            most_token_rows=TOKEN_ROWS, half_life=64.0, rule_used=1, rule_scan=8, decay=0.9,
            most_events=4, events=self._keep((PlayerEvent * 4)()), ids=new(np.int32, pairs),
            rows=self.rows.ctypes.data, late=self.late.ctypes.data,
            late_pairs=new(np.int32, pairs), used=new(np.int32, most),
            resident=self.resident.ctypes.data, kinds=self.kinds.ctypes.data,
            experts=new(np.int32, most), slots=new(np.int32, most + 1), shown=new(np.int32, most),
            order=new(np.int32, most + 1), most_pairs=pairs, most_experts=most,
        )  # fmt: skip
        player.whole = min(layer.home for layer in self.layers) >= 0 and self.rng.randint(0, 1)
        if costs is not None:
            entry = CostEntry(costs, most)
            self.kept.append(entry)
            entry.give(player)
            player.ends = new(np.float64, player.most_lines, most + 1)
            for name, _, value in self._named("costs."):
                setattr(entry.struct, name, value)
            for _, which, value in self._named("seconds"):
                array = entry._kept[which % len(entry._kept)].reshape(-1)
                if len(array):
                    array[which % len(array)] = float("nan") if value % 2 else float(value)
        for name, _, value in self._named("player."):
            setattr(player, name, value)
        return player

    # -- the device --------------------------------------------------------------------------------

    def _calls(self) -> Calls:
        functions = (
            _COMPUTE(self._compute),
            _MOVE(lambda _, tensor, values, offset, n: C.string_at(values, n) and None),
            _MOVE(self._get), _ONE(lambda _: None), _COUNT(lambda *_: None),
            _POOL(lambda *_: None),
        )  # fmt: skip
        self.kept.append(functions)
        pointers = [C.cast(function, C.c_void_p).value for function in functions]
        return Calls(*pointers, _NE, _NB, _DATA, _BUFFER, _PARAMETERS)

    def _compute(self, stream: int, _: int) -> int:
        is_waiting = self.waited_for and self.waited_for > self.answered  # only rings have words
        if stream == self.player.stream and is_waiting:
            self.n_computed_while_waiting += 1
        return self.statuses.pop() if self.statuses else 0

    def _wait(self, _: int, word: int, value: int, flags: int) -> None:
        self.waited_for = value

    def _get(self, _: int, tensor: int, to: int, offset: int, n_bytes: int) -> None:
        given = self.ids.get(tensor)
        values = b"\7" * n_bytes if given is None else given.tobytes()
        if tensor == self.block:
            values = b"".join(ids.tobytes() for ids in self.ids.values())
        C.memmove(to, values[offset:].ljust(n_bytes, b"\7"), n_bytes)

    def _bell(self) -> Bell:
        """The driver and a second stream, which does all at once."""

        def of_driver(do: Any = None) -> Any:
            def call(*arguments: int) -> int:
                error = self.errors.pop() if self.errors else 0
                if do is not None and not error:
                    do(*arguments)
                return error

            return call

        def write(_: int, word: int, value: int, flags: int) -> None:
            if self.is_silent:
                return
            C.c_uint32.from_address(word).value = value
            layer = self.layers[(value - self.bell.n_told - 1) % len(self.layers)]
            self._get(0, layer.ids_tensor, layer.ids_at, 0, layer.ids_bytes)  # by a kernel

        functions = (
            _EVENT(of_driver()), _RECORD(of_driver()),
            _WORD(of_driver(write)), _WORD(of_driver(self._wait)), _QUERY(of_driver()),
            _POOL(lambda *_: None), _POOL(lambda *_: None),
        )  # fmt: skip
        self.kept.append(functions)
        names = ("wait_for", "record", "write", "wait", "query", "backend_record", "backend_wait")
        pointers = {
            name: C.cast(function, C.c_void_p).value
            for name, function in zip(names, functions, strict=True)
        }
        bell = Bell(
            rung=self._new(np.uint32, 1), answered=self._new(np.uint32, 1), n_ahead=2,
            **pointers,
        )  # fmt: skip
        for name, _, value in self._named("bell."):
            setattr(bell, name, value)
        return bell

    @property
    def answered(self) -> int:
        """The last layer that the host has answered, as the word counts them."""
        return C.c_uint32.from_address(self.bell.answered).value

    # -- Python ------------------------------------------------------------------------------------

    def play(self) -> int:
        """Play as GraphPlayer.run does. Return the code with which it ended."""
        player, n_yields = self.player, 0
        native().begin(self.address)
        while True:
            code = int(native().play(self.address))
            self.memory.assert_guarded()
            assert api.DONE <= code <= api.YIELD_LATE
            if code < api.YIELD_SUBMIT:
                return code
            n_yields += 1
            assert n_yields <= 4 * len(self.words) + 4, "the player does not come to its end"
            layer = self.layers[player.layer] if player.layer >= 0 else None
            if code == api.YIELD_SUBMIT:
                player.done, player.open, player.python_open = player.until, -1, 0
            elif code == api.YIELD_FETCH:
                assert layer is not None
                self._divide_late(layer)
            elif code == api.YIELD_LATE:
                player.n_arrived += self.rng.randint(1, max(1, player.n_late - player.n_arrived))
                for _, _, value in self._named("n_arrived"):
                    player.n_arrived = value
            elif code == api.YIELD_ISSUE:
                assert layer is not None
                layer.issues = 0
            elif code == api.YIELD_NEED:
                assert layer is not None
                self._take_slots(layer)

    def _divide_late(self, layer: Any) -> None:
        """Let the CPU compute some experts of a split layer later than others, or let it divide."""
        if not layer.host or not self.rng.randint(0, 2):
            return
        n = int(layer.n_experts)
        self.kinds[:n] = [0 if there else 2 for there in self.resident[:n]]
        misses = [e for e in range(n) if self.rows[e] and not self.resident[e]]
        late = self.rng.sample(misses, self.rng.randint(0, len(misses)))
        self.kinds[late] = 3
        for _, which, value in self._named("kinds"):
            self.kinds[which % len(self.kinds)] = value % 256
        self.late[: len(late)] = late
        for _, which, value in self._named("late"):
            self.late[which % len(self.late)] = np.int64(value).astype(np.int32)
        self.player.n_late, self.player.phase = len(late), api.IS_DIVIDED
        for _, _, value in self._named("n_late"):
            self.player.n_late = value

    def _take_slots(self, layer: Any) -> None:
        """Put the device's experts into slots, if not told to forget it."""
        if any(self._named("forget")):
            return
        tables = self.tables[int(layer.layer)]
        slot_of, n = tables["slot_of"], int(layer.n_on_device)
        experts = (C.c_int32 * n).from_address(self.player.experts)[:] if n else []
        for expert in experts:
            if slot_of[expert] < 0:
                kept = {int(slot_of[e]) for e in experts}
                slot = next((s for s in range(layer.n_slots) if s not in kept), -1)
                slot_of[slot_of == slot] = -1
                slot_of[expert] = slot
        layer.waits = self.rng.randint(0, 1)
