"""Lets a graph compute layers before the host knows which experts their routers chose.

The device then finds the slots of experts itself. A GET_ROWS before each layer's products looks up
the slot of each of the router's ids in a table in device memory. The player uploads the table's
changed entries. Afterwards the host reads the ids. If an expert was in no slot, the player goes
back to its layer.

ggml gives the memory of a result to a later node when no other node reads the result any more. A
repair reads such results again, so they get memory of their own. Inputs that later nodes overwrite
are copied to such memory when the graph begins. Rows of a KV cache need no copy, because the repair
writes the same rows.
"""

from __future__ import annotations

import ctypes as C
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.alignment import ALIGNMENT_BYTES, aligned
from offload.ggml.backend import Device
from offload.ggml.graph import Graph
from offload.ggml.library.lib import op_number
from offload.ggml.player import PlayerAhead, RedirectEntry
from offload.ggml.rewriting import VIEWS, Scratch
from offload.ggml.tensor import (
    TENSOR,
    Buffer,
    Tensor,
    buffer_at,
    data_at,
    new_tensor,
    op_at,
    root_at,
    size_at,
    sources_at,
)
from offload.plan.working import MOST_AHEAD_BYTES
from offload.stream.cuts import CutStep

_LEAST_IDS_BYTES = 16 << 10  # smallest buffer for ids on the host


