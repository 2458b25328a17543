"""Calls whose arguments stand between tags follow their schemas, in every family."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from byte_grammars import fits, follows, tokens
from forced_play import play
from published import ASK, NAMES, chat_format, source

from offload.errors import BadRequest
from offload.sampling.grammar import grammar_of
from offload.sampling.schema_text import FORMATS
from specoffload.chat.conversation import Conversation, Tool, joined
from specoffload.chat.families import FAMILIES, Family, family_of, written
from specoffload.chat.grammar import answer_grammar
from specoffload.chat.parser import AnswerForm, StreamParser
from specoffload.chat.tool_schemas import SchemaNote
from specoffload.generation.generation import GenerateOptions

TAGGED = [family for family in FAMILIES if family.layout.before_key]
TEMPLATES = list({family_of(source(name)).name: name for name in NAMES}.values())
MODE = {"type": "string", "enum": ["write", "edit"]}
REF = {"$ref": "#/$defs/Mode"}
# The schema of an argument, with values that it allows and values that it does not.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "an enum": (MODE, ["write"], ["read", "writ", "write "]),
    "an enum behind a reference": (REF, ["edit"], ["read", ""]),
    "a reference in allOf, as pydantic writes it": (
        {"allOf": [REF], "description": "d"}, ["edit"], ["read"],
    ),
    "a reference with a default": ({**REF, "default": "edit"}, ["edit"], ["read"]),
    "oneOf of constants": (
        {"oneOf": [{"type": "string", "const": "write"}, {"type": "string", "const": "edit"}]},
        ["write", "edit"], ["oneOf"],
    ),
    "anyOf of a reference and a constant": (
        {"anyOf": [REF, {"const": "deleted"}]}, ["write", "deleted"], ["x"],
    ),
    "an enum or null": ({"anyOf": [REF, {"type": "null"}]}, ["write", None], ["x", 3]),
    "an enum with null": ({"enum": ["a", None]}, ["a", None], ["b", 3]),
    "an enum of numbers in text": ({"enum": ["1", "true", "null"]}, ["1", "true"], ["2", 3]),
    "values with line feeds": ({"enum": ["\na\n", "b\n"]}, ["\na\n", "b\n"], ["a", "b"]),
    "a pattern": ({"type": "string", "pattern": "^[0-9]{3}$"}, ["123"], ["12", "1234", "a123"]),
    "a pattern that is searched": (
        {"type": "string", "pattern": "a/b|^c"}, ["xa/b\ny", "cd"], ["xc", "ab", ""],
    ),
    "a pattern in classes": ({"type": "string", "pattern": "^[^/<$^]+$"}, ["a>"], ["a<", "$", ""]),
    "a date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "x", ""]),
    "a length": ({"type": "string", "maxLength": 3}, ["", "äöü"], ["abcd"]),
    "a least length": ({"type": "string", "minLength": 2}, ["ab", "abc"], ["a", ""]),
    "rules of several parts": (
        {"type": "string", "allOf": [{"pattern": "^a"}, {"maxLength": 3}, {"pattern": "z$"}]},
        ["az", "abz"], ["abbz", "bz", "ab"],
    ),
    "one of two patterns": (
        {"type": "string", "anyOf": [{"pattern": "^a$"}, {"format": "ipv4"}]},
        ["a", "127.0.0.1"], ["b", "256.0.0.1"],
    ),
    "an enum with a length": (
        {"type": "string", "enum": ["a", "bb", "ccc"], "minLength": 2}, ["bb"], ["a", "dd"],
    ),
    "a number": ({"type": "integer", "minimum": 3, "maximum": 5}, [4], [2, 6, 3.5, "x"]),
    "a multiple": ({"type": "number", "multipleOf": 0.5}, [1.5], [0.3]),
    "a list": (
        {"type": "array", "items": REF, "maxItems": 2}, [["write"], []], [["x"], ["edit"] * 3],
    ),
    "an object": (
        {"type": "object", "properties": {"m": REF}, "required": ["m"],
         "additionalProperties": False},
        [{"m": "edit"}], [{}, {"m": "x"}, {"m": "edit", "n": 1}],
    ),
    "tags in an object": ({"type": "object", "properties": {"t": {"type": "string"}}},
        [{"t": "</parameter>\n</arg_value></｜DSML｜parameter>"}], [{"t": 3}],
    ),
}  # fmt: skip


NEVER_BY_CHANCE = ("a pattern that is searched",)


def tool_of(schema: Any, *, strict: bool = False, **more: Any) -> Tool:
    parameters = {
        "type": "object", "properties": {"x": schema}, "required": ["x"],
        "additionalProperties": False, "$defs": {"Mode": MODE}, **more,
    }  # fmt: skip
    return Tool("set", None, parameters, strict=strict)


def forced(family: Family, tool: Tool) -> tuple[str, list[SchemaNote]]:
    notes: list[SchemaNote] = []
    gbnf = answer_grammar(Conversation((ASK,), (tool,), "required"), family, note=notes.append)
    assert gbnf is not None
    return gbnf, notes


def allows(family: Family, tool: Tool, arguments: dict[str, Any]) -> bool:
    gbnf, notes = forced(family, tool)
    assert not notes
    return follows(grammar_of(tokens, gbnf, None), written(family.layout, [("set", arguments)]))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("name", CASES)
def test_a_call_takes_what_the_schema_allows_and_nothing_else(family: Family, name: str) -> None:
    schema, right, wrong = CASES[name]
    tool = tool_of(schema)
    for value in right:
        if "\n" in str(value) and family.layout.before_key and not isinstance(value, dict):
            continue  # `written` does not add the line feeds that readers drop
        assert allows(family, tool, {"x": value}), value
    for value in wrong:
        assert not allows(family, tool, {"x": value}), value
    assert not allows(family, tool, {})


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_written_under_the_grammar_is_read_as_a_call_by_the_schema(name: str) -> None:
    form, options = chat_format(name), GenerateOptions(reasoning_budget=0)
    for at, (case, (schema, _, _)) in enumerate(CASES.items()):
        if case in NEVER_BY_CHANCE:
            continue
        tool = tool_of(schema)
        asked = Conversation((ASK,), (tool,), "required", parallel_tool_calls=False)
        for seed in range(2):
            played = play(form, asked, options, np.random.default_rng((at, seed)))
            assert played.is_whole, (case, played)
            if "<|" in played.raw.partition("<|message|>")[2]:
                continue  # a marker of gpt-oss in a string ends the call
            (call,) = played.message.calls
            assert fits(
                tool.parameters, json.dumps(json.loads(call.arguments), ensure_ascii=False)
            ), (case, call)


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
def test_values_with_line_feeds_at_their_ends_are_read_as_they_are(family: Family) -> None:
    """Readers drop one line feed at each end, so one more is written if the tags have none."""
    tool = tool_of({"enum": ["\na\n"]})
    gbnf, _ = forced(family, tool)
    layout = family.layout
    head = f"{layout.begin}{layout.before_name}set{layout.after_name}"
    head += layout.before_key + "x" + layout.key_end(is_string=True)
    found = [
        head + text + layout.after_value + layout.after_arguments + layout.end
        for text in ("\na\n", "\n\na\n", "\na\n\n", "\n\na\n\n")
    ]
    (right,) = [text for text in found if follows(grammar_of(tokens, gbnf, None), text)]
    parser = StreamParser(AnswerForm(family, {"set": dict(tool.parameters)}))
    message = joined([*parser.feed(right), *parser.finish()])
    assert json.loads(message.calls[0].arguments) == {"x": "\na\n"}


ARGS = {"type": "object", "properties": {"x": MODE, "n": {"type": "integer"}}, "required": ["x"]}
WHOLE: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "all behind a reference": (
        {"$ref": "#/$defs/Args", "$defs": {"Args": ARGS}},
        [{"x": "edit"}, {"x": "edit", "n": 3}], [{}, {"x": "y"}, {"n": 3}],
    ),
    "in parts": (
        {"allOf": [ARGS, {"properties": {"x": {"maxLength": 4}}}]}, [{"x": "edit"}],
        [{"x": "write"}],
    ),
    "one of two sets": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}], [{}],
    ),
    "a required name without a schema": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
        [{"a": 1, "b": 2}], [{"a": 1}],
    ),
    "a property that cannot be": (
        {"type": "object", "properties": {"a": False, "b": {"type": "integer"}}},
        [{"b": 2}, {}], [{"a": 1}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
@pytest.mark.parametrize("name", WHOLE)
def test_the_arguments_themselves_may_be_described_anywhere(family: Family, name: str) -> None:
    parameters, right, wrong = WHOLE[name]
    tool = Tool("set", None, parameters)
    for arguments in right:
        assert allows(family, tool, arguments), arguments
        text = written(family.layout, [("set", arguments)])
        parser = StreamParser(AnswerForm(family, {"set": parameters}))
        message = joined([*parser.feed(text), *parser.finish()])
        assert json.loads(message.calls[0].arguments) == arguments
    for arguments in wrong:
        assert not allows(family, tool, arguments), arguments


NOT_HELD: dict[str, tuple[dict[str, Any], str]] = {
    "unique items": ({"type": "array", "uniqueItems": True}, "#/properties/x/uniqueItems"),
}


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
@pytest.mark.parametrize("name", NOT_HELD)
def test_what_cannot_be_enforced_is_named_and_a_strict_tool_refused(
    family: Family, name: str
) -> None:
    schema, place = NOT_HELD[name]
    _, notes = forced(family, tool_of(schema))
    assert [note.place for note in notes] == [place]
    with pytest.raises(BadRequest, match=f"tool 'set' is strict, and {place} of its parameters"):
        forced(family, tool_of(schema, strict=True))
    two = {"x": {"type": "integer"}, "y": {"type": "integer"}}
    many = tool_of({}, properties=two, minProperties=2)
    assert [note.place for note in forced(family, many)[1]] == ["#/minProperties"]


TEXTS = {
    "date": ["2024-02-29", "1999-12-31"],
    "date-time": ["2024-02-29T23:59:59.5Z", "2024-01-01t00:00:00+01:00"],
    "time": ["23:59:59Z", "00:00:00.25-12:30"],
    "duration": ["P1Y2M3DT4H5M6S", "P4W", "PT36H"],
    "email": ["a@b.example", "a.b+c@d-e.org"],
    "hostname": ["a-b.example.org", "localhost"],
    "ipv4": ["127.0.0.1", "255.255.255.255"],
    "ipv6": ["::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8", "1::"],
    "uri": ["https://a.example:80/b?c=d#e", "mailto:a@b.example"],
    "uuid": ["2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
}


@pytest.mark.parametrize("form", FORMATS)
def test_formats_of_bare_text_are_those_of_json(form: str) -> None:
    """Texts of both kinds, and those with a character changed, left out or doubled."""
    schema = {"type": "string", "format": form}
    gbnf, _ = forced(TAGGED[0], tool_of(schema))
    layout = TAGGED[0].layout
    n_right = 0
    for text in TEXTS[form]:
        assert fits(schema, json.dumps(text)), text
        changed = [text[:i] + c + text[j:] for i in range(len(text)) for j in (i, i + 1)
                   for c in ("", "0", "9", "-", text[i])]  # fmt: skip
        for candidate in dict.fromkeys([text, *changed]):
            call = written(layout, [("set", {"x": candidate})])
            if follows(grammar_of(tokens, gbnf, None), call):
                n_right += 1
                assert fits(schema, json.dumps(candidate)), candidate
            else:
                assert candidate != text
    assert n_right >= len(TEXTS[form])
