"""The page in a browser, with a server and the embedded pair behind it."""

from __future__ import annotations

from typing import Any

from browser import Seen, send, stored, wait_for_answer
from running import eventually, http

PROMPT = "def fibonacci(n):"


def limit(page: Any, n_tokens: int) -> None:
    """Short answers, through the settings as a person would make them."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer").fill(str(n_tokens))
    page.get_by_role("button", name="Save", exact=True).click()


def test_an_answer_streams_and_is_measured_and_stays_after_a_reload(page: Any, seen: Seen) -> None:
    limit(page, 40)
    send(page, PROMPT)
    answer = wait_for_answer(page)
    text = answer.locator(".prose").inner_text()
    assert text.strip()
    assert "tokens/s" in answer.locator(".plot.speed").inner_text()
    assert "40 tokens in" in answer.locator(".meter-summary").inner_text()
    assert seen.bodies[-1]["max_tokens"] == 40
    assert seen.bodies[-1]["messages"] == [{"role": "user", "content": PROMPT}]
    eventually(lambda: stored(page) == 1)
    page.reload()
    again = wait_for_answer(page)
    assert again.locator(".prose").inner_text() == text
    assert "tokens/s" in again.locator(".plot.speed").inner_text()


_WATCH = """() => {
  window.drawn = {};
  new MutationObserver(() => {
    for (const kind of ["speed", "acceptance"]) {
      const plot = document.querySelector(`article.assistant[aria-busy="true"] .plot.${kind}`);
      if (plot?.querySelector(".plot-line[d^='M']")) window.drawn[kind] ||= plot.innerText;
    }
  }).observe(document.body, { subtree: true, childList: true, attributes: true });
}"""


def test_while_an_answer_grows_its_speed_and_drafts_are_drawn(page: Any, seen: Seen) -> None:
    page.evaluate("localStorage.setItem('specoffload.settings', '{\"temperature\": 0}')")
    page.reload()
    page.evaluate(_WATCH)  # from within: an answer may have ended before it is asked from here
    send(page, PROMPT)
    eventually(lambda: page.evaluate("Boolean(window.drawn.speed && window.drawn.acceptance)"))
    assert "tokens/s" in page.evaluate("window.drawn.speed")
    assert seen.bodies[-1]["timings_per_token"] is True
    page.keyboard.press("Escape")
    wait_for_answer(page)


def test_the_page_shows_the_text_that_the_api_gives(page: Any, url: str) -> None:
    page.evaluate("localStorage.setItem('specoffload.settings', '{\"shown\": \"code\"}')")
    page.reload()
    limit(page, 24)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
    whole = http.post(url + "/v1/chat/completions", json=body).json()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Save", exact=True).click()
    send(page, PROMPT)
    shown = wait_for_answer(page).locator("pre").text_content()
    assert shown == whole["choices"][0]["message"]["content"] or shown == (
        whole["choices"][0]["message"]["content"].rstrip("\n")
    )


def test_escape_stops_an_answer_and_frees_the_server(page: Any, url: str) -> None:
    send(page, PROMPT)
    page.get_by_role("button", name="Stop").wait_for()
    page.locator("article.assistant .prose pre").wait_for()
    page.keyboard.press("Escape")
    answer = wait_for_answer(page)
    assert "Stopped." in answer.locator(".error").inner_text()
    eventually(lambda: http.get(url + "/props").json()["requests_processing"] == 0)
    assert page.get_by_role("button", name="Send").is_disabled()


def test_asking_again_and_editing_add_versions_and_lose_none(page: Any, seen: Seen) -> None:
    limit(page, 12)
    send(page, PROMPT)
    wait_for_answer(page).get_by_role("button", name="Ask again").click()
    second = wait_for_answer(page)
    assert second.locator(".versions").inner_text().split() == ["2", "/", "2"]
    second.get_by_role("button", name="Version before").click()
    assert page.locator("article.assistant .versions").inner_text().split() == ["1", "/", "2"]

    page.locator("#composer-text").focus()
    page.keyboard.press("ArrowUp")  # edits the last message
    field = page.get_by_label("Edit the message")
    assert field.input_value() == PROMPT
    field.fill("class Stack:")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    assert page.locator("article.user .bubble").inner_text() == "class Stack:"
    assert seen.bodies[-1]["messages"] == [{"role": "user", "content": "class Stack:"}]
    page.locator("article.user").get_by_role("button", name="Version before").click()
    assert page.locator("article.user .bubble").inner_text() == PROMPT


def test_the_conversation_and_the_system_prompt_go_to_the_server(page: Any, seen: Seen) -> None:
    limit(page, 8)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Write Python.")
    page.get_by_label("Min p").fill("0.1")
    page.get_by_label("More fields of the request").fill('{"stop": ["\\n\\n\\n"]}')
    page.get_by_role("button", name="Save", exact=True).click()
    send(page, PROMPT)
    first = wait_for_answer(page).locator(".prose").text_content()
    send(page, "class Stack:")
    wait_for_answer(page, 2)
    sent = seen.bodies[-1]
    assert sent["min_p"] == 0.1
    assert sent["stop"] == ["\n\n\n"]
    roles = [message["role"] for message in sent["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert sent["messages"][0]["content"] == "Write Python."
    assert first is not None
    assert sent["messages"][2]["content"].strip() in first


def test_conversations_are_listed_opened_and_deleted(page: Any) -> None:
    limit(page, 8)
    for text in ("import os", "import sys"):
        page.get_by_role("button", name="New chat").click()
        send(page, text)
        wait_for_answer(page)
    listed = page.locator(".conversation")
    assert listed.all_inner_texts() == ["import sys", "import os"]
    listed.nth(1).click()
    assert page.locator("article.user .bubble").inner_text() == "import os"
    page.locator(".conversations li").nth(0).hover()
    page.get_by_role("button", name="Delete “import sys”").click()
    page.get_by_text("Delete?").click()
    eventually(lambda: stored(page) == 1)
    assert page.locator(".conversation").all_inner_texts() == ["import os"]


def test_why_says_what_the_server_says_of_itself(page: Any, url: str) -> None:
    page.get_by_role("tab", name="Why").click()
    page.locator(".notes").wait_for()
    shown = page.locator("#why").inner_text()
    for note in http.get(url + "/props").json()["notes"]:
        assert note.split(": ", 1)[-1][:40] in shown
    assert "deepseek2" in shown
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("tab", name="Chat").get_attribute("aria-selected") == "true"


def test_what_the_server_refuses_is_said_in_its_words(page: Any) -> None:
    send(page, "x " * 2000)
    answer = wait_for_answer(page)
    assert "the context 512" in answer.locator(".error").inner_text()
    limit(page, 4)
    answer.get_by_role("button", name="Ask again").wait_for()
