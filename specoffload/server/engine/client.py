"""Manages the engine process for the API process: a bounded queue, running jobs, restarts.

    STARTING ──Ready──> READY ──process died──> RESTARTING ──Ready──> READY
        │                 │                          │
        └── load failed, or too many deaths in a row ┴──> FAILED        close() ──> CLOSED

Jobs wait here and not in the engine process, so a crash loses only running jobs. Everything runs on
the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from offload.errors import DeviceFailed, WorkerUnavailable
from offload.remote.address import Address
from offload.remote.hello import look_for
from specoffload.errors import UsageError
from specoffload.server.engine.child import Child
from specoffload.server.engine.health import RestartPolicy, Watchdog, describe_exit
from specoffload.server.engine.messages import (
    Alive,
    Cancel,
    EngineCall,
    Finished,
    FromEngine,
    Job,
    JobEvent,
    LoadFailed,
    Loading,
    Problem,
    Ready,
    Result,
    Shutdown,
    Started,
    Stopping,
    Submit,
)
from specoffload.server.engine.process import Factory
from specoffload.server.engine.ticket import (
    RequestFailed,
    Ticket,
    abandoned_line,
    answer_line,
    unavailable,
)
from specoffload.server.engine.turns import FairQueue, spread_s, whole_s
from specoffload.server.metrics import Metrics
from specoffload.session.generation import ModelCard, Piece

_CLOSE_PATIENCE_S = 5.0
_SAY_LOADING_S = 3.0
_SAY_PROMPT_S = 10.0
_LOADING_RETRY_AFTER_S = 5
_WORKER_LOOK_S = 0.5  # pause between two greetings of a worker that is missing
_START_UP_NOTES = (
    "device ",
    "devices: ",
    "remote: ",
    "weights: ",
    "disk ",
)  # beginnings of notes that are said
# Parts of notes that are said: experts on the disk, and measurements that each start makes again.
_SAID_NOTES = ("do not fit memory", "not stored", "not kept:")


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


_SHUTTING_DOWN = unavailable("the server is shutting down")


class EngineClient:
    """Starts, feeds, restarts and ends the engine process.

    At most `max_queue` jobs wait, in addition to the running ones. Clients are served by turns.
    `say` is called with lines for the operator. The caller must await `start`, and `close` in every
    case.
    """

    def __init__(
        self,
        factory: Factory,
        *,
        max_queue: int = 16,
        policy: RestartPolicy | None = None,
        watchdog: Watchdog | None = None,
        workers: Sequence[Address] = (),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`workers` are the machines of --rpc, without which the engine cannot compute."""
        if max_queue < 0:
            raise UsageError(f"--max-queue {max_queue}: must be 0 or more")
        self._factory = factory
        self._policy = policy or RestartPolicy()
        self._watchdog = watchdog or Watchdog()
        self._workers = tuple(workers)
        self._say = say
        # State of the process. Times are of time.monotonic().
        self.state = State.STARTING
        self.card: ModelCard | None = None
        self.n_parallel = 1  # jobs in the engine process at once; known when it is ready
        self.loading: Loading | None = None  # progress while it loads
        self.failure: Exception | None = None  # reason for State.FAILED
        self.failed = asyncio.Event()
        self.metrics = Metrics()
        self._child: Child | None = None
        self._child_gone = asyncio.Event()
        self._alive_at = 0.0  # time of the last message, heartbeats included
        self._heard_at = 0.0  # time of the last step, or of the first job after a pause
        self._ready_at: float | None = None
        self._said_loading_at = 0.0
        self._hung_s: float | None = None  # silence after which the watchdog ended the process
        self._watching: asyncio.Task[None] | None = None  # runs the watchdog
        self._restart_timer: asyncio.TimerHandle | None = None
        self._waiting_for_workers: asyncio.Task[None] | None = None
        self._missing = ""  # sentence on the worker that is missing, or ""
        self._load_problem: Problem | None = None
        self._stopping: Stopping | None = None  # why the process ended itself
        self._n_failures = 0  # failures in a row
        # The queue.
        self._next_id = 0
        self._waiting: FairQueue[Ticket] = FairQueue(max_queue)
        self._running: dict[int, Ticket] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._random = random.Random()
        self._job_s = 0.25  # running mean of the seconds of recent jobs; first a guess
        self._n_ended = 0

    # ---- requests of the API

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Number of jobs that generate in the engine process."""
        return sum([ticket.generates for ticket in self._running.values()])

    def unavailable(self) -> Problem | None:
        """Return why the engine takes no jobs now, or None if it takes them."""
        if self._draining or self.state is State.CLOSED:
            return _SHUTTING_DOWN
        if self.state is State.FAILED:
            return unavailable(f"the engine has failed: {self.failure}")
        if self.state is State.STARTING:
            return unavailable("Loading model", _LOADING_RETRY_AFTER_S)
        if self.state is State.RESTARTING and self._missing:
            words = f"{self._missing}; the engine starts again as soon as it answers"
            return unavailable(words, _LOADING_RETRY_AFTER_S)
        if self.state is State.RESTARTING:
            return unavailable(
                "Loading model: the engine process died and is being restarted",
                _LOADING_RETRY_AFTER_S,
            )
        return None

    def unwell(self) -> Problem | None:
        """Return why an engine that takes jobs may not answer them, or None if all is well."""
        if self.state is not State.READY:
            return None
        now = time.monotonic()
        silent_s = now - self._heard_at if self._running else None
        symptom = self._watchdog.symptom(
            now - self._alive_at, silent_s, reads_prompts=self._reads_prompts
        )
        return None if symptom is None else unavailable(symptom, _LOADING_RETRY_AFTER_S)

    @property
    def _reads_prompts(self) -> bool:
        """True while an answer has no token yet."""
        return any(t.generates and not t.n_tokens for t in self._running.values())

    def submit(self, job: Job, hear: Callable[[JobEvent, float], None], client: str = "") -> Ticket:
        """Queue a job that generates, or hand any other job to the engine at once.

        Raises RequestFailed (503) while loading or shutting down, and if the queue is full.
        """
        problem = self.unavailable()
        if problem is not None:
            raise RequestFailed(problem)
        ticket = Ticket(self._next_id, job, client, hear, self._give_up)
        self._next_id += 1
        if ticket.generates:
            self._enqueue(ticket)
            self._dispatch()
        else:  # answered between two steps, without a slot
            self._hand_over(ticket)
        return ticket

    async def call(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None
    ) -> Any:
        """Call a function of `engine/calls.py` in the engine process; returns its result.

        Raises RequestFailed if the job is refused or fails, and TimeoutError after `timeout_s`.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def hear(event: JobEvent, made_at_s: float) -> None:
            if answer.done():
                return
            if isinstance(event, Problem):
                answer.set_exception(RequestFailed(event))
            elif isinstance(event, Result):
                answer.set_result(event.value)

        ticket = self.submit(EngineCall(function, arguments), hear)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            ticket.cancel()

    # ---- life

    async def start(self) -> None:
        """Start the engine process; returns before the model is loaded."""
        if self._watchdog.limit_s > 0:
            self._watching = asyncio.create_task(self._watch())
        self._spawn()

    async def drain(self, grace_s: float) -> None:
        """Refuse new jobs, drop waiting ones, and cancel running ones after `grace_s` seconds."""
        self._draining = True
        for ticket in self._waiting.clear():
            ticket.put(_SHUTTING_DOWN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        for ticket in self._running.values():
            ticket.put(_SHUTTING_DOWN)
            if self._child is not None:
                self._child.send(Cancel(ticket.job_id))

    async def close(self) -> None:
        """End the engine process and wait for its end. Kills it if it is loading or has jobs."""
        polite = self.state is State.READY and not self._running
        self.state = State.CLOSED
        for later in (self._restart_timer, self._watching, self._waiting_for_workers):
            if later is not None:
                later.cancel()
        self._fail_all(_SHUTTING_DOWN)
        child = self._child
        if child is None:
            return
        if polite:
            child.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_PATIENCE_S):
                    await self._child_gone.wait()
        child.kill()
        await self._child_gone.wait()

    # ---- news of the process

    def _spawn(self) -> None:
        self._restart_timer = None
        self._ready_at = None
        self._load_problem = self._stopping = None
        self._child_gone.clear()
        try:
            self._child = Child(self._factory, self._on_message, self._on_exit)
        except OSError as e:
            self._fail(DeviceFailed(f"the engine process cannot be started: {e}"))

    def _on_message(self, message: FromEngine) -> None:
        if self.state is State.CLOSED:
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
            self._load_problem = message.problem
        elif isinstance(message, Stopping):
            self._stopping = message
        else:
            for job_id, event in message.outputs:
                self._on_event(job_id, event, message.made_at_s)
            self._dispatch()

    def _on_loading(self, loading: Loading) -> None:
        is_first, self.loading = self.loading is None, loading
        now = time.monotonic()
        if is_first:
            self._said_loading_at = now  # a small model is loaded before the first line
        elif now - self._said_loading_at > _SAY_LOADING_S:
            self._said_loading_at = now
            self._say(f"loading: {loading.step} {loading.done:.0%}")

    def _on_ready(self, card: ModelCard) -> None:
        self.loading = None
        self._missing = ""
        self.card = card
        self.n_parallel = card.n_parallel
        self._ready_at = time.monotonic()
        self.state = State.READY
        self._say(f"model loaded: {card.name}, context {card.n_ctx} tokens")
        for note in card.notes:
            if note.startswith(_START_UP_NOTES) or any(words in note for words in _SAID_NOTES):
                self._say(note)
        self._dispatch()

    def _on_event(self, job_id: int, event: JobEvent, made_at_s: float) -> None:
        ticket = self._running.get(job_id)
        if ticket is None:
            return  # `drain` or `close` has ended the job, and the engine did not know yet
        if isinstance(event, Finished | Problem):
            self._release(ticket)  # first, because the listener may submit another job
        ticket.put(event, made_at_s)
        if isinstance(event, Piece):
            if event.stats is not None:
                self.metrics.add(event.stats)
                self._say(answer_line(job_id, event.stats))
            elif event.n_prompt_read is not None:
                self._on_part_of_prompt(ticket, event.n_prompt_read)
        elif isinstance(event, Started):
            ticket.n_prompt_tokens = event.n_prompt_tokens
        elif isinstance(event, Problem):
            self._say(f"#{job_id}: {event.message}")

    def _on_part_of_prompt(self, ticket: Ticket, n_read: int) -> None:
        began, now = ticket.started_at, time.monotonic()
        assert began is not None  # the job is running
        if now - (ticket.said_at or began) > _SAY_PROMPT_S:
            ticket.said_at = now
            part = f"prompt {n_read} of {ticket.n_prompt_tokens} tokens"
            self._say(f"#{ticket.job_id}: {part} in {now - began:.0f} s")

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
        served = list(self._running.values())
        for ticket in served:
            ticket.put(lost)
            self._release(ticket)
        first_load = self.card is None
        if lost_worker and not first_load:
            self._start_again_with_workers(lost_worker)
            return
        ready_for_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        if not served:  # otherwise a request may be the cause
            self._n_failures = self._policy.count(self._n_failures, ready_for_s)
        delay_s = self._policy.delay_s(max(1, self._n_failures))
        if first_load or delay_s is None:
            self._fail(self._why(end, first_load))
            return
        self.state = State.RESTARTING
        self.metrics.n_restarts += 1
        why = "" if self._load_problem is None else f" ({self._load_problem.message})"
        self._say(f"the engine process {end}{why}; restarting it in {delay_s:g} s")
        loop = asyncio.get_running_loop()
        self._restart_timer = loop.call_later(delay_s, self._spawn)

    def _lost_worker(self) -> str:
        """Return the sentence on the lost worker if the process ended because of one, or ""."""
        problem = self._load_problem
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

    def _why(self, end: str, first_load: bool) -> Exception:
        """Return the error that ends the server.

        A refused model keeps its exit code: 2 for bad input, 1 for a failure.
        """
        if self._load_problem is not None:
            usage = self._load_problem.exit_code == 2
            return (UsageError if usage else DeviceFailed)(self._load_problem.message)
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
        self._fail_all(unavailable(f"the engine has failed: {error}"))
        self.failed.set()

    # ---- the queue

    def _enqueue(self, ticket: Ticket) -> None:
        """Queue a job. Raises RequestFailed (503) with the time to retry if the queue is full."""
        now = time.monotonic()
        running_s = [
            now - other.started_at
            for other in self._running.values()
            if other.started_at is not None and other.generates
        ]
        # Running jobs may take longer than those that have ended.
        job_s = max(self._job_s, sum(running_s) / max(1, len(running_s)))
        wait_s = self._waiting.enter(
            ticket.client,
            ticket,
            n_slots=self.n_parallel,
            n_idle=max(0, self.n_parallel - len(running_s)),
            place_s=job_s / self.n_parallel,
            now_s=now,
        )
        if wait_s is None:
            return
        self.metrics.n_refused += 1
        problem = unavailable(
            f"the queue is full: {self.n_waiting} requests are waiting, the limit is "
            f"{self._waiting.limit} (--max-queue)"
        )
        after_s = spread_s(wait_s, self._random.random())
        whole = whole_s(after_s, self._random.random())
        raise RequestFailed(
            replace(problem, retry_after_s=whole, retry_after_ms=round(1000 * after_s))
        )

    def _dispatch(self) -> None:
        while self.state is State.READY and self._waiting and self.n_running < self.n_parallel:
            self._hand_over(self._waiting.next())

    def _hand_over(self, ticket: Ticket) -> None:
        assert self._child is not None  # READY
        ticket.started_at = time.monotonic()
        if not self._running:
            self._heard_at = ticket.started_at
        self._running[ticket.job_id] = ticket
        self._idle.clear()
        self._child.send(Submit(ticket.job_id, ticket.job))

    async def _watch(self) -> None:
        """End a process that hangs; `_on_exit` tells its clients and starts another."""
        while True:
            await asyncio.sleep(self._watchdog.look_s)
            silent_s = time.monotonic() - self._heard_at
            is_hung = self._watchdog.is_hung(silent_s, reads_prompts=self._reads_prompts)
            if is_hung and self._running and self.state is State.READY and self._child is not None:
                self._hung_s = silent_s
                self._child.kill()

    def _give_up(self, ticket: Ticket) -> None:
        """Drop a waiting job, or cancel a running one.

        A running job keeps its place until the engine has ended it.
        """
        if ticket.generates:
            self._say(abandoned_line(ticket))
        if ticket.job_id not in self._running:
            self._waiting.remove(ticket.client, ticket)
        elif self._child is not None:
            self._child.send(Cancel(ticket.job_id))

    def _release(self, ticket: Ticket) -> None:
        del self._running[ticket.job_id]
        if ticket.started_at is not None and ticket.generates:
            self._n_ended += 1
            took_s = time.monotonic() - ticket.started_at
            self._job_s += max(0.2, 1 / self._n_ended) * (took_s - self._job_s)
            self._waiting.ended(ticket.client)
        if not self._running:
            self._idle.set()

    def _fail_all(self, problem: Problem) -> None:
        for ticket in [*self._running.values(), *self._waiting.clear()]:
            ticket.put(problem)
        self._running.clear()
        self._idle.set()
