"""Adapts JSON schemas so that llguidance reads them as llama.cpp does. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import BadRequest
from offload.sampling.schema_objects import ClosedObjects
from offload.sampling.schema_parts import PartReader, SchemaFault
from offload.sampling.schema_refs import StepLimit

MOST_SCHEMA_BYTES = 256 * 1024
# White space is limited, as in llama.cpp's converter: otherwise small models indent for ever.
_WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
# These options make llguidance ignore unknown keywords and treat oneOf as anyOf, as in llama.cpp.
_OPTIONS: dict[str, Any] = {
    "x-guidance": {"whitespace_pattern": _WHITE_SPACE, "lenient": True, "coerce_one_of": True}
}


@dataclass(frozen=True)
class AdaptedSchema:
    """A schema for llguidance, and what it does not enforce of the schema that was given.

    `ignored` has the places of keywords without effect, as JSON pointers such as `#/uniqueItems`.
    `faults` are keywords that cannot be followed and were left out.
    """

    schema: dict[str, Any]
    ignored: tuple[str, ...] = ()
    faults: tuple[SchemaFault, ...] = ()


def read_schema(text: str) -> dict[str, Any]:
    """Return the schema in a JSON text, adapted for llguidance.

    Raises BadRequest, with the place in the text if the text is not JSON.
    """
    return adapted(_parsed(text)).schema


def ignored_places(text: str) -> tuple[str, ...]:
    """Return the places of keywords without effect of the schema in a JSON text.

    Raises BadRequest as `read_schema` does.
    """
    return adapted(_parsed(text)).ignored


def _parsed(text: str) -> dict[str, Any]:
    if len(text) > MOST_SCHEMA_BYTES:
        raise BadRequest(
            f"the JSON schema has {len(text)} characters; at most {MOST_SCHEMA_BYTES} are read"
        )
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as e:
        raise BadRequest(f"the JSON schema is not JSON: {e}") from e
    except (ValueError, RecursionError) as e:  # too many digits, or too many nested brackets
        raise BadRequest("the JSON schema is nested too deeply or has too long a number") from e
    if not isinstance(schema, dict):
        raise BadRequest("the JSON schema must be a JSON object")
    return schema


def adapted(
    schema: Mapping[str, Any], *, drops: bool = False, closes: bool = True
) -> AdaptedSchema:
    """Return `schema` adapted for llguidance, and what is not enforced.

    With `drops`, keywords that cannot be followed are left out. Otherwise they raise BadRequest,
    which names the first one and its place. With `closes`, objects with properties have no others
    unless the schema says so.
    """
    steps = StepLimit()
    parts = PartReader(schema, steps, drops=drops)
    read = parts.read(dict(schema))
    closed = ClosedObjects(read, parts.ignored, steps, closes=closes).close(read)
    return AdaptedSchema({**closed, **_OPTIONS}, tuple(parts.ignored), tuple(parts.faults))
