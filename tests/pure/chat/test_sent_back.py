"""Every answer that a parser produces can be sent back to the template of the same model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from published import NAMES, WEATHER, chat_format, source
from recorded import RECORDED, SCHEMAS, counted

from specoffload.chat.conversation import Conversation, Message, Tool, joined
from specoffload.chat.families import HARMONY_REASONING, Family, family_of, reasoning_of, written
from specoffload.chat.parser import AnswerForm, StreamParser

TOOLS = (WEATHER, Tool("now", "The time", {"type": "object", "properties": {}}))
ASK = {"role": "user", "content": "How is the weather?"}
NEXT = {"role": "user", "content": "And tomorrow?"}
IDS = {
    "own": lambda family, n: next(itertools.islice(iter(_own(family)), n, None)),
    "OpenAI's": lambda family, n: f"call_{n:024x}",
    "Anthropic's": lambda family, n: f"toolu_{n:024x}",
    "Kimi's": lambda family, n: f"functions.get_weather:{n}",
}
ANSWERS = list(itertools.product(("", "I look."), ("", "Hm."), range(4)))
CALLS = list(itertools.product(IDS, ("whole", "cut", "none")))


def _own(family: Family) -> Any:
    parser = StreamParser(AnswerForm(family, SCHEMAS))
    calls = [("get_weather", {"city": "x"})] * (1 if family.layout.is_harmony else 4)
    deltas = parser.feed(written(family.layout, calls)) + parser.finish()
    ids = [call.id for call in joined(deltas).calls]
    return ids if len(ids) == 4 else [f"{ids[0]}{n}" for n in range(4)]


def sent_back(message: Message, **more: Any) -> dict[str, Any]:
    """The message in the shape in which clients send it back."""
    found: dict[str, Any] = {"role": "assistant", "content": message.content, **more}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.calls:
        found["content"] = message.content or None
        found["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    return found


def conversation(turn: dict[str, Any]) -> tuple[Conversation, list[str]]:
    """A conversation that goes on after `turn`, and the texts of its results."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"rain {n}"}
        for n, call in enumerate(turn.get("tool_calls", ()))
    ]
    messages = (ASK, turn, *results, {"role": "assistant", "content": "So."}, NEXT)
    return Conversation(messages, TOOLS), [result["content"] for result in results]


def rendered(name: str, asked: Conversation) -> str:
    """The prompt from the first question on."""
    text = chat_format(name).prepare(asked).text.replace("\\u00fc", "ü")
    return text[text.index(ASK["content"]) :]


def in_order(text: str, *words: str) -> bool:
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


@pytest.mark.parametrize(("content", "reasoning", "n"), ANSWERS)
@pytest.mark.parametrize("name", NAMES)
def test_any_parts_of_an_answer_are_taken_back(
    name: str, content: str, reasoning: str, n: int
) -> None:
    """Own ids and other servers', several calls, and arguments that the token limit cut."""
    family = family_of(source(name))
    for ids, arguments in CALLS if n else CALLS[:1]:
        calls = []
        for at in range(n):
            text = json.dumps({"city": f"Zürich{at}"}, ensure_ascii=False)
            cut = {"whole": text, "cut": text[:-2], "none": ""}[arguments]
            function = {"name": "get_weather", "arguments": cut}
            calls.append({"id": IDS[ids](family, at), "type": "function", "function": function})
        turn: dict[str, Any] = {"role": "assistant", "content": content or None}
        turn |= {"reasoning_content": reasoning} if reasoning else {}
        turn |= {"tool_calls": calls} if calls else {}
        asked, results = conversation(turn)
        text = rendered(name, asked)
        given = [f"Zürich{at}" for at in range(n) if arguments != "none"]
        assert in_order(text, *given, NEXT["content"])
        assert in_order(text, *results, "So.", NEXT["content"])
        assert text.count("get_weather") >= n
        # gpt-oss's template writes text beside a call as reasoning, and drops it in later turns.
        now = rendered(name, replace(asked, messages=asked.messages[: 2 + n]))
        assert in_order(now, content, *given)
        assert in_order(now, content, *results)


@settings(deadline=None)  # the first use of a template compiles it
@given(st.sampled_from(NAMES), st.data())
def test_an_answer_that_the_parser_reads_is_taken_back_wherever_it_was_cut(
    name: str, data: st.DataObject
) -> None:
    """With each reasoning format, one of which leaves the family's markers in the content."""
    family, markers = family_of(source(name)), reasoning_of(source(name))
    texts = [answer.text for answer in RECORDED if answer.family == family.name]
    assume(texts)
    text = data.draw(st.sampled_from(texts))
    cut = text[: data.draw(st.integers(0, len(text)))]
    form = AnswerForm(
        family,
        SCHEMAS if data.draw(st.booleans()) else {},
        markers,
        data.draw(st.sampled_from(["auto", "none", "deepseek-legacy"])),
        thinking=data.draw(st.booleans()),
    )
    parser = StreamParser(form, counted() if family.id_length is None else None)
    message = joined(parser.feed(cut) + parser.finish(cut=data.draw(st.booleans())))
    asked, results = conversation(sent_back(message))
    assert in_order(chat_format(name).prepare(asked).text, *results, "So.", NEXT["content"])


def test_gpt_oss_takes_its_own_markers_back_as_reasoning() -> None:
    opens, closes, _ = HARMONY_REASONING
    raw = f"{opens}Hm.{closes}<|start|>assistant<|channel|>final<|message|>Hello"
    turn = {"role": "assistant", "content": raw}
    text = chat_format("openai-gpt-oss-120b").prepare(Conversation((ASK, turn, NEXT))).text
    assert "<|start|>assistant<|channel|>final<|message|>Hello<|end|>" in text
    assert "Hm." not in text  # the template drops the reasoning of earlier turns


def test_gpt_oss_is_told_each_call_with_its_result() -> None:
    turn = sent_back(Message("I look.", "Hm."))
    names = ("get_weather", "now")
    turn["tool_calls"] = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]
    results = [{"role": "tool", "tool_call_id": n, "content": f"of {n}"} for n in reversed(names)]
    asked = Conversation((ASK, turn, *results), TOOLS)
    text = chat_format("openai-gpt-oss-120b").prepare(asked).text
    assert in_order(
        text,
        "<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>",
        "assistant to=functions.get_weather",
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"of get_',
        "assistant to=functions.now",
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"of now"',
    )


def test_ministral_is_told_its_reasoning_as_a_part() -> None:
    turn = sent_back(Message("Fine.", "Hm."))
    name = "mistralai-Ministral-3-14B-Reasoning-2512"
    assert (
        "[THINK]Hm.[/THINK]Fine." in chat_format(name).prepare(Conversation((ASK, turn, NEXT))).text
    )
