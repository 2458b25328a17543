"""The parser reads recorded answers of every model family, wherever the stream is cut."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from recorded import BY_NAME, RECORDED, SCHEMAS, THINK, Recorded, counted, parsed

from specoffload.chat.conversation import CallPiece, joined
from specoffload.chat.families import FAMILIES, Family, written
from specoffload.chat.parser import AnswerForm, StreamParser


def cut(text: str, places: set[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("answer", RECORDED, ids=lambda a: f"{a.family}-{RECORDED.index(a)}")
def test_a_recorded_answer_becomes_its_message(answer: Recorded) -> None:
    message = parsed(answer.form, [answer.text])
    assert message.content == answer.content
    assert message.reasoning == answer.reasoning
    assert [(call.name, call.arguments) for call in message.calls] == list(answer.calls)
    for call in message.calls:
        json.loads(call.arguments)
    if answer.ids is not None:
        assert tuple(call.id for call in message.calls) == answer.ids
    assert parsed(answer.form, list(answer.text)) == message


@pytest.mark.parametrize("answer", RECORDED, ids=lambda a: f"{a.family}-{RECORDED.index(a)}")
def test_hidden_reasoning_is_left_out_and_the_rest_stays(answer: Recorded) -> None:
    form = replace(answer.form, reasoning_format="hidden")
    message = parsed(form, list(answer.text))
    assert not message.reasoning
    assert message.content == answer.content
    assert [(call.name, call.arguments) for call in message.calls] == list(answer.calls)


def test_every_family_has_a_recorded_answer_with_a_call() -> None:
    assert {answer.family for answer in RECORDED if answer.calls} == set(BY_NAME)


@given(st.sampled_from(RECORDED), st.sets(st.integers(0, 500)))
def test_where_a_recorded_answer_is_cut_makes_no_difference(
    answer: Recorded, places: set[int]
) -> None:
    assert parsed(answer.form, cut(answer.text, places)) == parsed(answer.form, [answer.text])


# Pieces of recorded answers. Random texts are made of them, so that most are damaged calls.
_PIECES = sorted(
    {
        piece
        for answer in RECORDED
        for piece in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\W", answer.text)
    }
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[AnswerForm, str]:
    answer = draw(st.sampled_from(RECORDED))
    form = AnswerForm(
        answer.form.family,
        SCHEMAS,
        draw(st.sampled_from([None, THINK])),
        thinking=draw(st.booleans()),
    )
    if draw(st.booleans()):
        return form, "".join(draw(st.lists(st.sampled_from(_PIECES), max_size=40)))
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(answer.text))] * 2)))
    return form, answer.text[:start] + draw(st.sampled_from(_PIECES)) + answer.text[end:]


@given(damaged(), st.sets(st.integers(0, 500)))
def test_where_a_damaged_answer_is_cut_makes_no_difference(
    damaged: tuple[AnswerForm, str], places: set[int]
) -> None:
    form, text = damaged
    whole = parsed(form, [text])
    assert parsed(form, cut(text, places)) == whole
    assert parsed(form, list(text)) == whole


@given(st.sampled_from(FAMILIES), st.text(alphabet="<>[]{}| \nabtol_c/\"'", max_size=60))
def test_text_without_a_call_is_content_to_the_last_character(family: Family, text: str) -> None:
    form = AnswerForm(family, SCHEMAS)
    message = parsed(form, list(text))
    if not message.calls:
        assert message.content == text


@given(st.sampled_from(RECORDED), st.integers(0, 500), st.sets(st.integers(0, 500)))
@example(next(answer for answer in RECORDED if answer.text.startswith("<think>")), 3, set())
def test_a_limit_within_a_call_or_a_marker_shows_no_part_of_it(
    answer: Recorded, n: int, places: set[int]
) -> None:
    """For example, `', {"name": "get_'` of a second call must not become text of the answer."""
    parser = StreamParser(answer.form, counted())
    pieces = cut(answer.text[:n], places)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    message, whole = joined(deltas + parser.finish(cut=True)), parsed(answer.form, [answer.text])
    assert whole.reasoning.startswith(message.reasoning)
    assert whole.content.startswith(message.content.rstrip())
    assert len(message.calls) <= len(whole.calls)
    for call, full in zip(message.calls, whole.calls, strict=False):
        assert call.name == full.name
        assert full.arguments.startswith(call.arguments)


def test_what_may_be_a_marker_is_held_back_and_arguments_come_as_they_are_written() -> None:
    parser = StreamParser(AnswerForm(BY_NAME["hermes"], SCHEMAS))
    assert parser.feed("a <tool") != []
    assert parser.feed("_call") == []
    assert parser.feed('>{"name": "now", "argum') == []
    first = parser.feed('ents": {"x": [1')
    assert isinstance(first[0], CallPiece)
    assert (first[0].name, first[0].arguments) == ("now", '{"x": [1')
    assert parser.feed(", 2]}}") == [CallPiece(0, None, None, ", 2]}")]
    assert parser.finish() == []


_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>[]\0"), max_size=12)
_VALUES = st.one_of(_WORDS, st.integers(), st.booleans(), st.none(), st.lists(_WORDS, max_size=2))


@given(
    st.sampled_from(FAMILIES),
    st.lists(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), _VALUES), min_size=1),
    st.sets(st.integers(0, 2000)),
)
def test_calls_written_as_a_family_writes_them_are_read_as_they_were(
    family: Family, arguments: list[dict[str, Any]], places: set[int]
) -> None:
    arguments = arguments[:1] if family.layout.is_harmony else arguments
    text = written(family.layout, [("get", values) for values in arguments])
    properties = {
        key: {"type": "string"} if isinstance(value, str) else {}
        for values in arguments
        for key, value in values.items()
    }
    if family.layout.before_key:  # unquoted text is a string or JSON
        shapes = {key: [v[key] for v in arguments if key in v] for key in properties}
        mixed = any(len({isinstance(v, str) for v in values}) > 1 for values in shapes.values())
        assume(not mixed)
        assume(
            not any(v != v.strip("\n") for vs in shapes.values() for v in vs if isinstance(v, str))
        )
    schema = {"type": "object", "properties": properties}
    message = parsed(AnswerForm(family, {"get": schema}), cut(text, places))
    assert message.content == ""
    assert [call.name for call in message.calls] == ["get"] * len(arguments)
    assert [json.loads(call.arguments) for call in message.calls] == arguments


def test_only_one_call_is_given_out_where_no_more_are_wanted() -> None:
    text = RECORDED[0].text
    form = replace(RECORDED[0].form, most_calls=1)
    calls, wanted = parsed(form, list(text)).calls, parsed(RECORDED[0].form, [text]).calls
    assert [(call.name, call.arguments) for call in calls] == [
        (call.name, call.arguments) for call in wanted[:1]
    ]
    assert len(wanted) > 1


def test_without_tools_nothing_is_taken_for_a_call_and_reasoning_is_split_still() -> None:
    text = "<think>a</think>b <tool_call>"
    form = AnswerForm(BY_NAME["hermes"], {}, THINK)
    message = parsed(form, list(text))
    assert (message.content, message.reasoning) == ("b <tool_call>", "a")


def test_the_reasoning_format_none_leaves_the_text_as_it_is() -> None:
    text = " <think>a</think>\n\nb "
    assert parsed(AnswerForm(BY_NAME["hermes"], {}, THINK, "none"), list(text)).content == text
    raw = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    message = parsed(AnswerForm(BY_NAME["gpt-oss"], {}, None, "none"), list(raw))
    assert message.content == "<|channel|>analysis<|message|>Hm.<|end|>Hi"


def test_the_legacy_format_gives_reasoning_twice() -> None:
    form = AnswerForm(BY_NAME["hermes"], {}, THINK, "deepseek-legacy")
    message = parsed(form, list("<think>a</think>b"))
    assert (message.content, message.reasoning) == ("<think>a</think>b", "a")


def test_ids_are_unlike_and_of_the_length_that_a_template_insists_on() -> None:
    parser = StreamParser(AnswerForm(BY_NAME["mistral"], SCHEMAS))
    deltas = parser.feed(next(a for a in RECORDED if a.family == "mistral").text) + parser.finish()
    ids = [delta.id for delta in deltas if isinstance(delta, CallPiece) and delta.id]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", i) for i in ids)


def test_no_marker_of_a_family_begins_another() -> None:
    """This matters because the reader takes the first complete marker."""
    for family in FAMILIES:
        for a in family.markers:
            assert not any(b != a and b.startswith(a) for b in family.markers), family.name
