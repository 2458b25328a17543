"""Limits the number of uvicorn's connections, and the time that each may take.

    waiting ──header complete──> body ──complete──> answering ──sent──> waiting
       │ header_s, keep_alive_s     │ body_s + rate     │ the client reads nothing: write_s
       └────────────────────────────┴───────────────────┴──> closed

If a request is refused before all of it has arrived, the rest is read up to a limit and discarded.
Closing at once would reset the connection, and the client would not see the answer (nginx's
`lingering_close`; RFC 9112, 9.6).

If the limit of connections is reached, a new connection replaces the one that has waited longest.
A client that has closed only its sending side still gets its answer.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from specoffload.server.log import mark_refused, request_line

WRITE_PART = "specoffload.write_part"
"""An extension of the ASGI scope: `write(data) -> bool` writes a part of a streamed body at once.
It returns False if that is not possible now, and `send`, which takes much longer, has to."""

BACKLOG = 128  # connections that the kernel queues until they are accepted
_MOST_CONNECTIONS = 1024
_MOST_HEADER_BYTES = 64 * 2**10  # uvicorn's default
_SPARE_DESCRIPTORS = 64  # file descriptors of pipes, files and the listening socket
_PROBE_S = (0.1, 1.0)  # first and longest pause between two probes of a half-closed connection

log = logging.getLogger("specoffload.server")


@dataclass(frozen=True)
class SocketLimits:
    """Limits of connections; times are in seconds.

    A body may take `body_s`, plus one second per `body_bytes_per_s` bytes that have arrived. A
    client that reads nothing of its answer for `write_s` is disconnected. If a request is answered
    before all of it has arrived, up to `linger_bytes` more are read, for up to `linger_s`.
    """

    n_connections: int = _MOST_CONNECTIONS
    header_s: float = 10.0
    body_s: float = 30.0
    body_bytes_per_s: int = 64 * 2**10
    keep_alive_s: int = 30
    write_s: float = 60.0
    linger_s: float = 30.0
    linger_bytes: int = 128 * 2**20

    @property
    def n_at_once(self) -> int:
        """Number of connections that may be accepted before any is closed to make room.

        It is low enough to leave file descriptors free.
        """
        return max(1, min(BACKLOG, self.n_connections // 4))


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files. Returns how many connections the limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST_CONNECTIONS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    n_open = _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - _SPARE_DESCRIPTORS
    return max(1, min(_MOST_CONNECTIONS, n_open))


class OncePerWhile(logging.Filter):
    """A log filter that passes a message at most once in `every_s` seconds, with the number of
    messages held back. Messages with the same format string count as the same."""

    def __init__(self, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._said: dict[
            str, tuple[float, int]
        ] = {}  # by format string: (time of last message, number held back)

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, text = self._clock(), str(record.msg)
        at_s, n_held = self._said.get(text, (-self._every_s, 0))
        if now_s - at_s < self._every_s:
            self._said[text] = (at_s, n_held + 1)
            return False
        if len(self._said) > 1000:
            self._said.clear()
        self._said[text] = (now_s, 0)
        if n_held:
            record.msg = f"{text} ({n_held} more since this was last said)"
        return True


class IdleConnections:
    """Connections that may be closed to make room, the longest waiting first.

    They wait for the header of a request, or for the rest of a request that is answered already.
    `n_closed` counts connections that were closed to make room.
    """

    def __init__(self, limits: SocketLimits) -> None:
        self.limits = limits
        self.n_closed = 0
        self._waiting: dict[HttpConnection, None] = {}  # used as an ordered set

    def begin(self, connection: HttpConnection) -> None:
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def end(self, connection: HttpConnection) -> None:
        self._waiting.pop(connection, None)

    def make_room(self, n_open: int) -> bool:
        """Close the longest waiting connection if `n_open` connections are too many.

        Returns False if there are too many and none waits. The caller must then close the new one.
        """
        if n_open <= self.limits.n_connections:
            return True
        oldest = next(iter(self._waiting), None)
        log.warning(
            "%d connections are open, which is the limit; the longest silent one is closed for "
            "each that comes, and if none is silent, the new one",
            n_open - 1,
        )
        self.n_closed += 1
        if oldest is None:
            return False
        self.end(oldest)
        oldest.transport.abort()
        return True


class _Lingering:
    """The methods of a transport that uvicorn uses to answer a request, with `close` replaced."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _Strict(h11.Connection):
    """Refuses requests of which two servers in a row could find different ends (RFC 9112, 6.1)."""

    refusal: tuple[int, str] | None = None  # status and sentence of the last refused request
    method = b""  # of the request that is to be answered

    def start_next_cycle(self) -> None:
        self.method = b""
        super().start_next_cycle()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.refusal, self.method = _refusal_of(event), event.method
            if self.refusal is not None:
                raise h11.RemoteProtocolError(self.refusal[1])
        return event


