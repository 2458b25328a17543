"""A job that a client has submitted to the engine: its events, its failure, and its log lines."""

from __future__ import annotations

import time
from collections.abc import Callable

from specoffload.server.engine.messages import EngineCall, Finished, Job, JobEvent, Problem
from specoffload.session.generation import Piece
from specoffload.session.statistics import GenerationStats


class RequestFailed(Exception):
    """A job gets no answer, or no more of it. `problem` tells the client why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def unavailable(message: str, retry_after_s: int | None = None) -> Problem:
    return Problem("Unavailable", message, 503, "unavailable_error", retry_after_s=retry_after_s)


class Ticket:
    """One submitted job. `hear` gets each event with its `made_at_s`."""

    def __init__(
        self,
        job_id: int,
        job: Job,
        client: str,
        hear: Callable[[JobEvent, float], None],
        give_up: Callable[[Ticket], None],
    ) -> None:
        self.job_id = job_id
        self.job = job
        self.generates = not isinstance(job, EngineCall)
        self.client = client
        self.started_at: float | None = None  # time.monotonic() when the engine got it
        self.n_prompt_tokens = 0  # known once the engine has begun
        self.n_tokens = 0  # tokens of all answers
        self.said_at: float | None = None  # time.monotonic() of the last line about its prompt
        self._hear = hear
        self._give_up = give_up
        self._over = False

    def put(self, event: JobEvent, made_at_s: float = 0.0) -> None:
        """Deliver an event; none is delivered after the last one."""
        if self._over:
            return
        if isinstance(event, Piece):
            self.n_tokens += len(event.tokens)
        else:
            self._over = isinstance(event, Finished | Problem)
        self._hear(event, made_at_s)

    def cancel(self) -> None:
        """Cancel the job and free its place. May be called repeatedly."""
        if not self._over:
            self._over = True
            self._give_up(self)


def abandoned_line(ticket: Ticket) -> str:
    """Return the log line of a job whose client has left."""
    done = "while it waited in the queue"
    if ticket.started_at is not None:
        for_s = time.monotonic() - ticket.started_at
        done = f"before its first token, after {for_s:.1f} s"
        if ticket.n_tokens:
            done = f"after {ticket.n_tokens} tokens in {for_s:.1f} s"
    return f"#{ticket.job_id}: cancelled, since the client has gone, {done}"


def answer_line(job_id: int, stats: GenerationStats) -> str:
    """Return the log line of a finished answer."""
    parts = [
        f"#{job_id}: {stats.n_tokens} tokens, {stats.tokens_per_s:.1f} t/s",
        f"prompt {stats.n_prompt_tokens} ({stats.n_cached_tokens} cached) in "
        f"{stats.prefill_s:.2f} s",
    ]
    if stats.acceptance_rate is not None:
        parts.append(f"acceptance {stats.acceptance_rate:.0%}")
    if stats.streamed_bytes:
        parts.append(f"streamed {stats.streamed_bytes / 2**20:.0f} MiB")
    return " · ".join(parts)
