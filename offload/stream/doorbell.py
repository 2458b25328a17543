"""Lets a decode's split layers run without a wait of the host for the device, on CUDA.

The host enqueues layers before their ids are known (player.c describes the order). A kernel writes
ids and rows to pinned memory, and then a stream of our own writes a word. The host computes the
CPU's pairs and writes its own word, for which that stream waits. Then a kernel reads the rows.

What the device computes does not depend on the host. A GET_ROWS maps ids to slots, as for layers
that are computed ahead (layers_ahead.py), and another one fetches a row for each pair
(bell_rows.py). A layer's ids and rows lie side by side in memory that no other node gets, so that
one kernel brings both. The output lies where both its rows and the CPU's have numbers.
"""

from __future__ import annotations

import ctypes as C
import math
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

from offload.alignment import aligned
from offload.errors import DeviceFailed
from offload.ggml.backend import Device, StreamEvent
from offload.ggml.cuda_driver import DriverStream, NoDriver, StuckStream, driver, event_of, is_cuda
from offload.ggml.graph import Graph
from offload.ggml.library import log
from offload.ggml.library.lib import library
from offload.ggml.player import Bell, PlayerAhead, RedirectEntry
from offload.ggml.tensor import Buffer, Tensor, data_at, op_at, root_at, size_at, sources_at
from offload.stream.bell_rows import Placing, placing_of, sending_node
from offload.stream.bell_use import BELLS
from offload.stream.cuts import CutStep
from offload.stream.layers_ahead import AheadMemory, ResultAddresses, mapping_node, moves_of

MOST_SECONDS = 15  # longest time in which a decode does not go on
_LAYERS_AHEAD = 4  # layers that are enqueued before the host answers the first of them
_WORDS_BYTES = 128  # two words, each in a cache line of its own
_MOST_ROWS_BYTES = 512 << 10  # of a layer's rows, whose memory on the device is no other node's
# Seconds of a layer that a doorbell saves at least, in most rows of docs/gpu.md (The price of a
# split layer).
_SAVES_S = 20e-6
_FORGETS = 1 / 8  # share of the average that each decode replaces
FIRST_TRIAL, _LONGEST_PERIOD = 64, 4096  # decodes before the other way is timed
_UNTIMED, _COMPARED = 6, 8  # decodes of a trial: graphs are captured in the first ones
_FASTER = 0.98  # share of a decode's time that another way must not exceed
# The first decodes of a graph capture it, load kernels and take memory. Such calls may wait for all
# streams, so no stream may wait for the host meanwhile. ggml frees what was not used for 10 s.
_CAREFUL_DECODES = 4
_UNUSED_S = 5.0


# CUDA's backend waits for the device within a product with experts, unless it has a kernel that
# finds each expert's rows by itself (ggml_cuda_mul_mat_id in llama.cpp's ggml-cuda.cu). It has one
# for a token and any quantised type (mmvq.cu), and for up to 63 tokens and these types (mmq.cu).
_NOT_QUANTISED = frozenset({"f32", "f16", "bf16"})
_MANY_TOKENS = frozenset({
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq1_s",
    "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs", "iq4_nl", "mxfp4", "nvfp4",
})  # fmt: skip
_MOST_TOKENS = 63  # MMQ_DP4A_MAX_BATCH_SIZE - 1 (mmq.cuh), whatever a small batch is here


def waits_inside(types: Iterable[str], n_tokens: int) -> bool:
    """True if the backend may wait for the device within products with experts of these types."""
    if n_tokens == 1:
        return not _NOT_QUANTISED.isdisjoint(types)
    return n_tokens > _MOST_TOKENS or not _MANY_TOKENS.issuperset(types)


# Under a virtual clock: addresses of functions in place of the host's loads and stores of words
# (`see` and `tell` in player.c), which would take no virtual time.
virtual_words: tuple[int | None, int | None] = None, None


class CannotRing(Exception):
    """The layers of a graph cannot run without a wait of the host. The text says why."""


