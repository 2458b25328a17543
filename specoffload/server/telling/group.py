"""Several jobs of one request, followed as one: prompts of a list, answers to the same prompt."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from specoffload.server.engine.client import EngineClient, RequestFailed, Ticket
from specoffload.server.engine.messages import (
    Event,
    Finished,
    GeneratingJob,
    Problem,
    problem_of,
)

_AGAIN_S = 0.2

log = logging.getLogger("specoffload.server")


class Heard(NamedTuple):
    """An event, the number of its job, and when the engine made it (time.monotonic())."""

    job: int
    event: Event
    made_at_s: float


class TicketGroup:
    """Submits the jobs in their order, as many at once as the engine runs; one reader.

    What a list of prompts asks for so waits here, and takes no more places of the queue than the
    engine has slots.
    """

    def __init__(self, engine: EngineClient, jobs: Sequence[GeneratingJob], client: str) -> None:
        """`client` is who asks. Raises RequestFailed where not even the first is taken."""
        self._engine, self._client = engine, client
        self._jobs = deque(enumerate(jobs))  # that wait
        self._n_left = len(jobs)
        self._n_at_once = max(1, engine.n_parallel)
        self._events: asyncio.Queue[Heard] = asyncio.Queue()
        self._tickets: dict[int, Ticket] = {}
        self._again: asyncio.TimerHandle | None = None
        self.at_once: Callable[[Heard], bool] | None = None
        """Is offered each event that comes while none waits; True if it has taken it."""
        self._submit()
        self._go_on()

    async def next(self, timeout_s: float | None = None) -> Heard | None:
        """The next event; None when all jobs have ended.

        Raises RequestFailed with the first problem of any of them, and TimeoutError, after which
        nothing is lost and it can be called again.
        """
        while self._n_left:
            async with asyncio.timeout(timeout_s):
                heard = await self._events.get()
            if isinstance(heard.event, Problem):
                raise RequestFailed(heard.event)
            if not isinstance(heard.event, Finished):
                return heard
            self._n_left -= 1
        return None

    def written(self, made_at_s: float) -> None:
        """A token that the engine made then has been written to the client's socket."""
        self._engine.delays.add(monotonic() - made_at_s)

    def cancel(self) -> None:
        """The client has gone, or has got all. May be called repeatedly."""
        self._jobs.clear()
        if self._again is not None:
            self._again.cancel()
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()

    def _go_on(self) -> None:
        """Submit what there is room for. The request was taken: a later part of it waits where the
        queue is full."""
        self._again = None
        while self._jobs and len(self._tickets) < self._n_at_once:
            try:
                self._submit()
            except RequestFailed as e:
                if e.problem.retry_after_s is None:
                    self._events.put_nowait(Heard(self._jobs[0][0], e.problem, 0.0))
                else:
                    loop = asyncio.get_running_loop()
                    after_ms = e.problem.retry_after_ms
                    after_s = _AGAIN_S if after_ms is None else after_ms / 1000
                    self._again = loop.call_later(after_s, self._go_on)
                return

    def _submit(self) -> None:
        index, job = self._jobs[0]
        ticket = self._tickets[index] = self._engine.submit(job, self._client)
        self._jobs.popleft()
        ticket.hear = functools.partial(self._hear, index)

    def _hear(self, index: int, event: Event, made_at_s: float) -> None:
        heard = Heard(index, event, made_at_s)
        if self.at_once is not None and self._events.empty():
            try:
                if self.at_once(heard):
                    return
            except Exception as e:  # of ours: others' events are in the same message
                log.exception("telling of an answer failed")
                self.at_once = None
                heard = Heard(index, problem_of(e), made_at_s)
        self._events.put_nowait(heard)
        if isinstance(event, Finished):
            del self._tickets[index]
            if self._again is None:
                self._go_on()
