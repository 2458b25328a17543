"""Requests of the Responses API become chat requests.

Its events fit the published schema and order, and its own client understands them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter, ValidationError
from running import StartServer, http
from told_answers import answers, ended, no_parser

from offload.errors import BadRequest
from specoffload.chat.conversation import CallPiece, Content, Delta, Reasoning, joined
from specoffload.server.api import streaming
from specoffload.server.api.response_input import ResponsesRequest, as_chat
from specoffload.server.api.responses import ResponsesWording
from specoffload.server.engine.messages import Problem

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def _told() -> ResponsesWording:
    return ResponsesWording(no_parser(), ResponsesRequest.model_validate({"input": "hi"}), "m")


def _chat(**fields: Any) -> dict[str, Any]:
    return as_chat(ResponsesRequest.model_validate({"input": "hi", **fields}))[0]


def _check_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check all rules of the published event order, and return the items of the stream.

    https://platform.openai.com/docs/api-reference/responses-streaming
    """
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete", "failed")
    for event in events[:2]:
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
    items: list[dict[str, Any]] = []
    texts: dict[int, str] = {}  # output index -> joined deltas of an open item
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        if kind == "in_progress":  # a sign of life
            continue
        at = event["output_index"]
        if kind == "output_item.added":
            assert at == len(items)  # each index once, without gaps
            assert not texts
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            texts[at] = ""
            continue
        assert [*texts] == [at]  # the item was added and is not done
        if kind == "output_item.done":
            whole = event["item"]
            key = next((key for key in ("arguments", "input") if key in whole), "")
            said = whole[key] if key else whole["content"][0]["text"]
            assert said == texts.pop(at)
            assert (whole["id"], whole["type"]) == (items[at]["id"], items[at]["type"])
            items[at] = whole
        else:
            assert event["item_id"] == items[at]["id"]
            texts[at] += event["delta"] if kind.endswith(".delta") else ""
    assert not texts
    last = events[-1]["response"]
    assert last["output"] == items
    assert last["id"] == events[0]["response"]["id"]
    assert last["status"] == kinds[-1]
    return items


@pytest.mark.parametrize("prompt", ["hi", "[parts][prefill]", "[crash]"])
def test_a_stream_keeps_the_order_of_events(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    """The cases are a plain answer, one with signs of life first, and one that breaks off."""
    monkeypatch.setattr(streaming, "_HEADER_PATIENCE_S", 0.1)
    monkeypatch.setattr(streaming, "_KEEP_ALIVE_S", 0.1)
    server = start_server()
    body = {"input": prompt, "stream": True}
    text = http.post(server.url + "/v1/responses", json=body).text
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    items = _check_order(events)
    assert items[0]["content"][0]["text"]
    n_signs = [event["type"] for event in events].count("response.in_progress")
    assert (n_signs > 3) == ("[prefill]" in prompt)


@settings(deadline=None)  # the first event takes pydantic a second
@given(answers)
def test_the_events_add_up_to_the_whole_response(deltas: list[Delta]) -> None:
    told = _told()
    events = [event for delta in deltas for event in told.add(delta)]
    events += told.finish(ended("stop"), 0)
    assert _check_order(events) == told.result["output"]
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


@given(st.text())
def test_reasoning_that_was_asked_for_comes_back_with_store_false(text: str) -> None:
    """AI SDK and Codex drop reasoning items without encrypted_content if nothing is stored."""
    fields = {"input": "hi", "include": ["reasoning.encrypted_content"], "store": False}
    told = ResponsesWording(no_parser(), ResponsesRequest.model_validate(fields), "m")
    events = told.add(Reasoning(text))
    events += told.add(Content("so")) + told.finish(ended("stop"), 0)
    (item, _) = told.result["output"]
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"][0] == item
    sent = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    again = _chat(input=[{"role": "user", "content": "?"}, sent, {"role": "user", "content": "!"}])
    thoughts = [m.get("reasoning_content") for m in again["messages"] if m["role"] == "assistant"]
    assert thoughts == [text] * bool(text)


@pytest.mark.parametrize("content", ["gAAAAABo", "specoffload:%", "specoffload:/w==", ""])
def test_reasoning_that_another_server_sealed_is_left_out(content: str) -> None:
    sent = {"type": "reasoning", "summary": [], "encrypted_content": content}
    assert _chat(input=[{"role": "user", "content": "?"}, sent])["messages"] == [
        {"role": "user", "content": "?"}
    ]


def test_an_answer_at_its_limit_is_incomplete() -> None:
    told = _told()
    told.add(Content("a"))
    events = told.finish(ended("length"), 0)
    assert events[-1]["type"] == "response.incomplete"
    whole = Response.model_validate(told.result)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"


@settings(deadline=None)  # the first event takes pydantic a second
@given(answers)
def test_an_answer_that_breaks_off_says_so(deltas: list[Delta]) -> None:
    told = _told()
    events = [event for delta in deltas for event in told.add(delta)]
    events += told.break_off(Problem("E", "it died", 500, "server_error"))
    _check_order(events)
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
        "reasoning": {"effort": "low", "summary": "auto"},
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "temperature": 0.5,
    }
    assert ignored == ["tools[1]"]
    others = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    assert as_chat(request.model_copy(update={"include": others}))[1] == ["include", "tools[1]"]


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


def _reasoning(text: str) -> dict[str, Any]:
    """A reasoning item. Without text it is one whose text is encrypted."""
    content = [{"type": "reasoning_text", "text": text}] if text else None
    return {"type": "reasoning", "summary": [], "content": content, "encrypted_content": "gAA"}


