"""Follows all jobs of one HTTP request together, and writes its response.

Each API has a `Wording`. It turns events of jobs into the bytes that the client gets.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specoffload.chat.conversation import Delta
from specoffload.chat.parser import StreamParser
from specoffload.generation.generation import TextPiece
from specoffload.generation.statistics import GenerationStats
from specoffload.server.api.answers import (
    STREAM_HEADERS,
    ParsedAnswer,
    named_events,
    server_sent,
    to_json,
)
from specoffload.server.api.leaving import until_left
from specoffload.server.api.life_signs import SIGN_S
from specoffload.server.api.refusals import Api, Json, error_body, problem_response
from specoffload.server.engine.client import (
    EngineClient,
    SubmittedJob,
    answers_words,
    cancelled_words,
)
from specoffload.server.engine.messages import (
    Finished,
    GeneratingJob,
    JobEvent,
    Problem,
    RequestFailed,
    Started,
    problem_of,
)
from specoffload.server.engine.supervisor import SHUTTING_DOWN
from specoffload.server.log import add_words
from specoffload.server.sockets import WRITE_PART

_AGAIN_S = 0.2

# The header of a stream is sent when the engine has accepted the prompt, because a refused one
# gets its HTTP status. But proxies and clients must not time out while a request is queued.
_HEADER_PATIENCE_S = SIGN_S
_KEEP_ALIVE_S = SIGN_S

log = logging.getLogger("specoffload.server")


class Wording:
    """Writes one request's answers in the form of one API.

    The returned bytes go to the client in the order of the calls. `job` is the number of the job
    within the request, and `piece.index` is the number of the answer within the job.
    """

    api = Api.NATIVE

    def started(self, job: int, started: Started) -> None:
        """Record that the prompt of a job was accepted."""

    def opening(self) -> bytes:
        """Return the events that open the stream before its first piece; b"" if there are none.

        They come once: after this call, and after the first piece, nothing is returned.
        """
        return b""

    def sign(self) -> bytes:
        """Return an event that says that the answer is still coming, and adds nothing to it."""
        raise NotImplementedError

    def piece(self, job: int, piece: TextPiece) -> bytes:
        """Return the events of a piece, after those that open the stream if it is not open yet.

        The last piece has a finish reason and statistics.
        """
        raise NotImplementedError

    def end(self) -> bytes:
        """Return the last events of a stream."""
        return b""

    def failed(self, problem: Problem) -> bytes:
        """Return the events of a stream that breaks off."""
        return server_sent(error_body(problem, self.api))

    def tells_refusal(self, problem: Problem) -> bool:
        """True if a stream that is refused before its header begins and says why in an event.

        Otherwise it gets the status of the refusal.
        """
        return False

    def whole(self) -> bytes:
        """Return the JSON of all pieces, for an answer that is not streamed."""
        raise NotImplementedError


class EventWording(Wording):
    """Writes streams of an API as named events that add up to `result`.

    Subclasses define the events.
    """

    def __init__(self, parser: StreamParser, result: Json) -> None:
        self.result = result
        self._answer = ParsedAnswer(parser)

    def opening_events(self) -> list[Json]:
        raise NotImplementedError

    def signs(self) -> list[Json]:
        """Return the events that `sign` writes."""
        raise NotImplementedError

    def add(self, delta: Delta) -> list[Json]:
        raise NotImplementedError

    def finish(self, last: TextPiece, n_reasoning: int) -> list[Json]:
        raise NotImplementedError

    def break_off(self, problem: Problem) -> list[Json]:
        raise NotImplementedError

    def opening(self) -> bytes:
        return named_events(self.opening_events())

    def sign(self) -> bytes:
        return named_events(self.signs())

    def piece(self, job: int, piece: TextPiece) -> bytes:
        told = b"".join(named_events(self.add(delta)) for delta in self._answer.add(piece))
        if piece.finish_reason is None:
            return told
        return told + named_events(self.finish(piece, self._answer.n_reasoning))

    def failed(self, problem: Problem) -> bytes:
        return named_events(self.break_off(problem))

    def whole(self) -> bytes:
        return to_json(self.result).encode()


class Heard(NamedTuple):
    """An event, its job's number, and the time.monotonic() at which the engine made it."""

    job: int
    event: JobEvent
    made_at_s: float


