"""The ways in which models write tool calls, and how each is read while the text arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specoffload.chat.reader import DeltaCollector, Reading, TextReader

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of arguments by the tools' names."""

_INDEXED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class JsonCalls:
    """`{"name": "f", "arguments": {...}}` after one of the markers `opens`: in a list, or one after
    the other with `between` between them.

    Without a marker, a call is a text that begins with such an object and names a known tool. It
    may stand after one of `may_begin`, and in a list under the key `wrapper`.
    """

    opens: tuple[str, ...] = ()
    closes: str = ""
    between: str = ""
    wrapper: str = ""
    may_begin: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MarkedCalls:
    """Calls between markers. `section` and `section_end` are around all calls; `opens` and `closes`
    around each; `after_name` follows the name. A marker that a format lacks is empty."""

    section: str = ""
    section_end: str = ""
    opens: str = ""
    after_name: str = ""
    closes: str = ""


@dataclass(frozen=True, kw_only=True)
class NamedCalls(MarkedCalls):
    """A name, then the arguments as JSON. `prefix` may come before the name, and `id_marker` before
    an id after it. With `name_is_id`, functions.NAME:INDEX is name and id in one."""

    prefix: str = ""
    id_marker: str = ""
    name_is_id: bool = False


@dataclass(frozen=True, kw_only=True)
class TaggedCalls(MarkedCalls):
    """A name, then each argument's key and value between tags, as text.

    White space between tags is skipped, and one line feed at either end of a value. A key that
    ends with `string_mark` has a string, whatever the schema says, and one that ends with
    `other_mark` has JSON.
    """

    key_opens: str
    after_key: str
    value_opens: str = ""
    value_closes: str
    string_mark: str = ""
    other_mark: str = ""


@dataclass(frozen=True)
class HarmonyCalls:
    """Messages on channels, some of them to a tool (gpt-oss)."""


@dataclass(frozen=True)
class MistralCalls:
    """After one marker a list of JSON objects, or a name and its arguments."""

    listed: JsonCalls
    named: NamedCalls


Calls = JsonCalls | NamedCalls | TaggedCalls | HarmonyCalls | MistralCalls


def openers(calls: Calls) -> tuple[str, ...]:
    """The markers that begin a call anywhere in a text; empty for formats without such markers."""
    if isinstance(calls, MistralCalls):
        return (calls.named.opens,)
    if isinstance(calls, HarmonyCalls):
        return ()
    if isinstance(calls, JsonCalls):
        return calls.opens
    return tuple(marker for marker in (calls.section, calls.opens) if marker)


# ---- JSON objects


def read_json_calls(
    reader: TextReader, output: DeltaCollector, calls: JsonCalls, known: Collection[str] | None
) -> Reading[bool]:
    """Read all objects up to the closing marker; False if there is none.

    Objects are calls if they name one of `known`; None: any tool.
    """
    n_before = output.n_calls
    yield from reader.space()
    in_list = yield from reader.takes("[")
    separator = "," if in_list else calls.between
    while (yield from _read_json_call(reader, output, calls, known)):
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
    yield from reader.takes(calls.closes)
    return True


def read_wrapped_calls(
    reader: TextReader, output: DeltaCollector, calls: JsonCalls, known: Collection[str] | None
) -> Reading[bool]:
    """Read an object with the list of calls under its only key; False if there is none."""
    if not (yield from reader.takes("{")):
        return False
    yield from reader.space()
    if (yield from _string(reader)) != calls.wrapper:
        return False
    yield from reader.space()
    if not (yield from reader.takes(":")):
        return False
    if not (yield from read_json_calls(reader, output, calls, known)):
        return False
    yield from reader.space()
    yield from reader.takes("}")
    return True


def _read_json_call(
    reader: TextReader, output: DeltaCollector, calls: JsonCalls, known: Collection[str] | None
) -> Reading[bool]:
    """Read one object as far as it goes. If it is no call, returns False, and has no effect on
    `output`."""
    found = _JsonCall(output, known)
    depth = 0
    while True:
        yield from reader.space()
        if (yield from reader.takes("{" if depth == 0 else "}")):
            depth += 1 if depth == 0 else -1
            if depth == 0:
                return found.end()
            continue
        if depth == 0:
            return False
        if (yield from reader.takes(",")):
            continue
        key = yield from _string(reader)
        yield from reader.space()
        if key is None or not (yield from reader.takes(":")):
            return found.begun
        yield from reader.space()
        if key == "function" and (yield from reader.takes("{")):
            depth += 1  # {"type": "function", "function": {"name": ..., "arguments": ...}}
        elif not (yield from _read_json_field(reader, found, calls, key)):
            return found.begun


