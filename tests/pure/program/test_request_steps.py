"""Doubles what a request brings: the time at most doubles, or the request is refused by its steps.

The size of a request bounds its bytes, and not the steps that they cause. Each function that walks
a body has an input here for each way in which its steps could multiply.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from offload.errors import BadRequest
from offload.sampling.gbnf import lark_of_gbnf
from offload.sampling.json_schema import ignored_places
from offload.sampling.options import read_logit_bias
from specoffload.chat.conversation import ChatSettings, Conversation, Tool
from specoffload.chat.format import ChatFormat
from specoffload.server.api.body import checked
from specoffload.server.api.media_bytes import MediaBytes
from specoffload.server.api.parameters import conversation_of
from specoffload.server.api.requests import ConversationRequest
from specoffload.server.api.response_input import ResponsesRequest, as_chat
from specoffload.server.api.stored import StoredResponses
from specoffload.server.api.whole_input import whole_request
from specoffload.slots.stopping import StopScanner

_SLACK = 3.0  # of linear inputs, whose ratio is 2; a quadratic one's is 4
_LEAST_S = 0.004  # shorter times say nothing
_ROUNDS = 10

Work = Callable[[], object]


def _seconds(work: Work) -> float:
    """Return the least processor time of a few calls. A refused input is timed too."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        with contextlib.suppress(BadRequest):
            work()
        best = min(best, time.process_time() - began)
    return best


def _ratio(made: Callable[[int], Work], n: int) -> float:
    """Return by how much the time grows with the double of an input that takes long enough.

    Other work on the machine lengthens both times, one more than the other. So a ratio that is
    too large is measured again: the least times of all rounds only come nearer to the true ones.
    """
    while (once := _seconds(made(n))) < _LEAST_S and n < 1_000_000:
        n *= 2
    single, double = made(n), made(2 * n)
    twice = _seconds(double)
    for _ in range(_ROUNDS):
        if twice < _SLACK * max(once, _LEAST_S):
            break
        once, twice = min(once, _seconds(single)), min(twice, _seconds(double))
    return twice / max(once, _LEAST_S)


# ---- schemas


_ANCHORED = {"$anchor": "m", "type": "object", "properties": {"q": {"type": "string"}}}
_A_CONSTANT = {"const": 1}


def _refs_to_an_anchor(n: int) -> dict[str, Any]:
    properties = {f"p{i}": {"$ref": "#m"} for i in range(n)}
    return {"items": {"properties": properties}, "$defs": {"last": _ANCHORED}}


def _refs_to_many_anchors(n: int) -> dict[str, Any]:
    named = {f"d{i}": {"$anchor": f"m{i}", "type": "string"} for i in range(n)}
    return {"prefixItems": [{"$ref": f"#m{i}"} for i in range(n)], "$defs": named}


def _choices_by_anchor(n: int) -> dict[str, Any]:
    return {"oneOf": [{"$ref": "#m"}] * n, "$defs": {"last": _ANCHORED}}


def _a_chain_of_refs(n: int) -> dict[str, Any]:
    chain = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(100)}
    return {"prefixItems": [{"$ref": "#/$defs/c0"}] * n, "$defs": {**chain, "c100": _ANCHORED}}


def _refs_to_many_names(n: int) -> dict[str, Any]:
    names = {"type": "object", "properties": {f"q{i}": True for i in range(n)}}
    return {"items": {"anyOf": [{"$ref": "#/$defs/a"}] * n}, "$defs": {"a": names}}


def _dependent_names(n: int) -> dict[str, Any]:
    names = {"type": "object", "properties": {f"q{i}": True for i in range(n)}}
    depending = {f"d{i}": {"$ref": "#/$defs/a"} for i in range(n)}
    return {"dependentSchemas": depending, "properties": {"x": True}, "$defs": {"a": names}}


