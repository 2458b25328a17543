"""Recorded answers of each model family, in the format of its template, with parsed messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from specoffload.chat.conversation import Message, joined
from specoffload.chat.families import FAMILIES
from specoffload.chat.parser import AnswerForm, StreamParser

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
THINK = ("<think>", "</think>")
BY_NAME = {family.name: family for family in FAMILIES}


@dataclass(frozen=True)
class Recorded:
    """A recorded text, and the message that the parser must return. Calls are (name, arguments)."""

    family: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    markers: tuple[str, str] | None = None
    thinking: bool = False
    ids: tuple[str, ...] | None = None

    @property
    def form(self) -> AnswerForm:
        return AnswerForm(
            BY_NAME[self.family], SCHEMAS, self.markers, "auto", thinking=self.thinking
        )


def counted() -> Callable[[], str]:
    """A function that returns the ids "id0", "id1", ... of calls."""
    return map("id{}".format, itertools.count()).__next__


def parsed(form: AnswerForm, pieces: list[str]) -> Message:
    """The message parsed from a text that comes in `pieces`. Ids of calls are "id0", "id1", ..."""
    parser = StreamParser(form, counted())
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return joined(deltas + parser.finish())


PARIS = '{"city": "Paris", "days": 3}'
TWO = (("get_weather", PARIS), ("now", "{}"))

RECORDED = (
    Recorded(
        "hermes",
        "<think>\nThe user asks.\n</think>\n\nI look.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        content="I look.",
        reasoning="The user asks.",
        calls=TWO,
        markers=THINK,
    ),
    Recorded(  # arguments first, as Hermes 2 Pro may; and as JSON in a string
        "hermes",
        '<tool_call>{"arguments": "{\\"city\\": \\"Rome\\"}", "name": "get_weather"}</tool_call>',
        calls=(("get_weather", '{"city": "Rome"}'),),
    ),
    Recorded(
        "hermes", "The tag <tool_call> opens a call.\n", "The tag <tool_call> opens a call.\n"
    ),
    Recorded(
        "qwen3-coder",
        'Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ris\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        content="Sure.",
        calls=(("get_weather", '{"city": "Pa\\"ris", "days": 3}'), ("now", "{}")),
    ),
    Recorded(  # without the outer tag, as Qwen3-Coder sometimes does
        "qwen3-coder",
        "<function=get_weather>\n<parameter=city>\na\n\nb\n</parameter>\n</function>\n</tool_call>",
        calls=(("get_weather", '{"city": "a\\n\\nb"}'),),
    ),
    Recorded(
        "deepseek-r1",
        "<think>\nHm.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        f"<｜tool▁sep｜>get_weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        reasoning="Hm.",
        calls=TWO,
        markers=THINK,
    ),
    Recorded(
        "deepseek-v3.1",
        "Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{PARIS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        content="I look.",
        reasoning="Hm.",
        calls=TWO,
        markers=THINK,
        thinking=True,
    ),
    Recorded(
        "deepseek-v3.2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        calls=TWO,
    ),
    Recorded(
        "kimi-k2",
        "I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        content="I look.",
        calls=TWO,
        ids=("functions.get_weather:0", "functions.now:1"),
    ),
    Recorded(  # a section of calls ends reasoning that was not closed, too
        "kimi-k2",
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        reasoning="Hm.",
        calls=(("now", "{}"),),
        markers=THINK,
    ),
    Recorded(
        "glm-4.5",
        "\n<think>Hm.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        content="I look.",
        reasoning="Hm.",
        calls=TWO,
        markers=THINK,
    ),
    Recorded(
        "minimax-m2",
        'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        reasoning="Hm.",
        calls=TWO,
        markers=THINK,
        thinking=True,
    ),
    Recorded(
        "seed-oss",
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        reasoning="Hm.",
        calls=TWO,
        markers=("<seed:think>", "</seed:think>"),
    ),
    Recorded(
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
        reasoning="Hm.",
        calls=TWO[:1],
    ),
    Recorded(
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello. <|return|>",
        content="Hello. ",
        reasoning="Hm.",
    ),
    Recorded(  # recipient before the channel
        "gpt-oss",
        " to=functions.now<|channel|>commentary json<|message|>{}",
        calls=TWO[1:],
    ),
    Recorded(
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}, "id": "123456789"}}, '
        '{"name": "now", "arguments": {}}]',
        calls=TWO,
    ),
    Recorded(
        "mistral-v11",
        f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}",
        content="I look.",
        reasoning="Hm.",
        calls=TWO,
        markers=("[THINK]", "[/THINK]"),
    ),
    Recorded(
        "nemotron-v2",
        f'<think>\nHm.\n</think>\n\n<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
        reasoning="Hm.",
        calls=TWO,
        markers=THINK,
    ),
    Recorded(
        "minimax-m1",
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {PARIS}}}\n'
        '{"name": "now", "arguments": {}}\n</tool_calls>',
        calls=TWO,
    ),
    Recorded(
        "granite",
        '<|tool_call|>[{"arguments": {}, "name": "now"}]',
        calls=TWO[1:],
    ),
    Recorded(
        "mistral-v11",
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
        calls=TWO[1:],
        ids=("abcdefghi",),
    ),
    Recorded(
        "llama-3",
        f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
        calls=TWO,
    ),
    Recorded(
        "llama-3",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        calls=TWO[1:],
    ),
    Recorded("llama-3", ' {"name": "Bob", "age": 3}', ' {"name": "Bob", "age": 3}'),
    Recorded(
        "generic",
        f'{{"tool_calls": [{{"name": "get_weather", "arguments": {PARIS}}}, '
        '{"name": "now", "arguments": {}}]}',
        calls=TWO,
    ),
    Recorded("generic", '{"tool_calls": 3}\n', '{"tool_calls": 3}\n'),
)