def _read_json_field(
    reader: TextReader, found: _JsonCall, calls: JsonCalls, key: str
) -> Reading[bool]:
    """Read the value of a call's key. False if the object is no call, or the text ends."""
    stops = (calls.closes,) if calls.closes else ()
    if key in ("name", "function"):
        name = yield from _string(reader)
        return name is not None and found.name(name)
    if key in ("arguments", "parameters"):
        if (yield from reader.peek()) != '"':
            return (yield from reader.json_value(found.arguments, stops))
        text = yield from _string(reader)  # JSON in a JSON string
        if text is not None:
            found.arguments(text)
        return text is not None
    if not found.may_have(key):
        return False
    parts: list[str] = []
    whole = yield from reader.json_value(parts.append, stops)
    if key == "id":
        found.call_id = "".join(parts).strip('"') or None
    return whole


class _JsonCall:
    """A JSON object so far. The call begins when its name and arguments are known."""

    def __init__(self, output: DeltaCollector, known: Collection[str] | None) -> None:
        self._output, self._known = output, known
        self._name: str | None = None
        self.call_id: str | None = None
        self._early = ""  # arguments that came before the name
        self.begun = False

    def name(self, name: str) -> bool:
        """False if it is no name of a tool."""
        is_known = self._known is None or name in self._known
        if not name or self._name is not None or not is_known:
            return False
        self._name = name
        if self._early:
            self.arguments("")
        return True

    def may_have(self, key: str) -> bool:
        """False if `key` shows that this is another kind of object."""
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
        """The object is complete. True if it was a call."""
        if self._name is not None:
            self.arguments("")
            self._output.end_call()
        return self.begun


def _string(reader: TextReader) -> Reading[str | None]:
    raw = yield from reader.json_string()
    try:
        value = None if raw is None else json.loads(raw, strict=False)
    except ValueError:
        return None
    assert value is None or isinstance(value, str)
    return value


# ---- calls between markers


def read_marked_calls(
    reader: TextReader,
    output: DeltaCollector,
    calls: NamedCalls | TaggedCalls,
    schemas: Schemas,
    opened: str,
) -> Reading[bool]:
    """Read all calls of a section after the marker `opened`; False if there is none."""
    n_before = output.n_calls
    if calls.opens and opened == calls.section:
        yield from reader.space()
        found = yield from reader.takes(calls.opens)
        if not found and isinstance(calls, TaggedCalls):
            return False
    while (
        yield from _read_tagged_call(reader, output, calls, schemas)
        if isinstance(calls, TaggedCalls)
        else _read_named_call(reader, output, calls)
    ):
        reader.mark()
        yield from reader.space()
        if calls.section_end and (yield from reader.takes(calls.section_end)):
            reader.mark()
            break
        if not calls.opens or not (yield from reader.takes(calls.opens)):
            break
    if output.n_calls == n_before:
        return False
    reader.back_unless_cut()
    return True


def _read_named_call(
    reader: TextReader, output: DeltaCollector, calls: NamedCalls
) -> Reading[bool]:
    """Read one call after its opening marker; False if there is none."""
    yield from reader.space()
    yield from reader.takes(calls.prefix)
    markers = [m for m in (calls.after_name, calls.id_marker, calls.closes, "{") if m]
    name, marker = yield from reader.within(markers)
    name, call_id = name.strip(), None
    if marker and marker == calls.id_marker:
        call_id, marker = yield from reader.within((calls.after_name,))
    if not name or marker is None or marker == calls.closes:
        return False
    if calls.name_is_id:
        call_id, found = name, _INDEXED.fullmatch(name)
        assert found is not None
        name = found[1]
    output.begin_call(name, call_id)
    if marker == "{":
        reader.put_back(marker)
    yield from reader.space()
    stops = [s for s in (calls.closes, calls.section_end) if s]
    if (yield from reader.json_value(output.arguments, stops)):
        output.end_call()
    yield from reader.space()
    yield from reader.takes(calls.closes)
    return True