def _many_proofs(n: int) -> dict[str, Any]:
    one = {"oneOf": [{"const": j} for j in range(60)]}
    return {"prefixItems": [one] * (n // 10)}


def _proofs_by_names(n: int) -> dict[str, Any]:
    branches = [{"type": "object", "properties": {f"k{i}": True}, "required": [f"r{j}" for j in
                range(n)]} for i in range(20)]  # fmt: skip
    return {"oneOf": branches, "properties": {f"p{i}": True for i in range(n)}}


def _long_places(n: int) -> dict[str, Any]:
    inside = {"properties": {f"p{i}": {"uniqueItems": True} for i in range(n)}}
    return {"properties": {"x" * (20 * n): inside}}


def _all_of(n: int) -> dict[str, Any]:
    # Each part gets the names of all others, so this multiplies. About 400 parts are refused.
    parts = range(5 * n)
    return {"allOf": [{"properties": {f"k{i}": {"type": "string"}}} for i in parts]}


def _properties(n: int) -> dict[str, Any]:
    return {"properties": {f"p{i}": {"type": "string"} for i in range(n)}}


def _patterns(n: int) -> dict[str, Any]:
    return {"prefixItems": [{"type": "string", "pattern": "[a-c]" * 20}] * n}


def _nested_constants(n: int) -> dict[str, Any]:
    value: Any = 1.0
    for _ in range(60):
        value = {"a": value, "b": ["x"] * (n // 60)}
    return {"oneOf": [{"const": value}, {"const": 2}]}


SCHEMAS = (
    *(_refs_to_an_anchor, _refs_to_many_anchors, _choices_by_anchor, _a_chain_of_refs),
    *(_refs_to_many_names, _dependent_names, _many_proofs, _proofs_by_names, _long_places),
    *(_all_of, _properties, _patterns, _nested_constants),
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__[1:])
def test_a_schema_of_double_size_is_read_in_double_the_time(
    schema: Callable[[int], dict[str, Any]],
) -> None:
    def made(n: int) -> Work:
        text = json.dumps(schema(n))
        return lambda: ignored_places(text)

    assert _ratio(made, 100) < _SLACK


# ---- conversations


def _call(name: str = "x") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _result(name: str = "x") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": "r"}


_USER = {"role": "user", "content": "question"}


def _calls_with_one_id(n: int) -> list[dict[str, Any]]:
    calls = {"role": "assistant", "content": "", "tool_calls": [_call()] * n}
    return [_USER, calls, *[_result()] * n]


def _turns_with_one_id(n: int) -> list[dict[str, Any]]:
    return [_USER, *[{"role": "assistant", "content": "", "tool_calls": [_call()]}, _result()] * n]


def _calls_without_results(n: int) -> list[dict[str, Any]]:
    return [_USER, *[{"role": "assistant", "content": "", "tool_calls": [_call()]}] * n]


def _results_far_away(n: int) -> list[dict[str, Any]]:
    calls = [{"role": "assistant", "content": "", "tool_calls": [_call(f"c{i}")]} for i in range(n)]
    return [_USER, *calls, *[_result(f"c{i}") for i in reversed(range(n))]]


def _results_without_calls(n: int) -> list[dict[str, Any]]:
    return [_USER, *[_result()] * n]


def _users(n: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "question " * 9}] * n


def _systems(n: int) -> list[dict[str, Any]]:
    return [_USER, *[{"role": "system", "content": "rule " * 9}] * n]


def _answers(n: int) -> list[dict[str, Any]]:
    return [_USER, *[{"role": "assistant", "content": "a", "reasoning_content": "b " * 9}] * n]


CONVERSATIONS = (
    *(_calls_with_one_id, _turns_with_one_id, _calls_without_results, _results_far_away),
    *(_results_without_calls, _users, _systems, _answers),
)
# A strict template: system messages come first, and users' and answers by turns.
_STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('by turns') }}{% endif %}[{{ m.content }}]{% endfor %}"
)