class Doorbell:
    """A stream beside the backend's, with the events and words of both."""

    def __init__(self, device: Device) -> None:
        """Open it, and try its words. Raises CannotRing.

        Ends the process if the device hangs in the trial.
        """
        self.watchdog: BellWatchdog | None = None
        self._events: list[StreamEvent] = []
        self._stream: DriverStream | None = None
        self._words = device.pinned_memory(_WORDS_BYTES)
        try:
            self._events += (device.event() for _ in range(2))
            if self._words is None:
                raise CannotRing("no memory is pinned")
            rung, answered = self._words.base, self._words.base + _WORDS_BYTES // 2
            self._stream = DriverStream(device)
            self._stream.try_words(*map(C.c_uint32.from_address, (rung, answered)))
            calls, lib = driver(), library()
        except (CannotRing, DeviceFailed, NoDriver) as e:
            self.close()
            raise CannotRing(str(e)) from e
        except StuckStream as e:
            BELLS.refuse(str(e))
            log.end(f"{e}; start again with SPECOFFLOAD_WITHOUT=doorbell")
        routed, landed = (event.address for event in self._events)
        self.struct = Bell(
            wait_for=calls.address("cuStreamWaitEvent"), record=calls.address("cuEventRecord"),
            write=calls.address("cuStreamWriteValue32_v2"),
            wait=calls.address("cuStreamWaitValue32_v2"), query=calls.address("cuStreamQuery"),
            backend_record=C.cast(lib.ggml_backend_event_record, C.c_void_p),
            backend_wait=C.cast(lib.ggml_backend_event_wait, C.c_void_p),
            stream=self._stream.address, routed=event_of(routed), landed=event_of(landed),
            backend_routed=routed, backend_landed=landed, rung=rung, answered=answered,
            n_ahead=_LAYERS_AHEAD, see=virtual_words[0], tell=virtual_words[1],
        )  # fmt: skip
        self.watchdog = BellWatchdog(self.struct, device.name)

    def close(self) -> None:
        """Free all. Nothing that was enqueued may be under way."""
        if self.watchdog is not None:
            self.watchdog.close()
        if self._stream is not None:
            self._stream.close()
        for event in self._events:
            event.close()
        self._events.clear()
        if self._words is not None:
            self._words.close()
            self._words = None


def try_bell(device: Device) -> str:
    """Try a doorbell on a device before it is needed. Returns why there is none, "" if it works.

    Also returns "" for devices of other backends than CUDA's, on which the host always waits. Ends
    the process if the device hangs in the trial.
    """
    if not is_cuda(device):
        return ""
    if not BELLS.why_not:
        try:
            Doorbell(device).close()
        except CannotRing as e:
            BELLS.refuse(f"{device.name}: {e}")
    return BELLS.why_not


