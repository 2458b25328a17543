"""One request over a connection of its own, byte for byte as it is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 30.0
LOOPBACK = "127.0.0.1"


class NoAnswer(Exception):
    """The server did not answer in time, or in a way that is none of HTTP's."""


@dataclass(frozen=True)
class Request:
    """`headers` are added to those that every request has, or take their place."""

    path: str
    body: bytes = b""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    def raw(self, port: int) -> bytes:
        """The bytes to send."""
        headers = {
            "Host": f"{LOOPBACK}:{port}",
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(self.body)),
            **self.headers,
        }
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + self.body


@dataclass(frozen=True)
class Answer:
    """Headers' names are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises ValueError."""
        return json.loads(self.body)


def ask_for(path: str, body: Any, **headers: str) -> Request:
    return Request(path, json.dumps(body).encode(), headers=headers)


async def send(port: int, request: Request, patience_s: float = PATIENCE_S) -> Answer:
    """The whole answer. Raises NoAnswer."""
    return read(await send_raw(port, request.raw(port), patience_s))


async def send_raw(port: int, data: bytes, patience_s: float = PATIENCE_S) -> bytes:
    """All that the server says until it closes. Raises NoAnswer."""
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            try:
                return await _exchange(reader, writer, data)
            finally:
                writer.close()
    except TimeoutError as e:
        raise NoAnswer(f"no answer in {patience_s:g} s") from e
    except OSError as e:
        raise NoAnswer(f"{type(e).__name__}: {e}") from e


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes
) -> bytes:
    with suppress(OSError):  # refused before all was sent: what was said can still be read
        writer.write(data)
        await writer.drain()
    return await read_all(reader)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """All that is said until the connection ends. Raises ConnectionResetError where that is
    nothing."""
    parts: list[bytes] = []
    try:
        while part := await reader.read(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        if not parts:
            raise
    return b"".join(parts)


def read(data: bytes) -> Answer:
    """An answer of its bytes, interim ones skipped. Raises NoAnswer."""
    head, separator, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if not separator or len(words) < 2 or not words[1].isdigit():
        raise NoAnswer(f"no HTTP answer: {data[:100]!r}")
    if words[1].startswith("1"):
        return read(body)
    headers = dict(_header(line) for line in lines[1:])
    if headers.get("transfer-encoding") == "chunked":
        body = _dechunked(body)
    return Answer(int(words[1]), headers, body)


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def _dechunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while (end := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:end].partition(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    raise NoAnswer("the connection ended within an answer")
