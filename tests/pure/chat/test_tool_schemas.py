"""Tools whose schemas cannot be followed do not end requests that may do without a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from byte_grammars import follows, tokens
from published import ASK, WEATHER

from offload.errors import BadRequest
from offload.sampling.grammar import grammar_of
from specoffload.chat.arguments import types_of
from specoffload.chat.conversation import (
    Allowed,
    Conversation,
    Tool,
    ToolChoice,
    joined,
    of_whole_characters,
)
from specoffload.chat.families import FAMILIES, GENERIC, Family, written
from specoffload.chat.format import ChatFormat
from specoffload.chat.grammar import answer_grammar
from specoffload.chat.parser import AnswerForm, StreamParser
from specoffload.chat.tool_schemas import SchemaNote

NOW = Tool("now")
TEMPLATES = sorted((Path(__file__).parents[2] / "fixtures/templates").glob("*.jinja"))
ODD = {  # the odd part of a schema, and the place that is named
    "look-ahead": ({"type": "string", "pattern": "^(?!\\.)a$"}, "#/properties/x/pattern"),
    "any": ({"type": "any"}, "#/properties/x/type"),
    "int": ({"type": "int"}, "#/properties/x/type"),
    "null": (None, "#/properties/x"),
    "list of types": ({"type": ["string", "number", "any"]}, "#/properties/x/type"),
    "great number": ({"const": 2**60 + 1}, "#/properties/x/const"),
    "unsatisfiable": ({"type": "string", "minLength": 3, "maxLength": 1}, "#"),
}


def grammar_for(
    family: Family, tools: tuple[Tool, ...], choice: ToolChoice = "auto"
) -> tuple[str | None, list[SchemaNote]]:
    notes: list[SchemaNote] = []
    asked = Conversation((ASK,), tools, choice)
    return answer_grammar(asked, family, note=notes.append), notes


def passes(gbnf: str | None, text: str) -> bool:
    assert gbnf is not None
    return follows(grammar_of(tokens, gbnf, None), text)


def with_odd(part: object, *, strict: bool = False) -> Tool:
    properties = {"x": part, "y": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["x"]}
    return Tool("odd", None, parameters, strict=strict)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_followed_is_left_out_of_optional_calls(family: Family, name: str) -> None:
    part, place = ODD[name]
    tool = with_odd(part)
    gbnf, notes = grammar_for(family, (tool, NOW), Allowed(("odd", "now")))
    assert [note.place for note in notes] == [place]
    assert str(notes[0]).startswith("tool 'odd': ")
    assert passes(gbnf, written(family.layout, [("odd", {"x": "abc", "y": 3})]))
    assert passes(gbnf, written(family.layout, [("now", {})]))
    if place != "#":  # the rest of the schema still counts
        assert not passes(gbnf, written(family.layout, [("odd", {"x": "abc", "y": "no"})]))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("name", ODD)
def test_a_strict_tool_that_cannot_be_followed_is_refused(family: Family, name: str) -> None:
    """It promises that calls follow the whole schema, and OpenAI's API refuses it too."""
    part, place = ODD[name]
    with pytest.raises(BadRequest, match=f"tool 'odd' is strict, and {place} of its parameters"):
        grammar_for(family, (with_odd(part, strict=True), NOW))
    loose, _ = grammar_for(family, (with_odd(part), Tool("now", strict=True)))
    assert passes(loose, written(family.layout, [("odd", {"x": "abc", "y": 3})]))


@pytest.mark.parametrize("name", ODD)
def test_a_forced_call_names_the_tool_and_the_keyword(name: str) -> None:
    part, place = ODD[name]
    tool = with_odd(part)
    words = "tool 'odd': its parameters cannot be followed" if place == "#" else f"'odd': {place}: "
    for choice in ("required", Allowed(("odd",), must_call=True)):
        with pytest.raises(BadRequest, match=words):
            grammar_for(GENERIC, (tool, NOW), choice)
    forced, _ = grammar_for(GENERIC, (tool, NOW), Allowed(("now",), must_call=True))
    assert passes(forced, written(GENERIC.layout, [("now", {})]))


def test_properties_that_are_null_are_none() -> None:
    tool = Tool("odd", None, {"type": "object", "properties": None})
    for family in FAMILIES:
        gbnf, notes = grammar_for(family, (tool,), Allowed(("odd",)))
        assert [note.place for note in notes] == ["#/properties"]
        assert passes(gbnf, written(family.layout, [("odd", {})]))


