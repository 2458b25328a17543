"""The computing process of a worker: holds weights, and runs ggml's RPC server over our device.

The process that listens for clients (specoffload/server/worker.py) starts and ends this process,
because ggml's server never returns. If this process fails, it sends the reason and ends itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from numa.threads import EVERYWHERE, Processors
from offload.device import DeviceChoice, choose_device
from offload.errors import DeviceFailed, DoesNotFit, NotSupported, OffloadError
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.native_build import library_build
from offload.ggml.pydevice import WrappedStream
from offload.ggml.rpc import check_built, serve_devices
from offload.ggml.threads import CpuTeam, ThreadPool
from offload.mla import chosen_crossover
from offload.model_file import read_facts
from offload.notes import OnProgress
from offload.opening.start import Start
from offload.options import EngineOptions
from offload.plan.decision import decide_part
from offload.plan.found import Found
from offload.plan.wanted import Wanted
from offload.probe import Here, found_device
from offload.remote.hello import Admit, AskCounters, LayersAsked, WorkerState
from offload.schedule.division import DeviceCosts
from offload.schedule.splitter import ByCosts, stay
from offload.store.store import Store, StoreOptions, room_now
from offload.stream.bell_use import BELLS, NoDoorbell
from offload.stream.building import ExecutorBuilder
from offload.stream.device import BatchRules
from offload.stream.options import StreamingOptions
from offload.stream.read_speed import measure_reads
from offload.stream.split_path import Hybrid
from offload.stream.ways_in_use import WaysInUse
from offload.times.min_batch import MinBatch
from offload.times.ways import Ways
from offload.worker.device import WorkerDevice, WorkerEvents
from offload.worker.door import LOOPBACK, Door
from offload.worker.split_costs import ExpertLayer, measure_split_layer, words_of
from offload.worker.weights import NamedWeights

_HOST_NAME = "SPEC_HOST"


@dataclass(frozen=True)
class GraphRefusal:
    """A graph of the client was not computed. The process goes on; the client has to leave."""

    reason: str


# dict: counters by name, for a Count
# DeviceCosts: measured ones, to keep
ProcessMessage = WorkerState | Admit | GraphRefusal | DeviceCosts | NoDoorbell | dict[str, float]


@dataclass(frozen=True)
class WorkerOptions:
    """The worker's own options: its file, its device and its memory."""

    path: Path
    device: str = "auto"
    wanted: Wanted = Wanted()
    streaming: StreamingOptions = StreamingOptions()
    store: StoreOptions = StoreOptions()
    n_threads: int = 1
    on: Processors = EVERYWHERE
    kept_splits: tuple[DeviceCosts, ...] = ()  # costs of split layers, the best ones first
    measures_splits: bool = False  # measure these costs if none of the kept ones are this device's


def serve_layers(line: Connection, options: WorkerOptions, no_doorbell: str = "") -> NoReturn:
    """Open the device, wait for a LayersAsked, load these layers, and serve them on loopback.

    `no_doorbell`: why an earlier process has used no doorbell any more, "" if none has said so.
    `line` is the pipe to the listening process. It gets WorkerStates, Refusals, and answers to
    Count and Admit. On a failure, sends a state with the error and exits with code 1.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # drops ggml's output

    sending = threading.Lock()

    def send(answer: ProcessMessage) -> None:
        try:
            with sending:
                line.send(answer)
        except OSError:  # the listening process is gone
            os._exit(1)

    if options.on.cpus:  # threads that the library starts inherit the processors
        os.sched_setaffinity(0, options.on.cpus)
    BELLS.refuse(no_doorbell)
    BELLS.listeners.append(lambda reason: send(NoDoorbell(reason)))

    def end(e: BaseException) -> NoReturn:
        send(WorkerState(error=str(e) or type(e).__name__))
        os._exit(1)

    try:
        check_built()
        choice = choose_device(options.device)
        free, total = choice.device.memory_bytes() if choice.sim is None else _sim_bytes(choice)
        send(WorkerState(device=choice.name, free_bytes=free, total_bytes=total))
        asked: LayersAsked = line.recv()
        device, notes = _open(
            options, _decide(options, choice, asked), lambda *step: send(WorkerState(*step)), end,
            lambda e: send(GraphRefusal(str(e))), send,
        )  # fmt: skip
        door = Door()
        answering = (line, send, end, device, door, notes)
        threading.Thread(target=_listen, args=answering, daemon=True).start()
        serve_devices(f"{LOOPBACK}:0", [device], options.n_threads)
    except BaseException as e:
        end(e)
    end(OffloadError(f"ggml's server found no free port on {LOOPBACK}"))


def _sim_bytes(choice: DeviceChoice) -> tuple[int, int]:
    assert choice.sim is not None
    vram = choice.sim.vram_bytes
    return (vram, vram) if vram else choice.device.memory_bytes()


def _listen(
    line: Connection,
    send: Callable[[ProcessMessage], None],
    end: Callable[[BaseException], NoReturn],
    device: WorkerDevice,
    door: Door,
    notes: Sequence[str],
) -> None:
    """Wait until ggml's server listens, then answer Admit and Count of the listening process.

    Ends this process if that fails, or when the listening process is gone.
    """
    try:
        door.wait()
        send(WorkerState(is_ready=True, port=door.port, notes=(*notes, *door.notes)))
        while True:
            asked: Admit | AskCounters = line.recv()
            if isinstance(asked, Admit):
                door.admit(asked.port)
                send(replace(asked, is_spent=device.is_spent))
            else:
                send(asdict(device.counters()))
    except EOFError:
        os._exit(1)
    except BaseException as e:
        end(e)


def _hybrid(options: WorkerOptions, ways: WaysInUse) -> Hybrid | None:
    """Return the objects that split layers of small batches, or None if none is split."""
    if not ways.now.may_split:
        return None
    team, pool = CpuTeam(), ThreadPool(options.n_threads, on=options.on)
    team.use((pool, pool))
    return Hybrid(ways, team, is_foreign=True)


class _SplitChoice:
    """Makes a worker's device split layers by kept costs, or by costs that it measures."""

    def __init__(
        self, options: WorkerOptions, choice: DeviceChoice, ways: WaysInUse, n_used: int,
        notes: list[str], on_costs: Callable[[DeviceCosts], None],
    ) -> None:  # fmt: skip
        """`notes` gets sentences for the user, and `on_costs` the costs that were measured."""
        self._options, self._choice, self._ways = options, choice, ways
        self._n_used, self._notes, self._on_costs = n_used, notes, on_costs
        self._measured: list[ExpertLayer] = []

    def use_kept(self) -> bool:
        """Split by kept costs. Returns False if there are none of this device."""
        here = (self._choice.words, self._options.n_threads, library_build())
        for kept in self._options.kept_splits:
            if (kept.device, kept.n_threads, kept.build) == here:
                self._use(kept)
                return True
        return False

    def measure(
        self, weights: NamedWeights, streamed: Sequence[str], device: WorkerDevice,
        stream: WrappedStream,
    ) -> None:  # fmt: skip
        """Measure, and split by the result. Without a result no layer is split.

        What was measured keeps its memory: Vulkan's backend corrupts memory when it computes after
        buffers were freed.
        """
        reason = "the device takes no layer of experts as a whole"
        try:
            costs = measure_split_layer(
                weights.tensors, streamed, self._n_used, device.inner, self._ways,
                partial(device.split_sides, stream), self._measured,
            )  # fmt: skip
        except (DoesNotFit, DeviceFailed, NotSupported) as e:
            costs, reason = None, str(e)
        if costs is None:
            self._ways.change(may_split=False)
            self._notes.append(f"no layer is split: its costs could not be measured ({reason})")
            return
        words, n_threads = self._choice.words, self._options.n_threads
        measured = DeviceCosts(words, n_threads, library_build(), costs)
        self._use(measured)
        self._on_costs(measured)

    def _use(self, known: DeviceCosts) -> None:
        self._ways.change(splitter=ByCosts(known.costs.costs()))
        self._notes.append(words_of(known, self._n_used))


