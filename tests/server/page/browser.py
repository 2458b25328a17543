"""Helpers of the page's tests: a browser, a server with the embedded pair, and faked answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from program import serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
PHONE = {"width": 390, "height": 780}
DESKTOP = {"width": 1280, "height": 820}


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """A server with the embedded pair; its address, without a slash."""
    with serving("--device", "sim", "--min-batch", "3", *flags) as program:
        yield program.url


def chromium(*flags: str) -> Iterator[Any]:
    """A headless browser with these flags; the test is skipped where there is none."""
    from playwright import sync_api as api

    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", *flags]
        )
        yield browser
        browser.close()


@dataclass
class Seen:
    """The requests that a page sent, and its errors."""

    requests: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # bodies of chat completion requests
    errors: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> None:
        page.on("request", self._request)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)

    def _request(self, request: Any) -> None:
        self.requests.append(request.url)
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(json.loads(request.post_data))

    def _console(self, message: Any) -> None:
        # Browsers log each HTTP error. The page shows these to the user, so they are no failures.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)


@contextmanager
def shown(browser: Any, url: str, seen: Seen) -> Iterator[Any]:
    """The page at `url`, ready for use. Fails at the end if it had errors or asked other hosts."""
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(20_000)
    page = context.new_page()
    seen.watch(page)
    page.goto(url)
    page.locator("#welcome").wait_for()
    yield page
    context.close()
    assert seen.errors == []
    assert [asked for asked in seen.requests if not asked.startswith(url)] == []


def stream(*deltas: dict[str, Any], finish: str = "stop") -> str:
    """A stream of server-sent events with these deltas, ended by `finish`."""
    ends: list[str | None] = [None] * len(deltas) + [finish]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answer_with(page: Any, body: str, status: int = 200) -> None:
    """Answer the page's next chat requests with `body` instead of asking the server."""
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, content_type="text/event-stream", body=body),
    )


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_answer(page: Any, n: int = 1) -> Any:
    """Wait until the model's `n`th message (from 1) is complete, and return its element."""
    message = page.locator("article.assistant").nth(n - 1)
    message.locator("xpath=self::*[@aria-busy='false']").wait_for(timeout=60_000)
    return message


def stored(page: Any) -> int:
    """Number of conversations that the browser stores."""
    return int(
        page.evaluate(
            """() => new Promise((resolve) => {
              const opening = indexedDB.open("specoffload");
              opening.onsuccess = () => {
                const reading = opening.result.transaction("conversations");
                const counting = reading.objectStore("conversations").count();
                counting.onsuccess = () => resolve(counting.result);
              };
            })"""
        )
    )
