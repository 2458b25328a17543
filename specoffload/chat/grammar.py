"""Grammars that hold an answer to tool calls in the form of the model's family.

GBNF, with `%json {...}` for text that follows a JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specoffload.chat.conversation import Tool
from specoffload.chat.families import GENERIC
from specoffload.chat.family import Family, HarmonyCalls, openers
from specoffload.chat.layout import Layout
from specoffload.chat.parsing.tagged_calls import types_of

_SPACE = "[ \\t\\r\\n]{0,8}"
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class Asked:
    """Calls that an answer may have, or must: one, or where `parallel` some.

    It may reason before, between the markers `reasoning`; where `thinking`, the first of them
    stands in the prompt.
    """

    family: Family
    tools: tuple[Tool, ...]
    must_call: bool
    parallel: bool = True
    reasoning: tuple[str, str] | None = None
    thinking: bool = False
    schema: str | None = None  # of an answer that is no call, as JSON text


def answer_grammar(asked: Asked) -> str | None:
    """GBNF for the answer; None where it is free.

    An answer that need not be a call is free, but for the family that has no format of its own: if
    it begins with a brace, it is calls. With a strict tool, every family's calls are held to the
    schemas, also where they are free to come. With a schema, an answer of a family whose calls
    begin with a brace is none: one brace cannot be told from the other.
    """
    harmony = isinstance(asked.family.calls, HarmonyCalls)
    if asked.schema is not None and not (asked.tools or asked.reasoning or harmony):
        return None  # the schema alone says it
    generic = asked.family.name == GENERIC.name
    holds = asked.must_call or generic or any(tool.strict for tool in asked.tools)
    if asked.schema is None and not (asked.tools and holds):
        return None
    rules = _Rules()
    layout = asked.family.layout
    is_bare = (layout.begin + layout.before_name).startswith("{")
    with_calls = asked.must_call or not (asked.schema is not None and is_bare)
    forms = [_calls(rules, asked)] if asked.tools and with_calls else []
    if asked.schema is not None and not asked.must_call:
        final = '"<|channel|>final<|message|>" ' if harmony else ""
        forms.append(f"{final}%json {asked.schema}")
    elif not asked.must_call and harmony:
        forms.append('"<|channel|>final<|message|>" [^\\x00]*')
    elif not asked.must_call and (markers := openers(asked.family.calls)):
        forms = [f"{without(markers)} ({forms[0]})?"]
    elif not asked.must_call:
        forms.append("([^{ \\t\\r\\n] [^\\x00]*)?")
    return rules.text(f"{_before(rules, asked)} ({' | '.join(forms)})")


def _calls(rules: _Rules, asked: Asked) -> str:
    layout = asked.family.layout
    calls = [_call(rules, layout, tool, at) for at, tool in enumerate(asked.tools)]
    rules.add("call", " | ".join(calls))
    more = ""
    if asked.parallel and not layout.one_only:
        more = f" ({literal(layout.between)} call)*" if layout.between else " call*"
    return f"{literal(layout.begin)} call{more} {literal(layout.end)}"


def _before(rules: _Rules, asked: Asked) -> str:
    if isinstance(asked.family.calls, HarmonyCalls):
        opens, closes = "<|channel|>analysis<|message|>", "<|end|>"
        return f'({literal(opens)} {rules.until(closes)} "<|start|>assistant")?'
    if asked.reasoning is None:
        return _SPACE
    opens, closes = asked.reasoning
    if asked.thinking:
        return f"{rules.until(closes)} {_SPACE}"
    return f"{_SPACE} ({literal(opens)} {rules.until(closes)} {_SPACE})?"


class _Rules:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self._texts: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        self._lines.append(f"{name} ::= {body}")
        return name

    def until(self, marker: str) -> str:
        """The rule of any text up to the first `marker`, and that."""
        if marker not in self._texts:
            self._texts[marker] = self.add(f"text-{len(self._texts)}", until(marker))
        return self._texts[marker]

    def text(self, root: str) -> str:
        return "\n".join([f"root ::= {root}", *self._lines]) + "\n"


def _call(rules: _Rules, layout: Layout, tool: Tool, at: int) -> str:
    after_name = layout.after_name
    if "{i}" in after_name:
        left, right = after_name.split("{i}")
        after = f"{literal(left)} [0-9]{{1,4}} {literal(right)}"
    else:
        after = literal(after_name)
    arguments = (
        _tagged(rules, layout, tool, at)
        if layout.before_key
        else rules.add(f"arguments-{at}", _json(_object(tool.parameters)))
    )
    body = f"{literal(layout.before_name + tool.name)} {after} {arguments}"
    return rules.add(f"call-{at}", f"{body} {literal(layout.after_arguments)}")


def _tagged(rules: _Rules, layout: Layout, tool: Tool, at: int) -> str:
    """The arguments in the schema's order, those not required as it likes."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required") or ()
    parts = []
    for i, (key, schema) in enumerate(properties.items() if properties else ()):
        value, is_string = _value(rules, layout, schema, tool.parameters)
        body = f"{literal(layout.before_key + key + layout.key_end(is_string=is_string))} {value}"
        name = rules.add(f"argument-{at}-{i}", body)
        parts.append(name if key in required else f"{name}?")
    return " ".join(parts) or '""'


def _value(
    rules: _Rules, layout: Layout, schema: object, root: Mapping[str, Any]
) -> tuple[str, bool]:
    """A value with what follows it, and True if it is written as a string."""
    after = literal(layout.after_value)
    if not isinstance(schema, Mapping):
        return f"{_json({})} {after}", False
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
        return f"({' | '.join(literal(choice) for choice in choices)}) {after}", True
    if types_of(schema, root) == {"string"}:
        return rules.until(layout.after_value), True
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    return f"{_json({**schema, **definitions})} {after}", False


def _object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    if set(parameters) <= {"type"}:  # nothing is said of its arguments: it has none
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def literal(text: str) -> str:
    """GBNF of exactly this text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def until(marker: str) -> str:
    """GBNF of any text up to the first `marker`, and that.

    The automaton that looks for the marker (Knuth, Morris and Pratt 1977), written with loops and
    no recursion: an Earley parser follows these at a constant cost per token. White space at the
    marker's ends is left to the text. The marker's first character is not in it again.
    """
    word = marker.strip()
    first, rest = word[0], word[1:]
    assert first not in rest
    begun = [literal(rest[:n]) for n in range(len(rest))]  # of the marker, past its first
    again = [f"{b} {_one_of(first)}" for b in begun]
    failed = [f"{b} {_none_of(first + rest[n])}" for n, b in enumerate(begun)]
    start = f"{_one_of(first)} ({' | '.join(again)})*"
    space = literal(marker[len(marker.rstrip()) :])
    return f"({_none_of(first)} | {start} ({' | '.join(failed)}))* {start} {literal(rest)} {space}"


def without(markers: Sequence[str]) -> str:
    """GBNF of any text in which none of `markers` is, which may end with a part of one.

    They begin with the same character, which is not in them again. An automaton as in `until`, over
    the tree of what may follow that character.
    """
    stripped = sorted({marker.strip() for marker in markers})
    words = [
        w for w in stripped if not any(w != other and w.startswith(other) for other in stripped)
    ]
    first = words[0][0]
    assert all(word[0] == first and first not in word[1:] for word in words)
    follows: dict[str, set[str]] = {}  # a marker's part past its first -> what may come next
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