# graph_check.py cannot see numbers that a graph computes, and a GPU's kernels do not check them.
_UNCHECKED = (
    "row numbers that a client's graph computes as floats, or from NaNs or infinities, are not "
    "checked on a GPU: let only clients that you trust connect (--allow)"
)


def _decide(options: WorkerOptions, choice: DeviceChoice, asked: LayersAsked) -> Start:
    """Decide where the client's layers lie. Raises DoesNotFit or BadModel."""
    facts = asked.of(read_facts(options.path))
    wanted = replace(options.wanted, reserve_bytes=asked.reserve_bytes)
    found = Found((found_device(choice, wanted.machine),), ram_bytes=room_now().available_bytes)
    layout = decide_part(facts, found, wanted)
    is_on = options.streaming.mla
    crossover = chosen_crossover(facts, choice.device, token_major=True, is_on=is_on)
    here = Here(found, (choice,))
    opened = EngineOptions(wanted=wanted, streaming=options.streaming, store=options.store)
    return Start(facts, opened, here, layout, crossovers=(crossover,))


def _open(
    options: WorkerOptions,
    start: Start,
    on_progress: OnProgress,
    on_failure: Callable[[BaseException], Any],
    on_refusal: Callable[[OffloadError], None],
    on_costs: Callable[[DeviceCosts], None] = lambda _: None,
) -> tuple[WorkerDevice, list[str]]:
    facts, choice, streaming = start.facts, start.choice, start.options.streaming
    plan = start.layout.plan
    pending, notes = Pending(), list(plan.reasons)
    pin_for = choice.device if choice.on_gpu else None
    store = Store(facts, plan.streamed, replace(start.store, pin_for=pin_for))
    host = HostBufferType(_HOST_NAME, store, pending, placer=store)
    weights = NamedWeights(facts, plan, choice.device, host, store)
    weights.load(pending, on_progress)
    if store.report is not None and plan.streamed:
        notes.append(store.report.sentence())
    splitter = streaming.splitter
    ways = WaysInUse(
        Ways(
            MinBatch(1, 1),
            may_split=start.options.wanted.hybrid and bool(plan.streamed),
            splitter=splitter or stay,
            rings=streaming.doorbell,
        )
    )
    hybrid = _hybrid(options, ways)
    builder = ExecutorBuilder(
        choice, streaming, notes, store, hybrid,
        measure_reads=measure_reads if plan.streamed else None,
    )  # fmt: skip
    (crossover,) = start.crossovers
    if crossover.note:
        notes.append(crossover.note)
    if choice.on_gpu:
        notes.append(_UNCHECKED)
    measure: Callable[[WorkerDevice, WrappedStream], None] | None = None
    if hybrid is not None:
        splits = _SplitChoice(options, choice, ways, facts.n_experts_used, notes, on_costs)
        if not splits.use_kept() and options.measures_splits:
            streamed = [entry.name for entry in plan.streamed]
            measure = partial(splits.measure, weights, streamed)

    def on_open(device: WorkerDevice, stream: WrappedStream) -> None:
        builder.take_slots(plan, device)  # now, so that no prompt fails for lack of memory
        if measure is not None:
            measure(device, stream)

    rules = BatchRules(ways, crossover.n_tokens)
    events = WorkerEvents(on_open, on_failure, on_refusal)
    serving = WorkerDevice(choice, plan, builder.executors(plan), rules, weights, events)
    return serving, notes
