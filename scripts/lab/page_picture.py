"""Makes docs/page.png: headless Chromium's picture of the page with an embedded pair's answer.

    scripts/lab/run page-picture [FILE]

Needs playwright (the extra `clients`) and a chromium.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lab import ROOT

sys.path[:0] = [str(ROOT / "tests" / "server"), str(ROOT / "tests" / "server" / "page")]

from browser import chromium, send, served, wait_for_answer  # noqa: E402

SIZE = {"width": 1000, "height": 640}
PROMPT = "class Stack:\n    def __init__(self):"
SETTINGS = {"temperature": 0.5, "seed": 5, "repeat_penalty": 1.1, "max_tokens": 230}


def main() -> None:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "page.png")
    with served("--ctx-size", "2048") as url:
        for browser in chromium():
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            page.goto(url)
            kept = json.dumps(json.dumps(SETTINGS))
            page.evaluate(f"localStorage.setItem('specoffload.settings', {kept})")
            page.reload()
            page.locator("#welcome").wait_for()
            send(page, PROMPT)
            wait_for_answer(page).locator(".hljs-keyword").first.wait_for()
            page.locator("#composer-text").blur()
            page.mouse.move(0, 0)
            page.wait_for_timeout(300)  # duration of the page's transitions
            page.screenshot(path=file)


if __name__ == "__main__":
    main()
