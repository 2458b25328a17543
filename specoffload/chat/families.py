"""The tool-call formats of model families, and which of them a chat template teaches its model.

One row is one family; docs/chat-formats.md shows what each looks like. The rows are in the order in
which a template is tried: the most telling marker first.
"""

from __future__ import annotations

from dataclasses import replace

from specoffload.chat.family import Family, HarmonyCalls, MistralCalls
from specoffload.chat.layout import Layout
from specoffload.chat.parsing import harmony
from specoffload.chat.parsing.json_calls import JsonCalls, NamedCalls
from specoffload.chat.parsing.tagged_calls import TaggedCalls

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
_DSML = TaggedCalls(
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
)
_INVOKE = TaggedCalls(
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    opens='<invoke name="',
    after_name='">',
    key_opens='<parameter name="',
    after_key='">',
    value_opens="",
    value_closes="</parameter>",
    closes="</invoke>",
)
_GLM = TaggedCalls(
    section="<tool_call>",
    section_end="",
    opens="",
    after_name="",
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
    value_opens="",
    value_closes="</parameter>",
    closes="</function>",
)
_FUNCTION_LAYOUT = Layout(
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
_MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_OBJECT = Layout(  # {"name": "f", "arguments": {}}
    before_name='{"name": "', after_name='", "arguments": ', after_arguments="}", between=", "
)

GENERIC = Family(
    "generic",
    (),
    JsonCalls((), wrapper="tool_calls"),
    replace(_OBJECT, begin='{"tool_calls": [', end="]}"),
)

FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        HarmonyCalls(),
        Layout(
            before_name="<|channel|>commentary to=functions.",
            after_name=" <|constrain|>json<|message|>",
            after_arguments="",
            one_only=True,
        ),
        harmony.MARKERS,
    ),
    Family(
        "deepseek-v3.2",
        ("｜DSML｜",),
        _DSML,
        Layout(
            begin=_DSML.section + "\n",
            before_name=_DSML.opens,
            after_name='">\n',
            before_key=_DSML.key_opens,
            after_key='" string="false">',
            after_key_of_string='" string="true">',
            after_value=_DSML.value_closes + "\n",
            after_arguments=_DSML.closes + "\n",
            end=_DSML.section_end,
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
        Layout(
            begin=_DEEPSEEK.section,
            before_name=_DEEPSEEK.opens + "function<｜tool▁sep｜>",
            after_name="\n```json\n",
            after_arguments="\n```" + _DEEPSEEK.closes,
            between="\n",
            end=_DEEPSEEK.section_end,
        ),
        _DEEPSEEK_MARKERS,
        ends_reasoning=True,
    ),
    Family(
        "deepseek-v3.1",
        (_DEEPSEEK.section,),
        _DEEPSEEK,
        Layout(
            begin=_DEEPSEEK.section,
            before_name=_DEEPSEEK.opens,
            after_name=_DEEPSEEK.after_name,
            after_arguments=_DEEPSEEK.closes,
            end=_DEEPSEEK.section_end,
        ),
        _DEEPSEEK_MARKERS,
        ends_reasoning=True,
    ),
    Family(
        "kimi-k2",
        (_KIMI.section,),
        _KIMI,
        Layout(
            begin=_KIMI.section,
            before_name=_KIMI.opens + "functions.",
            after_name=":{i}" + _KIMI.after_name,
            after_arguments=_KIMI.closes,
            end=_KIMI.section_end,
        ),
        (_KIMI.section, _KIMI.section_end, _KIMI.opens, _KIMI.after_name, _KIMI.closes),
        ends_reasoning=True,
    ),
    Family(
        "minimax-m2",
        (_INVOKE.section, "<invoke name="),
        _INVOKE,
        Layout(
            begin=_INVOKE.section + "\n",
            before_name=_INVOKE.opens,
            after_name='">\n',
            before_key=_INVOKE.key_opens,
            after_key='">',
            after_value=_INVOKE.value_closes + "\n",
            after_arguments=_INVOKE.closes + "\n",
            end=_INVOKE.section_end,
        ),
        (_INVOKE.section, _INVOKE.section_end),
    ),
    Family(
        "glm-4.5",
        ("<arg_key>", "<tool_call>"),
        _GLM,
        Layout(
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
        "mistral-v11",  # of Mistral's tokenizers
        ("[TOOL_CALLS]", "[ARGS]"),
        _MISTRAL,
        Layout(before_name="[TOOL_CALLS]", after_name="[ARGS]", after_arguments=""),
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
        Layout(
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
        JsonCalls((), between=";", may_begin=("<|python_tag|>",)),
        replace(_OBJECT, after_name='", "parameters": ', between="; "),
        ("<|python_tag|>",),
    ),
    GENERIC,
)


def family_of(template: str) -> Family:
    """The first family whose marks the template has; GENERIC has none."""
    return next(f for f in FAMILIES if all(mark in template for mark in f.marks))


# Markers around reasoning, by the family that first used them: DeepSeek-R1, Mistral, Seed-OSS.
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


def reasoning_of(template: str) -> tuple[str, str] | None:
    """The markers around a model's reasoning; None where its template names none."""
    for opens, closes in _REASONING:
        if closes in template or opens in template:
            return opens, closes
    return None
