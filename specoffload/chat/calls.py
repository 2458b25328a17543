"""Reads tool calls in a model's format from text that is still arriving."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from specoffload.chat.arguments import Arguments, type_of
from specoffload.chat.conversation import of_whole_characters
from specoffload.chat.families import CallLayout, lines_of
from specoffload.chat.reader import DeltaCollector, ReadingSteps, TextReader

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of arguments by the tools' names."""

_NUMBER = re.compile(r":\d+$")


# ---- JSON objects


def read_json_calls(
    reader: TextReader, output: DeltaCollector, layout: CallLayout, known: Collection[str] | None
) -> ReadingSteps[bool]:
    """Read calls that are JSON objects, and the closing marker. Returns False if there is no call.

    An object is a call only if its name is in `known` (None: any name).
    """
    n_before = output.n_calls
    yield from reader.space()
    in_list = yield from reader.takes("[")
    separator = "," if in_list else layout.between.rstrip(" ")
    while (yield from _read_json_call(reader, output, layout, known)):
        reader.mark()
        yield from reader.space()
        if in_list and (yield from reader.takes("]")):
            reader.mark()
            break
        if separator.strip():
            if not (yield from reader.takes(separator)):
                break
        elif not separator or (yield from reader.peek()) != "{":
            break
    if output.n_calls == n_before:
        return False
    reader.back_unless_cut()
    yield from reader.space()
    yield from reader.takes("".join(layout.closers))
    return True


def read_wrapped_calls(
    reader: TextReader, output: DeltaCollector, layout: CallLayout, known: Collection[str] | None
) -> ReadingSteps[bool]:
    """Read a JSON object whose only key holds the list of calls. Returns False if there is none."""
    if not (yield from reader.takes("{")):
        return False
    yield from reader.space()
    if (yield from _string(reader)) != layout.wrapper:
        return False
    yield from reader.space()
    if not (yield from reader.takes(":")):
        return False
    if not (yield from read_json_calls(reader, output, layout, known)):
        return False
    yield from reader.space()
    yield from reader.takes("}")
    return True


def _read_json_call(
    reader: TextReader, output: DeltaCollector, layout: CallLayout, known: Collection[str] | None
) -> ReadingSteps[bool]:
    """Read one JSON object, even if the text ends within it. Returns False if it is no call.

    An object that is no call does not change `output`.
    """
    call = _JsonCall(output, known)
    depth = 0
    while True:
        yield from reader.space()
        if (yield from reader.takes("{" if depth == 0 else "}")):
            depth += 1 if depth == 0 else -1
            if depth == 0:
                return call.end()
            continue
        if depth == 0:
            return False
        if (yield from reader.takes(",")):
            continue
        key = yield from _string(reader)
        yield from reader.space()
        if key is None or not (yield from reader.takes(":")):
            return call.begun
        yield from reader.space()
        if key == "function" and (yield from reader.takes("{")):
            depth += 1  # {"type": "function", "function": {"name": ..., "arguments": ...}}
        elif not (yield from _read_json_field(reader, call, layout, key)):
            return call.begun


def _read_json_field(
    reader: TextReader, call: _JsonCall, layout: CallLayout, key: str
) -> ReadingSteps[bool]:
    """Read the value of `key`. Returns False if the object is no call, or the text ends."""
    stops = layout.closers
    if key in ("name", "function"):
        name = yield from _string(reader)
        return name is not None and call.name(name)
    if key in ("arguments", "parameters"):
        if (yield from reader.peek()) != '"':
            return (yield from reader.json_value(call.arguments, stops))
        text = yield from _string(reader)  # JSON in a JSON string
        if text is not None:
            call.arguments(text)
        return text is not None
    if not call.may_have(key):
        return False
    parts: list[str] = []
    whole = yield from reader.json_value(parts.append, stops)
    if key == "id":
        call.call_id = "".join(parts).strip('"') or None
    return whole


class _JsonCall:
    """A JSON object that may be a call, while it is read.

    The call is added to the output once its name is known and its arguments begin, or at its end.
    """

    def __init__(self, output: DeltaCollector, known: Collection[str] | None) -> None:
        self._output, self._known = output, known
        self._name: str | None = None
        self.call_id: str | None = None
        self._early = ""  # arguments that came before the name
        self.begun = False

    def name(self, name: str) -> bool:
        """Set the call's name. Returns False if no tool has it, or the call has a name already."""
        is_known = self._known is None or name in self._known
        if not name or self._name is not None or not is_known:
            return False
        self._name = name
        if self._early:
            self.arguments("")
        return True

    def may_have(self, key: str) -> bool:
        """Return False if `key`, read before the name, shows that the object is no call."""
        return self._known is None or self._name is not None or key in ("type", "id")

    def arguments(self, text: str) -> None:
        if self._name is None:
            self._early += text
            return
        if not self.begun:
            self.begun = True
            self._output.begin_call(self._name, self.call_id)
        self._output.arguments(self._early + text)
        self._early = ""

    def end(self) -> bool:
        """Record that the object is complete. Returns True if it was a call."""
        if self._name is not None:
            self.arguments("")
            self._output.end_call()
        return self.begun


def _string(reader: TextReader) -> ReadingSteps[str | None]:
    raw = yield from reader.json_string()
    try:
        value = None if raw is None else of_whole_characters(json.loads(raw, strict=False))
    except ValueError:
        return None
    assert value is None or isinstance(value, str)
    return value


# ---- calls between markers


