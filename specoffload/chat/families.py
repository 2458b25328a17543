"""Lists llama.cpp's built-in templates, and how model families write tool calls.

docs/chat-formats.md shows what each format looks like.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

# llama.cpp's built-in templates as Jinja, by the names of --chat-template. llama.cpp has them as
# code (llama_chat_apply_template), which the process that renders templates does not load. A test
# compares their output with that of the pinned library.
BUILT_IN: dict[str, str] = json.loads(pkgutil.get_data("specoffload.chat", "built_in.json") or "")
CHATML = BUILT_IN["chatml"]  # for a model whose file has no template

_TAG = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]")


@dataclass(frozen=True)
class CallLayout:
    """The texts that a model writes around the names and arguments of its tool calls.

    If `before_key` is set, each argument has its own markers, and strings have no quotes. Otherwise
    the arguments are a JSON object. If `before_name` ends with `"name": "`, the whole call is a
    JSON object. `{i}` in `name` stands for the call's number; the name with that number is then
    also the call's id. `id_marker` separates a name from an optional id. `is_harmony` is True for
    gpt-oss, which writes a call as a message on a channel and makes one call per answer.
    """

    before_name: str
    after_name: str
    after_arguments: str
    begin: str = ""
    between: str = ""
    end: str = ""
    name: str = "{name}"
    before_key: str = ""
    after_key: str = ""
    after_key_of_string: str = ""  # replaces after_key before a string, if set
    after_value: str = ""
    id_marker: str = ""
    is_harmony: bool = False

    def key_end(self, *, is_string: bool) -> str:
        return (is_string and self.after_key_of_string) or self.after_key

    @cached_property
    def is_json(self) -> bool:
        return self.before_name.endswith('"name": "')

    @cached_property
    def openers(self) -> tuple[str, ...]:
        """The markers at which a call may begin anywhere in a text; empty if the format has none.

        The marker before all calls comes first, if there is one. The marker before each call
        follows.
        """
        if self.is_harmony:
            return ()
        if self.is_json:
            return lines_of(self.begin.partition("{")[0].removesuffix("["),
                          self.before_name.partition("{")[0])  # fmt: skip
        return lines_of(self.begin, self.before_name)

    @cached_property
    def closers(self) -> tuple[str, ...]:
        """The markers after a call, and after all calls."""
        if self.is_json:
            return lines_of(self.after_arguments.removeprefix("}"), self.end.lstrip("]}"))
        return lines_of(self.after_arguments, self.end)

    @cached_property
    def wrapper(self) -> str:
        """The key of the JSON object that holds the list of calls; empty if there is none."""
        return self.begin.split('"')[1] if self.begin.startswith("{") else ""


def lines_of(*texts: str) -> tuple[str, ...]:
    """Return the lines of all texts that are not blank, without blanks around them."""
    return tuple(line.strip() for text in texts for line in text.split("\n") if line.strip())


def written(layout: CallLayout, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return `calls`, each a name and its arguments, as the model would write them."""
    texts = [
        layout.before_name
        + layout.name.replace("{name}", name).replace("{i}", str(at))
        + layout.after_name
        + _written_arguments(layout, arguments)
        + layout.after_arguments
        for at, (name, arguments) in enumerate(calls)
    ]
    return layout.begin + layout.between.join(texts) + layout.end


def _written_arguments(layout: CallLayout, arguments: Mapping[str, Any]) -> str:
    if not layout.before_key:
        return json.dumps(arguments, ensure_ascii=False)
    written = ""
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        written += layout.before_key + key + layout.key_end(is_string=is_string)
        written += text + layout.after_value
    return written


