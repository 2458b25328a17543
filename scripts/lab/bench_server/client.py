"""Clients that use little processor time, so that the server on the same machine has the rest.

They collect bytes, and parse them when the answer has ended. `load` runs many of them for a while.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lab.attack.client import NoAnswer, ask_for, dechunked
from lab.attack.program import LOOPBACK

_READ_BYTES = 1 << 16
_TEXT = re.compile(rb'"(?:text|content)":\s*"[^"][^\n]*\n')  # the rest of an event with text


class BadAnswer(Exception):
    """The answer is not a valid stream."""


@dataclass(frozen=True)
class Answer:
    """A whole streamed answer. Times are values of time.perf_counter."""

    text: str
    n_tokens: int
    tokens: tuple[int, ...]  # token ids; only /completion streams have them
    sent_s: float
    first_s: float  # first byte of the header
    content_s: float  # the bytes that complete the first event with text
    ended_s: float
    n_cached: int = 0  # prompt tokens that were cached; only /completion streams have the number


async def ask(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Answer:
    """Send one streamed request and read its answer. Raises BadAnswer or OSError."""
    native = path == "/completion"
    extra = {} if native else {"stream_options": {"include_usage": True}}
    request = ask_for(path, {**body, "stream": True, **extra}).raw(port)
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        sent_s = time.perf_counter()
        writer.write(request)
        answer = await reader.read(1)
        first_s = content_s = time.perf_counter()
        while (found := _TEXT.search(answer)) is None:
            part = await reader.read(_READ_BYTES)
            if not part:
                break
            answer += part
            content_s = time.perf_counter()
        answer += await reader.read()
        ended_s = time.perf_counter()
        if found is None:
            content_s = ended_s  # the whole answer is empty
    finally:
        writer.close()
    tokens, n_cached = tuple[int, ...](), 0
    if native:
        text, n_tokens, tokens = read_native(answer)
        n_cached = json.loads(events_of(answer)[-1]).get("timings", {}).get("cache_n", 0)
    else:
        text, n_tokens = read(answer)
    return Answer(text, n_tokens, tokens, sent_s, first_s, content_s, ended_s, n_cached)


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
    """Text, number of tokens and token ids of a stream of /completion. Raises BadAnswer."""
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
        raise BadAnswer(f"{len(tokens)} tokens came, but the stream says that it has {n_tokens}")
    return "".join(text), n_tokens, tuple(tokens)


def events_of(answer: bytes) -> list[bytes]:
    """The data of each server-sent event. Raises BadAnswer if this is no such stream."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode()
    if " 200 " not in status + " ":
        raise BadAnswer(f"{status}: {body[:300].decode(errors='replace')}")
    if b"chunked" in head.lower():
        try:
            body = dechunked(body)
        except NoAnswer as e:
            raise BadAnswer(str(e)) from e
    return [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]


Tokens = tuple[int, ...]


@dataclass
class Report:
    """The results of a load."""

    n_streams: int
    n_answers: int = 0
    n_tokens: int = 0
    took_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    differing: Counter[tuple[str, Tokens]] = field(default_factory=Counter)  # (prompt, tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.took_s


def request(prompt: str, n_tokens: int) -> dict[str, Any]:
    """The body of a greedy request for exactly `n_tokens` tokens."""
    return {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0.0, "ignore_eos": True}


async def alone(port: int, prompts: Iterable[str], n_tokens: int) -> dict[str, Answer]:
    """The answer to each prompt, with one request at a time."""
    return {p: await ask(port, request(p, n_tokens), "/completion") for p in prompts}


async def load(
    port: int, known: dict[str, Answer], n_tokens: int, n_streams: int, duration_s: float
) -> Report:
    """Run `n_streams` clients for `duration_s` seconds. Each sends its next request when it has its
    answer.

    This finds lost and doubled tokens, because each stream must have `n_tokens` tokens. Streams
    with the tokens that a single client got (`known`) must also have its text.
    """
    report = Report(n_streams)
    prompts = list(known)
    began_s = time.perf_counter()

    async def client(number: int) -> None:
        turn = number
        while time.perf_counter() - began_s < duration_s:
            prompt = prompts[turn % len(prompts)]
            turn += n_streams + 1  # so that each turn combines other prompts
            try:
                answer = await ask(port, request(prompt, n_tokens), "/completion")
            except (BadAnswer, OSError) as e:
                report.errors[f"{type(e).__name__}: {e}"] += 1
                continue
            report.n_answers += 1
            report.n_tokens += answer.n_tokens
            if answer.n_tokens != n_tokens:
                report.errors[f"{answer.n_tokens} tokens in place of {n_tokens}"] += 1
            if answer.tokens != known[prompt].tokens:
                report.differing[prompt, answer.tokens] += 1
            elif answer.text != known[prompt].text:
                report.errors["the same tokens with another text"] += 1

    await asyncio.gather(*(client(n) for n in range(n_streams)))
    report.took_s = time.perf_counter() - began_s
    return report


async def speed(port: int, prompts: list[list[str]], n_tokens: int) -> tuple[float, list[Answer]]:
    """Start a stream for each list of prompts, all together. A stream sends one prompt after
    another. Returns the tokens per second of all streams, and the answers."""

    async def stream(texts: list[str]) -> list[Answer]:
        return [await ask(port, request(text, n_tokens)) for text in texts]

    began_s = time.perf_counter()
    streams = await asyncio.gather(*map(stream, prompts))
    answers = [answer for found in streams for answer in found]
    took_s = max(answer.ended_s for answer in answers) - began_s
    return sum(answer.n_tokens for answer in answers) / took_s, answers
