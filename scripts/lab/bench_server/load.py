"""Many streams for a while, and whether each is what one client alone is given."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lab.bench_server.client import Answer, BadAnswer, ask

Tokens = tuple[int, ...]


@dataclass
class Report:
    """What came of a load."""

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
    """Greedy, of a fixed length."""
    return {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0.0, "ignore_eos": True}


async def alone(port: int, prompts: Iterable[str], n_tokens: int) -> dict[str, Answer]:
    """The answer to each prompt, with one request at a time."""
    return {p: await ask(port, request(p, n_tokens), "/completion") for p in prompts}


async def load(
    port: int, known: dict[str, Answer], n_tokens: int, n_streams: int, duration_s: float
) -> Report:
    """`n_streams` clients for `duration_s` seconds, each asking on as soon as it has its answer.

    A token that is lost or doubled on its way shows: the tokens of each stream are counted against
    what its end says, and their texts joined against what one client alone was given for the same
    tokens.
    """
    report = Report(n_streams)
    prompts = list(known)
    began_s = time.perf_counter()

    async def client(number: int) -> None:
        turn = number
        while time.perf_counter() - began_s < duration_s:
            prompt = prompts[turn % len(prompts)]
            turn += n_streams + 1  # so that neighbours do not stay neighbours
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


async def speed(
    port: int, prompts: list[str], n_tokens: int, n_streams: int, n_requests: int
) -> tuple[float, list[Answer]]:
    """Tokens per second of `n_streams` streams that begin together, each of `n_requests` requests
    one after another, and the answers."""

    async def stream(number: int) -> list[Answer]:
        asked = range(number, number + n_requests)
        return [await ask(port, request(prompts[i % len(prompts)], n_tokens)) for i in asked]

    began_s = time.perf_counter()
    streams = await asyncio.gather(*(stream(n) for n in range(n_streams)))
    answers = [answer for found in streams for answer in found]
    took_s = max(answer.ended_s for answer in answers) - began_s
    return sum(answer.n_tokens for answer in answers) / took_s, answers