class TicketGroup:
    """Submits the jobs of a request in order, at most as many at once as the engine has slots.

    The other jobs wait here, so that a long list of prompts does not fill the queue.
    """

    def __init__(self, engine: EngineClient, jobs: Sequence[GeneratingJob], client: str) -> None:
        """Raises RequestFailed if not even the first job is accepted."""
        self._engine, self._client = engine, client
        self._jobs = deque(enumerate(jobs))  # jobs that are not submitted yet
        self._n_left = len(jobs)
        self._n_at_once = max(1, engine.n_parallel)
        self._events: asyncio.Queue[Heard] = asyncio.Queue()
        self._tickets: dict[int, SubmittedJob] = {}
        self._unstarted: set[int] = set()  # submitted jobs whose prompt is not accepted yet
        self._answers: list[tuple[int, GenerationStats]] = []  # job ids and statistics
        self._again: asyncio.TimerHandle | None = None
        self.at_once: Callable[[Heard], bool] | None = None
        """Is offered each event that arrives while none waits; returns True if it took it."""
        self._submit()
        self._go_on()

    @property
    def has_started(self) -> bool:
        """True if the engine has accepted the prompts of all jobs that were submitted so far."""
        return not self._unstarted

    async def next(self, timeout_s: float | None = None) -> Heard | None:
        """Wait for the next event and return it; None when all jobs have ended.

        Raises RequestFailed with the first problem of any job. Raises TimeoutError after
        `timeout_s`; the caller may then call `next` again.
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
        """Record that a token made at `made_at_s` has been written to the client's socket."""
        self._engine.metrics.add_delay(monotonic() - made_at_s)

    @property
    def words(self) -> str:
        """What became of the jobs, for the request's line: ended ones, or else cancelled ones."""
        running = map(cancelled_words, self._tickets.values())
        return answers_words(self._answers) or next(running, "")

    def cancel(self) -> None:
        """Cancel all jobs that have not ended. May be called repeatedly."""
        self._jobs.clear()
        if self._again is not None:
            self._again.cancel()
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()

    def _go_on(self) -> None:
        """Submit as many jobs as there is room for.

        If the queue is full, the other jobs are retried later, because the request was accepted.
        """
        self._again = None
        while self._jobs and len(self._tickets) < self._n_at_once:
            try:
                self._submit()
            except RequestFailed as e:
                if e.problem.retry_after_s is None or e.problem is SHUTTING_DOWN:
                    self._events.put_nowait(Heard(self._jobs[0][0], e.problem, 0.0))
                else:
                    after_ms = e.problem.retry_after_ms
                    after_s = _AGAIN_S if after_ms is None else after_ms / 1000
                    loop = asyncio.get_running_loop()
                    self._again = loop.call_later(after_s, self._go_on)
                return

    def _submit(self) -> None:
        index, job = self._jobs[0]
        hear = functools.partial(self._hear, index)
        self._tickets[index] = self._engine.submit(job, hear, self._client)
        self._unstarted.add(index)
        self._jobs.popleft()

    def _hear(self, index: int, event: JobEvent, made_at_s: float) -> None:
        heard = Heard(index, event, made_at_s)
        if isinstance(event, Started):
            self._unstarted.discard(index)
        elif isinstance(event, TextPiece) and event.stats is not None:
            self._answers.append((self._tickets[index].job_id, event.stats))
        if self.at_once is not None and self._events.empty():
            try:
                if self.at_once(heard):
                    return
            except Exception as e:  # must not reach other requests' events in the same message
                log.exception("telling of an answer failed")
                self.at_once = None
                heard = Heard(index, problem_of(e), made_at_s)
        self._events.put_nowait(heard)
        if isinstance(event, Finished):
            del self._tickets[index]
            if self._again is None:
                self._go_on()


