"""Adapts JSON schemas so that llguidance reads them as llama.cpp does. Pure."""

from __future__ import annotations

import json
from typing import Any

from offload.errors import BadRequest

MOST_SCHEMA_BYTES = 256 * 1024
DEEPEST_SCHEMA = 64
# White space is limited, as in llama.cpp's converter: otherwise small models indent for ever.
_WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
# These options make llguidance ignore unknown keywords and treat oneOf as anyOf, as in llama.cpp.
_OPTIONS: dict[str, Any] = {
    "x-guidance": {"whitespace_pattern": _WHITE_SPACE, "lenient": True, "coerce_one_of": True}
}
_OF_NAMES = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_DATA = frozenset({"const", "enum", "default", "examples"})
# llguidance writes a bound, digit by digit, as a regular expression. Its parser refuses bounds with
# more than about 60 zeros after the point. Its numbers end at the range of 64-bit integers.
_LEAST_BOUND = 1e-30
_LARGEST_BOUND = 2**63 - 1024  # the largest float below 2**63
_LARGEST_EXACT = 2**53  # largest integer below which a float is exact
_OF_OTHERS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})


def read_schema(text: str) -> dict[str, Any]:
    """Return the schema in a JSON text, adapted for llguidance.

    Raises BadRequest, with the place in the text if the text is not JSON.
    """
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
    # The parts of an allOf may each name properties of their own, so no object is closed.
    closed = '"allOf"' not in text
    return {**_schema(schema, 0, closed=closed), **_OPTIONS}


def _schema(node: Any, depth: int, *, closed: bool) -> Any:
    """Return the adapted schema of `node`.

    With `closed`, objects without a rule for other properties allow none, as in llama.cpp, because
    small models would add properties for ever.
    """
    if depth > DEEPEST_SCHEMA:
        raise BadRequest(f"the JSON schema is nested over {DEEPEST_SCHEMA} deep")
    if isinstance(node, list):
        return [_schema(item, depth + 1, closed=closed) for item in node]
    if not isinstance(node, dict):
        return _whole(node)
    out: dict[str, Any] = {}
    for name, value in node.items():
        if name in _DATA:
            out[name] = value
        elif name in _OF_NAMES and isinstance(value, dict):
            out[name] = {n: _schema(s, depth + 1, closed=closed) for n, s in value.items()}
        else:
            out[name] = _schema(value, depth + 1, closed=closed)
    if closed and "properties" in node and _OF_OTHERS.isdisjoint(node):
        out["additionalProperties"] = False
    _narrow(out, "minimum", 1)
    _narrow(out, "maximum", -1)
    return out


def _narrow(node: dict[str, Any], name: str, sign: int) -> None:
    """Move a bound that llguidance cannot follow inwards, to the next one that it can.

    Numbers within the new bound are within the old one. `sign`: 1 for a lower bound, -1 for an
    upper bound.
    """
    for key in (name, "exclusive" + name.capitalize()):
        bound = node.get(key)
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            continue
        lower: float = sign * bound  # an upper bound of x is a lower one of -x
        if 0 < abs(lower) < _LEAST_BOUND:
            lower = _LEAST_BOUND if lower > 0 else 0
        elif lower < -_LARGEST_BOUND:
            lower = -_LARGEST_BOUND
        else:
            continue
        del node[key]
        other = node.get(name)
        node[name] = (
            sign * max(lower, sign * other) if isinstance(other, int | float) else sign * lower
        )


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an integer, e.g. 4 for 4.0; JSON treats both alike."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
        return int(value)
    return value
