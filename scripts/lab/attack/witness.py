"""A client with honest requests, which asks all the time: is it served as if it were alone?"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from lab.attack.exchange import NoAnswer, ask_for, send
from lab.attack.overload import completion

# Of these, those are asked whose answer is decided: quantised kernels round by batch size, and the
# likeliest two tokens might swap where they are close (docs/server.md, Slots).
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
_LEAST_MARGIN = 1.3  # in log probability; rounding was seen to move logits by so much at most
_MOST_PROMPTS = 4
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
    """Prompts whose answers do not depend on rounding, and what one client alone is given.

    Raises NoAnswer, also where there is no such prompt.
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
    """By how much the likeliest token is ahead where it is least."""
    ahead = []
    for step in steps:
        best = sorted(step.values(), reverse=True)
        ahead.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return min(ahead, default=0.0)


async def witness_of(port: int, *, bears_deaths: bool = False) -> Witness:
    """One that knows what it is given when it is alone. Raises NoAnswer."""
    return Witness(port, await decided_texts(port), bears_deaths)
