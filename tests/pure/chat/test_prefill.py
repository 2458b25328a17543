"""A begun answer is rendered in the family's format, and the parser reads how it goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import ASK, NAMES, WEATHER, chat_format, source
from recorded import BY_NAME, SCHEMAS, parsed

from offload.errors import BadRequest
from specoffload.chat.conversation import Conversation, ReasoningOptions
from specoffload.chat.families import BUILT_IN, HARMONY_REASONING, family_of, reasoning_of
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.chat.parser import AnswerForm

THINKS = [n for n in NAMES if reasoning_of(source(n)) or family_of(source(n)).name == "gpt-oss"]
PLAIN = [n for n in NAMES if n not in THINKS]
ENABLED = (None, True, False)


def markers_of(name: str) -> tuple[str, str] | None:
    return HARMONY_REASONING[:2] if name.startswith("openai") else reasoning_of(source(name))


def begun(name: str, enabled: bool | None = None, **last: Any) -> ChatPrompt:
    """The prompt of an answer that begins with `last`. One template only works with tools."""
    tools = (WEATHER,) if "tool_use" in name else ()
    asked = Conversation(
        ({"role": "user", "content": "Hi"}, {"role": "assistant", **last}),
        tools,
        reasoning=ReasoningOptions(enabled=enabled),
        continues="auto",
    )
    return chat_format(name).prepare(asked)


def turn(name: str, prompt: ChatPrompt) -> str:
    """The begun turn: what follows the user's message."""
    return prompt.text[prompt.text.rindex("Hi") + 2 :]


@pytest.mark.parametrize("enabled", ENABLED)
@pytest.mark.parametrize("name", NAMES)
def test_begun_content_follows_the_header_of_an_answer(name: str, enabled: bool | None) -> None:
    """llama.cpp #23012, #22162: no header, and two blocks of reasoning."""
    prompt = begun(name, enabled, content="The answer is")
    text = turn(name, prompt)
    assert text.endswith("The answer is")
    assert len(text.removesuffix("The answer is")) > 4
    assert not prompt.form.thinking
    assert prompt.form.in_answer
    if (found := markers_of(name)) is not None:
        opens, closes = found
        assert text.count(opens) <= 1
        assert text.rfind(opens) <= text.rfind(closes)


@pytest.mark.parametrize("enabled", ENABLED)
@pytest.mark.parametrize("name", THINKS)
def test_begun_reasoning_is_open_and_reasoning_before_content_is_closed(
    name: str, enabled: bool | None
) -> None:
    found = markers_of(name)
    assert found is not None
    opens, closes = found
    prompt = begun(name, enabled, content=None, reasoning_content="Okay, so")
    text = turn(name, prompt)
    assert text.endswith("Okay, so")
    assert text.count(opens) == 1
    assert closes not in text[text.index(opens) :]
    assert prompt.form.thinking
    assert not prompt.form.in_answer
    prompt = begun(name, enabled, content="Yes", reasoning_content="Done.")
    text = turn(name, prompt)
    assert text.endswith("Yes")
    assert text.count(opens) == 1
    assert text.index(opens) < text.index("Done.") < text.rindex(closes) < text.rindex("Yes")
    assert not prompt.form.thinking


@pytest.mark.parametrize("name", THINKS)
def test_reasoning_in_the_content_is_not_written_a_second_time(name: str) -> None:
    """llama.cpp #21889: clients end the reasoning themselves."""
    found = markers_of(name)
    assert found is not None
    opens, closes = found
    whole = begun(name, content="Yes", reasoning_content="Done.").text
    assert begun(name, content=f"{opens}Done.{closes}Yes").text == whole
    assert begun(name, content=f"{opens}\nDone.\n{closes}\n\nYes").text == whole
    half = begun(name, content=None, reasoning_content="Okay, so").text
    assert begun(name, content=f"{opens}Okay, so").text == half
    closed = begun(name, content=f"{opens}{closes}")
    assert closed.form.in_answer
    assert turn(name, closed).count(opens) <= 1


@pytest.mark.parametrize("name", PLAIN)
def test_a_family_without_reasoning_continues_the_content_alone(name: str) -> None:
    both = begun(name, content="Yes", reasoning_content="Done.")
    assert both.text == begun(name, content="Yes").text
    asked = Conversation(
        (ASK, {"role": "assistant", "content": None, "reasoning_content": "x"}),
        (WEATHER,),
        continues="reasoning_content",
    )
    with pytest.raises(BadRequest, match="the chat template has no reasoning"):
        chat_format(name).prepare(asked)


@settings(deadline=None)  # the first use of a template compiles it
@given(
    st.sampled_from(NAMES),
    st.text(st.characters(codec="utf-8", exclude_characters="<>[]|/\0"), min_size=1, max_size=20),
)
def test_the_prompt_ends_with_the_begun_text_to_the_last_blank(name: str, text: str) -> None:
    found = begun(name, content=text)
    if not text.strip():
        return
    assert found.text.endswith(text.lstrip())


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_answer_begins_nothing(name: str) -> None:
    tools = (WEATHER,) if "tool_use" in name else ()
    asked = Conversation((ASK,), tools)
    empty = {"role": "assistant", "content": ""}
    with_empty = replace(asked, messages=(ASK, empty), continues="auto")
    form = chat_format(name)
    assert form.prepare(with_empty).text == form.prepare(asked).text


def test_calls_before_the_begun_answer_and_a_conversation_of_nothing_else() -> None:
    for name in NAMES:
        tools = (WEATHER,) if "tool_use" in name else ()
        asked = Conversation(({"role": "assistant", "content": "Yes"},), tools, continues="auto")
        assert chat_format(name).prepare(asked).text.endswith("Yes")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_templates_write_a_header_too(name: str) -> None:
    form = ChatFormat({"default": BUILT_IN[name]}, "<s>", "</s>", name, "<s>")
    messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"})
    asked = form.prepare(Conversation(messages[:1])).text
    prompt = form.prepare(Conversation(messages, continues="auto")).text
    assert prompt.endswith("Yes")
    header = asked[asked.rindex("Hi") + 2 :].strip()
    assert prompt[prompt.rindex("Hi") + 2 :].lstrip().startswith(header[: len(header) // 2])


HARMONY = AnswerForm(BY_NAME["gpt-oss"], SCHEMAS)


def test_gpt_oss_goes_on_in_the_channel_that_the_prompt_opened() -> None:
    rest = "me.<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    thought = parsed(replace(HARMONY, thinking=True), list(rest))
    assert (thought.reasoning, thought.content) == ("me.", "Hello")
    answer = parsed(replace(HARMONY, in_answer=True), list(" 42.<|return|>"))
    assert (answer.reasoning, answer.content) == ("", " 42.")


def test_a_brace_in_a_begun_answer_opens_no_call() -> None:
    text = '{"name": "now", "parameters": {}}'
    form = AnswerForm(BY_NAME["llama-3"], SCHEMAS, in_answer=True)
    message = parsed(form, list(text))
    assert (message.content, message.calls) == (text, [])
