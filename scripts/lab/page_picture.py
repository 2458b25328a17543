"""Makes docs/page.png: headless Chromium's picture of the page with a demonstration text.

    scripts/lab/run page-picture [FILE]

No model that is small enough to come with the program answers questions. So the text and its
numbers are made up, and docs/server.md says so. The page, and how it shows them, are real.

Needs playwright (the extra `clients`) and a chromium.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import ROOT

sys.path[:0] = [str(ROOT / "tests" / "server"), str(ROOT / "tests" / "server" / "page")]

from browser import answer_with, chromium, send, served, wait_for_answer  # noqa: E402

SIZE = {"width": 1000, "height": 810}
QUESTION = "How much memory does a model with 30 billion weights need at 4.5 bits a weight?"
OTHERS = ("Explain virtual memory", "A haiku about RAM", "Why is the sky blue?")
ANSWER = r"""With $N$ weights of $b$ bits each, the weights take

$$M = \frac{N \, b}{8} = \frac{30 \times 10^9 \cdot 4.5}{8} \approx 16.9 \text{ GB}.$$

The cache of keys and values comes on top. It grows with the context:

| context | cache | together |
|--:|--:|--:|
| 8,192 tokens | 0.8 GB | 17.7 GB |
| 32,768 tokens | 3.2 GB | 20.1 GB |

In Python:

```python
def weights_gb(n_weights: float, bits: float) -> float:
    return n_weights * bits / 8 / 1e9
```
"""
_TOKENS_PER_S = 40.0
_BYTES_PER_S = 9e9
_DRAFT_LENGTH = 3
_PROMPT_TOKENS = 27


def demonstration(text: str = ANSWER) -> str:
    """Server-sent events of an answer with made-up timings: one word after the other."""
    n, drafted, accepted, at_s, n_bytes = 0, 0, 0, 0.0, 0.0
    lines = []
    timings: dict[str, Any] = {}
    for n_steps, word in enumerate(_words(text)):
        kept = (n_steps * 7 // 5) % (_DRAFT_LENGTH + 1)  # some drafts are kept, some are not
        n += 1 + kept
        drafted += _DRAFT_LENGTH
        accepted += kept
        step_s = (1 + kept) / (_TOKENS_PER_S * (1 + 0.15 * math.sin(n_steps / 4)))
        at_s += step_s
        n_bytes += step_s * _BYTES_PER_S * (1 + 0.1 * math.cos(n_steps / 6))
        timings = {
            "prompt_n": _PROMPT_TOKENS, "prompt_ms": 180.0, "cache_n": 0,
            "predicted_n": n, "predicted_ms": 1e3 * at_s, "predicted_per_second": n / at_s,
            "draft_n": drafted, "draft_n_accepted": accepted,
            "streamed_bytes": int(n_bytes),
        }  # fmt: skip
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        lines.append({"choices": [choice], "timings": timings})
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    lines.append({"choices": [end], "timings": timings})
    return "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"


def _words(text: str) -> Iterator[str]:
    return (found[0] for found in re.finditer(r"\S+\s*", text))


def prepare(page: Any, url: str) -> None:
    """Show the demonstration: a conversation, and the titles of others."""
    page.goto(url)
    page.evaluate("localStorage.setItem('specoffload.settings', '{\"shown\": \"markdown\"}')")
    page.reload()
    page.locator("#welcome").wait_for()
    answer_with(page, demonstration())
    for question in (*OTHERS, QUESTION):
        page.keyboard.press("Control+Shift+O")
        send(page, question)
        answer = wait_for_answer(page)
    answer.locator(".hljs-keyword").first.wait_for()
    answer.locator(".katex-display").wait_for()
    page.evaluate("document.fonts.ready")
    page.locator("#composer-text").blur()
    page.mouse.move(0, 0)
    page.wait_for_timeout(400)  # duration of the page's transitions


def main() -> None:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "page.png")
    with served("--ctx-size", "8192", "--alias", "demonstration") as url:
        for browser in chromium():
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            prepare(page, url)
            page.locator("#scroller").evaluate("(e) => (e.scrollTop = 0)")
            page.screenshot(path=file)


if __name__ == "__main__":
    main()
