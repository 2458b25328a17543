"""One browser and one server for the tests of the page; each test has a profile of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import Seen, chromium, served, shown


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test that uses a browser as needing Playwright."""
    if "browser" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.extra("playwright"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for one module.

    Playwright's event loop runs in this thread while the browser lives, so later tests could not
    start their own loops.
    """
    yield from chromium()


@pytest.fixture(scope="module")
def url(browser: Any) -> Iterator[str]:
    with served() as address:
        yield address


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Any, url: str, seen: Seen) -> Iterator[Any]:
    """The page of the module's server."""
    with shown(browser, url, seen) as page:
        yield page


@pytest.fixture(scope="module")
def drafting_url(browser: Any) -> Iterator[str]:
    """A slow server that drafts in every round, so that a browser can watch an answer grow.

    The default policy may find that drafts do not pay.
    """
    slow = ("--device", "sim:vram=4MiB,bw=100MB/s")
    with served("--spec-policy", "fixed", "--draft-max", "3", *slow) as address:
        yield address


@pytest.fixture
def drafting_page(browser: Any, drafting_url: str, seen: Seen) -> Iterator[Any]:
    """The page of a server that drafts in every round."""
    with shown(browser, drafting_url, seen) as page:
        yield page
