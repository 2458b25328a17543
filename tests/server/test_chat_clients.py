"""Third-party clients work with `specoffload serve` and the embedded pair.

The pair is too small to call tools by itself, so a grammar forces the calls.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionToolParam
from program import Program
from pydantic import BaseModel

TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch a light.",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"type": "string", "enum": ["kitchen", "hall"]},
                "on": {"type": "boolean"},
            },
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    },
}
NOW: ChatCompletionToolParam = {"type": "function", "function": {"name": "now"}}
ASK: list[Any] = [{"role": "user", "content": "Light in the kitchen, please."}]
REQUIRED: dict[str, Any] = {
    "model": "any",
    "messages": ASK,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 400,
}
NAMED: dict[str, Any] = {
    **REQUIRED,
    "tools": [NOW, TOOL],
    "tool_choice": {"type": "function", "function": {"name": "set_light"}},
}
# The bias makes a second call likelier than the end. Otherwise the pair would stop after one.
SEVERAL: dict[str, Any] = {
    **REQUIRED,
    "parallel_tool_calls": True,
    "max_tokens": 120,
    "logit_bias": {"]": -100, "]}": -100, "}]": -100},
}


class Switch(BaseModel):
    room: Literal["kitchen", "hall"]
    on: bool


def _check(name: str | None, arguments: str | None) -> None:
    assert name == "set_light"
    assert arguments is not None
    Switch.model_validate_json(arguments, strict=True)


def _joined(chunks: list[ChatCompletionChunk]) -> list[tuple[str, str]]:
    """The name and arguments of each call in a stream. Fails if an id comes twice."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            if piece.id:
                assert piece.index not in names
                assert piece.function.name is not None
                names[piece.index] = piece.function.name
            more = piece.function.arguments or ""
            arguments[piece.index] = arguments.get(piece.index, "") + more
    assert list(names) == list(range(len(names)))
    return [(names[i], arguments[i]) for i in names]


# -- OpenAI's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [REQUIRED, NAMED], ids=["required", "named"])
def test_a_forced_call_follows_the_tools_schema(pair: Program, asked: dict[str, Any]) -> None:
    with pair.client() as client:
        answer = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
    choice = answer.choices[0]
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    _check(call.function.name, call.function.arguments)
    [(name, arguments)] = _joined(chunks)
    _check(name, arguments)
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 2


def test_two_calls_in_one_answer_have_their_own_ids(pair: Program) -> None:
    with pair.client() as client:
        answer = client.chat.completions.create(**SEVERAL)
        chunks = list(client.chat.completions.create(**SEVERAL, stream=True))
    calls = answer.choices[0].message.tool_calls or []
    whole = [(call.function.name, call.function.arguments) for call in calls]
    assert len(whole) >= 2
    for call in whole[:2]:
        _check(*call)
    assert len({call.id for call in calls}) == len(calls)
    assert _joined(chunks) == whole


def test_parse_with_pydantic_gives_objects(pair: Program) -> None:
    with pair.client() as client:
        answer = client.chat.completions.parse(
            model="any", messages=ASK, response_format=Switch, max_tokens=400
        )
        called = client.chat.completions.parse(
            **{**REQUIRED, "tools": [openai.pydantic_function_tool(Switch)]}
        )
    assert isinstance(answer.choices[0].message.parsed, Switch)
    [call] = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Switch)


def test_logprobs_of_each_token_whole_and_streamed(pair: Program) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": ASK, "logprobs": True, "max_tokens": 6}
    with pair.client() as client:
        answer = client.chat.completions.create(**asked, top_logprobs=3)
        stream = list(client.chat.completions.create(**asked, stream=True))
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content
    for token in told.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy: the likeliest
        assert token.bytes is not None
    streamed = [
        token
        for chunk in stream
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or ()
    ]
    assert [token.token for token in streamed] == [token.token for token in told.content]


def test_a_response_calls_a_function_whole_and_streamed(pair: Program) -> None:
    asked: dict[str, Any] = {
        "model": "any",
        "input": "Light in the kitchen, please.",
        "tools": [{"type": "function", **TOOL["function"]}],
        "parallel_tool_calls": False,
        "max_output_tokens": 400,
    }
    for choice in ("required", {"type": "function", "name": "set_light"}):
        with pair.client() as client:
            response = client.responses.create(**asked, tool_choice=choice)
        [call] = response.output
        assert call.type == "function_call"
        _check(call.name, call.arguments)
    with (
        pair.client() as client,
        client.responses.stream(**asked, tool_choice="required") as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    [call] = final.output
    assert call.type == "function_call"
    _check(call.name, call.arguments)


# -- other clients -----------------------------------------------------------------------------


@pytest.mark.extra("anthropic")
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_light"}])
def test_anthropics_client_gets_tool_uses(pair: Program, choice: dict[str, Any]) -> None:
    import anthropic

    function = TOOL["function"]
    asked: dict[str, Any] = {
        "model": "any",
        "max_tokens": 400,
        "messages": ASK,
        "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    with anthropic.Anthropic(
        base_url=pair.url, api_key="none", max_retries=0, timeout=60
    ) as client:
        message = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    for found in (message, final):
        assert found.stop_reason == "tool_use"
        [block] = found.content
        assert block.type == "tool_use"
        _check(block.name, json.dumps(block.input))


@pytest.mark.extra("langchain_openai")
def test_langchain_binds_tools_and_reads_objects(pair: Program) -> None:
    import langchain_openai as langchain

    model = langchain.ChatOpenAI(
        base_url=pair.url + "/v1", api_key="none", model="any", max_retries=0, max_tokens=400
    )
    for choice in ("required", "set_light"):
        bound = model.bind_tools([NOW, TOOL], tool_choice=choice, parallel_tool_calls=False)
        message = bound.invoke("Light in the kitchen, please.")
        [call] = message.tool_calls
        assert call["name"] in ("set_light", "now")
    _check(call["name"], json.dumps(call["args"]))
    pieces = list(bound.stream("Light in the kitchen, please."))
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    [call] = total.tool_calls
    _check(call["name"], json.dumps(call["args"]))
    found = model.with_structured_output(Switch, method="json_schema").invoke("Light, please.")
    assert isinstance(found, Switch)


@pytest.mark.extra("litellm")
@pytest.mark.filterwarnings("ignore:Item 'summary':UserWarning")  # pydantic's, of its own types
def test_litellm_completes_with_tools_whole_and_streamed(
    pair: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download from GitHub
    import litellm

    for asked in (REQUIRED, NAMED):
        options = {
            **asked,
            "model": "openai/any",
            "api_base": pair.url + "/v1",
            "api_key": "none",
        }
        answer = litellm.completion(**options)
        [call] = answer.choices[0].message.tool_calls
        _check(call.function.name, call.function.arguments)
        chunks = list(litellm.completion(**options, stream=True))
        rebuilt = litellm.stream_chunk_builder(chunks)
        [call] = rebuilt.choices[0].message.tool_calls
        _check(call.function.name, call.function.arguments)