def test_reasoning_belongs_to_the_item_after_it_and_adds_no_turn_of_its_own() -> None:
    """llama.cpp #29159: an empty turn of the assistant was put before each answer."""
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": "so"}

    def turns(*items: dict[str, Any]) -> list[tuple[str, str, str | None, int]]:
        messages = _chat(input=list(items))["messages"]
        return [
            (m["role"], m["content"], m.get("reasoning_content"), len(m.get("tool_calls", ())))
            for m in messages
        ]

    user = ("user", "?", None, 0)
    assert turns(asked, _reasoning(""), said, asked) == [user, ("assistant", "so", None, 0), user]
    assert turns(asked, _reasoning(""), asked) == [user, user]
    assert turns(asked, _reasoning("a"), asked) == [user, ("assistant", "", "a", 0), user]
    assert turns(asked, _reasoning("a"), _reasoning("b"), call, output) == [
        user, ("assistant", "", "ab", 1), ("tool", "1", None, 0)
    ]  # fmt: skip
    assert turns(_reasoning("a"), said, _reasoning("b"), call) == [
        ("assistant", "so", "a", 0), ("assistant", "", "b", 1)
    ]  # fmt: skip


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "spawn", "parameters": {"type": "object"}},
        {"type": "function", "name": "look", "parameters": {"type": "object"}},
    ],
}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def test_custom_tools_and_namespaces_become_functions() -> None:
    request = {"input": "hi", "tools": [PATCH, {"type": "web_search"}, AGENTS, LOOK]}
    body, ignored = as_chat(ResponsesRequest.model_validate(request))
    functions = [tool["function"] for tool in body["tools"]]
    assert [f["name"] for f in functions] == ["apply_patch", "spawn", "agents__look", "look"]
    assert functions[0]["parameters"]["required"] == ["input"]
    assert 'lark grammar:\nstart: "*** Begin Patch"' in functions[0]["description"]
    assert ignored == ["tools[0].format", "tools[1]", "tools[2].description"]
    chosen = {"type": "custom", "name": "apply_patch"}
    body = _chat(tools=[PATCH], tool_choice=chosen)
    assert body["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}
    allowed = {"type": "allowed_tools", "tools": [chosen]}
    body = _chat(tools=[PATCH], tool_choice=allowed)
    assert body["tool_choice"]["allowed_tools"]["tools"][0]["type"] == "function"


def test_calls_of_custom_tools_and_namespaces_are_told_as_they_were_made() -> None:
    request = ResponsesRequest.model_validate({"input": "hi", "tools": [PATCH, AGENTS, LOOK]})
    told = ResponsesWording(no_parser(), request, "m")
    events = []
    calls = [("apply_patch", '{"input": "a\\n\\u00fc"}'), ("agents__look", "{}"), ("look", "{}")]
    for index, (name, arguments) in enumerate(calls):
        events += told.add(CallPiece(index, f"c{index}", name, ""))
        for letter in arguments:
            events += told.add(CallPiece(index, None, None, letter))
    events += told.finish(ended("stop"), 0)
    items = _check_order(events)
    patch, theirs, ours = Response.model_validate(told.result).output
    assert isinstance(patch, ResponseCustomToolCall)
    assert (patch.name, patch.input, patch.call_id) == ("apply_patch", "a\nü", "c0")
    assert isinstance(theirs, ResponseFunctionToolCall)
    assert isinstance(ours, ResponseFunctionToolCall)
    assert (theirs.name, theirs.namespace) == ("look", "agents")
    assert (ours.name, ours.namespace) == ("look", None)
    results = [{"type": "custom_tool_call_output", "call_id": "c0", "output": "done"}]
    again = _chat(input=[{"role": "user", "content": "?"}, *items, *results], tools=request.tools)
    made = again["messages"][1]["tool_calls"]
    assert [call["function"]["name"] for call in made] == [name for name, _ in calls]
    assert json.loads(made[0]["function"]["arguments"]) == {"input": "a\nü"}
    assert again["messages"][2] == {"role": "tool", "tool_call_id": "c0", "content": "done"}


def test_a_call_of_a_custom_tool_that_is_cut_is_told_as_far_as_it_came() -> None:
    request = ResponsesRequest.model_validate({"input": "hi", "tools": [PATCH]})
    told = ResponsesWording(no_parser(), request, "m")
    events = told.add(CallPiece(0, "c0", "apply_patch", '{"input": "a'))
    events += told.finish(ended("length"), 0)
    assert _check_order(events)[0]["input"] == '{"input": "a'


def test_records_of_tools_that_ran_elsewhere_are_left_out_and_named() -> None:
    items = [
        {"role": "user", "content": "?"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {}},
        {"role": "assistant", "content": "so"},
    ]
    body, ignored = as_chat(ResponsesRequest.model_validate({"input": items}))
    assert [m["role"] for m in body["messages"]] == ["user", "assistant"]
    assert ignored == ["input[1]"]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": 5},
        {"input": [{"role": "king", "content": "x"}]},
        {"input": [{"role": "user"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": [{"type": "function_call_output", "output": "f"}]},
        {"previous_response_id": "resp_1"},
        {"conversation": "c"},
        {"background": True},
        {"max_output_tokens": 0},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "custom"}]},
        {"tools": [{"type": "namespace", "tools": []}]},
        {"tools": [PATCH], "tool_choice": {"type": "mcp", "name": "x"}},
        {"input": [{"type": "custom_tool_call", "name": "f", "input": "x"}]},
        {"input": [{"type": "custom_tool_call_output", "output": "f"}]},
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((BadRequest, ValidationError)):
        _chat(**fields)
