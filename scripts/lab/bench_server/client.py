"""A client that costs little, so that it takes no time from the server beside it: bytes are read as
they come and looked at when the answer is over."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

HEAD = (
    "POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    "Content-Length: {length}\r\nConnection: close\r\n\r\n"
)


class BadAnswer(Exception):
    """An answer that is not what a stream must be."""


@dataclass(frozen=True)
class Answer:
    """A stream from the first byte sent to the last received; times are of time.perf_counter."""

    text: str
    n_tokens: int
    tokens: tuple[int, ...]  # of llama-server's own form of a stream; else none are told
    sent_s: float
    first_s: float
    ended_s: float


class _Reader(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self.parts: list[bytes] = []
        self.first_s = 0.0
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.parts:
            self.first_s = time.perf_counter()
        self.parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(time.perf_counter())


async def ask(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Answer:
    """One streamed completion. Raises BadAnswer, and OSError."""
    native = path == "/completion"
    extra = {} if native else {"stream_options": {"include_usage": True}}
    content = json.dumps({**body, "stream": True, **extra})
    head = HEAD.format(path=path, host="127.0.0.1", port=port, length=len(content.encode()))
    sent_s = time.perf_counter()
    loop = asyncio.get_running_loop()
    request = head.encode() + content.encode()
    transport, reader = await loop.create_connection(lambda: _Reader(request), "127.0.0.1", port)
    try:
        ended_s = await reader.ended
    finally:
        transport.close()
    answer = b"".join(reader.parts)
    tokens: tuple[int, ...] = ()
    if native:
        text, n_tokens, tokens = read_native(answer)
    else:
        text, n_tokens = read(answer)
    return Answer(text, n_tokens, tokens, sent_s, reader.first_s, ended_s)


def read(answer: bytes) -> tuple[str, int]:
    """Text and number of tokens of a stream of completions. Raises BadAnswer."""
    events = events_of(answer)
    if not events or events[-1].strip() != b"[DONE]":
        raise BadAnswer(f"the stream has no end: ...{answer[-200:].decode(errors='replace')}")
    text, n_tokens = [], -1
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            raise BadAnswer(str(event["error"]))
        text += [choice.get("text") or "" for choice in event["choices"]]
        if event.get("usage"):
            n_tokens = event["usage"]["completion_tokens"]
    if n_tokens < 0:
        raise BadAnswer("the stream has no usage")
    return "".join(text), n_tokens


def read_native(answer: bytes) -> tuple[str, int, tuple[int, ...]]:
    """Text, number of tokens and the tokens of a stream of /completion. Raises BadAnswer."""
    text: list[str] = []
    tokens: list[int] = []
    n_tokens = -1
    for event in map(json.loads, events_of(answer)):
        if "error" in event:
            raise BadAnswer(str(event["error"]))
        if n_tokens >= 0:
            raise BadAnswer("the stream goes on after its end")
        text.append(event["content"])
        tokens += event["tokens"]
        if event["stop"]:
            n_tokens = event["tokens_predicted"]
    if n_tokens != len(tokens):
        raise BadAnswer(f"{len(tokens)} tokens came, and {n_tokens} are said to be there")
    return "".join(text), n_tokens, tuple(tokens)


def events_of(answer: bytes) -> list[bytes]:
    """The data of server-sent events. Raises BadAnswer for what is no such stream."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode()
    if " 200 " not in status + " ":
        raise BadAnswer(f"{status}: {body[:300].decode(errors='replace')}")
    if b"chunked" in head.lower():
        body = dechunked(body)
    return [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]


def dechunked(body: bytes) -> bytes:
    """HTTP's chunks put together. Raises BadAnswer where the last one is missing."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.find(b"\r\n", at)
        if end < 0:
            raise BadAnswer("the connection ended within an answer")
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
