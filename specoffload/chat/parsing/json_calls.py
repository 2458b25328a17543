"""Tool calls that are JSON objects with name and arguments, and those that name the tool first."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from specoffload.chat.parsing.output import Output
from specoffload.chat.parsing.reader import Reader, Reading

_INDEXED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class JsonCalls:
    """`{"name": "f", "arguments": {...}}` after an opening marker; in a list, or one by one.

    With no opening marker a call is a text that begins so, and names a known tool.
    """

    opens: tuple[str, ...]
    closes: str = ""
    between: str = ""  # what stands between two objects
    wrapper: str = ""  # key of an object around the list: {"tool_calls": [...]}
    may_begin: tuple[str, ...] = ()  # what may stand before a call without an opening marker
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")


@dataclass(frozen=True)
class NamedCalls:
    """A name between markers, then the arguments as JSON.

    `section` and `section_end` stand around all calls, and are empty where there is no section.
    """

    section: str
    section_end: str
    opens: str
    prefix: str  # between `opens` and the name
    after_name: str
    closes: str
    id_marker: str = ""  # before an id that stands between name and arguments
    name_is_id: bool = False  # functions.NAME:INDEX is name and id in one


def read_json_call(
    reader: Reader, output: Output, calls: JsonCalls, known: Collection[str] | None
) -> Reading[bool]:
    """One object, as far as it goes. False where it is none: nothing was given out then.

    `known` are the names that make an object a call; None: any.
    """
    found = _Found(output, known)
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
            return found.end(whole=False)
        yield from reader.space()
        if key == "function" and (yield from reader.takes("{")):
            depth += 1  # {"type": "function", "function": {"name": ..., "arguments": ...}}
        elif not (yield from _read_value(reader, found, calls, key)):
            return found.end(whole=False)


def _read_value(reader: Reader, found: _Found, calls: JsonCalls, key: str) -> Reading[bool]:
    """The value of a call's key. False where the object is no call, or the text ends."""
    if key in ("name", "function"):
        name = yield from _string(reader)
        return name is not None and found.name(name)
    if key in calls.arguments_keys:
        return (yield from _arguments(reader, found, calls))
    if not found.may_have(key):
        return False
    parts: list[str] = []
    whole = yield from reader.json_value(parts.append, _stops(calls))
    if key == "id":
        found.identifier("".join(parts).strip('"'))
    return whole


class _Found:
    """An object as far as it is known; the call begins when both name and arguments are there."""

    def __init__(self, output: Output, known: Collection[str] | None) -> None:
        self._output, self._known = output, known
        self._name: str | None = None
        self._id: str | None = None
        self._early = ""  # arguments that came before the name
        self.begun = False

    def name(self, name: str) -> bool:
        """False if that is no name of a tool."""
        if (
            not name
            or self._name is not None
            or self._known is not None
            and name not in self._known
        ):
            return False
        self._name = name
        if self._early:
            self.arguments("")
        return True

    def may_have(self, key: str) -> bool:
        """False where `key` shows that this is an object of another kind."""
        return self._known is None or self._name is not None or key in ("type", "id")

    def identifier(self, text: str) -> None:
        self._id = text or None

    def arguments(self, text: str) -> None:
        if self._name is None:
            self._early += text
            return
        if not self.begun:
            self.begun = True
            self._output.begin_call(self._name, self._id)
        self._output.arguments(self._early + text)
        self._early = ""

    def end(self, *, whole: bool = True) -> bool:
        """True if there was a call."""
        if whole and self._name is not None:
            self.arguments("")
            self._output.end_call()
        return self.begun


def _arguments(reader: Reader, found: _Found, calls: JsonCalls) -> Reading[bool]:
    if (yield from reader.peek()) != '"':
        return (yield from reader.json_value(found.arguments, _stops(calls)))
    text = yield from _string(reader)  # JSON in a JSON string
    if text is None:
        return False
    found.arguments(text)
    return True


def _stops(calls: JsonCalls) -> tuple[str, ...]:
    return (calls.closes,) if calls.closes else ()


def _string(reader: Reader) -> Reading[str | None]:
    raw = yield from reader.json_string()
    if raw is None:
        return None
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    assert isinstance(value, str)
    return value


def read_json_calls(
    reader: Reader, output: Output, calls: JsonCalls, known: Collection[str] | None
) -> Reading[bool]:
    """All objects up to the closing marker. False if there was none."""
    n_before = output.n_calls
    yield from reader.space()
    in_list = yield from reader.takes("[")
    separator = "," if in_list else calls.between
    while (yield from read_json_call(reader, output, calls, known)):
        reader.mark()
        yield from reader.space()
        if in_list and (yield from reader.takes("]")):
            reader.mark()
            break
        if not (yield from _goes_on(reader, separator)):
            break
    if output.n_calls == n_before:
        return False
    reader.back_unless_cut()
    yield from reader.space()
    if calls.closes:
        yield from reader.takes(calls.closes)
    return True


def _goes_on(reader: Reader, separator: str) -> Reading[bool]:
    """True if another object follows, the separator taken. White space is taken already."""
    if separator.strip():
        return (yield from reader.takes(separator))
    return bool(separator) and (yield from reader.peek()) == "{"


def read_wrapped_calls(
    reader: Reader, output: Output, calls: JsonCalls, known: Collection[str] | None
) -> Reading[bool]:
    """An object whose one key has the list of calls. False where there is none."""
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


def read_named_calls(
    reader: Reader, output: Output, calls: NamedCalls, opened: str
) -> Reading[bool]:
    """All calls of a section; `opened` is the marker that was taken. False if there was none."""
    n_before = output.n_calls
    if opened == calls.section:
        yield from reader.space()
        yield from reader.takes(calls.opens)
    while (yield from _read_named_call(reader, output, calls)):
        reader.mark()
        yield from reader.space()
        if calls.section_end and (yield from reader.takes(calls.section_end)):
            reader.mark()
            break
        if not (yield from reader.takes(calls.opens)):
            break
    if output.n_calls == n_before:
        return False
    reader.back_unless_cut()
    return True


def _read_named_call(reader: Reader, output: Output, calls: NamedCalls) -> Reading[bool]:
    """One call, its opening marker taken. False where there is none."""
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
