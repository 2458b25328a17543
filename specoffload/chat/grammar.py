"""Writes grammars that restrict an answer to tool calls in the format of the model's family.

The grammars are GBNF, in which `%json {...}` stands for text that follows a JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offload.sampling.schema_places import escaped, has_ref, moved
from offload.sampling.schema_words import ANNOTATIONS
from specoffload.chat.calls import types_of
from specoffload.chat.conversation import Allowed, Conversation, Tool
from specoffload.chat.families import (
    GENERIC,
    HARMONY_ANSWER,
    HARMONY_ENDS,
    HARMONY_REASONING,
    HARMONY_STARTS,
    CallLayout,
    Family,
)
from specoffload.chat.tool_schemas import SchemaNote, followable

_SPACE = "[ \\t\\r\\n]{0,8}"
_HARMONY_END = HARMONY_REASONING[2]  # closes the reasoning, and begins the next message


def answer_grammar(
    conversation: Conversation,
    family: Family,
    reasoning: tuple[str, str] | None = None,
    *,
    thinking: bool = False,
    in_answer: bool = False,
    note: Callable[[SchemaNote], object] = lambda note: None,
) -> str | None:
    """Return the GBNF for the answer to a conversation, or None if no grammar is needed.

    `reasoning` has the two markers around the answer's reasoning. `thinking` is True if the prompt
    ends inside the reasoning. `in_answer` is True if it ends inside the answer's text. `note`
    gets each keyword of a tool's schema that has no effect.

    The grammar restricts an answer that must be a call or has to follow a schema. It restricts
    other answers in two cases. If a tool is strict or only some may be called, the calls follow the
    tools' schemas. If the family is GENERIC, which has no call format of its own, an answer that
    begins with a brace must consist of calls.

    Raises BadRequest for a schema that cannot be followed, if the answer must be a call.

    Optional calls are excluded if the answer has to follow a schema and the family's calls begin
    with a brace, because such calls could not be distinguished from the answer.
    """
    tools, schema, must_call = (
        conversation.callable_tools, conversation.schema, conversation.must_call
    )  # fmt: skip
    layout = family.layout
    harmony = layout.is_harmony
    final = f"{literal(HARMONY_ANSWER)} " if harmony and not in_answer else ""
    reasoning = None if in_answer else reasoning
    if schema is not None and not (tools or reasoning or harmony):
        return None  # the engine follows the schema without a grammar
    holds = must_call or family.name == GENERIC.name or any(tool.strict for tool in tools)
    if schema is None and not (tools and (holds or isinstance(conversation.tool_choice, Allowed))):
        return None
    rules = _Rules()
    is_bare = (layout.begin + layout.before_name).startswith("{")
    if in_answer and is_bare and schema is None and not must_call:
        return None  # a brace in the middle of a text opens no call
    with_calls = must_call or not (schema is not None and is_bare)
    forms = []
    if tools and with_calls:
        tools, notes = followable(tools, must_call=must_call)
        for found in notes:
            note(found)
        forms = [_calls(rules, layout, tools, parallel=conversation.parallel_tool_calls)]
    if must_call:
        pass
    elif schema is not None:
        forms.append(f"{final}%json {schema}")
    elif harmony:
        forms.append(f"{final}{without(HARMONY_ENDS)}")
    elif markers := layout.openers:
        forms = [f"{without(markers)} ({forms[0]})?"]
    else:
        forms.append("([^{ \\t\\r\\n] [^\\x00]*)?")
    if harmony and in_answer:
        before = f"({literal(_HARMONY_END)})?" if must_call else ""
    else:
        space = "" if harmony or thinking else f"{_SPACE} "
        before = space + _reasoning(family, reasoning, rules.until, thinking=thinking)
    return rules.text(f"{before} ({' | '.join(forms)})")


def after_reasoning(
    gbnf: str, family: Family, reasoning: tuple[str, str] | None, *, thinking: bool
) -> tuple[str, str]:
    """Return a client's grammar with the answer's reasoning before it, and the name of its root.

    A grammar that has a marker of the reasoning describes the reasoning itself. It is returned as
    it is. The other arguments are those of `answer_grammar`.
    """
    harmony = family.layout.is_harmony
    markers = (HARMONY_STARTS[1], HARMONY_REASONING[1]) if harmony else reasoning
    if markers is None or any(marker in gbnf for marker in markers):
        return gbnf, "root"
    root = "answer"
    while root in gbnf:
        root += "-"
    before = _reasoning(family, reasoning, until, thinking=thinking)
    final = literal(HARMONY_ANSWER) if harmony else ""
    return f"{gbnf}\n{root} ::= {before} {final} root\n", root


def _reasoning(
    family: Family,
    reasoning: tuple[str, str] | None,
    until: Callable[[str], str],
    *,
    thinking: bool,
) -> str:
    """Return the GBNF of the reasoning before an answer. Unless `thinking`, it may be absent."""
    if family.layout.is_harmony:
        opens = HARMONY_REASONING[0]
        text = f"{without(HARMONY_ENDS)} {literal(_HARMONY_END)}"
    elif reasoning is not None:
        opens, closes = reasoning
        openers = family.layout.openers if family.ends_reasoning else ()
        thought = f"{without((closes, *openers))} {literal(closes)}" if openers else until(closes)
        text = f"{thought} {_SPACE}"
    else:
        return ""
    return text if thinking else f"({literal(opens)} {text})?"


class _Rules:
    """Collects the rules of a grammar."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._texts: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        self._lines.append(f"{name} ::= {body}")
        return name

    def until(self, marker: str) -> str:
        """Return the name of the rule for any text up to and including the first `marker`."""
        if marker not in self._texts:
            self._texts[marker] = self.add(f"text-{len(self._texts)}", until(marker))
        return self._texts[marker]

    def text(self, root: str) -> str:
        return "\n".join([f"root ::= {root}", *self._lines]) + "\n"


