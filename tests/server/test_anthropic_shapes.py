"""Anthropic's requests become chat requests, and its own client understands our events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter, ValidationError
from told_answers import answers, ended, no_parser

from offload.errors import BadRequest
from specoffload.chat.conversation import CallPiece, Content, Delta, joined
from specoffload.server.api.anthropic import AnthropicWording
from specoffload.server.api.body import checked
from specoffload.server.api.message_input import MessagesRequest, as_chat
from specoffload.server.api.parameters import wish_of
from specoffload.server.api.requests import ConversationRequest
from specoffload.server.engine.messages import Started

pytest.importorskip("anthropic", reason="anthropic is not installed: scripts/test-extras runs this")
from anthropic.lib.streaming._messages import accumulate_event  # noqa: E402
from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402

pytestmark = pytest.mark.extra("anthropic")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def _told() -> AnthropicWording:
    return AnthropicWording(no_parser(), "m")


def _chat(**fields: Any) -> dict[str, Any]:
    given = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return as_chat(MessagesRequest.model_validate(given))[0]


@settings(deadline=None)
@given(answers)
def test_the_events_add_up_to_the_whole_message(deltas: list[Delta]) -> None:
    told = _told()
    told.started(0, Started(6))
    events = [event for delta in deltas for event in told.add(delta)]
    events += told.finish(ended("stop"), 0)
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(
            event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
        )
    whole = Message.model_validate(told.result)
    assert snapshot.to_dict()["content"] == whole.to_dict()["content"]
    assert snapshot.stop_reason == whole.stop_reason
    assert snapshot.usage.output_tokens == whole.usage.output_tokens == 7
    said = joined(deltas)
    blocks = told.result["content"]
    assert "".join(b["text"] for b in blocks if b["type"] == "text") == said.content
    assert "".join(b["thinking"] for b in blocks if b["type"] == "thinking") == said.reasoning
    calls = [b for b in blocks if b["type"] == "tool_use"]
    assert [(c["id"], c["name"], c["input"]) for c in calls] == [
        (c.id, c.name, json.loads(c.arguments)) for c in said.calls
    ]
    assert whole.stop_reason == ("tool_use" if calls else "end_turn")


def test_the_reason_for_the_end_has_anthropics_name() -> None:
    assert _ended("length") == ("max_tokens", None)
    assert _ended("stop") == ("end_turn", None)
    assert _ended("stop", "END") == ("stop_sequence", "END")
    assert _ended("stop", "<|im_end|>") == ("end_turn", None), "the chat format's, not the client's"


def _ended(reason: Any, word: str | None = None) -> tuple[Any, Any]:
    told = AnthropicWording(no_parser(), "m", ["END"])
    told.add(Content("a"))
    told.finish(ended(reason, word), 0)
    return told.result["stop_reason"], told.result["stop_sequence"]


def test_a_call_cut_short_has_no_made_up_input() -> None:
    told = _told()
    told.add(CallPiece(0, "c", "t", '{"a": "b'))
    told.finish(ended("length"), 0)
    assert told.result["content"][0]["input"] == {}
    assert told.result["stop_reason"] == "max_tokens"


def test_system_stops_and_sampling_become_those_of_a_chat() -> None:
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = _chat(system=system, stop_sequences=["x"], temperature=1, top_k=5, min_p=0.1)
    assert body == {
        "max_tokens": 9,
        "stop": ["x"],
        "temperature": 1,
        "top_k": 5,
        "min_p": 0.1,
        "messages": [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi"}],
    }


def test_a_round_of_tools_becomes_calls_and_results() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "3"}],
    }
    think = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [think, {"type": "text", "text": "so"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert _chat(messages=messages)["messages"] == [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tools_and_their_choice(choice: dict[str, Any], expected: object) -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    body = _chat(tools=[tool], tool_choice={**choice, "disable_parallel_tool_use": True})
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == expected
    assert body["parallel_tool_calls"] is False


def test_thinking_has_a_budget() -> None:
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body, ignored = as_chat(MessagesRequest.model_validate({**asked, "thinking": thinking}))
    assert ignored == []
    wish = wish_of(checked(body, ConversationRequest))
    assert (wish.enabled, wish.budget_tokens) == (True, 1024)


def test_tools_that_run_elsewhere_are_named_as_ignored() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    request = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    body, ignored = as_chat(MessagesRequest.model_validate(request))
    assert ignored == ["tools[0]"]
    assert "tools" not in body


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}},
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((BadRequest, ValidationError)):
        _chat(**fields)
