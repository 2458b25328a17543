"""Grammars that force calls accept each family's own format and nothing else."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from byte_grammars import follows, tokens
from hypothesis import given
from hypothesis import strategies as st
from published import ASK, WEATHER
from recorded import THINK

from offload.sampling.grammar import grammar_of
from specoffload.chat.conversation import Conversation, Tool
from specoffload.chat.families import FAMILIES, GENERIC, Family, written
from specoffload.chat.grammar import after_reasoning, answer_grammar, literal, until, without

NOW = Tool("now")
ONE = [("get_weather", {"city": "Zürich", "days": 2})]
TWO = [*ONE, ("now", {})]


def passes(gbnf: str, text: str, *, to_the_end: bool = True) -> bool:
    return follows(grammar_of(tokens, gbnf, None), text, to_the_end=to_the_end)


def grammar_for(
    family: Family,
    tools: tuple[Tool, ...],
    *,
    choice: Literal["auto", "required"] = "auto",
    parallel: bool = True,
    schema: str | None = None,
    reasoning: tuple[str, str] | None = None,
    thinking: bool = False,
    in_answer: bool = False,
) -> str | None:
    asked = Conversation((ASK,), tools, choice, parallel_tool_calls=parallel, schema=schema)
    return answer_grammar(asked, family, reasoning, thinking=thinking, in_answer=in_answer)


def forced(family: Family, tools: tuple[Tool, ...] = (WEATHER, NOW), **options: Any) -> str:
    gbnf = grammar_for(family, tools, choice="required", **options)
    assert gbnf is not None
    return gbnf


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_calls_as_the_family_writes_them_pass_and_others_do_not(family: Family) -> None:
    gbnf = forced(family)
    one = written(family.layout, ONE)
    assert passes(gbnf, one)
    assert not passes(gbnf, one[:-1])
    assert not passes(gbnf, one.replace("get_weather", "get_whether"))
    assert not passes(gbnf, "It is fine.", to_the_end=False)
    assert not passes(gbnf, written(family.layout, [("get_weather", {"town": "x"})]))
    assert not passes(
        gbnf, written(family.layout, [("get_weather", {"days": 2})])
    )  # without the required city
    assert passes(gbnf, written(family.layout, TWO)) != family.layout.is_harmony
    assert not passes(forced(family, parallel=False), written(family.layout, TWO))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_forced_call_may_be_thought_about_before(family: Family) -> None:
    call = written(family.layout, ONE)
    if family.layout.is_harmony:
        thought = "<|channel|>analysis<|message|>Hm. <|en<<|end|><|start|>assistant"
        assert passes(forced(family), thought + call)
        return
    gbnf = forced(family, reasoning=THINK)
    assert passes(gbnf, f"<think>\nHm. </thi<</think >\n</think>\n\n{call}")
    assert passes(gbnf, call)
    opened = forced(family, reasoning=THINK, thinking=True)
    assert passes(opened, f"Hm.</think>{call}")
    assert not passes(opened, call)


def test_an_answer_is_free_unless_a_call_is_forced_or_the_family_has_no_format() -> None:
    for family in FAMILIES:
        gbnf = grammar_for(family, (WEATHER,))
        assert (gbnf is None) == (family.name != GENERIC.name)
        assert grammar_for(family, ()) is None
    gbnf = grammar_for(GENERIC, (WEATHER, NOW))
    assert gbnf is not None
    assert passes(gbnf, "It is fine: {}.")
    assert passes(gbnf, written(GENERIC.layout, TWO))
    assert not passes(gbnf, '{"name": 3}')


def test_an_answer_by_a_schema_may_be_a_call_instead_and_may_be_thought_about() -> None:
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}})
    for family in FAMILIES:
        gbnf = grammar_for(family, (WEATHER,), reasoning=THINK, schema=schema)
        assert gbnf is not None
        harmony = family.layout.is_harmony
        final = "<|channel|>final<|message|>" if harmony else "<think>Hm.</think>\n"
        assert passes(gbnf, final + '{"n": 3}')
        assert not passes(gbnf, final + '{"n": "x"}')
        call = written(family.layout, ONE)
        assert passes(gbnf, call) != call.startswith("{")
        if not harmony:
            alone = grammar_for(family, (), schema=schema)
            assert alone is None  # without tools the schema suffices


def test_the_grammar_begins_where_a_begun_answer_ends() -> None:
    harmony = next(family for family in FAMILIES if family.layout.is_harmony)
    header, schema = "<|start|>assistant", '{"type": "object"}'
    final = f"{header}<|channel|>final<|message|>{{}}"
    within = grammar_for(harmony, (), schema=schema, in_answer=True)
    assert within is not None
    assert passes(within, "{}")
    assert not passes(within, final.removeprefix(header))
    thinking = grammar_for(harmony, (), schema=schema, thinking=True)
    assert thinking is not None
    assert passes(thinking, f"m.<|end|>{final}")
    assert not passes(thinking, final.removeprefix(header))
    assert passes(forced(harmony, in_answer=True), f"<|end|>{header}{written(harmony.layout, ONE)}")
    hermes = next(family for family in FAMILIES if family.name == "hermes")
    assert grammar_for(hermes, (), schema=schema, reasoning=THINK, in_answer=True) is None
    llama = next(family for family in FAMILIES if family.name == "llama-3")
    strict = (Tool("f", None, {}, strict=True),)
    assert grammar_for(llama, strict) is not None
    assert grammar_for(llama, strict, in_answer=True) is None


def test_text_arguments_are_any_text_and_choices_are_theirs() -> None:
    tool = Tool(
        "f",
        None,
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "unit": {"enum": ["K", "°C"]}},
            "required": ["text"],
        },
    )
    tagged = [family for family in FAMILIES if family.layout.before_key]
    assert len(tagged) >= 4
    for family in tagged:
        gbnf = forced(family, (tool,))
        for text in ("", "a\n\n<b>\"'", "</parameter", "</｜DSML", "</arg_valu"):
            assert passes(gbnf, written(family.layout, [("f", {"text": text, "unit": "°C"})]))
        assert not passes(gbnf, written(family.layout, [("f", {"text": "x", "unit": "F"})]))


@given(st.sampled_from(["</think>", "<|end|>", "[/X]"]), st.text("<>/|[]X</thinkend", max_size=30))
def test_until_is_any_text_up_to_the_first_marker(marker: str, text: str) -> None:
    gbnf = f"root ::= {until(marker)}\n"
    assert passes(gbnf, text + marker) == ((text + marker).find(marker) == len(text))


STRICT = Tool("get_weather", None, WEATHER.parameters, strict=True)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_strict_tool_that_may_be_called_is_called_by_its_schema(family: Family) -> None:
    gbnf = grammar_for(family, (STRICT, NOW))
    assert gbnf is not None
    final = "<|channel|>final<|message|>" if family.layout.is_harmony else ""
    assert passes(gbnf, final + "It is fine, as 1 < 2 [1].")
    call = written(family.layout, ONE)
    assert passes(gbnf, call)
    assert not passes(gbnf, written(family.layout, [("get_weather", {"days": 2})]))
    assert not passes(gbnf, written(family.layout, [("get_whether", {"city": "x"})]))
    if family.layout.openers:
        assert passes(gbnf, "I look. " + call)
        assert passes(gbnf, "1 < 2 <<" + call[:1] + call)
        for marker in family.layout.openers:
            assert not passes(gbnf, f"I look. {marker} nothing")
    loose = Tool("get_weather", None, WEATHER.parameters)
    free = grammar_for(family, (loose, NOW))
    assert (free is None) == (family is not GENERIC)


@given(
    st.lists(st.text("ab<x", min_size=0, max_size=3).map("<".__add__), min_size=1, max_size=3),
    st.text("ab<x", max_size=12),
)
def test_without_is_any_text_that_has_none_of_the_markers(found: list[str], text: str) -> None:
    markers = ["<" + marker.replace("<", "") for marker in found]
    markers = [marker if len(marker) > 1 else "<a" for marker in markers]
    gbnf = f"root ::= {without(markers)}\n"
    assert passes(gbnf, text) == (not any(marker in text for marker in markers))
    behind = f'root ::= {without(markers)} {literal(markers[0])} "!"\n'
    has_one = any(marker in text for marker in markers)
    assert passes(behind, text + markers[0] + "!") == (not has_one)


def passes_after(family: Family, gbnf: str, text: str, *, thinking: bool = False) -> bool:
    wrapped, root = after_reasoning(gbnf, family, THINK, thinking=thinking)
    return follows(grammar_of(tokens, wrapped, None, root), text)


def test_a_grammar_of_a_client_begins_after_the_reasoning() -> None:
    answer = 'root ::= "yes" | "no"\nanswer ::= "unused"\n'
    for family in FAMILIES:
        harmony = family.layout.is_harmony
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if harmony else (
            "<think>Hm.</think>\n"
        )  # fmt: skip
        final = "<|channel|>final<|message|>" if harmony else ""
        for before in ("", thought):
            assert passes_after(family, answer, f"{before}{final}yes")
            assert not passes_after(family, answer, f"{before}{final}maybe")
        opened = thought.partition("Hm.")[2]
        assert passes_after(family, answer, f"Hm.{opened}{final}no", thinking=True)
        assert not passes_after(family, answer, f"{final}no", thinking=True)


def test_a_grammar_with_the_markers_of_the_reasoning_is_all_of_the_answer() -> None:
    own = 'root ::= "<think>" [a-z]* "</think>" "yes"\n'
    hermes = next(family for family in FAMILIES if family.name == "hermes")
    assert after_reasoning(own, hermes, THINK, thinking=False) == (own, "root")
    assert after_reasoning(own, hermes, None, thinking=False) == (own, "root")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_the_parser_reads_as_the_end_of_the_reasoning_ends_it_in_the_grammar(
    family: Family,
) -> None:
    """A call's marker in the reasoning would begin a call whose schema nobody enforces."""
    if family.layout.is_harmony:
        ends: tuple[str, ...] = ("<|channel|>", "<|call|>", "<|start|>")
        gbnf = forced(family, thinking=True)
    else:
        ends = family.layout.openers if family.ends_reasoning else ()
        gbnf = forced(family, reasoning=THINK, thinking=True)
    assert passes(gbnf, "Hm. <", to_the_end=False)
    for marker in ends:
        assert not passes(gbnf, f"Hm. {marker}", to_the_end=False)