def _calls(rules: _Rules, layout: CallLayout, tools: Sequence[Tool], *, parallel: bool) -> str:
    calls = [_call(rules, layout, tool, at) for at, tool in enumerate(tools)]
    rules.add("call", " | ".join(calls))
    more = ""
    if parallel and not layout.is_harmony:
        more = f" ({literal(layout.between)} call)*" if layout.between else " call*"
    return f"{literal(layout.begin)} call{more} {literal(layout.end)}"


def _call(rules: _Rules, layout: CallLayout, tool: Tool, at: int) -> str:
    head = layout.before_name + layout.name.replace("{name}", tool.name) + layout.after_name
    before_arguments = " [0-9]{1,4} ".join(map(literal, head.split("{i}")))
    if layout.before_key:
        arguments = _tagged(rules, layout, tool, at)
    else:
        schema: dict[str, Any] = {"type": "object", **tool.parameters}
        if set(tool.parameters) <= {"type"}:  # a tool without arguments
            schema = {"type": "object", "properties": {}, "additionalProperties": False}
        arguments = rules.add(f"arguments-{at}", _json(schema))
    body = f"{before_arguments} {arguments} {literal(layout.after_arguments)}"
    return rules.add(f"call-{at}", body)


def _tagged(rules: _Rules, layout: CallLayout, tool: Tool, at: int) -> str:
    """Return the GBNF of a tool's arguments in the schema's order. Optional ones may be absent."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required") or ()
    parts = []
    for i, key in enumerate(properties if isinstance(properties, Mapping) else ()):
        forms = [
            f"{literal(layout.before_key + key + layout.key_end(is_string=is_string))} {value}"
            for value, is_string in _values(rules, layout, key, tool.parameters)
        ]
        name = rules.add(f"argument-{at}-{i}", " | ".join(forms))
        parts.append(name if key in required else f"{name}?")
    return " ".join(parts) or '""'


def _values(
    rules: _Rules, layout: CallLayout, key: str, parameters: Mapping[str, Any]
) -> list[tuple[str, bool]]:
    """Return the forms of an argument: GBNF of the value and its end, and whether it is a string.

    A value of any type may be a string, which has no quotes, or JSON.
    """
    after = literal(layout.after_value)
    schema = parameters["properties"][key]
    if not isinstance(schema, Mapping):
        schema = {}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
        return [(f"({' | '.join(literal(choice) for choice in choices)}) {after}", True)]
    text = rules.until(layout.after_value), True
    if types_of(schema, parameters) == {"string"}:
        return [text]
    if has_ref(schema):  # to any place of the parameters
        schema = moved(parameters, f"#/properties/{escaped(key)}")
    form = f"{_json(schema)} {after}", False
    return [text, form] if not set(schema) - ANNOTATIONS else [form]


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def literal(text: str) -> str:
    """Return GBNF that matches exactly `text`."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def until(marker: str) -> str:
    """Return GBNF that matches any text up to and including the first `marker`.

    The GBNF describes the automaton that finds the marker (Knuth, Morris and Pratt 1977). It uses
    loops and no recursion, so an Earley parser's cost per token is constant. The marker's leading
    white space need not occur, but its trailing white space must. The marker's first other
    character must not occur in it again.
    """
    word = marker.strip()
    first, rest = word[0], word[1:]
    assert first not in rest
    # The marker's beginnings, without `first`.
    begun = [literal(rest[:n]) for n in range(len(rest))]
    again = [f"{b} {_one_of(first)}" for b in begun]
    failed = [f"{b} {_none_of(first + rest[n])}" for n, b in enumerate(begun)]
    start = f"{_one_of(first)} ({' | '.join(again)})*"
    space = literal(marker[len(marker.rstrip()) :])
    return f"({_none_of(first)} | {start} ({' | '.join(failed)}))* {start} {literal(rest)} {space}"


def without(markers: Sequence[str]) -> str:
    """Return GBNF that matches any text in which none of `markers` is complete.

    The text may end with the beginning of a marker. All markers must begin with the same character,
    which must not occur in them again. The GBNF describes an automaton as in `until`, here for
    several markers at once.
    """
    stripped = sorted({marker.strip() for marker in markers})
    words = [
        w for w in stripped if not any(w != other and w.startswith(other) for other in stripped)
    ]
    first = words[0][0]
    assert all(word[0] == first and first not in word[1:] for word in words)
    follows: dict[str, set[str]] = {}  # next letters by beginning, without `first`
    for word in words:
        for n in range(1, len(word)):
            follows.setdefault(word[1:n], set()).add(word[n])
    begun = [literal(part) for part in follows]
    again = f"({' | '.join(f'{b} {_one_of(first)}' for b in begun)})*"
    failed = [
        f"{literal(part)} {_none_of(first + ''.join(sorted(more)))}"
        for part, more in follows.items()
    ]
    start = _one_of(first)
    return (
        f"({_none_of(first)} | {start} {again} ({' | '.join(failed)}))* "
        f"({start} ({' | '.join(begun)}))*"
    )


def _one_of(characters: str) -> str:
    return f"[{_class(characters)}]"


def _none_of(characters: str) -> str:
    return f"[^{_class(characters)}]"


def _class(characters: str) -> str:
    return "".join(f"\\U{ord(c):08x}" for c in characters)