class GenerationResponse(Response):
    """An answer in one piece, or as server-sent events.

    Jobs are cancelled if the client leaves, even while they are queued or in prefill, when
    Starlette would not notice.
    """

    def __init__(self, group: TicketGroup, wording: Wording, *, stream: bool) -> None:
        super().__init__()
        self._group = group
        self._wording = wording
        self._stream = stream
        self._has_header = False
        self._has_failed = False
        self._is_writing = False  # True while new events have to wait
        self._told_at_s = monotonic()  # time of the last event
        self._write_part: Callable[[bytes], bool] | None = None
        self._unwritten = b""  # bytes that `write_part` refused, because the client reads slowly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_left(receive, self._produce(scope, receive, send))
        finally:
            if not self._has_failed:
                add_words(scope, self._group.words)
            self._group.cancel()

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":
            self._write_part = scope.get("extensions", {}).get(WRITE_PART)
        try:
            if self._stream:
                await self._tell(lambda data: self._write(send, data))
            else:
                while (heard := await self._group.next()) is not None:
                    self._take(heard.job, heard.event)
        except RequestFailed as e:
            self._has_failed = True  # the line of the request says why
            is_event = self._stream and self._wording.tells_refusal(e.problem)
            if not self._has_header and not is_event:
                await problem_response(e.problem)(scope, receive, send)
                return
            add_words(scope, e.problem.message)
            await self._write(send, self._wording.failed(e.problem))
        if self._stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            response = Response(self._wording.whole(), media_type="application/json")
            await response(scope, receive, send)

    async def _tell(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            patience_s = _KEEP_ALIVE_S if self._has_header else _HEADER_PATIENCE_S
            left_s = max(0.0, self._told_at_s + patience_s - monotonic())
            try:
                self._is_writing = False
                heard = await self._group.next(left_s)
                self._is_writing = True
            except TimeoutError:
                self._is_writing = True
                await self._write_sign(write, patience_s)
                continue
            if heard is None:
                break
            data = self._take(heard.job, heard.event)
            if data:
                await write(data)
                self._group.written(heard.made_at_s)
            elif not self._has_header and self._group.has_started:
                await write(self._wording.opening())
            else:
                await self._write_sign(write, patience_s)
        await write(self._wording.end())

    async def _write_sign(
        self, write: Callable[[bytes], Awaitable[None]], patience_s: float
    ) -> None:
        """Write a sign of life if there was no event for `patience_s`.

        Pieces of an answer may come without an event, for example while a call is incomplete.
        """
        if monotonic() - self._told_at_s >= patience_s:
            await write(self._wording.sign())

    def _write_at_once(self, heard: Heard) -> bool:
        """Write a piece that only adds text as soon as it arrives. Most tokens go this way."""
        job, event, made_at_s = heard
        if self._write_part is None or self._is_writing or not isinstance(event, TextPiece):
            return False
        if not event.text or event.finish_reason is not None:
            return False
        told = self._wording.piece(job, event)
        if told:
            self._told_at_s = monotonic()
        self._unwritten += told
        if self._unwritten and self._write_part(self._unwritten):
            self._unwritten = b""
            self._group.written(made_at_s)
        return True

    def _take(self, job: int, event: JobEvent) -> bytes:
        if isinstance(event, Started):
            self._wording.started(job, event)
        elif isinstance(event, TextPiece):
            return self._wording.piece(job, event)
        return b""

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._has_header:
            self._has_header = True
            start = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS.raw}
            await send(start)
            self._group.at_once = self._write_at_once  # later pieces need not wake this task
        data, self._unwritten = self._unwritten + data, b""
        if data:
            self._told_at_s = monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
