"""The tool-call formats of model families, and which of them a chat template teaches its model.

One row is one family; docs/chat-formats.md shows what each looks like. The rows are in the order in
which a template is tried: the most telling marker first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specoffload.chat.parsing import harmony
from specoffload.chat.parsing.json_calls import JsonCalls, NamedCalls
from specoffload.chat.parsing.tagged_calls import TaggedCalls


@dataclass(frozen=True)
class HarmonyCalls:
    """Channels of messages, of which some are to a tool."""


@dataclass(frozen=True)
class MistralCalls:
    """After one marker a list of JSON objects, or a name and its arguments."""

    listed: JsonCalls
    named: NamedCalls


Calls = JsonCalls | NamedCalls | TaggedCalls | HarmonyCalls | MistralCalls


@dataclass(frozen=True)
class Family:
    """`all_of` and `none_of` are what its templates have and have not. `markers` are texts that may
    be special tokens of its vocabulary, which the engine has to show for the parser to see."""

    name: str
    calls: Calls
    all_of: tuple[str, ...]
    none_of: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    ends_reasoning: bool = False  # a call's marker ends the reasoning, closed or not
    id_length: int | None = None  # of a call's id, where the template insists on one


_DEEPSEEK = NamedCalls(
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    opens="<｜tool▁call▁begin｜>",
    prefix="",
    after_name="<｜tool▁sep｜>",
    closes="<｜tool▁call▁end｜>",
)
_DEEPSEEK_MARKERS = (
    *(_DEEPSEEK.section, _DEEPSEEK.section_end, _DEEPSEEK.opens),
    *(_DEEPSEEK.after_name, _DEEPSEEK.closes),
)
_KIMI = NamedCalls(
    section="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    opens="<|tool_call_begin|>",
    prefix="",
    after_name="<|tool_call_argument_begin|>",
    closes="<|tool_call_end|>",
    name_is_id=True,
)
_FUNCTION_TAGS = {
    "opens": "<function=",
    "after_name": ">",
    "key_opens": "<parameter=",
    "after_key": ">",
    "value_opens": "",
    "value_closes": "</parameter>",
    "closes": "</function>",
}
_MISTRAL = MistralCalls(
    JsonCalls(("[TOOL_CALLS]",)),
    NamedCalls(
        section="",
        section_end="",
        opens="[TOOL_CALLS]",
        prefix="",
        after_name="[ARGS]",
        closes="",
        id_marker="[CALL_ID]",
    ),
)

GENERIC = Family("generic", JsonCalls((), wrapper="tool_calls"), all_of=())

FAMILIES = (
    Family("gpt-oss", HarmonyCalls(), ("<|channel|>", "<|message|>"), markers=harmony.MARKERS),
    Family(
        "deepseek-v3.2",
        TaggedCalls(
            section="<｜DSML｜function_calls>",
            section_end="</｜DSML｜function_calls>",
            opens='<｜DSML｜invoke name="',
            after_name='">',
            key_opens='<｜DSML｜parameter name="',
            after_key='">',
            value_opens="",
            value_closes="</｜DSML｜parameter>",
            closes="</｜DSML｜invoke>",
            string_mark='" string="true',
            other_mark='" string="false',
        ),
        ("｜DSML｜",),
        markers=("｜DSML｜",),
        ends_reasoning=True,
    ),
    Family(
        "deepseek-r1",
        replace(
            _DEEPSEEK,
            prefix="function<｜tool▁sep｜>",
            after_name="```json",
            closes="```<｜tool▁call▁end｜>",
        ),
        ("<｜tool▁calls▁begin｜>", "```json"),
        markers=_DEEPSEEK_MARKERS,
        ends_reasoning=True,
    ),
    Family(
        "deepseek-v3.1",
        _DEEPSEEK,
        ("<｜tool▁calls▁begin｜>",),
        markers=_DEEPSEEK_MARKERS,
        ends_reasoning=True,
    ),
    Family(
        "kimi-k2",
        _KIMI,
        ("<|tool_calls_section_begin|>",),
        markers=(_KIMI.section, _KIMI.section_end, _KIMI.opens, _KIMI.after_name, _KIMI.closes),
        ends_reasoning=True,
    ),
    Family(
        "minimax-m2",
        TaggedCalls(
            section="<minimax:tool_call>",
            section_end="</minimax:tool_call>",
            opens='<invoke name="',
            after_name='">',
            key_opens='<parameter name="',
            after_key='">',
            value_opens="",
            value_closes="</parameter>",
            closes="</invoke>",
        ),
        ("<minimax:tool_call>", "<invoke name="),
        markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Family(
        "glm-4.5",
        TaggedCalls(
            section="<tool_call>",
            section_end="",
            opens="",
            after_name="",
            key_opens="<arg_key>",
            after_key="</arg_key>",
            value_opens="<arg_value>",
            value_closes="</arg_value>",
            closes="</tool_call>",
        ),
        ("<arg_key>", "<tool_call>"),
        markers=(
            *("<tool_call>", "</tool_call>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
    ),
    Family(
        "seed-oss",
        TaggedCalls(section="<seed:tool_call>", section_end="</seed:tool_call>", **_FUNCTION_TAGS),
        ("<seed:tool_call>",),
        markers=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    Family(
        "qwen3-coder",
        TaggedCalls(section="<tool_call>", section_end="</tool_call>", **_FUNCTION_TAGS),
        ("<function=", "<parameter="),
        markers=("<tool_call>", "</tool_call>"),
    ),
    Family(
        "mistral",
        _MISTRAL,
        ("[TOOL_CALLS]",),
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    Family(
        "hermes",
        JsonCalls(("<tool_call>",), closes="</tool_call>", between="\n"),
        ("<tool_call>",),
        markers=("<tool_call>", "</tool_call>"),
    ),
    Family(
        "llama-3",
        JsonCalls((), between=";", may_begin=("<|python_tag|>",)),
        ("<|start_header_id|>", '"parameters"'),
        markers=("<|python_tag|>",),
    ),
    GENERIC,
)


def family_of(template: str) -> Family:
    """The first family whose marks the template has; GENERIC where none is."""
    for family in FAMILIES:
        if all(mark in template for mark in family.all_of) and not any(
            mark in template for mark in family.none_of
        ):
            return family
    return GENERIC


# Markers around reasoning, by the family that first used them: DeepSeek-R1, Mistral, Seed-OSS.
REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


def reasoning_of(template: str) -> tuple[str, str] | None:
    """The markers around a model's reasoning; None where its template names none."""
    for opens, closes in REASONING:
        if closes in template or opens in template:
            return opens, closes
    return None