@pytest.mark.parametrize("template", [None, _STRICT], ids=["chatml", "strict"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda made: made.__name__[1:])
def test_a_conversation_of_double_length_is_rendered_in_double_the_time(
    messages: Callable[[int], list[dict[str, Any]]], template: str | None
) -> None:
    form = ChatFormat.of(template)
    form.prepare(Conversation((_USER,)))  # a template's needs are found once

    def made(n: int) -> Work:
        conversation = Conversation(tuple(messages(n)))
        return lambda: form.prepare(conversation)

    assert _ratio(made, 100) < _SLACK


def test_double_the_tools_are_rendered_in_double_the_time() -> None:
    form = ChatFormat.of(None)
    names = itertools.count()

    def made(n: int) -> Work:
        schema = {"type": "object", "properties": {"a": {"type": "string"}}}

        def work() -> object:  # with other names each time, because read schemas are kept
            tools = tuple(Tool(f"tool_{next(names)}", "", schema) for _ in range(n))
            return form.prepare(Conversation((_USER,), tools, "required"))

        return work

    assert _ratio(made, 10) < _SLACK


# ---- grammars, biases and answers


def _token_of(words: str) -> int:
    return 1


GRAMMARS: dict[str, Callable[[int], str]] = {
    "rules": lambda n: "root ::= r0\n" + "".join(f'r{i} ::= "a"\n' for i in range(n)),
    "alternatives": lambda n: "root ::= " + " | ".join(['"a"'] * n),
    "classes": lambda n: "root ::= [" + "a-c" * n + "]",
    "comments": lambda n: 'root ::= "a"\n' + "# no\n" * n,
    "a long text": lambda n: f'root ::= "{"a" * n}"',
    "schemas": lambda n: "root ::= " + ' | '.join(['%json {"type": "string"}'] * n),
    "signs": lambda n: "root ::= " + '"a"? "b"* "c"+ ' * n,
}  # fmt: skip


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_a_grammar_of_double_length_is_read_in_double_the_time(
    grammar: Callable[[int], str],
) -> None:
    def made(n: int) -> Work:
        text = grammar(n)
        return lambda: lark_of_gbnf(text, _token_of)

    assert _ratio(made, 50) < _SLACK


def test_double_the_biases_are_read_in_double_the_time() -> None:
    def made(n: int) -> Work:
        given = {str(i): 1.0 for i in range(n)}
        return lambda: read_logit_bias(given)

    assert _ratio(made, 100) < _SLACK


# ---- bodies, stops and kept responses


def _parts(n: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": ["a", {"text": "b"}, None] * n}]}


def _reasoning_parts(n: int) -> dict[str, Any]:
    parts = [{"type": "reasoning.text", "text": "a"}] * n
    return {"messages": [_USER, {"role": "assistant", "content": "b", "reasoning_details": parts}]}


def _files_of_earlier_turns(n: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "file"}] * 3}, _USER] * n}


BODIES = (_parts, _reasoning_parts, _files_of_earlier_turns)


@pytest.mark.parametrize("body", BODIES, ids=lambda made: made.__name__[1:])
def test_a_body_of_double_size_is_checked_in_double_the_time(
    body: Callable[[int], dict[str, Any]],
) -> None:
    def made(n: int) -> Work:
        given = body(n)
        return lambda: conversation_of(checked(given, ConversationRequest), ChatSettings())

    assert _ratio(made, 50) < _SLACK


def test_double_the_items_are_read_in_double_the_time() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "a", "tool_calls": [call] * 3}

    def made(n: int) -> Work:
        given = {"input": [_USER, turn, _result("c")] * n}
        return lambda: as_chat(checked(given, ResponsesRequest))

    assert _ratio(made, 20) < _SLACK


def test_double_the_names_of_a_kept_response_are_resolved_in_double_the_time() -> None:
    def made(n: int) -> Work:
        stored, before = StoredResponses(), None
        for i in range(n):
            output = [{"type": "message", "id": f"m{i}", "role": "assistant", "content": "a"}]
            own = [b'{"role": "user", "content": "b"}']
            stored.keep("", {"id": f"r{i}", "output": output}, own, before)
            before = f"r{i}"
        named = [{"type": "item_reference", "id": f"m{i}"} for i in range(n)]
        given = {"input": named, "previous_response_id": before}
        request = checked(given, ResponsesRequest)
        return lambda: whole_request(stored, "", request, 2**30)

    assert _ratio(made, 20) < _SLACK


@pytest.mark.parametrize("unit", [b';base64,AAAA"', b'"url":"A', b";base64", b'"data"   : ', b"A"])
def test_media_of_double_size_are_found_in_double_the_time(unit: bytes) -> None:
    def made(n: int) -> Work:
        data = unit * n

        def work() -> None:
            media = MediaBytes()
            for at in range(0, len(data), 1000):
                media.add(data[at : at + 1000])

        return work

    assert _ratio(made, 1000) < _SLACK


@pytest.mark.parametrize("stop", ["a" * 200 + "b", "ab" * 100, "b"])
def test_a_text_of_double_length_is_searched_for_stops_in_double_the_time(stop: str) -> None:
    def made(n: int) -> Work:
        def work() -> None:
            scanner = StopScanner([stop, stop[1:] + "c"])
            for _ in range(n):
                scanner.feed("a")
            scanner.finish()

        return work

    assert _ratio(made, 500) < _SLACK
