"""Decodes compressed bodies of requests as they arrive (Content-Encoding; RFC 9110, 8.4).

A few kilobytes can decode to gigabytes. So a body is decoded in small parts, and only as far as
its reader asks for more: the reader's limits on bytes then hold for what is decoded. What is
decoded of a body in several encodings is limited here after each of them.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specoffload.server.api.body import MOST_BYTES, has_body, invalid
from specoffload.server.api.refusals import problem_response
from specoffload.server.engine.messages import Event, Problem, RequestFailed

ACCEPTED = "gzip, deflate"
_MOST_ENCODINGS = 2  # limit for each body
_MOST_MEMBERS = 1000  # of one gzip body: compressed parts one after another (RFC 1952, 2.2)
_PART_BYTES = 64 * 1024
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class Decoder(Protocol):
    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield what `data` decodes to, in parts. Raises RequestFailed (400, 413)."""
        ...

    def end(self) -> None:
        """Raises RequestFailed (400) if the data broke off."""
        ...


class _Inflate:
    """Decodes gzip, or deflate: zlib's form, or as some clients send it without zlib's header."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_gzip = name == "gzip"
        self._inner = zlib.decompressobj(_GZIP if self._is_gzip else _ZLIB)
        self._n_members = 1
        self._n_in = self._n_out = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        if not self._n_in and data and not self._is_gzip and not _has_zlib_header(data):
            self._inner = zlib.decompressobj(_RAW)
        self._n_in += len(data)
        while data:
            if self._inner.eof:
                self._next_member(data)
            try:
                part = self._inner.decompress(data, _PART_BYTES)
            except zlib.error as e:
                raise invalid(f"the body is not {self._name}, as Content-Encoding says") from e
            data = self._inner.unconsumed_tail or self._inner.unused_data
            if part:
                self._count(len(part))
                yield part
        while not self._inner.eof and (part := self._rest()):
            self._count(len(part))
            yield part

    def _rest(self) -> bytes:
        """Return what is decoded already, and was more than a part."""
        try:
            return self._inner.decompress(b"", _PART_BYTES)
        except zlib.error as e:
            raise invalid(f"the body is not {self._name}, as Content-Encoding says") from e

    def _next_member(self, data: bytes) -> None:
        self._n_members += 1
        if not self._is_gzip:
            raise invalid(f"the body has {len(data)} bytes or more behind its end")
        if self._n_members > _MOST_MEMBERS:
            raise invalid(f"the body has over {_MOST_MEMBERS} members: compress it at once", 413)
        self._inner = zlib.decompressobj(_GZIP)

    def _count(self, n_bytes: int) -> None:
        self._n_out += n_bytes
        if self._n_out > MOST_BYTES:
            raise invalid(
                f"the body is over {MOST_BYTES} bytes once it is decoded", 413, Event.BODY_TOO_LARGE
            )

    def end(self) -> None:
        if self._n_in and not self._inner.eof:
            raise invalid(f"the body breaks off: its {self._name} data has no end")


def _has_zlib_header(data: bytes) -> bool:
    """True if deflate data begins as zlib's format does (RFC 1950, 2.2), judged by its first byte,
    the only one that may have arrived."""
    return data[0] & 0x0F == 8 and data[0] >> 4 <= 7


def encodings_of(headers: Headers) -> list[str]:
    """Return the names in Content-Encoding in the order in which the body was encoded."""
    named = ",".join(headers.getlist("content-encoding")).split(",")
    names = [name.strip().lower().removeprefix("x-") for name in named]
    return [name for name in names if name not in ("", "identity")]


def decoders_of(names: Sequence[str]) -> list[Decoder]:
    """Return the decoders of a body with these encodings, in the order of their use.

    Raises RequestFailed (415) for an encoding that is not accepted, and for too many of them.
    """
    wrong = [name for name in names if name not in ("gzip", "deflate")]
    if wrong or len(names) > _MOST_ENCODINGS:
        said = f"Content-Encoding {', '.join(names)[:80]!r} is not accepted here"
        remedy = f"send {ACCEPTED} ({_MOST_ENCODINGS} at most), or an uncompressed body"
        raise RequestFailed(
            Problem(
                "UnsupportedMediaType",
                f"{said}: {remedy}",
                415,
                "invalid_request_error",
                can_retry=False,
            )
        )
    return [_Inflate(name) for name in reversed(names)]


def decoded(decoders: Sequence[Decoder], data: bytes) -> Iterator[bytes]:
    """Yield what `data` decodes to through all decoders, in parts."""
    if not decoders:
        yield data
        return
    for part in decoders[0].decode(data):
        yield from decoded(decoders[1:], part)


class Decoding:
    """ASGI middleware that gives the application decoded bodies, without Content-Encoding.

    It answers 415 to encodings that are not accepted, and names those that are (RFC 7694).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers({})
        names = encodings_of(headers)
        if not names or not has_body(headers):
            await self._app(scope, receive, send)
            return
        try:
            decoders = decoders_of(names)
        except RequestFailed as e:
            response = problem_response(e.problem)
            response.headers["Accept-Encoding"] = ACCEPTED
            await response(scope, receive, send)
            return
        changed = {**scope, "headers": list(scope["headers"])}
        plain = MutableHeaders(scope=changed)
        for name in ("content-encoding", "content-length"):
            del plain[name]
        plain["transfer-encoding"] = "chunked"  # the decoded length is not known
        await self._app(changed, _Decoded(receive, decoders).receive, send)


class _Decoded:
    """Receives a request's messages, and decodes its body part by part."""

    def __init__(self, receive: Receive, decoders: Sequence[Decoder]) -> None:
        self._receive, self._decoders = receive, decoders
        self._parts: Iterator[bytes] = iter(())
        self._n_received = 0
        self._is_last = self._has_ended = False

    async def receive(self) -> Message:
        while not self._has_ended:
            part = next(self._parts, None)
            if part is not None:
                await asyncio.sleep(0)  # decoding has to let others in
                return _body(part)
            if self._is_last:
                self._has_ended = True
                for decoder in self._decoders:
                    decoder.end()
                return _body(b"", more=False)
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            data = message.get("body", b"")
            self._n_received += len(data)
            if self._n_received > MOST_BYTES:
                raise invalid(
                    f"the body is over {MOST_BYTES} bytes: shorten it", 413, Event.BODY_TOO_LARGE
                )
            self._is_last = not message.get("more_body", False)
            self._parts = decoded(self._decoders, data)
        return await self._receive()


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}
