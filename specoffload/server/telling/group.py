"""Several jobs of one request, followed as one: prompts of a list, answers to the same prompt."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

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


class TicketGroup:
    """Submits the jobs in their order, as many at once as the engine runs; one reader.

    What a list of prompts asks for so waits here, and takes no more places of the queue than the
    engine has slots.
    """

    def __init__(self, engine: EngineClient, jobs: Sequence[GeneratingJob], client: str) -> None:
        """`client` is who asks. Raises RequestFailed where not even the first is taken."""
        self._engine, self._client = engine, client
        self._jobs = iter(enumerate(jobs))
        self._n_left = len(jobs)
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tickets: dict[int, Ticket] = {}
        self.at_once: Callable[[int, Event], bool] | None = None
        """Is offered each event that comes while none waits; True if it has taken it."""
        first = next(self._jobs)
        first_ticket = self._submit(*first)
        n_workers = max(1, min(engine.n_parallel, len(jobs)))
        self._workers = [
            asyncio.ensure_future(self._work(first[0], first_ticket)),
            *(asyncio.ensure_future(self._work()) for _ in range(n_workers - 1)),
        ]

    async def next(self, timeout_s: float | None = None) -> tuple[int, Event] | None:
        """The next event and the number of its job; None when all have ended.

        Raises RequestFailed with the first problem of any of them, and TimeoutError, after which
        nothing is lost and it can be called again.
        """
        while self._n_left:
            async with asyncio.timeout(timeout_s):
                index, event = await self._events.get()
            if isinstance(event, Problem):
                raise RequestFailed(event)
            if not isinstance(event, Finished):
                return index, event
            self._n_left -= 1
        return None

    def cancel(self) -> None:
        """The client has gone, or has got all. May be called repeatedly."""
        for worker in self._workers:
            worker.cancel()
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()

    async def _work(self, index: int = -1, ticket: Ticket | None = None) -> None:
        """One job after another, beginning with `ticket` if there is one."""
        try:
            while True:
                if ticket is None:
                    entry = next(self._jobs, None)
                    if entry is None:
                        return
                    index = entry[0]
                    ticket = await self._submit_in_time(*entry)
                while not isinstance(event := await ticket.next(), Finished):
                    self._events.put_nowait((index, event))
                del self._tickets[index]
                ticket = None
                self._events.put_nowait((index, event))
        except RequestFailed as e:
            self._events.put_nowait((index, e.problem))
        except Exception as e:
            log.exception("following a job failed")
            self._events.put_nowait((index, problem_of(e)))

    async def _submit_in_time(self, index: int, job: GeneratingJob) -> Ticket:
        """The request was taken: a later part of it waits where the queue is full."""
        while True:
            try:
                return self._submit(index, job)
            except RequestFailed as e:
                if e.problem.retry_after_s is None:
                    raise
            await asyncio.sleep(_AGAIN_S)

    def _submit(self, index: int, job: GeneratingJob) -> Ticket:
        ticket = self._tickets[index] = self._engine.submit(job, self._client)
        ticket.at_once = functools.partial(self._offer, index)
        return ticket

    def _offer(self, index: int, event: Event) -> bool:
        return self.at_once is not None and self._events.empty() and self.at_once(index, event)
