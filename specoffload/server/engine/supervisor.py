"""Supervises the engine process for the API process: starts, restarts and ends it.

    STARTING ──Ready──> READY ──process died──> RESTARTING ──Ready──> READY
        │                 │                          │
        └── load failed, or too many deaths in a row ┴──> FAILED        close() ──> CLOSED

Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from offload.errors import DeviceFailed, WorkerUnavailable
from offload.notes import NoteKind
from offload.remote.address import Address
from offload.remote.hello import look_for
from offload.stream.bell_use import BELLS, NoDoorbell
from specoffload import report
from specoffload.errors import UsageError
from specoffload.generation.generation import ModelCard
from specoffload.server.engine.child import Child
from specoffload.server.engine.health import RestartPolicy, Watchdog, describe_exit
from specoffload.server.engine.messages import (
    Alive,
    Event,
    FromEngine,
    LoadFailed,
    Loading,
    Outputs,
    Problem,
    Ready,
    Shutdown,
    Stopping,
    ToEngine,
    unavailable,
)
from specoffload.server.engine.process import Factory
from specoffload.server.metrics import Metrics

_CLOSE_PATIENCE_S = 5.0
_SAY_LOADING_S = 3.0
_LOADING_RETRY_AFTER_S = 5
_WORKER_LOOK_S = 0.5  # pause between two greetings of a worker that is missing
_FILE_LOOK_S = 0.5  # pause between two looks at a model's file that has changed
_FILE_REST_S = 2.0  # seconds without a change after which it is opened again
# The notes that the operator is told.
_SAID = frozenset(
    {NoteKind.DEVICE, NoteKind.CONTEXT, NoteKind.WEIGHTS, NoteKind.MEMORY, NoteKind.DISK,
     NoteKind.PROMPTS, NoteKind.LOST, NoteKind.FLAGS, NoteKind.UNUSED}
)  # fmt: skip
FileStamp = tuple[int, int, int]  # inode, bytes, and time of the last change in ns
SHUTTING_DOWN = unavailable("the server is shutting down", _LOADING_RETRY_AFTER_S)


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


class Supervisor:
    """Starts, watches, restarts and ends the engine process.

    A subclass gives it jobs. The subclass defines the properties below, which say whether the
    process has jobs, and the methods `on_...`, which are called for events. `say` is called with
    lines for the operator. The caller must await `start`, and `close` in every case.
    """

    def __init__(
        self,
        factory: Factory,
        policy: RestartPolicy | None,
        watchdog: Watchdog | None,
        workers: Sequence[Address],
        say: Callable[[str], None],
    ) -> None:
        """`workers` are the machines of --rpc, without which the engine cannot compute."""
        self._factory = factory
        self._policy = policy or RestartPolicy()
        self._watchdog = watchdog or Watchdog()
        self._workers = tuple(workers)
        self._say = say
        self.failed = asyncio.Event()
        self.metrics = Metrics()
        self.model_name = ""  # known when the model was loaded once
        self._child: Child | None = None
        self._child_gone = asyncio.Event()
        self._reset()

    def _reset(self) -> None:
        """Forget earlier processes, but not what was counted."""
        # Times are of time.monotonic().
        self.state = State.STARTING
        self.card: ModelCard | None = None
        self.n_parallel = 1  # jobs in the engine process at once; known when it is ready
        self.loading: Loading | None = None  # progress while it loads
        self.failure: Exception | None = None  # reason for State.FAILED
        self.failed.clear()
        self._alive_at = 0.0  # time of the last message, heartbeats included
        self._heard_at = 0.0  # time of the last step, or of the first job after a pause
        self._ready_at: float | None = None
        self._said_loading_at = 0.0
        self._said_step = ""  # the last line about a step
        self._hung_s: float | None = None  # silence after which the watchdog ended the process
        self._watching: asyncio.Task[None] | None = None  # runs the watchdog
        self._restart_timer: asyncio.TimerHandle | None = None
        self._waiting_for_workers: asyncio.Task[None] | None = None
        self._waiting_for_file: asyncio.Task[None] | None = None
        self._changed: Path | None = None  # file of the model that another program wrote to
        self._tried: FileStamp | None = None  # its stamp when it was opened last
        self._missing = ""  # sentence on the worker or file that the engine waits for, or ""
        self.load_problem: Problem | None = None
        self._stopping: Stopping | None = None  # why the process ended itself
        self._may_ring = True  # the process was started with doorbells
        self._n_failures = 0  # failures in a row
        self._draining = False

    # ---- what a subclass defines

    @property
    def is_working(self) -> bool:
        """True while the process has jobs."""
        raise NotImplementedError

    @property
    def reads_prompts(self) -> bool:
        """True while an answer has no token yet."""
        raise NotImplementedError

    def on_ready(self) -> None:
        """Called when the process takes jobs."""
        raise NotImplementedError

    def on_outputs(self, message: Outputs) -> None:
        """Called for events of jobs."""
        raise NotImplementedError

    def on_lost(self, problem: Problem) -> None:
        """Called when the process has ended, so that its jobs are lost."""
        raise NotImplementedError

    def on_closed(self, problem: Problem) -> None:
        """Called when no job will be done any more."""
        raise NotImplementedError

    # ---- health

    def unavailable(self) -> Problem | None:
        """Return why the engine takes no jobs now, or None if it takes them."""
        if self._draining or self.state is State.CLOSED:
            return SHUTTING_DOWN
        if self.state is State.FAILED:
            return unavailable(f"the engine has failed: {self.failure}")
        if self.state is State.STARTING:
            return unavailable("Loading model", _LOADING_RETRY_AFTER_S, Event.LOADING)
        if self.state is State.RESTARTING and self._missing:
            until = "it answers" if self._changed is None else "the file is whole"
            words = f"{self._missing}; the engine starts again as soon as {until}"
            return unavailable(words, _LOADING_RETRY_AFTER_S)
        if self.state is State.RESTARTING:
            return unavailable(
                "Loading model: the engine process died and is being restarted",
                _LOADING_RETRY_AFTER_S,
                Event.LOADING,
            )
        return None

    def unwell(self) -> Problem | None:
        """Return why an engine that takes jobs may not answer them, or None if all is well."""
        if self.state is not State.READY:
            return None
        now = time.monotonic()
        silent_s = now - self._heard_at if self.is_working else None
        symptom = self._watchdog.symptom(
            now - self._alive_at, silent_s, reads_prompts=self.reads_prompts
        )
        return None if symptom is None else unavailable(symptom, _LOADING_RETRY_AFTER_S)

    async def _watch(self) -> None:
        """End a process that hangs; `_on_exit` starts another."""
        while True:
            await asyncio.sleep(self._watchdog.look_s)
            silent_s = time.monotonic() - self._heard_at
            is_hung = self._watchdog.is_hung(silent_s, reads_prompts=self.reads_prompts)
            if (
                is_hung
                and self.is_working
                and self.state is State.READY
                and self._child is not None
            ):
                self._hung_s = silent_s
                self._child.kill()

    # ---- life

    async def start(self) -> None:
        """Start the engine process; returns before the model is loaded.

        After `close` the engine may be started again.
        """
        self._reset()
        if self._watchdog.limit_s > 0:
            self._watching = asyncio.create_task(self._watch())
        self._spawn()

    async def close(self, *, is_for_now: bool = False) -> None:
        """End the engine process and wait for its end. Kills it if it is loading or has jobs.

        Jobs do not count if it has prompts to keep. It then has time while it reports progress.
        `is_for_now`: the model may be opened again, so that its prompts are worth their RAM.
        """
        card = self.card
        shelves = is_for_now and card is not None and card.shelves_prompts
        keeps = shelves or (card is not None and card.keeps_prompts)
        polite = self.state is State.READY and (keeps or not self.is_working)
        self.state = State.CLOSED
        for later in (
            *(self._restart_timer, self._watching),
            *(self._waiting_for_workers, self._waiting_for_file),
        ):
            if later is not None:
                later.cancel()
        self.on_closed(SHUTTING_DOWN)
        child = self._child
        if child is None:
            return
        if polite:
            child.send(Shutdown(shelves))
            await self._wait_for_end()
        child.kill()
        await self._child_gone.wait()

    async def _wait_for_end(self) -> None:
        """Wait until the process has ended, or has reported no progress for some seconds."""
        self._heard_at = time.monotonic()
        while (left_s := self._heard_at + _CLOSE_PATIENCE_S - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._child_gone.wait()
                    return

    def send(self, message: ToEngine) -> None:
        """Send a message to the process, if there is one."""
        if self._child is not None:
            self._child.send(message)

    def work_begins(self) -> None:
        """Record that the process gets the first job after a pause."""
        self._heard_at = time.monotonic()

    # ---- news of the process

    def _spawn(self) -> None:
        self._restart_timer = None
        self._ready_at = None
        self.load_problem = self._stopping = None
        self._may_ring = not BELLS.why_not
        self._child_gone.clear()
        try:
            self._child = Child(self._factory, self._on_message, self._on_exit)
        except OSError as e:
            self._fail(DeviceFailed(f"the engine process cannot be started: {e}"))

    def _on_message(self, message: FromEngine) -> None:
        if self.state is State.CLOSED:
            if isinstance(message, Loading):  # its last work, of which it reports the progress
                self._heard_at = time.monotonic()
                self._say_step(message)
            return
        self._alive_at = time.monotonic()
        if isinstance(message, Alive):
            return
        self._heard_at = self._alive_at
        if isinstance(message, Loading):
            self._on_loading(message)
        elif isinstance(message, Ready):
            self._on_ready(message.card)
        elif isinstance(message, LoadFailed):
            self.load_problem = message.problem
        elif isinstance(message, Stopping):
            self._stopping = message
        elif isinstance(message, NoDoorbell):
            self._on_no_doorbell(message.reason)
        else:
            self.on_outputs(message)

    def _on_no_doorbell(self, reason: str) -> None:
        """Start all later engine processes of this server without doorbells."""
        BELLS.refuse(reason)
        if self.state is State.READY:  # otherwise a note of the engine says it
            self._say(f"{reason}; until this server ends, the host waits in each split layer")

    def _on_loading(self, loading: Loading) -> None:
        is_first, self.loading = self.loading is None, loading
        now = time.monotonic()
        if is_first:
            self._said_loading_at = now  # a small model is loaded before the first line
        else:
            self._say_step(loading, "loading: ")

    def _say_step(self, progress: Loading, what: str = "") -> None:
        """Say how far a step has come, unless it goes on and the last such line is very recent."""
        now = time.monotonic()
        is_last = self.state is State.CLOSED and progress.done >= 1
        words = f"{what}{progress.step} {progress.done:.0%}"
        if words == self._said_step:
            return
        if is_last or now - self._said_loading_at > _SAY_LOADING_S:
            self._said_loading_at = now
            self._said_step = words
            self._say(words)

    def _on_ready(self, card: ModelCard) -> None:
        self.loading = None
        self._missing = ""
        self._changed = self._tried = None
        self.card = card
        self.model_name = card.name
        self.n_parallel = card.n_parallel
        self._ready_at = time.monotonic()
        self.state = State.READY
        self._say(f"model loaded: {card.name}, context {card.n_ctx} tokens")
        for note in card.notes:
            if note.kind in _SAID or report.is_verbose():
                self._say(note)
        self.on_ready()

    def _on_exit(self, exit_code: int | None) -> None:
        self._child = None
        self._child_gone.set()
        if self.state is State.CLOSED:
            return
        end, hung_s = describe_exit(exit_code), self._hung_s
        if hung_s is not None:
            end = f"gave no sign of life for {hung_s:.0f} s and was ended"
            self._hung_s = None
        lost_worker = self._lost_worker()
        lost = Problem(
            "EngineDied",
            f"the engine process {end} while it served this request; the request is lost",
            500,
            "server_error",
            can_retry=False,  # the request may be the cause
        )
        if lost_worker:
            lost = unavailable(f"{lost_worker}; this request is lost", _LOADING_RETRY_AFTER_S)
        changed = self._changed if self._stopping is None else self._stopping.changed
        if changed is not None:
            lost = unavailable(f"{_changed_words(changed)}; this request is lost")
        served = self.is_working
        self.on_lost(lost)
        first_load = self.card is None
        if lost_worker and not first_load:
            self._start_again_with_workers(lost_worker)
            return
        if changed is not None and self._load_was_refused_or_left():
            self._start_again_with_file(changed)
            return
        ready_for_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        if not served:  # otherwise a request may be the cause
            self._n_failures = self._policy.count(self._n_failures, ready_for_s)
        delay_s = self._policy.delay_s(max(1, self._n_failures))
        # The next process makes no trial of a doorbell.
        hung_in_trial = self._may_ring and bool(BELLS.why_not) and self._stopping is not None
        if (first_load and not hung_in_trial) or delay_s is None:
            self._fail(self._error_of(end, first_load))
            return
        self.state = State.RESTARTING
        self.metrics.n_restarts += 1
        reason = "" if self.load_problem is None else f" ({self.load_problem.message})"
        self._say(f"the engine process {end}{reason}; restarting it in {delay_s:g} s")
        loop = asyncio.get_running_loop()
        self._restart_timer = loop.call_later(delay_s, self._spawn)

    def _lost_worker(self) -> str:
        """Return the sentence on the lost worker if the process ended because of one, or ""."""
        problem = self.load_problem
        if self._stopping is not None and self._stopping.by_worker:
            return self._stopping.reason
        is_missing = problem is not None and problem.name == WorkerUnavailable.__name__
        return problem.message if problem is not None and is_missing else ""

    def _start_again_with_workers(self, lost: str) -> None:
        """Start another process when all workers answer. Does not count as an engine failure."""
        if not self._missing:  # otherwise a worker was lost again before the engine was ready
            self._say(f"{lost}; the engine starts again as soon as it answers")
            self.metrics.n_restarts += 1
        self.state, self._missing, self.loading = State.RESTARTING, lost, None
        self._waiting_for_workers = asyncio.create_task(self._wait_for_workers())

    def _load_was_refused_or_left(self) -> bool:
        """True if the process ended itself and gave a reason, or refused the model's file."""
        return self._stopping is not None or self.load_problem is not None

    def _start_again_with_file(self, path: Path) -> None:
        """Start another process when the model's file is whole again."""
        refused = "" if self.load_problem is None else f" ({self.load_problem.message})"
        if self._changed is None:
            self._say(f"{_changed_words(path)}; the engine starts again as soon as it is whole")
            self.metrics.n_restarts += 1
        self._changed, self._missing = path, _changed_words(path) + refused
        self.state, self.loading = State.RESTARTING, None
        self._waiting_for_file = asyncio.create_task(self._wait_for_file(path))

    async def _wait_for_file(self, path: Path) -> None:
        """Start the engine when the file was not tried as it is, and nobody writes to it."""
        seen, since_s = await asyncio.to_thread(stamp_of, path), time.monotonic()
        while seen is None or seen == self._tried or time.monotonic() - since_s < _FILE_REST_S:
            await asyncio.sleep(_FILE_LOOK_S)
            now = await asyncio.to_thread(stamp_of, path)
            if now != seen:
                seen, since_s = now, time.monotonic()
        self._tried = seen
        self._spawn()

    async def _wait_for_workers(self) -> None:
        waiting = list(self._workers)
        while True:
            await asyncio.sleep(_WORKER_LOOK_S)
            if not waiting:
                break
            try:
                await asyncio.to_thread(look_for, waiting[0])
                waiting.pop(0)
            except WorkerUnavailable as e:
                self._missing = str(e)
        self._spawn()

    def _error_of(self, end: str, first_load: bool) -> Exception:
        """Return the error that ends the server.

        A refused model keeps its exit code: 2 for bad input, 1 for a failure.
        """
        if self.load_problem is not None:
            usage = self.load_problem.exit_code == 2
            return (UsageError if usage else DeviceFailed)(self.load_problem.message)
        if self._stopping is not None and self._stopping.by_worker:
            return DeviceFailed(self._stopping.reason)
        if first_load:
            return DeviceFailed(f"the engine process {end} while loading the model")
        return DeviceFailed(
            f"the engine process {end}, for the {self._n_failures}th time in a row; giving up"
        )

    def _fail(self, error: Exception) -> None:
        self.state = State.FAILED
        self.failure = error
        self.on_closed(unavailable(f"the engine has failed: {error}"))
        self.failed.set()


def _changed_words(path: Path) -> str:
    return f"another program wrote to {path.name}, a file of the model, while it was open"


def stamp_of(path: Path) -> FileStamp | None:
    """Return a value that differs after each change of a file, or None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