@dataclass(frozen=True)
class Family:
    """Models that write tool calls in one format. Their templates contain all of `marks`."""

    name: str
    marks: tuple[str, ...]
    layout: CallLayout
    more_markers: tuple[str, ...] = ()
    ends_reasoning: bool = False  # True if a call's marker ends open reasoning
    id_length: int | None = None  # required number of characters in a call's id

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens: the tags of the layout, and `more_markers`.

        The engine has to show these special tokens to the parser.
        """
        texts = " ".join(str(getattr(self.layout, field.name)) for field in fields(self.layout))
        return tuple(dict.fromkeys([*self.more_markers, *_TAG.findall(texts)]))


HARMONY_STARTS = ("<|start|>", "<|channel|>")
HARMONY_BODY = "<|message|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", *HARMONY_STARTS)  # end a message's text
HARMONY_ANSWER = "<|channel|>final<|message|>"
# Headers of messages whose text is the answer.
HARMONY_ANSWERS = (HARMONY_ANSWER, "<|channel|>commentary<|message|>")
HARMONY_CALL = "<|channel|>commentary to=functions."
# Texts that open the reasoning, that close it, and that close it and begin the next message.
HARMONY_REASONING = (
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant",
)

_DEEPSEEK = CallLayout(
    begin="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    after_name="<｜tool▁sep｜>",
    after_arguments="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
_FUNCTION = CallLayout(
    before_name="<tool_call>\n<function=",
    after_name=">\n",
    before_key="<parameter=",
    after_key=">\n",
    after_value="\n</parameter>\n",
    after_arguments="</function>\n</tool_call>",
    between="\n",
)
_OBJECT = CallLayout(  # {"name": "f", "arguments": {}}
    before_name='{"name": "', after_name='", "arguments": ', after_arguments="}", between=", "
)

GENERIC = Family("generic", (), replace(_OBJECT, begin='{"tool_calls": [', end="]}"))

# A template belongs to the first family whose marks it contains.
FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        CallLayout(
            before_name=HARMONY_CALL,
            after_name=" <|constrain|>json<|message|>",
            after_arguments="",
            is_harmony=True,
        ),
        (*HARMONY_STARTS, "<|end|>", "<|call|>"),
    ),
    Family(
        "deepseek-v3.2",
        ("｜DSML｜",),
        CallLayout(
            begin="<｜DSML｜function_calls>\n",
            before_name='<｜DSML｜invoke name="',
            after_name='">\n',
            before_key='<｜DSML｜parameter name="',
            after_key='" string="false">',
            after_key_of_string='" string="true">',
            after_value="</｜DSML｜parameter>\n",
            after_arguments="</｜DSML｜invoke>\n",
            end="</｜DSML｜function_calls>",
        ),
        ("｜DSML｜",),
        ends_reasoning=True,
    ),
    Family(
        "deepseek-r1",
        (_DEEPSEEK.begin, "```json"),
        replace(
            _DEEPSEEK,
            name="function<｜tool▁sep｜>{name}",
            after_name="\n```json\n",
            after_arguments="\n```" + _DEEPSEEK.after_arguments,
            between="\n",
        ),
        ends_reasoning=True,
    ),
    Family("deepseek-v3.1", (_DEEPSEEK.begin,), _DEEPSEEK, ends_reasoning=True),
    Family(
        "kimi-k2",
        ("<|tool_calls_section_begin|>",),
        CallLayout(
            begin="<|tool_calls_section_begin|>",
            before_name="<|tool_call_begin|>",
            name="functions.{name}:{i}",
            after_name="<|tool_call_argument_begin|>",
            after_arguments="<|tool_call_end|>",
            end="<|tool_calls_section_end|>",
        ),
        ends_reasoning=True,
    ),
    Family(
        "minimax-m2",
        ("<minimax:tool_call>", "<invoke name="),
        CallLayout(
            begin="<minimax:tool_call>\n",
            before_name='<invoke name="',
            after_name='">\n',
            before_key='<parameter name="',
            after_key='">',
            after_value="</parameter>\n",
            after_arguments="</invoke>\n",
            end="</minimax:tool_call>",
        ),
    ),
    Family(
        "glm-4.5",
        ("<arg_key>", "<tool_call>"),
        CallLayout(
            before_name="<tool_call>",
            after_name="\n",
            before_key="<arg_key>",
            after_key="</arg_key>\n<arg_value>",
            after_value="</arg_value>\n",
            after_arguments="</tool_call>",
            between="\n",
        ),
    ),
    Family(
        "seed-oss",
        ("<seed:tool_call>",),
        replace(
            _FUNCTION,
            before_name="<seed:tool_call>\n<function=",
            after_arguments="</function>\n</seed:tool_call>",
        ),
    ),
    Family("qwen3-coder", ("<function=", "<parameter="), _FUNCTION),
    Family(
        "mistral-v11",  # name in Mistral's tokenizers
        ("[TOOL_CALLS]", "[ARGS]"),
        CallLayout(
            before_name="[TOOL_CALLS]",
            after_name="[ARGS]",
            after_arguments="",
            id_marker="[CALL_ID]",
        ),
        id_length=9,
    ),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        replace(_OBJECT, begin="[TOOL_CALLS][", end="]"),
        id_length=9,
    ),
    Family(
        "hermes",
        ("<tool_call>",),
        replace(
            _OBJECT,
            before_name='<tool_call>\n{"name": "',
            after_arguments="}\n</tool_call>",
            between="\n",
        ),
    ),
    Family(
        "nemotron-v2",
        ("<TOOLCALL>",),
        replace(_OBJECT, begin="<TOOLCALL>[", end="]</TOOLCALL>"),
    ),
    Family(
        "minimax-m1",
        ("<tool_calls>",),
        replace(_OBJECT, begin="<tool_calls>\n", between="\n", end="\n</tool_calls>"),
    ),
    Family("granite", ("<|tool_call|>",), replace(_OBJECT, begin="<|tool_call|>[", end="]")),
    Family(
        "llama-3",
        ("<|start_header_id|>", '"parameters"'),
        replace(_OBJECT, after_name='", "parameters": ', between="; "),
        ("<|python_tag|>",),
    ),
    GENERIC,
)

_HARMONY_MARKED = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(analysis|final)<\|message\|>"
    r"(.*?)(?:<\|end\|>|<\|return\|>|(?=(?:<\|start\|>assistant)?<\|channel\|>)|\Z)",
    re.DOTALL,
)


def without_harmony(content: str) -> tuple[str, str]:
    """Return the reasoning and the rest of an answer that gpt-oss's markers may be part of.

    With the reasoning format "none" the content of an answer has these markers, and gpt-oss's
    template refuses them.
    """
    thoughts: list[str] = []

    def taken(match: re.Match[str]) -> str:
        if match[1] == "final":
            return match[2]
        thoughts.append(match[2])
        return ""

    rest = _HARMONY_MARKED.sub(taken, content)
    return "\n\n".join(filter(None, thoughts)), rest


def family_of(template: str) -> Family:
    """Return the family of a chat template; GENERIC, which has no marks, if no other matches."""
    return next(f for f in FAMILIES if all(mark in template for mark in f.marks))


# Markers around reasoning, by the family that first used them: DeepSeek-R1, Mistral, Seed-OSS.
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


def reasoning_of(template: str) -> tuple[str, str] | None:
    """Return the two markers around a model's reasoning; None if its template has none."""
    for opens, closes in _REASONING:
        if closes in template or opens in template:
            return opens, closes
    return None