def test_keywords_without_effect_are_noted() -> None:
    tool = with_odd({"type": "array", "uniqueItems": True})
    _, notes = grammar_for(GENERIC, (tool,), "required")
    assert [note.place for note in notes] == ["#/properties/x/uniqueItems"]
    free, notes = grammar_for(FAMILIES[1], (with_odd({"type": "any"}),))
    assert free is None
    assert notes == []  # no grammar reads the schema


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_only_allowed_tools_may_be_called(family: Family) -> None:
    gbnf, _ = grammar_for(family, (WEATHER, NOW), Allowed(("now",)))
    final = "<|channel|>final<|message|>" if family.layout.is_harmony else ""
    assert passes(gbnf, final + "It is fine.")
    assert passes(gbnf, written(family.layout, [("now", {})]))
    assert not passes(gbnf, written(family.layout, [("get_weather", {"city": "x"})]))
    forced, _ = grammar_for(family, (WEATHER, NOW), Allowed(("now",), must_call=True))
    assert not passes(forced, final + "It is fine.")
    with pytest.raises(BadRequest, match="no tool is called 'f'"):
        grammar_for(family, (NOW,), Allowed(("f",)))
    with pytest.raises(BadRequest, match="there are no tools"):
        grammar_for(family, (NOW,), Allowed((), must_call=True))


REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "from": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "to": {"$ref": "#/properties/from"},
        "via": {"type": "array", "items": {"$ref": "#/properties/to"}},
        "label": {"$ref": "#/$defs/a~1b"},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["from", "to"],
    "$defs": {
        "a/b": {"type": "string"},
        "tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}},
    },
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_references_to_any_place_hold_where_arguments_are_written_one_by_one(
    family: Family,
) -> None:
    tool = Tool("go", None, REFERRING)
    gbnf, notes = grammar_for(family, (tool,), "required")
    assert notes == []
    good = {"from": {"x": 1}, "to": {"x": 2}, "via": [{"x": 3}], "label": "h",
            "tree": {"next": {"next": {}}}}  # fmt: skip
    assert passes(gbnf, written(family.layout, [("go", good)]))
    for change in ({"to": {"x": "2"}}, {"via": [3]}, {"tree": {"next": 1}}, {"to": {}}):
        assert not passes(gbnf, written(family.layout, [("go", good | change)]))


def test_types_follow_references_to_any_place() -> None:
    properties = REFERRING["properties"]
    assert types_of(properties["label"], REFERRING) == {"string"}
    assert types_of(properties["to"], REFERRING) == {"object"}
    assert types_of({"$ref": "#/nowhere"}, REFERRING) == frozenset()
    loop = {"properties": {"a": {"$ref": "#/properties/a"}}}
    assert types_of(loop["properties"]["a"], loop) == frozenset()
    assert json.dumps(REFERRING)  # unchanged


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_takes_a_tool_with_a_name_alone(path: Path) -> None:
    """Clients leave out what OpenAI calls optional: the description, and properties."""
    form = ChatFormat.of(path.read_text(encoding="utf-8"), bos="<s>", eos="</s>")
    for parameters in ({}, {"type": "object"}, {"type": "object", "properties": None}):
        tools = (Tool("now", None, parameters), WEATHER)
        text = form.prepare(Conversation((ASK,), tools)).text
        if "get_weather" in text:
            assert "now" in text


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_half_a_character_in_arguments_becomes_the_replacement_character(path: Path) -> None:
    form = ChatFormat.of(path.read_text(encoding="utf-8"), bos="<s>", eos="</s>")
    arguments = '{"city": "a\\ud800b\\ude00"}'
    call = {"id": "call00000", "type": "function",
            "function": {"name": "get_weather", "arguments": arguments}}  # fmt: skip
    messages = (
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "fine", "tool_call_id": "call00000"},
    )
    text = form.prepare(Conversation(messages, (WEATHER,))).text
    assert text.encode()
    assert "a\ufffdb\ufffd" in text or "a\\ud800b\\ude00" in text  # JSON text stays as it is


def test_half_a_character_in_an_answer_becomes_the_replacement_character() -> None:
    parser = StreamParser(AnswerForm(GENERIC, {"f": {}}), lambda: "c1")
    deltas = parser.feed('{"tool_calls": [{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}]}')
    message = joined([*deltas, *parser.finish()])
    assert json.loads(message.calls[0].arguments) == {"a": "\ufffd"}
    assert of_whole_characters({"\ud800": ["a\udfff", 1]}) == {"\ufffd": ["a\ufffd", 1]}


def many_tools(n: int) -> tuple[Tool, ...]:
    """Tools of 2 kB, whose schemas share nothing."""
    return tuple(
        Tool(
            f"tool_{i}",
            None,
            {
                "type": "object",
                "properties": {
                    f"p{k}": {"enum": [f"v{i}_{j}" for j in range(12)], "description": "e" * 100}
                    for k in range(8)
                },
                "required": ["p0"],
            },
        )
        for i in range(n)
    )


@pytest.mark.parametrize("name", ["generic", "gpt-oss", "qwen3-coder", "hermes"])
def test_the_size_of_many_tools_is_no_limit(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    gbnf, notes = grammar_for(family, many_tools(200), "required")
    assert not notes
    assert passes(gbnf, written(family.layout, [("tool_199", {"p0": "v199_3"})]))
    assert not passes(gbnf, written(family.layout, [("tool_199", {"p0": "v198_3"})]))
