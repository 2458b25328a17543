"""The tool-call formats of model families, and which of them a chat template teaches its model.

docs/chat-formats.md shows what each format looks like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specoffload.chat.calls import (
    Calls,
    HarmonyCalls,
    JsonCalls,
    MistralCalls,
    NamedCalls,
    TaggedCalls,
)


@dataclass(frozen=True)
class CallLayout:
    """The texts around names, arguments and calls, for writing calls.

    With `before_key`, arguments are written one by one, and strings as they are. Without it, they
    are a JSON object. `{i}` in `after_name` is the call's number.
    """

    before_name: str
    after_name: str
    after_arguments: str
    begin: str = ""
    between: str = ""
    end: str = ""
    before_key: str = ""
    after_key: str = ""
    after_key_of_string: str | None = None  # if it differs
    after_value: str = ""
    one_only: bool = False  # an answer has one call

    def key_end(self, *, is_string: bool) -> str:
        if is_string and self.after_key_of_string is not None:
            return self.after_key_of_string
        return self.after_key


@dataclass(frozen=True)
class Family:
    """Models that write tool calls in one format. Their templates contain all of `marks`. `markers`
    may be special tokens of the vocabulary, which the engine has to show to the parser."""

    name: str
    marks: tuple[str, ...]
    calls: Calls
    layout: CallLayout
    markers: tuple[str, ...] = ()
    ends_reasoning: bool = False  # the marker of a call ends reasoning that is not closed
    id_length: int | None = None  # characters of a call's id, if the template requires one


def written(layout: CallLayout, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """`calls`, each a name and its arguments, as the model would write them."""
    texts = [
        layout.before_name
        + name
        + layout.after_name.replace("{i}", str(at))
        + _written_arguments(layout, arguments)
        + layout.after_arguments
        for at, (name, arguments) in enumerate(calls)
    ]
    return layout.begin + layout.between.join(texts) + layout.end


def _written_arguments(layout: CallLayout, arguments: Mapping[str, Any]) -> str:
    if not layout.before_key:
        return json.dumps(arguments, ensure_ascii=False)
    found = ""
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        found += layout.before_key + key + layout.key_end(is_string=is_string)
        found += text + layout.after_value
    return found


HARMONY_STARTS = ("<|start|>", "<|channel|>")
HARMONY_BODY = "<|message|>"
# Texts that open the reasoning, that close it, and that close it and begin the answer.
HARMONY_REASONING = (
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)


def _sectioned(calls: NamedCalls | TaggedCalls, gap: str = "") -> CallLayout:
    """The layout that writes the markers of `calls`, with `gap` after most of them."""
    layout = CallLayout(
        begin=calls.section + gap,
        before_name=calls.opens,
        after_name=calls.after_name + gap,
        after_arguments=calls.closes + gap,
        end=calls.section_end,
    )
    if isinstance(calls, NamedCalls):
        return layout
    return replace(
        layout,
        before_key=calls.key_opens,
        after_key=calls.after_key,
        after_value=calls.value_closes + gap,
    )


def _markers(calls: NamedCalls) -> tuple[str, ...]:
    return calls.section, calls.section_end, calls.opens, calls.after_name, calls.closes


_DEEPSEEK = NamedCalls(
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    opens="<｜tool▁call▁begin｜>",
    after_name="<｜tool▁sep｜>",
    closes="<｜tool▁call▁end｜>",
)
_KIMI = NamedCalls(
    section="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    opens="<|tool_call_begin|>",
    after_name="<|tool_call_argument_begin|>",
    closes="<|tool_call_end|>",
    name_is_id=True,
)
_DSML = TaggedCalls(
    section="<｜DSML｜function_calls>",
    section_end="</｜DSML｜function_calls>",
    opens='<｜DSML｜invoke name="',
    after_name='">',
    key_opens='<｜DSML｜parameter name="',
    after_key='">',
    value_closes="</｜DSML｜parameter>",
    closes="</｜DSML｜invoke>",
    string_mark='" string="true',
    other_mark='" string="false',
)
_INVOKE = TaggedCalls(
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    opens='<invoke name="',
    after_name='">',
    key_opens='<parameter name="',
    after_key='">',
    value_closes="</parameter>",
    closes="</invoke>",
)
_GLM = TaggedCalls(
    section="<tool_call>",
    key_opens="<arg_key>",
    after_key="</arg_key>",
    value_opens="<arg_value>",
    value_closes="</arg_value>",
    closes="</tool_call>",
)
_FUNCTION = TaggedCalls(
    section="<tool_call>",
    section_end="</tool_call>",
    opens="<function=",
    after_name=">",
    key_opens="<parameter=",
    after_key=">",
    value_closes="</parameter>",
    closes="</function>",
)
_FUNCTION_LAYOUT = CallLayout(
    before_name="<tool_call>\n<function=",
    after_name=">\n",
    before_key="<parameter=",
    after_key=">\n",
    after_value="\n</parameter>\n",
    after_arguments="</function>\n</tool_call>",
    between="\n",
)
_MISTRAL = MistralCalls(
    JsonCalls(("[TOOL_CALLS]",)),
    NamedCalls(opens="[TOOL_CALLS]", after_name="[ARGS]", id_marker="[CALL_ID]"),
)
_MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_OBJECT = CallLayout(  # {"name": "f", "arguments": {}}
    before_name='{"name": "', after_name='", "arguments": ', after_arguments="}", between=", "
)

GENERIC = Family(
    "generic",
    (),
    JsonCalls(wrapper="tool_calls"),
    replace(_OBJECT, begin='{"tool_calls": [', end="]}"),
)

# The first family whose marks a template contains is its family.
FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        HarmonyCalls(),
        CallLayout(
            before_name="<|channel|>commentary to=functions.",
            after_name=" <|constrain|>json<|message|>",
            after_arguments="",
            one_only=True,
        ),
        (*HARMONY_STARTS, HARMONY_BODY, "<|constrain|>", "<|end|>", "<|call|>"),
    ),
    Family(
        "deepseek-v3.2",
        ("｜DSML｜",),
        _DSML,
        replace(
            _sectioned(_DSML, "\n"),
            after_key='" string="false">',
            after_key_of_string='" string="true">',
        ),
        ("｜DSML｜",),
        ends_reasoning=True,
    ),
    Family(
        "deepseek-r1",
        (_DEEPSEEK.section, "```json"),
        replace(
            _DEEPSEEK,
            prefix="function<｜tool▁sep｜>",
            after_name="```json",
            closes="```" + _DEEPSEEK.closes,
        ),
        replace(
            _sectioned(_DEEPSEEK),
            before_name=_DEEPSEEK.opens + "function<｜tool▁sep｜>",
            after_name="\n```json\n",
            after_arguments="\n```" + _DEEPSEEK.closes,
            between="\n",
        ),
        _markers(_DEEPSEEK),
        ends_reasoning=True,
    ),
    Family(
        "deepseek-v3.1",
        (_DEEPSEEK.section,),
        _DEEPSEEK,
        _sectioned(_DEEPSEEK),
        _markers(_DEEPSEEK),
        ends_reasoning=True,
    ),
    Family(
        "kimi-k2",
        (_KIMI.section,),
        _KIMI,
        replace(
            _sectioned(_KIMI),
            before_name=_KIMI.opens + "functions.",
            after_name=":{i}" + _KIMI.after_name,
        ),
        _markers(_KIMI),
        ends_reasoning=True,
    ),
    Family(
        "minimax-m2",
        (_INVOKE.section, "<invoke name="),
        _INVOKE,
        _sectioned(_INVOKE, "\n"),
        (_INVOKE.section, _INVOKE.section_end),
    ),
    Family(
        "glm-4.5",
        ("<arg_key>", "<tool_call>"),
        _GLM,
        CallLayout(
            before_name=_GLM.section,
            after_name="\n",
            before_key="<arg_key>",
            after_key="</arg_key>\n<arg_value>",
            after_value="</arg_value>\n",
            after_arguments=_GLM.closes,
            between="\n",
        ),
        (_GLM.section, _GLM.closes, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Family(
        "seed-oss",
        ("<seed:tool_call>",),
        replace(_FUNCTION, section="<seed:tool_call>", section_end="</seed:tool_call>"),
        replace(
            _FUNCTION_LAYOUT,
            before_name="<seed:tool_call>\n<function=",
            after_arguments="</function>\n</seed:tool_call>",
        ),
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    Family(
        "qwen3-coder",
        ("<function=", "<parameter="),
        _FUNCTION,
        _FUNCTION_LAYOUT,
        (_FUNCTION.section, _FUNCTION.section_end),
    ),
    Family(
        "mistral-v11",  # name in Mistral's tokenizers
        ("[TOOL_CALLS]", "[ARGS]"),
        _MISTRAL,
        CallLayout(before_name="[TOOL_CALLS]", after_name="[ARGS]", after_arguments=""),
        _MISTRAL_MARKERS,
        id_length=9,
    ),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        _MISTRAL,
        replace(_OBJECT, begin="[TOOL_CALLS][", end="]"),
        _MISTRAL_MARKERS,
        id_length=9,
    ),
    Family(
        "hermes",
        ("<tool_call>",),
        JsonCalls(("<tool_call>",), closes="</tool_call>", between="\n"),
        CallLayout(
            before_name='<tool_call>\n{"name": "',
            after_name='", "arguments": ',
            after_arguments="}\n</tool_call>",
            between="\n",
        ),
        ("<tool_call>", "</tool_call>"),
    ),
    Family(
        "nemotron-v2",
        ("<TOOLCALL>",),
        JsonCalls(("<TOOLCALL>",), closes="</TOOLCALL>"),
        replace(_OBJECT, begin="<TOOLCALL>[", end="]</TOOLCALL>"),
        ("<TOOLCALL>", "</TOOLCALL>"),
    ),
    Family(
        "minimax-m1",
        ("<tool_calls>",),
        JsonCalls(("<tool_calls>",), closes="</tool_calls>", between="\n"),
        replace(_OBJECT, begin="<tool_calls>\n", between="\n", end="\n</tool_calls>"),
        ("<tool_calls>", "</tool_calls>"),
    ),
    Family(
        "granite",
        ("<|tool_call|>",),
        JsonCalls(("<|tool_call|>",)),
        replace(_OBJECT, begin="<|tool_call|>[", end="]"),
        ("<|tool_call|>",),
    ),
    Family(
        "llama-3",
        ("<|start_header_id|>", '"parameters"'),
        JsonCalls(between=";", may_begin=("<|python_tag|>",)),
        replace(_OBJECT, after_name='", "parameters": ', between="; "),
        ("<|python_tag|>",),
    ),
    GENERIC,
)


def family_of(template: str) -> Family:
    """The family of a template. GENERIC, the last one, has no marks."""
    return next(f for f in FAMILIES if all(mark in template for mark in f.marks))


# Markers around reasoning, by the family that first used them: DeepSeek-R1, Mistral, Seed-OSS.
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


def reasoning_of(template: str) -> tuple[str, str] | None:
    """The markers around a model's reasoning; None if its template has none."""
    for opens, closes in _REASONING:
        if closes in template or opens in template:
            return opens, closes
    return None