def _refusal_of(request: h11.Request) -> tuple[int, str] | None:
    version = request.http_version.decode()
    if not version.startswith("1."):
        return 505, f"HTTP/{version} is not served: send HTTP/1.1"
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
        return 400, "a request has Content-Length or Transfer-Encoding, not both"
    return None


class HttpConnection(H11Protocol):
    """One HTTP connection within `SocketLimits`. All methods run on the event loop's thread."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        waiting: IdleConnections,
        say: Callable[[str], None],
    ) -> None:
        """`say` gets the line of each request that the application does not answer."""
        super().__init__(config, server_state, app_state, _loop)
        self.conn: _Strict = _Strict(
            h11.SERVER, config.h11_max_incomplete_event_size or _MOST_HEADER_BYTES
        )  # fmt: skip
        self._waiting = waiting
        self._limits = waiting.limits
        self._say = say
        self._began_s = time.monotonic()  # time of the current request's first bytes
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_lingering = False
        self._n_after_answer = 0  # bytes of a request that arrived after its answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._waiting.make_room(len(self.connections)):
            self._refuse(503, "too many connections are open: try again later")
            return
        self._waiting.begin(self)
        self._limit(self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.end(self)
        for timer in (self._timer, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._n_after_answer += len(data)
            if self._n_after_answer > self._limits.linger_bytes:
                self.transport.abort()
                return
        if self._is_lingering:
            return
        was_idle = self.conn.their_state is h11.IDLE
        if was_idle and not self.conn.trailing_data[0]:
            self._began_s = time.monotonic()
        super().data_received(data)
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._waiting.end(self)
            if was_idle:
                self._limit(self._limits.body_s)
            elif self._timer is not None:
                later_s = len(data) / self._limits.body_bytes_per_s
                self._limit(self._timer.when() - self.loop.time() + later_s)
        elif state is not h11.IDLE:
            self._waiting.end(self)
            self._unlimit()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None and self.cycle is not None:
            # The application's task has not run yet, so its scope may still be changed.
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})  # type: ignore[assignment]
            extensions.setdefault(WRITE_PART, functools.partial(self._write_part, self.cycle))
            if self.cycle.transport is self.transport:
                self.cycle.transport = _Lingering(self.transport, self._linger)  # type: ignore[assignment]

    def _linger(self) -> None:
        """Close the connection, after time for the client to send the rest and read the answer."""
        if self.conn.their_state is not h11.SEND_BODY:
            self.transport.close()
            return
        self._is_lingering = True
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            self.transport.write_eof()
        self.flow.resume_reading()
        self._waiting.begin(self)
        self._limit(self._limits.linger_s)

    def _write_part(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        can = (
            cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not self.flow.write_paused
            and cycle.scope["http_version"] == "1.1"  # bodies of HTTP/1.1 streams are chunked
            and cycle.scope["method"] != "HEAD"
        )
        if can:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return can

    def on_response_complete(self) -> None:
        self._n_after_answer = 0
        super().on_response_complete()
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self._waiting.begin(self)
            self._limit(self._limits.keep_alive_s + self._limits.header_s)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self.conn.refusal or (400, msg)))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True to keep the sending side open, if a complete request is not yet answered."""
        if not self.transport.can_write_eof():
            return False
        answering = self.cycle is not None and not self.cycle.response_complete
        # An HTTP/1.0 client would take an interim answer for the answer itself.
        if not answering or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._probe(_PROBE_S[0])
        return True

    def _probe(self, next_s: float) -> None:
        """Send interim answers to a half-closed connection until the answer starts.

        Clients must skip interim answers (RFC 9110, 15.2). If the client has closed both
        directions, it resets the connection.
        """
        if self.transport.is_closing() or self.cycle.response_started:
            return
        interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        self.transport.write(self.conn.send(interim))
        longer_s = min(2 * next_s, _PROBE_S[1])
        self._probe_timer = self.loop.call_later(next_s, self._probe, longer_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _limit(self, seconds: float) -> None:
        self._unlimit()
        self._timer = self.loop.call_later(seconds, self._too_late)

    def _unlimit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        """Close the connection because the request is late.

        A client that has sent part of the request gets an error, unless its answer has started.
        """
        if self.transport.is_closing():
            return
        started = self.cycle is not None and self.cycle.response_started
        began = self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY
        if began and not started:
            self._refuse(408, "the request took too long to arrive")
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error in place of the application's answer, and close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer is already under way
            return
        kind = "unavailable_error" if status == 503 else "invalid_request_error"
        body = json.dumps({"error": {"code": status, "message": message, "type": kind}}).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if status == 503:
            headers.append(("retry-after", "5"))
        scope: Scope | None = None
        if self.cycle is not None and not self.cycle.response_complete:
            scope = cast(Scope, self.cycle.scope)
            mark_refused(scope)
        took_s = time.monotonic() - self._began_s
        self._say(request_line(scope, self.client, status, took_s, message))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(self.conn.send(h11.Response(status_code=status, headers=headers)))
        if self.conn.method != b"HEAD":  # whose answer has the header alone
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
        self.transport.close()
