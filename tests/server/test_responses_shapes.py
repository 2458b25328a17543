"""Requests of the Responses API as chat requests, and its events, by its own client's reckoning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError
from told_answers import STATS, answers

from offload.errors import BadRequest
from specoffload.chat.deltas import Content, Delta, joined
from specoffload.server.engine.messages import Problem
from specoffload.server.responses.answer import ResponseStory
from specoffload.server.responses.request import ResponsesRequest, as_chat

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def _told(**fields: Any) -> ResponseStory:
    request = ResponsesRequest.model_validate({"input": "hi", **fields})
    return ResponseStory(request, "m", 5)


def _chat(**fields: Any) -> dict[str, Any]:
    return as_chat(ResponsesRequest.model_validate({"input": "hi", **fields}))[0]


@given(answers)
def test_the_events_add_up_to_the_whole_response(deltas: list[Delta]) -> None:
    told = _told()
    events = told.begin(6)
    for delta in deltas:
        events += told.add(delta)
    events += told.end("stop", STATS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        heard = state.handle_event(EVENT.validate_python(event))
    whole = Response.model_validate(told.result)
    assert heard[-1].type == "response.completed"
    assert heard[-1].response.output_text == whole.output_text == joined(deltas).content
    said = joined(deltas)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(c.call_id, c.name, c.arguments) for c in calls] == [
        (c.id, c.name, c.arguments) for c in said.calls
    ]
    thought = [item for item in whole.output if item.type == "reasoning"]
    assert "".join(c.text for item in thought for c in item.content or ()) == said.reasoning
    assert all(item.status == "completed" for item in whole.output)
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.total_tokens) == (10, 17)


@given(answers)
def test_what_the_deltas_say_is_said_again_when_an_item_is_done(deltas: list[Delta]) -> None:
    told = _told()
    events = [*told.begin(6), *(e for delta in deltas for e in told.add(delta))]
    events += told.end("stop", STATS)
    heard: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            heard[event["item_id"]] = heard.get(event["item_id"], "") + event["delta"]
        elif event["type"].endswith(("text.done", "arguments.done")):
            said = event.get("text", event.get("arguments"))
            assert heard.get(event["item_id"], "") == said
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == told.result["output"]


def test_an_answer_at_its_limit_is_incomplete() -> None:
    told = _told()
    told.add(Content("a"))
    events = told.end("length", STATS)
    assert events[-1]["type"] == "response.incomplete"
    whole = Response.model_validate(told.result)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"


def test_an_answer_that_breaks_off_says_so() -> None:
    told = _told()
    events = told.fail(Problem("E", "it died", 500, "server_error"))
    assert events[-1]["type"] == "response.failed"
    assert Response.model_validate(events[-1]["response"]).error is not None


def test_fields_are_those_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    tools = [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "web_search"},
    ]
    request = ResponsesRequest.model_validate(
        {
            "input": "hi",
            "instructions": "be brief",
            "max_output_tokens": 9,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": form, "verbosity": "low"},
            "tools": tools,
            "tool_choice": {"type": "function", "name": "f"},
            "temperature": 0.5,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
    )
    body, ignored = as_chat(request)
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert body == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ],
        "max_tokens": 9,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "temperature": 0.5,
    }
    assert ignored == ("include", "tools[1]")


def test_the_items_of_one_turn_become_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {"role": "assistant", "content": "both"},
        {"role": "assistant", "content": "more"},
    ]  # fmt: skip
    messages = _chat(input=items)["messages"]
    assert [m["role"] for m in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        *["assistant"] * 2,
    ]
    assert messages[1]["reasoning_content"] == "hm"
    assert messages[1]["content"] == "so"
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert [m["content"] for m in messages[4:]] == ["both", "more"]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": 5},
        {"input": [{"role": "king", "content": "x"}]},
        {"input": [{"role": "user"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": [{"type": "function_call_output", "output": "f"}]},
        {"previous_response_id": "resp_1"},
        {"conversation": "c"},
        {"background": True},
        {"max_output_tokens": 0},
        {"tools": [{"type": "function"}]},
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((BadRequest, ValidationError)):
        _chat(**fields)
