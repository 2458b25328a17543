"""The page in a browser behind real proxies: a default nginx, and the blocks of docs/server.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Seen, chromium, send, wait_for_answer
from fake_generator import FakeFactory
from proxies import DEFAULT_NGINX, NAME, documented, proxied
from running import Running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for which the public name is this machine."""
    yield from chromium(f"--host-resolver-rules=MAP {NAME} 127.0.0.1")


@pytest.fixture(scope="module")
def fake(browser: Any) -> Iterator[Running]:
    running = Running(FakeFactory())
    running.wait_until_healthy()
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("language", "block", "host", "works"),
    [
        ("nginx", DEFAULT_NGINX, "127.0.0.1", True),
        ("nginx", DEFAULT_NGINX, NAME, False),  # no header names the page that asks
        ("nginx", None, NAME, True),
        ("nginx", None, "127.0.0.1", True),
        ("caddy", None, NAME, True),
    ],
)
def test_the_page_works_or_says_what_is_missing(
    browser: Any, fake: Running, seen: Seen, tmp_path: Path,
    language: str, block: str | None, host: str, works: bool,
) -> None:  # fmt: skip
    with (
        proxied(language, block or documented(language), fake.url, tmp_path) as port,
        browser.new_context() as context,
    ):
        context.set_default_timeout(30_000)
        page = context.new_page()
        seen.watch(page)
        page.goto(f"http://{host}:{port}/llm/")
        page.locator("#welcome .idea").first.wait_for()
        assert page.locator("#no-scripts").count() == 0
        send(page, "hello")
        answer = wait_for_answer(page)
        if works:
            assert "hello" in answer.locator(".prose").inner_text()
        else:
            assert "X-Forwarded-Host" in answer.locator(".error").inner_text()
        assert seen.errors == []


def test_a_page_without_its_scripts_is_not_blank(browser: Any, fake: Running) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.route("**/page/*.js", lambda route: route.fulfill(status=403))
        page.goto(fake.url)
        sentence = page.locator("#no-scripts")
        sentence.wait_for()
        assert "could not load the page's scripts" in sentence.inner_text()
