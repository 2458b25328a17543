"""Requests of the Responses API as chat requests; its events by the published schema and order, and
by its own client's reckoning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError
from told_answers import answers, ended, no_parser

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
from specoffload.server.engine.client import EngineClient, Ticket
from specoffload.server.engine.messages import (
    ChatJob,
    Finished,
    GeneratingJob,
    Job,
    JobEvent,
    Problem,
    Started,
)
from specoffload.server.metrics import Metrics
from specoffload.server.sockets import WRITE_PART
from specoffload.session.generation import GenerateOptions, Piece

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def _told(parser: StreamParser | None = None) -> ResponsesWording:
    request = ResponsesRequest.model_validate({"input": "hi"})
    return ResponsesWording(parser or no_parser(), request, "m")


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


HERMES = next(family for family in FAMILIES if family.name == "hermes")
ASKED: GeneratingJob = ChatJob("", GenerateOptions())


class _Engine:
    """The part of an EngineClient that a group needs; the test puts the events of its one job."""

    n_parallel = 1

    def __init__(self) -> None:
        self.metrics = Metrics()

    def submit(self, job: Job, hear: Callable[[JobEvent, float], None], client: str) -> Ticket:
        self.ticket = Ticket(0, job, client, hear, lambda ticket: None)
        return self.ticket


async def _streamed(
    parser: StreamParser, steps: list[tuple[JobEvent, int]], n_early: int, write: list[bool]
) -> list[dict[str, Any]]:
    """The events of a streamed response. `steps` are the engine's events and how often the loop
    turns after each; `n_early` of them come before the stream is asked for. `write` says whether
    writing at once works, in turn."""
    engine, data, writes = _Engine(), bytearray(), list(write)
    group = streaming.TicketGroup(cast(EngineClient, engine), [ASKED], "")
    for event, _ in steps[:n_early]:
        engine.ticket.put(event)

    def write_part(part: bytes) -> bool:
        if writes and not writes.pop():
            return False
        data.extend(part)
        return True

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        data.extend(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    response = streaming.GenerationResponse(group, _told(parser), stream=True)
    scope = {
        "type": "http",
        "path": "/v1/responses",
        "http_version": "1.1",
        "extensions": {WRITE_PART: write_part},
    }
    answering = asyncio.ensure_future(response(scope, receive, send))
    for event, n_turns in steps[n_early:]:
        for _ in range(n_turns):
            await asyncio.sleep(0)
        engine.ticket.put(event)
    await answering
    lines = [line for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


_CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
_SAID = st.lists(st.sampled_from(["so", "it is. ", _CALL]), max_size=4).map("".join)


@settings(deadline=None)
@given(st.data())
def test_no_schedule_changes_the_order_of_the_events(data: st.DataObject) -> None:
    """Wherever the answer's pieces are cut, whenever they come, whether or not the client was
    written to before: keep-alive comments come as soon as nothing else is there."""
    text = data.draw(st.sampled_from(["", "<think>", "<think>hm</think>"])) + data.draw(_SAID)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    ends = [*cuts, len(text)]
    cut = [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    parts = [Piece("")] * data.draw(st.integers(0, 2))  # of the prompt
    reason = data.draw(st.sampled_from(["stop", "length", None]))
    last: list[JobEvent] = [Problem("E", "it died", 500, "server_error")]
    if reason is not None:
        last = [ended(reason), Finished()]
    events = [Started(6), *parts, *(Piece(part, (1,)) for part in cut if part), *last]
    turns = data.draw(st.lists(st.integers(0, 4), min_size=len(events), max_size=len(events)))
    n_early = data.draw(st.integers(0, len(events)))
    write = data.draw(st.lists(st.booleans(), max_size=5))
    form = AnswerForm(HERMES, {"f": {}}, ("<think>", "</think>"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_HEADER_PATIENCE_S", data.draw(st.sampled_from([0.0, 10.0])))
        patch.setattr(streaming, "_KEEP_ALIVE_S", data.draw(st.sampled_from([0.0, 10.0])))
        steps = list(zip(events, turns, strict=True))
        found = asyncio.run(_streamed(StreamParser(form), steps, n_early, write))
    if reason is None and not found:
        return  # it failed before the stream had begun: an HTTP error
    items = _check_order(found)
    whole = StreamParser(form)
    if reason is not None:
        said = joined([*whole.feed(text), *whole.finish()])
        assert [item["arguments"] for item in items if "arguments" in item] == [
            call.arguments for call in said.calls
        ]
        assert (
            "".join(
                part["text"]
                for item in items
                if item["type"] == "message"
                for part in item["content"]
            )
            == said.content
        )


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


@settings(deadline=None)  # the first event takes pydantic a second
@given(answers)
def test_what_the_deltas_say_is_said_again_when_an_item_is_done(deltas: list[Delta]) -> None:
    told = _told()
    events = [event for delta in deltas for event in told.add(delta)]
    events += told.finish(ended("stop"), 0)
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
