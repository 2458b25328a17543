"""Gives the engine process the jobs of the API process: a bounded queue, and running jobs.

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
from typing import Any

from offload.remote.address import Address
from specoffload.chat.conversation import ChatSettings
from specoffload.errors import UsageError
from specoffload.generation.generation import TextPiece
from specoffload.generation.statistics import GenerationStats
from specoffload.server.engine.health import RestartPolicy, Watchdog
from specoffload.server.engine.messages import (
    Cancel,
    EngineCall,
    Event,
    Finished,
    Job,
    JobEvent,
    Outputs,
    Problem,
    RequestFailed,
    Result,
    Started,
    Submit,
    images_of,
    unavailable,
)
from specoffload.server.engine.process import Factory
from specoffload.server.engine.supervisor import SHUTTING_DOWN, State, Supervisor
from specoffload.server.engine.turns import FairQueue, spread_s, whole_s
from specoffload.session.chat import missing_template_words

_SAY_PROMPT_S = 10.0
_SAY_STOPPING_S = 1.0
_LEAST_WAIT_S = 0.1  # shorter waits are left out of a request's line
_LEAST_COPY_S = 0.01  # and shorter copies


class SubmittedJob:
    """One submitted job. `hear` gets each event with its `made_at_s`."""

    def __init__(
        self,
        job_id: int,
        job: Job,
        client: str,
        hear: Callable[[JobEvent, float], None],
        give_up: Callable[[SubmittedJob], None],
    ) -> None:
        self.job_id = job_id
        self.job = job
        self.generates = not isinstance(job, EngineCall)
        self.client = client
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None  # time.monotonic() when the engine got it
        self.n_prompt_tokens = 0  # known once the engine has begun
        self.n_tokens = 0  # tokens of all answers
        self.said_at: float | None = None  # time.monotonic() of the last line about its prompt
        self._hear = hear
        self._give_up = give_up
        self._over = False
        images = images_of(job)
        self._pixels = images.stored if images is not None else None

    def put(self, event: JobEvent, made_at_s: float = 0.0) -> None:
        """Deliver an event; none is delivered after the last one."""
        if self._over:
            return
        if isinstance(event, TextPiece):
            self.n_tokens += len(event.tokens)
        else:
            self._over = isinstance(event, Finished | Problem)
            self._give_back_pixels()
        self._hear(event, made_at_s)

    def cancel(self) -> None:
        """Cancel the job and free its place. May be called repeatedly."""
        if not self._over:
            self._over = True
            self._give_back_pixels()
            self._give_up(self)

    def _give_back_pixels(self) -> None:
        """Free the pixels, as the engine has read the prompt or will not read it."""
        pixels, self._pixels = self._pixels, None
        if pixels is not None:
            pixels.give_back()


class EngineClient(Supervisor):
    """Feeds the engine process, which its base class starts, restarts and ends.

    At most `max_queue` jobs wait, in addition to the running ones. Clients are served by turns.
    """

    def __init__(
        self,
        factory: Factory,
        *,
        max_queue: int = 16,
        policy: RestartPolicy | None = None,
        watchdog: Watchdog | None = None,
        workers: Sequence[Address] = (),
        chat: ChatSettings | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`workers` are the machines of --rpc, without which the engine cannot compute.

        `chat` tells whether a missing chat template is worth a line.
        """
        if max_queue < 0:
            raise UsageError(f"--max-queue {max_queue}: must be 0 or more")
        super().__init__(factory, policy, watchdog, workers, say)
        self._chat = chat or ChatSettings()
        self._next_id = 0
        self._waiting: FairQueue[SubmittedJob] = FairQueue(max_queue)
        self._running: dict[int, SubmittedJob] = {}
        self._idle = asyncio.Event()
        self._idle.set()
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

    @property
    def is_working(self) -> bool:
        return bool(self._running)

    @property
    def reads_prompts(self) -> bool:
        return any(t.generates and not t.n_tokens for t in self._running.values())

    def submit(
        self, job: Job, hear: Callable[[JobEvent, float], None], client: str = ""
    ) -> SubmittedJob:
        """Queue a job that generates, or hand any other job to the engine at once.

        Raises RequestFailed (503) while loading or shutting down, and if the queue is full.
        """
        problem = self.unavailable()
        if problem is not None:
            raise RequestFailed(problem)
        ticket = SubmittedJob(self._next_id, job, client, hear, self._give_up)
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

    async def drain(self, grace_s: float) -> None:
        """Refuse new jobs, drop waiting ones, and cancel running ones after `grace_s` seconds.

        Says each second what it waits for.
        """
        self._draining = True
        for ticket in self._waiting.clear():
            ticket.put(SHUTTING_DOWN)
        end_s = time.monotonic() + grace_s
        while self._running and (left_s := end_s - time.monotonic()) > 0:
            self._say(f"stopping: {self._running_words()}, {left_s:.0f} s left")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _SAY_STOPPING_S)):
                    await self._idle.wait()
        for ticket in self._running.values():
            ticket.put(SHUTTING_DOWN)
            self.send(Cancel(ticket.job_id))

    def _running_words(self) -> str:
        """Return a clause that names up to three running jobs, with their progress."""
        done = [_progress(ticket) for ticket in self._running.values()]
        more = [f"{len(done) - 3} more"] * (len(done) > 3)
        return f"waiting for {', '.join([*done[:3], *more])}"

    # ---- news of the process

    def on_ready(self) -> None:
        assert self.card is not None
        if words := missing_template_words(self.card, self._chat):
            self._say(words)
        self._dispatch()

    def on_outputs(self, message: Outputs) -> None:
        for job_id, event in message.outputs:
            self._on_event(job_id, event, message.made_at_s)
        self._dispatch()

    def on_lost(self, problem: Problem) -> None:
        for ticket in list(self._running.values()):
            ticket.put(problem)
            self._release(ticket)

    def on_closed(self, problem: Problem) -> None:
        for ticket in [*self._running.values(), *self._waiting.clear()]:
            ticket.put(problem)
        self._running.clear()
        self._idle.set()

    def _on_event(self, job_id: int, event: JobEvent, made_at_s: float) -> None:
        ticket = self._running.get(job_id)
        if ticket is None:
            return  # `drain` or `close` has ended the job, and the engine did not know yet
        if isinstance(event, Finished | Problem):
            self._release(ticket)  # first, because the listener may submit another job
        if isinstance(event, TextPiece):
            self._time(ticket, event, made_at_s)
        ticket.put(event, made_at_s)
        if isinstance(event, TextPiece):
            if event.stats is not None:
                self.metrics.add(event.stats, made_at_s - ticket.submitted_at)
            elif event.n_prompt_read is not None:
                self._on_part_of_prompt(ticket, event.n_prompt_read)
        elif isinstance(event, Started):
            ticket.n_prompt_tokens = event.n_prompt_tokens

    def _time(self, ticket: SubmittedJob, piece: TextPiece, made_at_s: float) -> None:
        """Count the time to the first token, and add the time of waiting to the statistics."""
        if piece.tokens and not ticket.n_tokens:
            self.metrics.add_first_token(made_at_s - ticket.submitted_at)
        for stats in (piece.stats, piece.so_far):
            if stats is not None:
                took_s = made_at_s - ticket.submitted_at
                stats.waited_s = max(0.0, took_s - stats.prefill_s - stats.decode_s)

    def _on_part_of_prompt(self, ticket: SubmittedJob, n_read: int) -> None:
        began, now = ticket.started_at, time.monotonic()
        assert began is not None  # the job is running
        if now - (ticket.said_at or began) > _SAY_PROMPT_S:
            ticket.said_at = now
            part = f"prompt {n_read} of {ticket.n_prompt_tokens} tokens"
            self._say(f"#{ticket.job_id}: {part} in {now - began:.0f} s")

    # ---- the queue

    def _enqueue(self, ticket: SubmittedJob) -> None:
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
        problem = unavailable(self._waiting.full_words(now), event=Event.QUEUE_FULL)
        after_s = spread_s(wait_s, self._random.random())
        whole = whole_s(after_s, self._random.random())
        raise RequestFailed(
            replace(problem, retry_after_s=whole, retry_after_ms=round(1000 * after_s))
        )

    def _dispatch(self) -> None:
        while self.state is State.READY and self._waiting and self.n_running < self.n_parallel:
            self._hand_over(self._waiting.next())

    def _hand_over(self, ticket: SubmittedJob) -> None:
        ticket.started_at = time.monotonic()
        if not self._running:
            self.work_begins()
        self._running[ticket.job_id] = ticket
        self._idle.clear()
        self.send(Submit(ticket.job_id, ticket.job))

    def _give_up(self, ticket: SubmittedJob) -> None:
        """Drop a waiting job, or cancel a running one.

        A running job keeps its place until the engine has ended it.
        """
        if ticket.job_id not in self._running:
            self._waiting.remove(ticket.client, ticket)
        else:
            self.send(Cancel(ticket.job_id))

    def _release(self, ticket: SubmittedJob) -> None:
        del self._running[ticket.job_id]
        if ticket.started_at is not None and ticket.generates:
            self._n_ended += 1
            took_s = time.monotonic() - ticket.started_at
            self._job_s += max(0.2, 1 / self._n_ended) * (took_s - self._job_s)
            self._waiting.ended(ticket.client)
        if not self._running:
            self._idle.set()


