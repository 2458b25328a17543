"""JSON schemas are read as llama.cpp reads them, and what is not enforced is named."""

from __future__ import annotations

import json

import pytest
from byte_grammars import fits
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadRequest
from offload.sampling.json_schema import adapted

INT, NULL, TEXT = {"type": "integer"}, {"type": "null"}, {"type": "string"}


def an_object(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Parts of one object are closed together.
        ({**an_object(a=INT), "anyOf": [{"required": ["a"]}, an_object(b=NULL)]},
         ['{"a": 1}', '{"a": 1, "b": null}'], ['{"a": 1, "c": 1}', "{}"]),
        ({"properties": {"kind": TEXT}, "required": ["kind"],
          "oneOf": [an_object(a=INT), an_object(b=INT)], "type": "object"},
         ['{"kind": "x", "a": 1}', '{"kind": "x", "b": 1}'], ['{"a": 1}', '{"kind": "x"}']),
        ({"$defs": {"Base": an_object(a=INT)}, "$ref": "#/$defs/Base", **an_object(b=INT)},
         ['{"b": 1, "a": 2}'], ['{"a": 2}', '{"b": 1, "a": 2, "c": 3}']),
        ({"$defs": {"Base": an_object(a=INT)},
          "allOf": [{"$ref": "#/$defs/Base"}, an_object(b=NULL)]},
         ['{"a": 1, "b": null}'], ['{"a": 1}', '{"a": 1, "b": null, "c": 1}']),
        ({"allOf": [{"additionalProperties": INT}, an_object(b=INT)]},
         ['{"b": 1, "z": 2}'], ['{"z": 2}']),
        ({"anyOf": [an_object(a=INT), {"type": "object"}]}, ['{"z": 1}', '{"a": 1}'], ["1"]),
        # A name in `required` without a property.
        ({"type": "object", "properties": {"a": INT}, "required": ["a", "b"]},
         ['{"a": 1, "b": [true]}'], ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}']),
        # References to any place, recursive ones too.
        (an_object(a=INT, b={"$ref": "#/properties/a"}), ['{"a": 1, "b": 2}'],
         ['{"a": 1, "b": "x"}']),
        ({"type": "object", "properties": {"n": INT, "next": {"$ref": "#"}}, "required": ["n"]},
         ['{"n": 1, "next": {"n": 2}}'], ['{"n": 1, "next": {"m": 2}}']),
        # Names of properties.
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
         ['{"a": 1}', "{}"], ['{"c": 1}', '{"a": "x"}']),
        ({"type": "object", "propertyNames": {"pattern": "^x-"}}, ['{"x-a": [1]}'], ['{"y": 1}']),
        ({**an_object(a=INT), "unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        # Numbers.
        ({"const": 2**53 + 2}, [str(2**53 + 2)], [str(2**53), str(2**53 + 4)]),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
        ({"type": "integer", "maximum": 2**53 + 3}, [str(2**53 + 2)], [str(2**53 + 4)]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-7", "9"], ["0.5"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),  # draft 4
        # Days and leap seconds.
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'],
         ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "string", "format": "time"}, ['"23:59:60Z"', '"08:00:00+01:00"'],
         ['"22:59:60Z"']),
    ],
)  # fmt: skip
def test_a_schema_is_followed(schema: object, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not fits(schema, text)] == []
    assert [text for text in bad if fits(schema, text)] == []


_NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.integers(2**53 - 3, 2**53 + 9))


@given(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    _NUMBERS,
    st.lists(st.integers(-3, 3), min_size=1, max_size=3),
    st.sampled_from(["integer", "number"]),
)
def test_no_integer_beyond_a_bound_is_allowed(
    keyword: str, bound: int, steps: list[int], kind: str
) -> None:
    schema = {"type": kind, keyword: bound}
    sign = 1 if "inimum" in keyword else -1
    if sign * bound > 10**18 - 128:
        with pytest.raises(BadRequest, match="beyond 10\\^18"):
            fits(schema, "5")
        return
    for step in steps:
        value = bound + step
        is_within = {
            "minimum": value >= bound,
            "maximum": value <= bound,
            "exclusiveMinimum": value > bound,
            "exclusiveMaximum": value < bound,
        }[keyword]
        assert is_within or not fits(schema, str(value))