class AheadMemory:
    """Memory for computing ahead. A player's programs share it, and one plays at a time."""

    def __init__(self, device: Device, n_groups: int, most_experts: int, most_slots: int) -> None:
        """`most_experts`: experts of the largest layer. `most_slots`: slots of the largest pool."""
        self.device, self._n, self.n_experts = device, n_groups * most_experts, most_experts
        self.results = Scratch(device, "results that a repair reads")
        self._pinned: list[Buffer] = []  # the table, then buffers for ids
        self._ids = np.empty(0, np.uint8)
        self._arrivals: Buffer | None = None
        self._slots: Buffer | None = None
        self.there = np.zeros(self._n, np.uint8)  # 1 if the table's slot holds the expert
        self.taken = np.zeros(most_slots, np.uint8)  # the player's own, 0 between its uses

    @property
    def device_bytes(self) -> int:
        return self.results.device_bytes + (self._slots.size_bytes if self._slots else 0)

    def close(self) -> None:
        for buffer in (*self._pinned, *([self._slots] if self._slots else ())):
            buffer.close()
        self.results.close()

    def table(self) -> tuple[Buffer, Tensor, NDArray[np.int32]]:
        """Return the table of experts' slots: the device's buffer and tensor, and the host's copy.

        It has a slot for each expert of each group.
        """
        if self._slots is None:
            size_bytes = 4 * self._n + ALIGNMENT_BYTES  # `first` lies behind the table
            self._slots = self.device.allocate(size_bytes, "slots of experts")
            self._slots_on_host = self._on_host(4 * self._n).view(np.int32)
            self._tensor = new_tensor("i32", (self._n, 1, 1, 1), (self._slots, 0))
        return self._slots, self._tensor, self._slots_on_host

    def first(self) -> Tensor:
        """Return a number on the device that is 0: the first row of a tensor. Needs the table."""
        assert self._slots is not None
        return new_tensor("i32", (1, 1, 1, 1), (self._slots, 4 * self._n))

    def arrivals(self, n_bytes: int) -> Buffer | None:
        """Return pinned memory that kernels write ids and rows of a layer to. None: there is none.

        All graphs use the same bytes in turn. Memory that became too small stays until `close`.
        """
        if self._arrivals is None or self._arrivals.size_bytes < n_bytes:
            least = 0 if self._arrivals is None else 2 * self._arrivals.size_bytes
            buffer = self.device.pinned_memory(max(n_bytes, least, _LEAST_IDS_BYTES))
            if buffer is None:
                return None
            self._arrivals = buffer
            self._pinned.append(buffer)
        return self._arrivals

    def ids_on_host(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return `n_bytes` of host memory for ids. All graphs use the same bytes in turn.

        Graphs keep their addresses, so a buffer that became too small stays until `close`. A new
        one is at least twice as large, so all of them together are smaller than two of the last.
        """
        if n_bytes > self._ids.size:
            self._ids = self._on_host(max(n_bytes, 2 * self._ids.size, _LEAST_IDS_BYTES))
        return self._ids[:n_bytes]

    def _on_host(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return `n_bytes` of zeroed host memory, pinned if the device can pin it."""
        buffer = self.device.pinned_memory(n_bytes)
        if buffer is None:
            return np.zeros(n_bytes, np.uint8)
        self._pinned.append(buffer)
        return buffer.host_range.array()[:n_bytes]


class AheadEntry:
    """Describes to the player how to compute layers of one graph ahead."""

    def __init__(self, graph: Graph, steps: Sequence[CutStep], memory: AheadMemory) -> None:
        """`steps`: all steps of the graph. Raises NotRepeatable, DoesNotFit."""
        kept = find_kept(graph, [step.at for step in steps])
        chosen = [_result_of(step, kept.results) for step in steps]  # routers' ids, by layer
        others = (result for result in kept.results if result not in set(chosen))
        order = [*chosen, *others, *kept.inputs]
        sizes = [aligned(size_at(result[0])) for result in order]
        if sum(sizes) > MOST_AHEAD_BYTES:
            raise NotRepeatable(f"{sum(sizes) / 2**20:.1f} MiB of results would have to be kept")
        starts = np.cumsum([0, *sizes])
        ids_bytes = int(starts[len(steps)])
        table, table_tensor, on_host = memory.table()
        self.nodes = [mapping_node(step, table, memory.n_experts) for step in steps]
        buffer = memory.results.reserve(sum(sizes))
        at_copies = starts.tolist()[len(order) - len(kept.inputs) :]
        self.copies = [
            _copying(result[0], buffer, start)
            for result, start in zip(kept.inputs, at_copies, strict=False)
        ]
        for node in (*self.nodes, *self.copies):
            if not memory.device.supports(node):
                raise NotRepeatable(f"{memory.device.name} does not compute {node.name}")
        moved = [
            entry
            for result, start in zip(order, starts.tolist(), strict=False)
            for entry in moves_of(result, buffer, start)
        ]
        self._moved = (RedirectEntry * len(moved))(*moved)
        ids = memory.ids_on_host(ids_bytes)
        ids_tensor = new_tensor("i32", (ids_bytes // 4, 1, 1, 1), (buffer, 0))
        self.ids_at = np.array(
            [
                start + _ids(step).position - data_at(result[0])
                for step, result, start in zip(steps, chosen, starts.tolist(), strict=False)
            ],
            np.int64,
        )
        self.table_at = np.array([step.group * memory.n_experts for step in steps], np.int64)
        self._kept = graph, ids, ids_tensor, table_tensor, on_host, memory
        self.struct = PlayerAhead(
            moved=C.addressof(self._moved), n_moved=len(moved),
            ids_tensor=ids_tensor.address, ids=ids.ctypes.data, ids_bytes=ids_bytes,
            ids_at=self.ids_at.ctypes.data, table_at=self.table_at.ctypes.data,
            table_tensor=table_tensor.address, table=on_host.ctypes.data,
            there=memory.there.ctypes.data, taken=memory.taken.ctypes.data,
            n_table=on_host.size, n_taken=memory.taken.size,
        )  # fmt: skip

    def play(self, segments: Any, resume: NDArray[np.int64]) -> None:
        """Set the segments of the program that is played next. The caller keeps both arrays.

        `resume`: the number of each layer's READ instruction.
        """
        self.struct.segments, self.struct.n_segments = C.addressof(segments), len(segments)
        self.struct.resume = resume.ctypes.data


def segments_of(n_layers: int, layers_per_wait: int) -> list[tuple[int, int]]:
    """Return the ranges of layers [first, end) that are computed ahead, one range for each wait.

    The ids of layer `end` are read in the same wait. The last layer alone is not computed ahead,
    because that saves no wait: the end of the graph would wait instead.
    """
    segments = []
    for first in range(0, n_layers, layers_per_wait):
        end = min(first + layers_per_wait - 1, n_layers)
        if layers_per_wait >= n_layers:
            end = n_layers
        if end > first and first < n_layers - 1:
            segments.append((first, end))
    return segments


def _ids(step: CutStep) -> Tensor:
    assert step.ids is not None
    return step.ids.tensor


def _result_of(step: CutStep, kept: Sequence[ResultAddresses]) -> ResultAddresses:
    root = root_at(_ids(step).address)
    for result in kept:
        if result[0] == root:
            return result
    raise NotRepeatable(f"{_ids(step).name} is no result of the graph")


def mapping_node(step: CutStep, table: Buffer, n_experts: int) -> Tensor:
    """Return the node that writes slots in place of a layer's ids."""
    ids = _ids(step)
    assert step.slot_ids is not None
    n_used, n_tokens, _, _ = ids.shape
    slots = new_tensor("i32", (1, step.n_experts, n_tokens, 1), (table, 4 * step.group * n_experts),
                       strides=(4, 4, 0, 0))  # fmt: skip
    shape, row = (1, n_used, n_tokens, 1), 4 * n_used
    return step.slot_ids.tensor.computing(
        "GET_ROWS", [slots, ids], shape=shape, strides=(4, 4, row, row * n_tokens)
    )


def _copying(address: int, buffer: Buffer, offset_bytes: int) -> Tensor:
    """Return the node that copies an input to an offset of a buffer."""
    shape = (-(-size_at(address) // 4), 1, 1, 1)
    source = new_tensor("i32", shape, (buffer, offset_bytes))
    source.lie_as(address)
    target = new_tensor("i32", shape, (buffer, offset_bytes))
    return target.computing("CPY", [source, target])


def moves_of(result: ResultAddresses, buffer: Buffer, offset_bytes: int) -> list[RedirectEntry]:
    """Return the pointers to change so that a result and its views lie at an offset of a buffer."""
    moves, start = [], data_at(result[0])
    for address in result:
        was, owner = data_at(address), TENSOR.from_address(address).buffer
        there = buffer.base + offset_bytes + was - start
        moves.append(RedirectEntry(address + TENSOR.data.offset, was, there))
        moves.append(RedirectEntry(address + TENSOR.buffer.offset, owner, buffer.address))
    return moves


_FORGETS = 1 / 8  # share of the averages that each decode replaces
_LEAST_DECODES = 8  # decodes with one wait a layer, before any other number is tried
# Seconds of a wait that the host does not see: a read back, and a launch. Estimated, not measured.
_UNSEEN_S = 10e-6
_LEAST_GAIN = 0.2  # share of the cost that a change of the number must save


class Waits:
    """Averages over decodes of one batch size, and the number of layers per wait chosen from them.

    If a layer computed ahead lacked an expert, the device computes it and the later layers again.
    A wait costs the device the time from the end of its work to the next submission.
    """

    def __init__(self, *, is_async: bool) -> None:
        """`is_async`: False if the host computes what it submits, so that no wait costs time."""
        self._is_async = is_async
        self._n_decodes = self.layers_per_wait = 0
        self._layers = self._missing = self._waits = self._waits_s = self._computed_s = 0.0

    def saw(
        self, n_layers: int, n_missing: int, n_repeated: int, n_waits: int, waits_s: float,
        decode_s: float,
    ) -> None:  # fmt: skip
        """Add a decode to the averages.

        `n_missing`: layers with a missing expert. `n_repeated`: layers computed again. `waits_s`:
        seconds from the end of a wait to the next submission, for `n_waits` waits without a miss.
        """
        keep = 1 - _FORGETS
        self._n_decodes += 1
        self._layers = keep * self._layers + n_layers
        self._missing = keep * self._missing + n_missing
        if n_waits:
            per_layer_s = (decode_s - waits_s) / (n_layers + n_repeated)
            self._waits = keep * self._waits + n_waits
            self._waits_s = keep * self._waits_s + waits_s
            share = _FORGETS if self._computed_s else 1.0
            self._computed_s += share * (per_layer_s - self._computed_s)

    def choose(self, n_layers: int) -> int:
        """Return the number of layers per wait, which is 1 if no layer is computed ahead."""
        if not self._is_async or self._n_decodes < _LEAST_DECODES or n_layers < 2:
            return 1
        choices = [1]
        while 2 * choices[-1] < n_layers:
            choices.append(2 * choices[-1])
        now = min(max(1, self.layers_per_wait), n_layers)
        costs_s = {n: self.cost_s(n, n_layers) for n in (*choices, n_layers)}
        best = min(costs_s, key=costs_s.__getitem__)
        if costs_s[best] < (1 - _LEAST_GAIN) * self.cost_s(now, n_layers):
            now = best
        self.layers_per_wait = now
        return now

    def cost_s(self, n: int, n_layers: int) -> float:
        """Return the expected seconds per layer for waits and repairs, with `n` layers per wait.

        The device computes n - 1 layers ahead, or all n if the only wait is at the graph's end. The
        position of the first layer with a missing expert has a geometric distribution. Layers
        computed ahead are computed again from this one on, with a wait for each.
        """
        wait_s = self._waits_s / max(self._waits, 1e-9) + _UNSEEN_S
        hit = 1 - self._missing / max(self._layers, 1e-9)
        n_ahead = n if n == n_layers else n - 1
        repeated = n_ahead - hit * (1 - hit**n_ahead) / (1 - hit) if hit < 1 else 0.0
        return (wait_s + repeated * (self._computed_s + wait_s)) / n


ResultAddresses = tuple[int, ...]  # the addresses of a result and of its views


class NotRepeatable(Exception):
    """A part of the graph cannot be computed twice. The text says why."""


class KeptResults(NamedTuple):
    """Results and inputs of a graph that get memory of their own."""

    results: list[ResultAddresses]
    inputs: list[ResultAddresses]  # inputs of the graph, which have to be copied


def find_kept(graph: Graph, cuts: Sequence[int]) -> KeptResults:
    """Return the results and inputs to keep, so that the graph can go back to each of its `cuts`.

    `cuts`: positions of nodes, ascending. Raises NotRepeatable.
    """
    views = frozenset(map(op_number, VIEWS))
    addresses, first = graph.addresses(), cuts[0]
    made: dict[int, int] = {}  # position of the node that computes a result
    last: dict[int, int] = {}  # position of the last node that reads it
    shown: dict[int, dict[int, None]] = {}  # views by result, other graphs' too
    again: dict[int, int] = {}  # first node from the first cut on that reads a result
    written: list[tuple[int, int]] = []  # (position, result) of writes through a view
    n_uses: Counter[int] = Counter()
    writers: dict[int, int] = {}  # last node that wrote a result, by address
    for at, node in enumerate(addresses):
        computes = op_at(node) not in views
        sources = sources_at(node)
        n_uses.update(sources)
        for source in sources:
            of = root_at(source)
            if of not in made and op_at(of):  # take this graph's node at its address
                of = writers.get(data_at(of), of)
            last[of] = at
            if source != of:
                shown.setdefault(of, {})[source] = None
            if computes and at >= first and of != root_at(node):
                again.setdefault(of, at)
        root = root_at(node)
        if root == node:
            made[node], writers[data_at(node)] = at, node
        elif computes:
            written.append((at, root))
    for at, root in written:
        if again.get(root, at) < at:
            raise NotRepeatable(f"{Tensor(root).name} is read and then written")
        if root in made and _is_read_later(made[root], at, cuts):
            raise NotRepeatable(f"{Tensor(root).name} is written in place")
    alive = {root for root, end in last.items() if _is_read_later(made.get(root, -1), end, cuts)}
    memory = {buffer_at(node) for node in made}
    # ggml never gives an output's memory to another node.
    results = [root for root in alive if root in made and not Tensor(root).is_output]
    for node in (one for root in results for one in (root, *shown.get(root, ()))):
        if graph.use_count(Tensor(node)) > n_uses[node]:
            raise NotRepeatable(f"{Tensor(node).name} is read by another graph")
    later = [node for node, at in made.items() if at >= first and node not in results]
    inputs = [
        root
        for root in alive
        if root not in made
        and buffer_at(root) in memory
        and any(_overlap(node, root) for node in later)
    ]
    return KeptResults(*([(node, *shown.get(node, ())) for node in of] for of in (results, inputs)))


def _is_read_later(made: int, last: int, cuts: Sequence[int]) -> bool:
    """True if a cut lies between node `made`, which computes a result, and its `last` reader."""
    return any(made < cut <= last for cut in cuts)


def _overlap(some: int, other: int) -> bool:
    if buffer_at(some) != buffer_at(other):
        return False
    first, its_first = data_at(some), data_at(other)
    return first < its_first + size_at(other) and its_first < first + size_at(some)
