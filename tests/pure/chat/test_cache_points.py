"""Places that clients mark with `cache_control` are found in the prompt of every template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import ASK, CONVERSATIONS, NAMES, SYSTEM, WEATHER, chat_format

from offload.errors import BadRequest
from specoffload.chat.cache_points import n_common
from specoffload.chat.conversation import CachePoint, ChatSettings, Conversation, Tool
from specoffload.server.api.body import checked
from specoffload.server.api.message_input import CountRequest, as_chat
from specoffload.server.api.parameters import conversation_of
from specoffload.server.api.requests import ConversationRequest

MARK = {"cache_control": {"type": "ephemeral"}}
FIRST, SECOND = "You are a careful reader of code.", "Rules: none."


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_with_another_end_has_the_same_text_up_to_the_point(name: str) -> None:
    text = f"{FIRST}\n{SECOND}"
    system = {"role": "system", "content": text}
    points = (CachePoint("message", 0, len(FIRST)), CachePoint("message", 0, len(text)))
    tools = (WEATHER,) if name.endswith("tool_use") else ()
    asked = [(system, {"role": "user", "content": text}) for text in ("How are you?", "Why?")]
    prompts = [
        chat_format(name).prepare(Conversation(messages, tools, cache_points=points))
        for messages in asked
    ]
    for prompt in prompts:
        first, second = prompt.cache_ends
        assert prompt.text[:first].endswith(FIRST)
        assert prompt.text[:second].endswith(text)
    ends = [prompt.text[: prompt.cache_ends[-1]] for prompt in prompts]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", NAMES)
def test_points_change_no_prompt(name: str) -> None:
    """A point behind each message and each tool, which may end in calls and results."""
    for conversation in CONVERSATIONS.values():
        if name.endswith("tool_use") and not conversation.tools:
            continue  # this template needs tools
        plain = chat_format(name).prepare(conversation)
        points = [CachePoint("message", at) for at in range(len(conversation.messages))]
        points += [CachePoint("tool", at) for at in range(len(conversation.tools))]
        for point in points:
            marked = replace(conversation, cache_points=(point,))
            prompt = chat_format(name).prepare(marked)
            assert prompt.text == plain.text
            assert replace(prompt, cache_ends=()) == plain
            assert all(0 < end <= len(plain.text) for end in prompt.cache_ends)


@pytest.mark.parametrize("name", ["Qwen3-Coder", "Qwen-Qwen3-0.6B", "Kimi-K2-Instruct"])
def test_the_tools_up_to_the_point_are_before_it(name: str) -> None:
    tools = tuple(Tool(f"tool_{i}", f"does {i}") for i in range(3))
    point = CachePoint("tool", 1)
    prompt = chat_format(name).prepare(Conversation((SYSTEM, ASK), tools, cache_points=(point,)))
    (end,) = prompt.cache_ends
    assert "does 1" in prompt.text[:end]
    assert "does 2" not in prompt.text[:end]


def test_the_last_message_and_a_begun_answer_may_have_points() -> None:
    begun = {"role": "assistant", "content": "It is fine"}
    for continues in (None, "auto"):
        found = Conversation(
            (ASK, begun), continues=continues, cache_points=(CachePoint("message", 1, 5),)
        )
        prompt = chat_format("Qwen3-Coder").prepare(found)
        (end,) = prompt.cache_ends
        assert prompt.text[:end].endswith("It is")


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_common_beginnings_are_the_longest(both: str, a: str, b: str) -> None:
    one, other = both + a, both + b
    n = n_common(one, other)
    assert n >= len(both)
    assert one[:n] == other[:n]
    assert n in (len(one), len(other)) or one[n] != other[n]


# ---- requests


def conversation(**fields: Any) -> Conversation:
    given = {"messages": [{"role": "user", "content": "hi"}], **fields}
    body = as_chat(CountRequest.model_validate(given))[0]
    return conversation_of(checked(body, ConversationRequest), ChatSettings())


def test_anthropics_marks_become_points_and_change_no_text() -> None:
    blocks = [{"type": "text", "text": FIRST, **MARK}, {"type": "text", "text": SECOND}]
    calls = [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {}, **MARK}]
    result = [{"type": "tool_result", "tool_use_id": "a", "content": "12 °C", **MARK}]
    tool = {"name": WEATHER.name, "input_schema": {"type": "object"}, **MARK}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": result},
    ]
    found = conversation(system=blocks, messages=messages, tools=[tool])
    assert found.messages[0]["content"] == f"{FIRST}\n{SECOND}"
    assert found.cache_points == (
        CachePoint("message", 0, len(FIRST)),
        CachePoint("message", 2),
        CachePoint("message", 3, len("12 °C")),
        CachePoint("tool", 0),
    )
    messages.append({"role": "user", "content": "And?"})
    with pytest.raises(BadRequest, match="5 parts have cache_control: at most 4"):
        conversation(system=blocks, messages=messages, tools=[tool], **MARK)


def test_a_mark_of_the_request_is_at_the_end_of_its_last_message() -> None:
    assert conversation(**MARK).cache_points == (CachePoint("message", 0, 2),)
    assert conversation().cache_points == ()