class BellWatchdog:
    """A thread that looks every second whether decodes with a doorbell go on.

    If nothing was enqueued or answered for some seconds, the host may wait for a device that waits
    for it. The watchdog then answers all layers. The decode fails, and the doorbell is not used any
    more. If that does not end the decode either, the thread ends the process. Seconds in which the
    whole process is stopped do not count.
    """

    def __init__(self, bell: Bell, device: str, *, second_s: float = 1.0) -> None:
        """`device` names the device in the sentence that ends the process."""
        self._bell, self._device, self._second_s = bell, device, second_s
        self._has_decode, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="doorbell", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Watch a decode that begins now."""
        if not self._has_decode.is_set():
            self._has_decode.set()

    def close(self) -> None:
        self._is_closed.set()
        self._has_decode.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            self._has_decode.wait()
            self._has_decode.clear()
            n_steps, n_seconds = -1, 0
            while not self._is_closed.wait(self._second_s) and self._bell.n_layers:
                n_seconds = n_seconds + 1 if self._bell.n_steps == n_steps else 0
                n_steps = self._bell.n_steps
                if n_seconds == MOST_SECONDS:
                    self._release()
                elif n_seconds >= 2 * MOST_SECONDS:
                    log.end(
                        f"{self._device} or a thread of the CPU stopped within a layer, and does "
                        f"not end it within {2 * MOST_SECONDS} s; start again, with "
                        "SPECOFFLOAD_WITHOUT=doorbell if it recurs"
                    )

    def _release(self) -> None:
        bell = self._bell
        bell.is_broken = 1
        BELLS.refuse(f"{self._device} and the host waited for each other")
        answered = C.c_uint32.from_address(bell.answered)
        answered.value = (bell.n_told + bell.n_layers) & 0xFFFFFFFF


class RingEntry:
    """Describes to the player how to run the layers of one graph without a wait of the host."""

    def __init__(self, graph: Graph, steps: Sequence[CutStep], memory: AheadMemory) -> None:
        """`steps`: all steps of the graph. Raises CannotRing, DoesNotFit."""
        _check(steps)
        by_kind = results_in_turns(graph, [root for step in steps for root in _moving(step)])
        sizes = [
            aligned(max(size_at(of_layer[0]) for of_layer in of_layers)) for of_layers in by_kind
        ]
        sizes[-1] += max(4 * step.split.output.shape[0] for step in steps if step.split)  # a row
        _, rows_at, output_at, size_bytes = np.cumsum([0, *sizes]).tolist()
        buffer, arrivals = memory.results.reserve(size_bytes), memory.arrivals(output_at)
        if arrivals is None:
            raise CannotRing("no memory is pinned for ids and rows")
        table, table_tensor, on_host = memory.table()
        self.mapping = [mapping_node(step, table, memory.n_experts) for step in steps]
        self.places = [_placing(step, (buffer, output_at)) for step in steps]
        self.sending = [
            sending_node((buffer, 0), rows_at + size_at(rows[0]), arrivals, memory.first())
            for rows in by_kind[1]
        ]
        self.arriving = [  # addresses of each layer's ids and rows in pinned memory
            (arrivals.base + ids, arrivals.base + rows_at + rows)
            for ids, rows in map(_within, steps)
        ]
        for node in (*self.mapping, *self.sending, *(place.node for place in self.places)):
            if not memory.device.supports(node):
                raise CannotRing(f"{memory.device.name} does not compute {node.name}")
        starts = [(0, rows_at, place.into) for place in self.places]
        moved = [
            entry
            for results, at in zip(zip(*by_kind, strict=True), starts, strict=True)
            for result, start in zip(results, at, strict=True)
            for entry in moves_of(result, buffer, start)
        ]
        self._moved = (RedirectEntry * len(moved))(*moved)
        self._table_at = np.array([step.group * memory.n_experts for step in steps], np.int64)
        self._kept = graph, table_tensor, on_host, memory, arrivals
        self.struct = PlayerAhead(
            moved=C.addressof(self._moved), n_moved=len(moved), table_at=self._table_at.ctypes.data,
            table_tensor=table_tensor.address, table=on_host.ctypes.data,
            there=memory.there.ctypes.data, taken=memory.taken.ctypes.data,
            n_table=on_host.size, n_taken=memory.taken.size,
        )  # fmt: skip
        self._first = FirstDecodes()

    def is_careful(self) -> bool:
        """Count a decode. Return True if the backend may have to prepare something in it."""
        return self._first.is_careful(time.perf_counter())

    def failed(self) -> None:
        """Note that a decode failed, after which the backend may have to prepare things again."""
        self._first = FirstDecodes()


class FirstDecodes:
    """Counts the decodes in which the backend may have to prepare something. Pure."""

    def __init__(self) -> None:
        self._n, self._last_s = 0, -math.inf

    def is_careful(self, now_s: float) -> bool:
        """Count a decode that begins at `now_s`. Return True for the first ones, and after a pause.

        A pause is longer than `_UNUSED_S`.
        """
        if now_s - self._last_s > _UNUSED_S:
            self._n = 0
        self._last_s = now_s
        self._n += 1
        return self._n <= _CAREFUL_DECODES


class RingChoice:
    """Whether decodes of one batch size ring, or wait in each layer. Pure.

    The faster way is taken. Now and then, the other way is timed for some decodes, and compared
    with the decodes just before them. With a doorbell no missing expert is streamed, so the slower
    side of a layer may take longer. If it takes too much longer by the measured costs, the decodes
    wait.
    """

    def __init__(self) -> None:
        self._left_s = 0.0  # average seconds by which a layer takes longer
        self._rings = True  # the way that was faster
        self._until_trial = self._period = FIRST_TRIAL  # decodes
        self._times: deque[float] = deque(maxlen=_COMPARED)  # of the last decodes in that way
        self._trial: list[float] | None = None  # times of decodes in the other way

    @property
    def pays(self) -> bool:
        """True if the next decode should ring."""
        return self._left_s < _SAVES_S and self._rings == (self._trial is None)

    def saw(self, n_layers: int, left_s: float, decode_s: float, *, rang: bool) -> None:
        """Add a decode.

        `left_s`: seconds by which its layers take longer if no expert is streamed. `rang`: whether
        it ran without a wait.
        """
        self._left_s += _FORGETS * (left_s / n_layers - self._left_s)
        if self._left_s >= _SAVES_S:
            self._trial = None
            return
        if rang != (self._rings == (self._trial is None)):
            return  # it could not be computed in the way that was to be timed
        if self._trial is None:
            self._times.append(decode_s)
            self._until_trial -= 1
            if self._until_trial <= 0 and len(self._times) == _COMPARED:
                self._trial = []
            return
        self._trial.append(decode_s)
        if len(self._trial) == _UNTIMED + _COMPARED:
            self._compare(self._trial[_UNTIMED:])

    def _compare(self, others: Sequence[float]) -> None:
        self._trial = None
        if statistics.median(others) < _FASTER * statistics.median(self._times):
            self._rings, self._period = not self._rings, FIRST_TRIAL
        else:
            self._period = min(2 * self._period, _LONGEST_PERIOD)
        self._times.clear()
        self._until_trial = self._period


def _moving(step: CutStep) -> tuple[int, int, int]:
    """Return the results that get other memory: a layer's ids, its experts' rows, their output."""
    assert step.ids is not None
    assert step.split is not None
    ids, rows, output = step.ids.tensor, step.split.inputs, step.split.output
    return root_at(ids.address), root_at(rows.address), root_at(output.address)


def _check(steps: Sequence[CutStep]) -> None:
    """Raise CannotRing if kernels cannot reach the host's memory, or if a product waits by itself.

    Raises it for layers with too many rows, too.
    """
    for step in steps:
        assert step.split is not None
        if not step.split.host.is_pinned:
            raise CannotRing("not all memory is pinned, so kernels cannot reach it")
        weights = step.split.weights.sources[: len(step.readers)]
        if waits_inside({weight.type for weight in weights}, step.n_tokens):
            raise CannotRing("the backend may wait for the device")
        rows_bytes = 4 * step.split.output.shape[0] * step.n_used * step.n_tokens
        if rows_bytes > _MOST_ROWS_BYTES:
            raise CannotRing(f"a layer has {rows_bytes / 2**20:.1f} MiB of rows")


def _placing(step: CutStep, into: tuple[Buffer, int]) -> Placing:
    """Return how a layer's output gets the CPU's rows."""
    assert step.split is not None
    return placing_of(step.split.host, step.n_used * step.n_tokens, into)


def _within(step: CutStep) -> tuple[int, int]:
    """Return how many bytes a layer's ids and rows come after the results that have them."""
    assert step.ids is not None
    assert step.split is not None
    ids, rows, _ = _moving(step)
    return step.ids.tensor.position - data_at(ids), step.split.inputs.position - data_at(rows)


