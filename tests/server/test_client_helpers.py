"""The official packages' own helpers work with `specoffload serve` and the embedded pair.

They are the parsers of objects, the runner of tools and the accumulators of streams, which check
more of an answer than the plain calls do. The pair calls no tools by itself, so a grammar forces
the calls.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from program import Program
from pydantic import BaseModel

ASKED = "Light in the kitchen, please."
LIMIT = 400


class Switch(BaseModel):
    room: Literal["kitchen", "hall"]
    on: bool


# -- openai ------------------------------------------------------------------------------------


def test_responses_parse_gives_an_object_whole_and_streamed(pair: Program) -> None:
    asked: dict[str, Any] = {"model": "any", "input": ASKED, "max_output_tokens": LIMIT}
    with pair.client() as client:
        whole = client.responses.parse(**asked, text_format=Switch)
        with client.responses.stream(**asked, text_format=Switch) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    assert isinstance(whole.output_parsed, Switch)
    assert isinstance(final.output_parsed, Switch)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds


def test_responses_parse_gives_the_arguments_of_a_call_as_an_object(pair: Program) -> None:
    asked: dict[str, Any] = {
        "model": "any",
        "input": ASKED,
        "max_output_tokens": LIMIT,
        "tools": [openai.pydantic_function_tool(Switch)["function"] | {"type": "function"}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    with pair.client() as client:
        [call] = client.responses.parse(**asked).output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, dict | Switch)
    Switch.model_validate_json(call.arguments, strict=True)


def test_a_chats_stream_helper_adds_up_to_an_object(pair: Program) -> None:
    asked: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": ASKED}],
        "max_tokens": LIMIT,
    }
    with pair.client() as client:
        with client.chat.completions.stream(**asked, response_format=Switch) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        tools = [openai.pydantic_function_tool(Switch)]
        with client.chat.completions.stream(
            **asked, tools=tools, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            called = {event.type for event in stream}
            with_call = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Switch)
    assert "tool_calls.function.arguments.done" in called
    [call] = with_call.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Switch)


def test_pages_of_models_are_iterated(pair: Program) -> None:
    with pair.client() as client:
        assert [model.id for model in client.models.list()]


# -- anthropic ---------------------------------------------------------------------------------


def anthropics(pair: Program) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=pair.url, api_key="none", max_retries=0, timeout=60)


MESSAGE: dict[str, Any] = {
    "model": "any",
    "max_tokens": LIMIT,
    "messages": [{"role": "user", "content": ASKED}],
}


@pytest.mark.extra("anthropic")
@pytest.mark.parametrize("is_beta", [False, True])
def test_messages_parse_gives_an_object_whole_and_streamed(pair: Program, is_beta: bool) -> None:
    with anthropics(pair) as client:
        messages = client.beta.messages if is_beta else client.messages
        whole = messages.parse(**MESSAGE, output_format=Switch)
        with messages.stream(**MESSAGE, output_format=Switch) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert isinstance(whole.parsed_output, Switch)
    assert isinstance(final.parsed_output, Switch)
    Switch.model_validate_json(text, strict=True)


@pytest.mark.extra("anthropic")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_runner_of_tools_runs_them_and_sends_their_results(
    pair: Program, is_streamed: bool
) -> None:
    anthropic = pytest.importorskip("anthropic")
    rooms: list[tuple[str, bool]] = []

    @anthropic.beta_tool
    def set_light(room: Literal["kitchen", "hall"], on: bool) -> str:
        """Switch a light."""
        rooms.append((room, on))
        return f"the light in the {room} is {on}"

    with anthropics(pair) as client:
        runner = client.beta.messages.tool_runner(
            **MESSAGE,
            tools=[set_light],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_iterations=2,
            **({"stream": True} if is_streamed else {}),
        )
        turns = [turn.get_final_message() if is_streamed else turn for turn in runner]
    first, second = turns  # the second one answers the tool's result, perhaps with a cut call
    assert first.stop_reason == "tool_use"
    assert second.stop_reason in ("tool_use", "max_tokens")
    read = [its.usage.input_tokens + its.usage.cache_read_input_tokens for its in (first, second)]
    assert read[1] > read[0], "no server keeps the conversation, so it is sent whole"
    [call] = (block for block in first.content if block.type == "tool_use")
    assert rooms[0] == (call.input["room"], call.input["on"])


@pytest.mark.extra("anthropic")
def test_a_streams_events_have_its_snapshots(pair: Program) -> None:
    tool = {
        "name": "set_light",
        "input_schema": Switch.model_json_schema(),
    }
    with (
        anthropics(pair) as client,
        client.messages.stream(**MESSAGE, tools=[tool], tool_choice={"type": "any"}) as stream,
    ):
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert "input_json" in kinds
    block = next(block for block in final.content if block.type == "tool_use")
    Switch.model_validate_json(json.dumps(block.input), strict=True)