@given(_NUMBERS, st.integers(-2, 2), st.booleans())
def test_a_constant_is_itself_or_refused(number: int, step: int, is_listed: bool) -> None:
    schema = {"enum": [number]} if is_listed else {"const": number}
    if abs(number) > 2**53 and (abs(number) > 10**18 or int(float(number)) != number):
        with pytest.raises(BadRequest, match="cannot be followed exactly"):
            fits(schema, "5")
    else:
        assert fits(schema, str(number))
        assert step == 0 or not fits(schema, str(number + step))


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"const": 2**53 + 1}, "#/const", "number 9007199254740993 cannot be followed exactly"),
        ({"enum": [{"a": [1 - 2**63]}]}, "#/enum", "cannot be followed exactly"),
        ({"type": "integer", "minimum": 10**18}, "#/minimum", "beyond 10\\^18"),
        ({"items": {"type": "any"}}, "#/items/type", "Invalid type: any"),
        ({"type": ["int", "null"]}, "#/type", "Invalid type: int"),
        ({"properties": None}, "#/properties", "must be an object"),
        ({"properties": {"a/b": None}}, "#/properties/a~1b", "an object or a boolean"),
        ({"pattern": "a(?!b)"}, "#/pattern", "look-ahead"),
        ({"patternProperties": {"(?<=a)b": {}}}, "#/patternProperties", "look-behind"),
        ({"pattern": r"(a)\1"}, "#/pattern", "references back"),
        ({"allOf": []}, "#/allOf", "a list of schemas"),
        ({"required": "a"}, "#/required", "a list of names"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_place_or_left_out(
    schema: dict[str, object], place: str, words: str
) -> None:
    with pytest.raises(BadRequest, match=f"cannot be followed: {place}: .*{words}"):
        adapted(schema)
    found = adapted(schema, drops=True)
    assert [fault.where for fault in found.faults] == [place]
    fits(json.loads(json.dumps(found.schema)), "1")  # compiles


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"items": {"uniqueItems": True}}, ["#/items/uniqueItems"]),
        ({"uniqueItems": False, "propertyNames": {"type": "string"}, "not": False}, []),
        ({"not": {}, "if": {}, "then": {}}, ["#/if", "#/not"]),
        ({"if": {}}, []),
        ({"properties": {"a": {"contains": {}, "minContains": 2}}}, ["#/properties/a/contains"]),
        ({"const": {"not": 1}, "default": {"not": {}}}, []),
        ({"properties": {"not": {"type": "null"}}}, []),
        ({"unevaluatedProperties": INT}, ["#/unevaluatedProperties"]),
        ({"format": "idn-email"}, ["#/format"]),
        ({"format": "int64"}, []),
        ({"oneOf": [TEXT, NULL]}, []),
        ({"oneOf": [TEXT, {}]}, ["#/oneOf"]),
        ({"oneOf": [an_object(k={"const": "a"}), an_object(k={"const": "b"})]}, []),
        ({"oneOf": [an_object(a=INT), an_object(b=INT)]}, []),  # closed objects exclude each other
        ({"oneOf": [an_object(a=INT), an_object(a={"type": "number"})]}, ["#/oneOf"]),
        ({"$defs": {"A": an_object(k={"enum": [1]}), "B": an_object(k={"enum": [2.0, 3]})},
          "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, []),
    ],
)  # fmt: skip
def test_keywords_without_effect_are_named(schema: dict[str, object], ignored: list[str]) -> None:
    assert sorted(adapted(schema).ignored) == ignored


def test_references_that_grow_or_lead_back_are_refused() -> None:
    chain = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n - 1}"}] * 2, **an_object(a=INT)}
             for n in range(1, 40)}  # fmt: skip
    with pytest.raises(BadRequest, match="over 20000 parts"):
        adapted(
            {"$defs": {"d0": an_object(b=INT), **chain}, "$ref": "#/$defs/d39", "properties": {}}
        )
    with pytest.raises(BadRequest, match="refers to itself without an end"):
        adapted({"properties": {"a": {}}, "allOf": [{"$ref": "#"}]})
    many = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)}
    with pytest.raises(BadRequest, match="references one after another"):
        adapted({"$defs": many, "$ref": "#/$defs/d0", "properties": {}})
