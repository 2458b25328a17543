"""The page loses nothing when it is loaded again during an answer. Several tabs show the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import DESKTOP, Seen, send, wait_for_answer
from fake_generator import TAIL, FakeFactory
from running import Running, eventually, http

FOREVER = "[slow] [forever] hi"
LONG = "[slow] [say]" + " ".join(f"word{n}" for n in range(40)) + "[/say]"
LONG_ANSWER = LONG.removeprefix("[slow] [say]").removesuffix("[/say]")


@pytest.fixture(scope="module")
def fake(browser: Any) -> Iterator[Running]:
    """A server whose answers take as long as their questions say."""
    running = Running(FakeFactory(n_ctx=4096, n_parallel=4))
    running.wait_until_healthy()
    yield running
    running.stop()


@pytest.fixture
def context(browser: Any, fake: Running, seen: Seen) -> Iterator[Any]:
    """A browser's profile, whose tabs may have no errors."""
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(30_000)
    yield context
    context.close()
    assert seen.errors == []


def _tab(context: Any, fake: Running, seen: Seen) -> Any:
    page = context.new_page()
    seen.watch(page)
    page.goto(fake.url)
    page.locator("#model-name", has_text="fake").wait_for()
    return page


def _text(page: Any, n: int = 1) -> str:
    return str(page.locator("article.assistant").nth(n - 1).locator(".prose").inner_text())


def _grows(page: Any) -> None:
    """Wait until the answer is longer than it is now."""
    n_letters = len(_text(page))
    eventually(lambda: len(_text(page)) > n_letters, 60)


def _starts_with(page: Any, text: str) -> None:
    """Wait until the answer begins with what it was before."""
    eventually(lambda: _text(page).startswith(text), 60)


def _stop(page: Any, fake: Running) -> None:
    page.keyboard.press("Escape")
    assert "Stopped." in wait_for_answer(page).locator(".error").inner_text()
    eventually(lambda: fake.props()["requests_processing"] == 0, 60)


@pytest.mark.parametrize("n_reloads", [1, 3])
def test_a_page_that_is_loaded_again_goes_on_with_its_answer(
    context: Any, fake: Running, seen: Seen, n_reloads: int
) -> None:
    page = _tab(context, fake, seen)
    send(page, FOREVER)
    page.locator("article.assistant .prose", has_text="hi").wait_for()
    for _ in range(n_reloads):
        before = _text(page)
        page.reload()
        page.locator("article.assistant .prose", has_text="hi").wait_for()
        assert page.locator("article.user .bubble").inner_text() == FOREVER
        _grows(page)
        _starts_with(page, before)
    assert len(seen.bodies) == 1
    _stop(page, fake)


def test_a_question_stays_although_the_page_is_left_at_once(
    context: Any, fake: Running, seen: Seen
) -> None:
    page = _tab(context, fake, seen)
    send(page, LONG)
    page.reload()
    assert wait_for_answer(page).locator(".error").inner_text() == ""
    assert page.locator("article.user .bubble").inner_text() == LONG
    assert _text(page) == LONG_ANSWER


def test_a_closed_page_finds_its_whole_answer(context: Any, fake: Running, seen: Seen) -> None:
    page = _tab(context, fake, seen)
    send(page, LONG)
    page.locator("article.assistant .prose", has_text="word0").wait_for()
    page.close()
    again = _tab(context, fake, seen)
    wait_for_answer(again)
    assert _text(again) == LONG_ANSWER
    assert again.locator("article").count() == 2


def test_what_came_stays_if_the_server_has_no_more_of_it(
    context: Any, fake: Running, seen: Seen
) -> None:
    page = _tab(context, fake, seen)
    send(page, FOREVER)
    page.locator("article.assistant .prose", has_text="hi").wait_for()

    def lose(route: Any) -> None:
        http.delete(route.request.url)
        route.continue_()

    context.route("**/v1/streams/*", lose)
    page.reload()
    said = wait_for_answer(page).locator(".error").inner_text()
    assert "cut off" in said
    assert page.locator("article.user .bubble").inner_text() == FOREVER
    context.unroute_all()
    page.get_by_role("button", name="Ask again").click()
    _grows(page)
    _stop(page, fake)


_STORED = """() => new Promise((resolve) => {
  indexedDB.open("specoffload").onsuccess = ({ target }) => {
    const all = target.result.transaction("conversations").objectStore("conversations").getAll();
    all.onsuccess = () => {
      target.result.close();
      resolve(all.result.map((one) => Object.values(one.messages).map((m) => m.content)));
    };
  };
})"""


def test_two_tabs_show_one_conversation_and_lose_nothing(
    context: Any, fake: Running, seen: Seen
) -> None:
    first = _tab(context, fake, seen)
    send(first, "one")
    wait_for_answer(first)
    second = _tab(context, fake, seen)
    assert second.locator("article.user .bubble").inner_text() == "one"
    send(second, "two")
    wait_for_answer(second, 2)
    first.locator("article.user", has_text="two").wait_for()
    eventually(lambda: TAIL.strip()[:8] in _text(first, 2))

    for page, text in ((first, "left [slow]"), (second, "right [slow]")):  # at the same time
        send(page, text)
    wait_for_answer(first, 3)
    wait_for_answer(second, 3)

    def everything() -> set[str]:
        (texts,) = first.evaluate(_STORED)
        return {text for text in texts if TAIL.strip()[:8] not in text}

    eventually(lambda: everything() == {"one", "two", "left [slow]", "right [slow]"})


def test_tabs_hear_of_new_names_and_of_deletions(context: Any, fake: Running, seen: Seen) -> None:
    first = _tab(context, fake, seen)
    send(first, "one")
    wait_for_answer(first)
    second = _tab(context, fake, seen)
    second.locator(".conversations li").hover()
    second.get_by_role("button", name="Rename “one”").click()
    second.get_by_label("Name of the conversation").fill("new name")
    second.keyboard.press("Enter")
    first.locator(".conversation", has_text="new name").wait_for()
    first.locator(".conversations li").hover()
    first.get_by_role("button", name="Delete “new name”").click()
    first.get_by_text("Delete?").click()
    second.locator("#welcome").wait_for()
    assert second.locator(".conversation").count() == 0
