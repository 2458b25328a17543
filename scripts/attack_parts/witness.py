"""A client with honest requests, which asks all the time: is it served as if it were alone?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from attack_parts.exchange import NoAnswer, send
from attack_parts.overload import completion

# After these the embedded pair's likeliest token is ahead by 1.3 and more in log probability, six
# times: quantised kernels round by batch size, and nearer ones might swap (docs/server.md, Slots).
PROMPTS = (
    'if __name__ == "__',
    "def __init__(self, name):\n        self.",
    "# -*- coding: utf-8 ",
)
N_TOKENS = 6
_PAUSE_S = 0.2


@dataclass
class Witness:
    """`lost` are answers that it did not get, or not as it must."""

    port: int
    texts: dict[str, str]
    bears_deaths: bool = False  # 500 and 503 of a killed engine are no loss
    n_answers: int = 0
    n_told_to_wait: int = 0
    longest_s: float = 0.0
    lost: list[str] = field(default_factory=list)

    async def watch(self, until: asyncio.Event) -> None:
        turn = 0
        while not until.is_set():
            await self._ask(PROMPTS[turn % len(PROMPTS)])
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


async def witness_of(port: int, *, bears_deaths: bool = False) -> Witness:
    """One that knows what it is given when it is alone. Raises NoAnswer."""
    texts = {}
    for prompt in PROMPTS:
        answer = await send(port, completion(prompt, N_TOKENS))
        if answer.status != 200:
            raise NoAnswer(f"{answer.status}: {answer.body[:200]!r}")
        texts[prompt] = str(answer.json()["choices"][0]["text"])
    return Witness(port, texts, bears_deaths)