def results_in_turns(
    graph: Graph, roots: Sequence[int]
) -> tuple[list[ResultAddresses], list[ResultAddresses], list[ResultAddresses]]:
    """Return the layers' ids, rows and outputs, each with its views.

    `roots` are the three results of each layer in turn. Raises CannotRing if results of two layers
    cannot have the same memory.
    """
    results = _with_views(graph, roots)
    by_kind = results[::3], results[1::3], results[2::3]
    for of_layers in by_kind:
        _check_turns(graph, of_layers)
    return by_kind


def _with_views(graph: Graph, roots: Sequence[int]) -> list[ResultAddresses]:
    """Return each result with its views. Raises CannotRing."""
    shown: dict[int, dict[int, None]] = {root: {} for root in roots}
    if len(shown) < len(roots):
        raise CannotRing("two layers have the same ids, rows or output")
    n_uses: Counter[int] = Counter()
    made: set[int] = set()
    for node in graph.addresses():
        sources = sources_at(node)
        n_uses.update(sources)
        for address in (*sources, node):
            of = root_at(address)
            if of in shown and address != of:
                shown[of][address] = None
        made.add(node)
    for root, views in shown.items():
        if root not in made or not op_at(root):
            raise CannotRing("a layer's ids, rows or output are no result of the graph")
        for one in (root, *views):
            if graph.use_count(Tensor(one)) > n_uses[one]:
                raise CannotRing("a layer's ids, rows or output are read by another graph")
    return [(root, *shown[root]) for root in roots]


def _check_turns(graph: Graph, results: Sequence[ResultAddresses]) -> None:
    """Raise CannotRing if a result is read after the next one of `results` is made.

    They have the same memory.
    """
    of = {address: i for i, result in enumerate(results) for address in result}
    begun = -1
    for node in graph.addresses():
        for source in sources_at(node):
            if of.get(source, begun) < begun:
                raise CannotRing("a layer's ids, rows or output are read in a later layer")
        begun = max(begun, of.get(node, begun))
