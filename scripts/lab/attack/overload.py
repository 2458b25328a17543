"""More clients than the queue has places: each is answered or told when to come back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.attack.exchange import NoAnswer, Request, ask_for, send


@dataclass
class Overload:
    """What came of it; `wrong` is what must not be."""

    n_clients: int
    answers: Counter[int] = field(default_factory=Counter)  # by client
    n_refused: int = 0
    retry_after_s: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def spread(self) -> tuple[int, int]:
        """Answers of the least and of the most served client."""
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
    """Greedy, of a fixed length."""
    body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    return ask_for("/v1/completions", body, **headers)


async def text_of(port: int, prompt: str, n_tokens: int) -> str:
    """What one client alone is given. Raises NoAnswer."""
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
    """Each client asks as soon as it has its answer, or when it was told to, until there are
    `n_answers` of all together or `duration_s` are over.

    `texts` are the prompts and the answers that are due. Clients differ by X-Forwarded-For, as
    behind a proxy on this machine.
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
