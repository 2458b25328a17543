"""Requests of the Responses API as chat requests; its events by the published schema and order, and
by its own client's reckoning."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError
from running import StartServer, http
from told_answers import STATS, answers, ended, no_parser

from offload.errors import BadRequest
from specoffload.chat.conversation import Content, Delta, joined
from specoffload.chat.families import FAMILIES
from specoffload.chat.parser import AnswerForm, StreamParser
from specoffload.server.api import streaming
from specoffload.server.api.responses import (
    ResponsesRequest,
    ResponsesWording,
    as_chat,
)
from specoffload.server.api.streaming import GenerationResponse, TicketGroup
from specoffload.server.engine.client import EngineClient
from specoffload.server.engine.messages import ChatJob, Finished, JobEvent, Problem, Started
from specoffload.server.sockets import WRITE_PART
from specoffload.session.generation import GenerateOptions, Piece

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def _told() -> ResponsesWording:
    return ResponsesWording(no_parser(), ResponsesRequest.model_validate({"input": "hi"}), "m")


def _chat(**fields: Any) -> dict[str, Any]:
    return as_chat(ResponsesRequest.model_validate({"input": "hi", **fields}))[0]


def _check_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a stream adds up to, all rules of the published event order checked.

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
    texts: dict[int, str] = {}  # deltas of the items that are open, joined
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        at = event["output_index"]
        if kind == "output_item.added":
            assert at == len(items)  # each index once, without gaps
            assert not texts
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            texts[at] = ""
            continue
        assert [*texts] == [at]  # all else comes between added and done
        if kind == "output_item.done":
            whole = event["item"]
            said = whole["arguments"] if "arguments" in whole else whole["content"][0]["text"]
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
    """Also if keep-alive comments come first, and if the answer breaks off."""
    monkeypatch.setattr(streaming, "_HEADER_PATIENCE_S", 0.1)
    monkeypatch.setattr(streaming, "_KEEP_ALIVE_S", 0.1)
    server = start_server()
    body = {"input": prompt, "stream": True}
    text = http.post(server.url + "/v1/responses", json=body).text
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    items = _check_order([json.loads(line.removeprefix("data: ")) for line in lines])
    assert items[0]["content"][0]["text"]
    assert (": the model is working" in text) == ("[prefill]" in prompt)


HERMES = next(family for family in FAMILIES if family.name == "hermes")
_FORM = AnswerForm(HERMES, {"f": {}}, ("<think>", "</think>"))
_CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
_THOUGHT = st.sampled_from(["", "<think>", "<think>hm</think>"])
_SAID = st.lists(st.sampled_from(["so", "it is. ", _CALL]), max_size=4).map("".join)


async def _streamed(
    steps: list[tuple[JobEvent, int]], n_early: int, writes: list[bool]
) -> list[dict[str, Any]]:
    """The events that a client gets.

    `steps` are the engine's events, each with the number of turns of the event loop before it. The
    first `n_early` come before the response begins. `writes` says, in turn, if the socket takes
    bytes at once.
    """
    heard: list[Any] = []
    data = bytearray()

    def submit(job: object, hear: object, client: str) -> SimpleNamespace:
        heard.append(hear)
        return SimpleNamespace(cancel=lambda: None)

    def write_part(part: bytes) -> bool:
        if writes and not writes.pop():
            return False
        data.extend(part)
        return True

    async def send(message: Any) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        data.extend(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    metrics = SimpleNamespace(add_delay=lambda seconds: None)
    engine = SimpleNamespace(n_parallel=1, metrics=metrics, submit=submit)
    group = TicketGroup(cast(EngineClient, engine), [ChatJob("", GenerateOptions())], "")
    wording = ResponsesWording(
        StreamParser(_FORM), ResponsesRequest.model_validate({"input": "hi"}), "m"
    )
    response = GenerationResponse(group, wording, stream=True)
    extensions = {WRITE_PART: write_part}
    scope = {"type": "http", "path": "/", "http_version": "1.1", "extensions": extensions}
    for event, _ in steps[:n_early]:
        heard[0](event, 0.0)
    answering = asyncio.ensure_future(response(scope, receive, send))
    for event, n_turns in steps[n_early:]:
        for _ in range(n_turns):
            await asyncio.sleep(0)
        heard[0](event, 0.0)
    await answering
    lines = [line for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@settings(deadline=None)
@given(st.data())
def test_no_schedule_changes_the_order_of_the_events(data: st.DataObject) -> None:
    """Wherever the text is cut into pieces, whenever these come, and however the client reads."""
    text = data.draw(_THOUGHT) + data.draw(_SAID)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6))), len(text)]
    parts = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if a < b]
    ends = data.draw(st.sampled_from(["stop", "length", None]))
    last: list[JobEvent] = [Problem("E", "it died", 500, "server_error")]
    if ends is not None:
        last = [Piece("", (), ends, STATS), Finished()]
    of_prompt = [Piece("")] * data.draw(st.integers(0, 2))
    events = [Started(6), *of_prompt, *(Piece(part, (1,)) for part in parts), *last]
    n_turns = data.draw(st.lists(st.integers(0, 4), min_size=len(events), max_size=len(events)))
    n_early = data.draw(st.integers(0, len(events)))
    writes = data.draw(st.lists(st.booleans(), max_size=5))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_HEADER_PATIENCE_S", "_KEEP_ALIVE_S"):  # 0: comments whenever nothing else
            patch.setattr(streaming, name, data.draw(st.sampled_from([0.0, 10.0])))
        steps = list(zip(events, n_turns, strict=True))
        found = asyncio.run(_streamed(steps, n_early, writes))
    if ends is None and not found:
        return  # an HTTP error, because nothing was written before it
    items = _check_order(found)
    if ends is None:
        return
    whole = StreamParser(_FORM)
    said = joined([*whole.feed(text), *whole.finish()])
    calls = [item["arguments"] for item in items if "arguments" in item]
    assert calls == [call.arguments for call in said.calls]
    messages = [item["content"] for item in items if item["type"] == "message"]
    assert "".join(part["text"] for content in messages for part in content) == said.content


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
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "temperature": 0.5,
    }
    assert ignored == ["include", "tools[1]"]


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