def read_marked_calls(
    reader: TextReader, output: DeltaCollector, layout: CallLayout, schemas: Schemas, opened: str
) -> ReadingSteps[bool]:
    """Read all calls that follow the marker `opened`. Returns False if there is none."""
    n_before = output.n_calls
    *section, opens = layout.openers
    if opened in section:
        yield from reader.space()
        if not (yield from reader.takes(opens)) and layout.before_key:
            return False
    while (
        yield from _read_tagged_call(reader, output, layout, schemas)
        if layout.before_key
        else _read_named_call(reader, output, layout)
    ):
        reader.mark()
        yield from reader.space()
        if layout.closers[1:] and (yield from reader.takes(layout.closers[1])):
            reader.mark()
            break
        if not (yield from reader.takes(opens)):
            break
    if output.n_calls == n_before:
        return False
    reader.back_unless_cut()
    return True


def _read_named_call(
    reader: TextReader, output: DeltaCollector, layout: CallLayout
) -> ReadingSteps[bool]:
    """Read a name and a JSON object after the opening marker. Returns False if there is no call."""
    yield from reader.space()
    prefix = layout.name.partition("{")[0]
    has_prefix = yield from reader.takes(prefix)
    after_name, closes = layout.after_name.strip(), "".join(layout.closers[:1])
    markers = [m for m in (after_name, layout.id_marker, closes, "{") if m]
    name, marker = yield from reader.within(markers)
    name, call_id = name.strip(), None
    if marker and marker == layout.id_marker:
        call_id, marker = yield from reader.within((after_name,))
    if not name or marker is None or marker == closes:
        return False
    if "{i}" in layout.name:
        call_id, name = prefix * has_prefix + name, _NUMBER.sub("", name) or name
    output.begin_call(name, call_id)
    if marker == "{":
        reader.put_back(marker)
    yield from reader.space()
    if (yield from reader.json_value(output.arguments, layout.closers)):
        output.end_call()
    yield from reader.space()
    yield from reader.takes(closes)
    return True


def _read_tagged_call(
    reader: TextReader, output: DeltaCollector, layout: CallLayout, schemas: Schemas
) -> ReadingSteps[bool]:
    """Read a name and tagged arguments after the opening marker. Returns False if no call comes."""
    after_name, closes = layout.after_name.strip(), layout.closers[0]
    ends = [m for m in (after_name, layout.before_key, closes) if m]
    name, marker = yield from reader.within(ends)
    name = name.strip()
    if not name or marker is None or len(name.split()) > 1:
        return False
    output.begin_call(name)
    if marker != after_name:
        reader.put_back(marker)
    arguments, opening = Arguments(schemas.get(name, {})), "{"
    while True:
        yield from reader.space()
        if not (yield from reader.takes(layout.before_key)):
            break
        if not (yield from _read_argument(reader, layout, output, arguments, opening)):
            return True  # the text ended inside the argument
        opening = ", "
    if reader.is_cut:
        return True  # more arguments could follow
    if opening != "{":
        output.arguments("}")
    output.end_call()
    yield from reader.takes(closes)
    return True


def _read_argument(
    reader: TextReader,
    layout: CallLayout,
    output: DeltaCollector,
    arguments: Arguments,
    opening: str,
) -> ReadingSteps[bool]:
    """Read one argument. Adds `opening`, its key and its value to `output` as JSON.

    Skips white space between tags, and one line feed at each end of the value. Returns False if the
    text ends inside the argument.
    """
    after_key, *before_value = lines_of(layout.after_key)
    of_string = layout.after_key_of_string
    key, marker = yield from reader.within([m for m in (of_string, after_key) if m])
    if marker is None:
        return False
    key = key.strip()
    types = arguments.types(key)
    is_string = marker == of_string if of_string else types == {"string"}
    for tag in before_value:
        yield from reader.space()
        yield from reader.takes(tag)
    yield from reader.takes("\n")
    output.arguments(f"{opening}{_json(key)}: ")
    closes = layout.after_value.strip()
    if not is_string:
        wanted = frozenset() if of_string else types
        return (yield from _read_json_argument(reader, output, closes, wanted))
    output.arguments('"')
    ends = ("\n" + closes, closes)
    marker = yield from reader.until(ends, lambda text: output.arguments(_json(text)[1:-1]))
    if marker is not None:
        output.arguments('"')
    return marker is not None


def _read_json_argument(
    reader: TextReader, output: DeltaCollector, closes: str, types: Collection[str]
) -> ReadingSteps[bool]:
    """Read a value that is JSON, or text that becomes JSON. A marker in a JSON string is text."""
    parts: list[str] = []
    reader.mark()
    yield from reader.space()
    first = yield from reader.peek()
    is_json = bool(first) and first in '{["' and (yield from reader.json_value(parts.append))
    yield from reader.space()
    if is_json and (yield from reader.takes(closes)) and _is_json("".join(parts)):
        reader.release()
        output.arguments(_json_value("".join(parts), types))
        return True
    reader.back()
    value, marker = yield from reader.within((closes,))
    if marker is not None:
        output.arguments(_json_value(value.removesuffix("\n"), types))
    return marker is not None


def is_read_as_text(text: str, types: Collection[str]) -> bool:
    """True if `text` between the tags of an argument of these JSON types is read as a string."""
    return types == {"string"} or _json_value(text, types) == _json(text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_value(text: str, types: Collection[str]) -> str:
    """Return `text` as JSON: unchanged if it is JSON, otherwise as a JSON string.

    If `types` has "string", JSON of a type outside `types` becomes a string too. If `types` has
    "boolean", True and False are read as booleans.
    """
    if "boolean" in types and text in ("True", "False"):
        text = text.lower()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _json(text)
    if "string" in types and type_of(value) not in types:
        return _json(text)
    return text.strip()


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
