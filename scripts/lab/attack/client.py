"""Clients for attacks.

`send_raw` sends bytes over a connection of their own. A witness sends valid requests all the time
and checks their answers. `overload` runs more clients than the queue has places.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lab.attack.program import LOOPBACK

PATIENCE_S = 30.0


class NoAnswer(Exception):
    """The server did not answer in time, or its answer is not valid HTTP."""


@dataclass(frozen=True)
class Request:
    """One HTTP request. `headers` extend or replace the headers that every request has."""

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
    """One HTTP answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, parsed. Raises ValueError if it is not JSON."""
        return json.loads(self.body)


def ask_for(path: str, body: Any, **headers: str) -> Request:
    return Request(path, json.dumps(body).encode(), headers=headers)


async def send(port: int, request: Request, patience_s: float = PATIENCE_S) -> Answer:
    """Send the request and return the whole answer. Raises NoAnswer."""
    try:
        return read(await send_raw(port, request.raw(port), patience_s))
    except TimeoutError as e:
        raise NoAnswer(f"no answer in {patience_s:g} s") from e
    except OSError as e:
        raise NoAnswer(f"{type(e).__name__}: {e}") from e


async def send_raw(
    port: int,
    data: bytes,
    patience_s: float = PATIENCE_S,
    *,
    ends: bool = False,
    leaves: bool = False,
) -> bytes:
    """Send `data` and return all that the server sends until it closes the connection.

    `ends`: the client closes its sending side afterwards. `leaves`: the client waits only for the
    first byte. Raises TimeoutError or OSError.
    """
    async with asyncio.timeout(patience_s):
        parts: list[bytes] = []
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        try:
            with suppress(OSError):  # after an early refusal, the answer can still be read
                writer.write(data)
                await writer.drain()
                if ends:
                    writer.write_eof()
            parts += [await reader.read(1)] if leaves else []
            while not leaves and (part := await reader.read(1 << 16)):
                parts.append(part)
        except ConnectionResetError:
            if not parts:
                raise
        finally:
            writer.close()
        return b"".join(parts)


def read(data: bytes) -> Answer:
    """Parse an answer, skipping interim answers. Raises NoAnswer."""
    head, separator, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if not separator or len(words) < 2 or not words[1].isdigit():
        raise NoAnswer(f"no HTTP answer: {data[:100]!r}")
    if words[1].startswith("1"):
        return read(body)
    headers = dict(_header(line) for line in lines[1:])
    if headers.get("transfer-encoding") == "chunked":
        body = dechunked(body)
    return Answer(int(words[1]), headers, body)


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def dechunked(body: bytes) -> bytes:
    """Join the chunks of a body. Raises NoAnswer if the last chunk is missing."""
    parts: list[bytes] = []
    at = 0
    while (end := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:end].partition(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    raise NoAnswer("the connection ended within an answer")


# -- more clients than the queue has places ------------------------------------------------------


@dataclass
class Overload:
    """The results of an overload; `wrong` lists what must not happen."""

    n_clients: int
    answers: Counter[int] = field(default_factory=Counter)  # numbers of answers by client
    n_refused: int = 0
    retry_after_s: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def spread(self) -> tuple[int, int]:
        """The fewest and the most answers that any client got."""
        counts = [self.answers[client] for client in range(self.n_clients)]
        return min(counts), max(counts)

    def said(self) -> dict[str, Any]:
        least, most = self.spread
        return {
            "clients": self.n_clients,
            "seconds": round(self.took_s, 1),
            "answers": sum(self.answers.values()),
            "least_served": least,
            "most_served": most,
            "refused": self.n_refused,
            "longest_retry_after_s": max(self.retry_after_s, default=0),
        }


def completion(prompt: str, n_tokens: int, **headers: str) -> Request:
    """A request for a greedy completion of exactly `n_tokens` tokens."""
    body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    return ask_for("/v1/completions", body, **headers)


async def text_of(port: int, prompt: str, n_tokens: int) -> str:
    """The text that one request gets. Raises NoAnswer."""
    answer = await send(port, completion(prompt, n_tokens))
    if answer.status != 200:
        raise NoAnswer(f"{answer.status}: {answer.body[:200]!r}")
    return str(answer.json()["choices"][0]["text"])


async def overload(
    port: int,
    texts: Mapping[str, str],
    n_tokens: int,
    *,
    n_clients: int,
    n_answers: int | None = None,
    duration_s: float | None = None,
) -> Overload:
    """Send requests from `n_clients` clients until they have `n_answers` in all, or `duration_s`
    seconds have passed.

    A client sends its next request when it has its answer, or after the time that a refusal named.
    `texts` maps prompts to the expected answers. Each client has its own X-Forwarded-For address,
    as behind a proxy on this machine.
    """
    found = Overload(n_clients)
    began_s = time.monotonic()
    prompts = list(texts)

    def is_over() -> bool:
        if n_answers is not None and sum(found.answers.values()) >= n_answers:
            return True
        return duration_s is not None and time.monotonic() - began_s >= duration_s

    async def client(number: int) -> None:
        turn = number
        while not is_over():
            prompt = prompts[turn % len(prompts)]
            address = f"10.0.{number // 250}.{number % 250 + 1}"
            request = completion(prompt, n_tokens, **{"X-Forwarded-For": address})
            try:
                answer = await send(port, request)
            except NoAnswer as e:
                found.wrong.append(f"client {number}: {e}")
                continue
            if answer.status == 503 and "retry-after" in answer.headers:
                found.n_refused += 1
                whole_s = int(answer.headers["retry-after"])
                found.retry_after_s[whole_s] += 1
                after_ms = int(answer.headers.get("retry-after-ms", 1000 * whole_s))
                await asyncio.sleep(after_ms / 1000)
                continue
            if answer.status != 200:
                found.wrong.append(f"client {number}: {answer.status} {answer.body[:200]!r}")
                continue
            turn += n_clients + 1  # so that neighbours do not stay neighbours
            text = answer.json()["choices"][0]["text"]
            found.answers[number] += 1
            if text != texts[prompt]:
                found.wrong.append(f"{prompt!r}: {text!r} in place of {texts[prompt]!r}")

    await asyncio.gather(*(client(number) for number in range(n_clients)))
    found.took_s = time.monotonic() - began_s
    return found


# -- the witness: a client that must be served as if it were alone -------------------------------

# The witness uses only candidates whose answers do not depend on rounding. Quantised kernels round
# differently by batch size, so two tokens with close scores might swap (docs/server.md, Slots).
CANDIDATES = (
    'if __name__ == "__',
    "def __init__(self, name):\n        self.",
    "# -*- coding: utf-8 ",
    "import unittest\n\nclass TestFoo(unittest.",
    "class Foo(object):\n    def __in",
    "self.assertEqual(",
    "    @property\n    def name(self):\n        return self._",
    "super().__init",
    "import os\nimport sys\n",
    "for i in range(len(",
    'print("Hello, ',
    "try:\n    import json\nexcept Import",
    "#!/usr/bin/env ",
    "x = 1\nx = 1\nx = 1\nx = 1\nx =",
    " 0, 1, 2, 3, 4,",
    "from collections import ",
    "raise NotImplemented",
)
_LEAST_MARGIN = 1.3  # log probability; the largest change by rounding that was seen
_MOST_PROMPTS = 4
N_TOKENS = 6
_PAUSE_S = 0.2


@dataclass
class Witness:
    """A client that sends valid requests and checks the texts. `lost` lists missing and wrong
    answers."""

    port: int
    texts: dict[str, str]
    bears_deaths: bool = False  # True: status 500 of a killed engine does not count as lost
    n_answers: int = 0
    n_told_to_wait: int = 0
    longest_s: float = 0.0
    lost: list[str] = field(default_factory=list)

    async def watch(self, until: asyncio.Event) -> None:
        turn, prompts = 0, list(self.texts)
        while not until.is_set():
            await self._ask(prompts[turn % len(prompts)])
            turn += 1
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, prompt: str) -> None:
        began_s = time.monotonic()
        try:
            answer = await send(self.port, completion(prompt, N_TOKENS))
        except NoAnswer as e:
            self.lost.append(f"the witness got {e}")
            return
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        told = answer.status == 503 and "retry-after" in answer.headers
        died = answer.status == 500 and b"engine process" in answer.body
        if told or (died and self.bears_deaths):
            self.n_told_to_wait += 1
        elif answer.status != 200:
            self.lost.append(f"the witness got {answer.status}: {answer.body[:200]!r}")
        else:
            self.n_answers += 1
            text = answer.json()["choices"][0]["text"]
            if text != self.texts[prompt]:
                self.lost.append(f"the witness got {text!r} in place of {self.texts[prompt]!r}")


async def decided_texts(port: int) -> dict[str, str]:
    """Returns prompts whose answers do not depend on rounding, each with its answer.

    Raises NoAnswer, also if no prompt of CANDIDATES is one.
    """
    margins = {}
    for prompt in CANDIDATES:
        request = completion(prompt, N_TOKENS)
        body = {**json.loads(request.body), "logprobs": 2}
        answer = await send(port, ask_for("/v1/completions", body))
        if answer.status != 200:
            raise NoAnswer(f"{answer.status}: {answer.body[:200]!r}")
        choice = answer.json()["choices"][0]
        margins[prompt] = (_margin(choice["logprobs"]["top_logprobs"]), choice["text"])
    decided = [p for p in margins if margins[p][0] >= _LEAST_MARGIN][:_MOST_PROMPTS]
    if not decided:
        raise NoAnswer(f"no prompt's answer is decided: {margins}")
    return {prompt: str(margins[prompt][1]) for prompt in decided}


def _margin(steps: list[dict[str, float]]) -> float:
    """The smallest lead of the likeliest token over the second, in log probability."""
    ahead = []
    for step in steps:
        best = sorted(step.values(), reverse=True)
        ahead.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return min(ahead, default=0.0)