def _read_tagged_call(
    reader: TextReader, output: DeltaCollector, calls: TaggedCalls, schemas: Schemas
) -> Reading[bool]:
    """Read one call after its opening marker; False if there is none."""
    ends = [m for m in (calls.after_name, calls.key_opens, calls.closes) if m]
    name, marker = yield from reader.within(list(dict.fromkeys(ends)))
    name = name.strip()
    if not name or marker is None or len(name.split()) > 1:
        return False
    output.begin_call(name)
    if marker != calls.after_name:
        reader.put_back(marker)
    schema, opening = schemas.get(name, {}), "{"
    while True:
        yield from reader.space()
        if not (yield from reader.takes(calls.key_opens)):
            break
        if not (yield from _read_argument(reader, calls, output, schema, opening)):
            return True  # the text ended inside
        opening = ", "
    if reader.is_cut:
        return True  # more arguments could follow
    if opening != "{":
        output.arguments("}")
    output.end_call()
    yield from reader.takes(calls.closes)
    return True


def _read_argument(
    reader: TextReader,
    calls: TaggedCalls,
    output: DeltaCollector,
    schema: Mapping[str, Any],
    opening: str,
) -> Reading[bool]:
    """Read a key and its value; write `opening` and both as JSON. False if the text ends inside."""
    key, marker = yield from reader.within((calls.after_key,))
    if marker is None:
        return False
    is_string: bool | None = None
    for mark, marks_string in ((calls.string_mark, True), (calls.other_mark, False)):
        if mark and key.endswith(mark):
            key, is_string = key.removesuffix(mark), marks_string
    key = key.strip()
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    types = types_of(found, schema) if isinstance(found, Mapping) else frozenset()
    if is_string is None:
        is_string = types == {"string"}
    elif not is_string:
        types = frozenset()
    if calls.value_opens:
        yield from reader.space()
        yield from reader.takes(calls.value_opens)
    yield from reader.takes("\n")
    output.arguments(f"{opening}{_json(key)}: ")
    if not is_string:
        value, marker = yield from reader.within((calls.value_closes,))
        if marker is not None:
            output.arguments(_json_value(value.removesuffix("\n"), types))
        return marker is not None
    output.arguments('"')
    ends = ("\n" + calls.value_closes, calls.value_closes)
    marker = yield from reader.until(ends, lambda text: output.arguments(_json(text)[1:-1]))
    if marker is not None:
        output.arguments('"')
    return marker is not None


def _json_value(text: str, types: Collection[str]) -> str:
    """`text` if it is JSON of one of `types` (none: of any), otherwise as a JSON string."""
    if "boolean" in types and text in ("True", "False"):
        text = text.lower()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _json(text)
    if "string" in types and _type_of(value) not in types:
        return _json(text)
    return text.strip()


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    kinds = {str: "string", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def types_of(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that `schema` allows; empty if it does not say.

    `$ref` refers to `$defs` or `definitions` of `root`.
    """
    if depth > 8:
        return frozenset()
    found: set[str] = set()
    kind = schema.get("type")
    if isinstance(kind, str):
        found.add(kind)
    elif isinstance(kind, list):
        found |= {k for k in kind if isinstance(k, str)}
    elif isinstance(schema.get("enum"), list):
        found |= {_type_of(value) for value in schema["enum"]}
    elif "const" in schema:
        found.add(_type_of(schema["const"]))
    others = [schema.get(word) for word in ("anyOf", "oneOf")]
    branches = [branch for listed in others if isinstance(listed, list) for branch in listed]
    where = schema.get("$ref")
    if isinstance(where, str):
        places = [root.get(place) for place in ("$defs", "definitions")]
        name = where.rpartition("/")[2]
        branches += [place.get(name) for place in places if isinstance(place, Mapping)]
    for branch in branches:
        if isinstance(branch, Mapping):
            found |= types_of(branch, root, depth + 1)
    if "number" in found:
        found.add("integer")
    return frozenset(found)