def _progress(ticket: SubmittedJob) -> str:
    if not ticket.generates:
        return f"#{ticket.job_id}"
    if ticket.n_tokens:
        return f"#{ticket.job_id} ({ticket.n_tokens} tokens)"
    return f"#{ticket.job_id} (reading its prompt)"


def cancelled_words(ticket: SubmittedJob) -> str:
    """Return a clause on how far a job had come when its client left."""
    done = "while it waited in the queue"
    if ticket.started_at is not None:
        for_s = time.monotonic() - ticket.started_at
        done = f"before its first token, after {for_s:.1f} s"
        if ticket.n_tokens:
            tokens = "1 token" if ticket.n_tokens == 1 else f"{ticket.n_tokens} tokens"
            done = f"after {tokens} in {for_s:.1f} s"
    return f"#{ticket.job_id}: cancelled {done}"


def answers_words(answers: Sequence[tuple[int, GenerationStats]]) -> str:
    """Return the tokens and speeds of a request's answers, each with its job's number."""
    if not answers:
        return ""
    job_id, stats = answers[0]
    if len(answers) > 1:
        n_tokens = sum(stats.n_tokens for _, stats in answers)
        return f"#{job_id}: {len(answers)} answers, {n_tokens} tokens"
    cached = "read from the disk" if stats.n_from_disk else "cached"
    waited = [f"waited {stats.waited_s:.1f} s"] * (stats.waited_s >= _LEAST_WAIT_S)
    if stats.copied_back_s >= _LEAST_COPY_S:
        cached += f", copied back in {stats.copied_back_s:.2f} s"
    parts = [
        f"#{job_id}: {'1 token' if stats.n_tokens == 1 else f'{stats.n_tokens} tokens'}, "
        f"{stats.tokens_per_s:.1f} t/s",
        *waited,
        f"prompt {stats.n_prompt_tokens} ({stats.n_cached_tokens} {cached}) in "
        f"{stats.prefill_s:.2f} s",
    ]
    if stats.idle_cells_s >= _LEAST_WAIT_S:
        parts.append(
            f"read {stats.n_idle_cells:,} cells of other conversations: {stats.idle_cells_s:.1f} s"
        )
    if stats.acceptance_rate is not None:
        parts.append(f"acceptance {stats.acceptance_rate:.0%}")
    if stats.streamed_bytes:
        parts.append(f"streamed {stats.streamed_bytes / 2**20:.0f} MiB")
    return " · ".join(parts)
