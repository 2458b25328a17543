"""Prepares tools' schemas for grammars: leaves out what cannot be followed, or refuses it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from offload.errors import BadRequest
from offload.sampling.json_schema import adapted
from offload.sampling.schema_places import without
from specoffload.chat.conversation import Tool

_REFUSED = "the JSON schema cannot be followed: "


@dataclass(frozen=True)
class SchemaNote:
    """A keyword of a tool's schema without effect. `place` is a JSON pointer."""

    tool: str
    place: str
    reason: str

    def __str__(self) -> str:
        return (
            f"tool {self.tool!r}: {self.place} of its parameters has no effect, and calls may "
            f"violate it: {self.reason}"
        )


def followable(
    tools: Sequence[Tool], *, must_call: bool
) -> tuple[tuple[Tool, ...], tuple[SchemaNote, ...]]:
    """Return the tools with schemas that a grammar can follow, and notes on what has no effect.

    If the answer may do without a call, a keyword that cannot be followed is left out. With
    `must_call`, it raises BadRequest, which names the tool and the keyword.
    """
    kept: list[Tool] = []
    notes: list[SchemaNote] = []
    for tool in tools:
        parameters, its_notes = _followable(tool.name, json.dumps(tool.parameters), must_call)
        kept.append(replace(tool, parameters=json.loads(parameters)))
        notes += its_notes
    return tuple(kept), tuple(notes)


def refuse_strict(tools: Sequence[Tool], notes: Sequence[SchemaNote]) -> None:
    """Raises BadRequest if one of `notes` is of a strict tool, which promises its whole schema."""
    strict = {tool.name for tool in tools if tool.strict}
    for note in notes:
        if note.tool in strict:
            raise BadRequest(
                f"tool {note.tool!r} is strict, and {note.place} of its parameters cannot be "
                f"enforced ({note.reason}): leave out that keyword, or send strict as false"
            )


@lru_cache(maxsize=256)
def _followable(name: str, text: str, must_call: bool) -> tuple[str, tuple[SchemaNote, ...]]:
    from offload.sampling.schema_check import fault_of_schema  # loads llguidance

    schema = json.loads(text)
    if schema.get("type", "object") != "object":
        schema = {**schema, "type": "object"}
    try:
        read = adapted(schema, drops=not must_call)
    except BadRequest as e:
        raise BadRequest(f"tool {name!r}: {str(e).removeprefix(_REFUSED)}") from e
    notes = [SchemaNote(name, fault.where, fault.reason) for fault in read.faults]
    notes += [SchemaNote(name, place, "it cannot be enforced") for place in read.ignored]
    kept = without(
        schema,
        [fault.where for fault in read.faults if not fault.is_schema],
        [fault.where for fault in read.faults if fault.is_schema],
    )
    fault = fault_of_schema(read.schema)
    if fault is not None and must_call:
        raise BadRequest(f"tool {name!r}: its parameters cannot be followed: {fault}")
    if fault is not None:
        notes, kept = [SchemaNote(name, "#", fault)], _names_alone(kept)
    return json.dumps(kept), tuple(notes)


def _names_alone(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of an object with the same properties, whose values may be anything."""
    properties = schema.get("properties")
    names = properties if isinstance(properties, dict) else ()
    return {
        "type": "object", "properties": dict.fromkeys(names, True), "additionalProperties": True
    }  # fmt: skip
