"""Tool calls whose arguments stand one by one between tags, as text: JSON is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specoffload.chat.parsing.output import Output
from specoffload.chat.parsing.reader import Reader, Reading

Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True)
class TaggedCalls:
    """Markers around a section of calls, one call, its name, and each key and value.

    `section` is empty where there is none. White space between tags has no meaning; one line feed
    at either end of a value has none either.
    """

    section: str
    section_end: str
    opens: str  # before the name
    after_name: str
    key_opens: str
    after_key: str
    value_opens: str
    value_closes: str
    closes: str
    string_mark: str = ""  # in the key's tag: its value is a string whatever the schema says
    other_mark: str = ""  # and: its value is JSON


def read_tagged_calls(
    reader: Reader, output: Output, calls: TaggedCalls, schemas: Schemas, opened: str
) -> Reading[bool]:
    """All calls of a section; `opened` is the marker that was taken. False if there was none."""
    n_before = output.n_calls
    in_section = bool(calls.section) and opened == calls.section
    if in_section and calls.opens:
        yield from reader.space()
        if not (yield from reader.takes(calls.opens)):
            return False
    while (yield from _read_call(reader, output, calls, schemas)):
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


def _read_call(
    reader: Reader, output: Output, calls: TaggedCalls, schemas: Schemas
) -> Reading[bool]:
    ends = [m for m in (calls.after_name, calls.key_opens, calls.closes) if m]
    name, marker = yield from reader.within(list(dict.fromkeys(ends)))
    name = name.strip()
    if not name or marker is None or len(name.split()) > 1:
        return False
    output.begin_call(name)
    if marker != calls.after_name:
        reader.put_back(marker)
    arguments = _Arguments(output, schemas.get(name, {}))
    while True:
        yield from reader.space()
        if not (yield from reader.takes(calls.key_opens)):
            if reader.is_cut:
                return True  # more arguments may have been to come
            break
        if not (yield from _read_argument(reader, calls, arguments)):
            return True  # the text ended within
    arguments.end()
    yield from reader.takes(calls.closes)
    return True


def _read_argument(reader: Reader, calls: TaggedCalls, arguments: _Arguments) -> Reading[bool]:
    key, marker = yield from reader.within((calls.after_key,))
    if marker is None:
        return False
    kind: bool | None = None
    for mark, is_text in ((calls.string_mark, True), (calls.other_mark, False)):
        if mark and key.endswith(mark):
            key, kind = key.removesuffix(mark), is_text
    if calls.value_opens:
        yield from reader.space()
        yield from reader.takes(calls.value_opens)
    yield from reader.takes("\n")
    if arguments.begin(key.strip(), kind):
        marker = yield from reader.until(
            ("\n" + calls.value_closes, calls.value_closes), arguments.text
        )
        if marker is not None:
            arguments.end_text()
        return marker is not None
    value, marker = yield from reader.within((calls.value_closes,))
    if marker is not None:
        arguments.value(value.removesuffix("\n"))
    return marker is not None


class _Arguments:
    """Writes the JSON object of the arguments as they come."""

    def __init__(self, output: Output, schema: Mapping[str, Any]) -> None:
        self._output, self._schema = output, schema
        self._n = 0
        self._types: frozenset[str] = frozenset()

    def begin(self, key: str, is_text: bool | None) -> bool:
        """True if the value is a string, to be given as `text`; else it comes as one `value`."""
        self._output.arguments(("{" if self._n == 0 else ", ") + _json(key) + ": ")
        self._n += 1
        properties = self._schema.get("properties")
        found = properties.get(key) if isinstance(properties, Mapping) else None
        self._types = types_of(found, self._schema) if isinstance(found, Mapping) else frozenset()
        if is_text is None:
            is_text = self._types == {"string"}
        elif not is_text:
            self._types = frozenset()
        if is_text:
            self._output.arguments('"')
        return is_text

    def text(self, text: str) -> None:
        self._output.arguments(_json(text)[1:-1])

    def end_text(self) -> None:
        self._output.arguments('"')

    def value(self, text: str) -> None:
        """JSON where the text is JSON of a type that the schema allows, else a string."""
        if "boolean" in self._types and text in ("True", "False"):
            text = text.lower()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        if "string" in self._types and _type_of(value) not in self._types:
            value = text
        self._output.arguments(_json(text) if value is text else text.strip())

    def end(self) -> None:
        if self._n:
            self._output.arguments("}")
        self._output.end_call()


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
    """The JSON types that `schema` allows; empty where it does not say.

    `$ref` is looked up in `root`, in `$defs` and `definitions`.
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
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        for branch in branches if isinstance(branches, list) else ():
            if isinstance(branch, Mapping):
                found |= types_of(branch, root, depth + 1)
    where = schema.get("$ref")
    if isinstance(where, str):
        for place in ("$defs", "definitions"):
            named = root.get(place)
            target = named.get(where.rpartition("/")[2]) if isinstance(named, Mapping) else None
            if isinstance(target, Mapping):
                found |= types_of(target, root, depth + 1)
    if "number" in found:
        found.add("integer")
    return frozenset(found)
