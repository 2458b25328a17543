"""Writes grammars that restrict an answer to tool calls in the format of the model's family.

The grammars are GBNF, in which `%json {...}` stands for text that follows a JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from offload.sampling.gbnf import text_symbol
from offload.sampling.schema_text import BareText, Rule, joined
from offload.sampling.schema_text import literal as exactly
from offload.sampling.schema_words import ANNOTATIONS
from specoffload.chat.arguments import Arguments
from specoffload.chat.calls import is_read_as_text
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
from specoffload.chat.tool_schemas import SchemaNote, followable, refuse_strict

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

    Raises BadRequest for a schema that cannot be followed, if the answer must be a call or the tool
    is strict.

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
        tools, lost = followable(tools, must_call=must_call)
        notes = list(lost)
        parallel = conversation.parallel_tool_calls
        forms = [_calls(rules, layout, tools, notes.append, parallel=parallel)]
        refuse_strict(tools, notes)
        for left_out in notes:
            note(left_out)
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


def _calls(
    rules: _Rules,
    layout: CallLayout,
    tools: Sequence[Tool],
    note: Callable[[SchemaNote], object],
    *,
    parallel: bool,
) -> str:
    calls = [_call(rules, layout, tool, at, note) for at, tool in enumerate(tools)]
    rules.add("call", " | ".join(calls))
    more = ""
    if parallel and not layout.is_harmony:
        more = f" ({literal(layout.between)} call)*" if layout.between else " call*"
    return f"{literal(layout.begin)} call{more} {literal(layout.end)}"


def _call(
    rules: _Rules, layout: CallLayout, tool: Tool, at: int, note: Callable[[SchemaNote], object]
) -> str:
    head = layout.before_name + layout.name.replace("{name}", tool.name) + layout.after_name
    before_arguments = " [0-9]{1,4} ".join(map(literal, head.split("{i}")))
    if layout.before_key:
        arguments = _tagged(rules, layout, tool, at, note)
    else:
        schema: dict[str, Any] = {"type": "object", **tool.parameters}
        if set(tool.parameters) <= {"type"}:  # a tool without arguments
            schema = {"type": "object", "properties": {}, "additionalProperties": False}
        arguments = rules.add(f"arguments-{at}", _json(schema))
    body = f"{before_arguments} {arguments} {literal(layout.after_arguments)}"
    return rules.add(f"call-{at}", body)


def _tagged(
    rules: _Rules, layout: CallLayout, tool: Tool, at: int, note: Callable[[SchemaNote], object]
) -> str:
    """Return the GBNF of a tool's arguments in the schema's order. Optional ones may be absent."""
    arguments, text = Arguments(tool.parameters), BareText(tool.parameters)
    known: dict[tuple[str, tuple[str, ...]], str] = {}
    forms = []
    for form in arguments.forms:
        parts = []
        for key, places in form.places.items():
            if (key, places) not in known:
                values = [
                    f"{literal(layout.before_key + key + layout.key_end(is_string=is_string))} {v}"
                    for v, is_string in _values(rules, layout, arguments, text, key, places)
                ]
                name = rules.add(f"argument-{at}-{len(known)}", " | ".join(values))
                known[key, places] = name
            name = known[key, places]
            parts.append(name if key in form.required else f"{name}?")
        forms.append(" ".join(parts) or '""')
    for place, reason in {**arguments.faults, **text.faults}.items():
        note(SchemaNote(tool.name, place, reason))
    return forms[0] if len(forms) == 1 else f"({' | '.join(forms)})"


def _values(
    rules: _Rules,
    layout: CallLayout,
    arguments: Arguments,
    text: BareText,
    key: str,
    places: tuple[str, ...],
) -> list[tuple[str, bool]]:
    """Return the forms of an argument: GBNF of the value and its end, and whether it is a string.

    A value of any type may be a string, which has no quotes, or JSON.
    """
    schema, end, where = arguments.schema(places), layout.after_value, "".join(places[:1])
    types = arguments.types(key)
    choices = text.choices(schema)
    if choices and (forms := _listed(layout, choices, types)):
        if len(forms) < len(choices):
            text.faults[where] = f"values with {end.strip()} in them cannot be written"
        return [
            (text_symbol(joined("or", listed), end, end.strip()), is_string)
            for is_string in (True, False)
            if (listed := [exactly(form) for form, of_string in forms if of_string == is_string])
        ]
    any_text = rules.until(end), True
    if types == {"string"}:
        rule = text.rule(schema, where)
        return [any_text if rule is None else (_held_text(layout, rule), True)]
    form = f"{_json(arguments.alone(places))} {literal(end)}", False
    return [any_text, form] if not set(schema) - ANNOTATIONS else [form]


def _listed(
    layout: CallLayout, values: Sequence[Any], types: Collection[str]
) -> list[tuple[str, bool]]:
    """Return the texts of constants between tags, and whether the tags are those of strings."""
    forms: list[tuple[str, bool]] = []
    for value in values:
        is_string = isinstance(value, str)
        text = json.dumps(value, ensure_ascii=False)
        # A string beside other types has quotes if it would be read as one of those.
        if is_string and (layout.after_key_of_string or is_read_as_text(value, types)):
            text = _with_line_feeds(layout, value)
        elif is_string:
            is_string = False
        if layout.after_value.strip() not in text:
            forms.append((text, is_string))
    return forms


def _with_line_feeds(layout: CallLayout, text: str) -> str:
    """Return `text` with the line feeds at its ends that readers of a call drop."""
    drops_first, drops_last = _dropped(layout)
    before, after = drops_first and text.startswith("\n"), drops_last and text.endswith("\n")
    return "\n" * before + text + "\n" * after


def _held_text(layout: CallLayout, rule: Rule) -> str:
    """Return the GBNF of a string without quotes that follows a rule, and of its end."""
    drops_first, drops_last = _dropped(layout)
    edges = ["\\n(?s:.*)"] * drops_first + ["(?s:.*)\\n"] * drops_last
    return text_symbol(rule, layout.after_value, layout.after_value.strip(), edges)


def _dropped(layout: CallLayout) -> tuple[bool, bool]:
    """True for each end of a string at which a reader drops a line feed of the string itself."""
    key_end = layout.key_end(is_string=True)
    return not key_end.endswith("\n"), not layout.after_value.startswith("\n")


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
