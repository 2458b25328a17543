"""Reads the parts of a JSON schema: checks them, and moves numbers that llguidance rounds. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import BadRequest
from offload.sampling.schema_places import escaped
from offload.sampling.schema_refs import StepLimit
from offload.sampling.schema_words import (
    BOUNDS,
    DATA,
    FORMAT_PATTERNS,
    IGNORED,
    OF_NAMES,
    OF_SCHEMA,
    OF_SCHEMAS,
    TYPES,
    UNKNOWN_FORMATS,
    fault_of_pattern,
    translated_pattern,
)

DEEPEST_SCHEMA = 64
# llguidance writes a bound, digit by digit, as a regular expression. Its parser refuses bounds with
# more than about 60 zeros after the point. Bounds of 19 digits overflow its integers, and a
# constant below -10^18 ends the process.
_LEAST_BOUND = 1e-30
_LARGEST_BOUND = 10**18 - 128  # the largest float below 10^18
_LARGEST_EXACT = 2**53  # largest integer below which each integer is a float
_OLD_DRAFTS = re.compile(r"draft-0[3-7]")


@dataclass(frozen=True)
class SchemaFault:
    """A keyword that cannot be followed. `where` is its place as a JSON pointer."""

    where: str
    reason: str
    is_schema: bool = False  # True if it stands in the place of a schema

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class PartReader:
    """Reads one schema. `ignored` has the places of keywords that have no effect.

    If `drops`, a keyword that cannot be followed is left out and noted in `faults`. Otherwise it
    raises BadRequest.
    """

    def __init__(self, root: Mapping[str, Any], steps: StepLimit, *, drops: bool) -> None:
        self._steps = steps
        self.ignored: dict[str, None] = {}
        self.faults: list[SchemaFault] = []
        self._drops = drops
        # Before draft 2019-09, keywords beside $ref have no effect.
        self._ref_is_alone = bool(_OLD_DRAFTS.search(str(root.get("$schema", ""))))

    def read(self, node: Any, where: str = "#", depth: int = 0, *, is_schema: bool = True) -> Any:
        """Return the schema `node` with the changes that llguidance needs.

        Without `is_schema`, the node stands under an unknown keyword. A `$ref` may point to it, but
        its faults do not count.
        """
        if depth > DEEPEST_SCHEMA:
            raise BadRequest(f"the JSON schema is nested over {DEEPEST_SCHEMA} deep")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            if is_schema:
                self._fault(where, "a schema must be an object or a boolean", is_schema=True)
            return True
        if self._ref_is_alone and isinstance(node.get("$ref"), str):
            node = {name: node[name] for name in ("$ref", "$defs", "definitions") if name in node}
        out: dict[str, Any] = {}
        for name, value in node.items():
            at = f"{where}/{escaped(name)}"
            self._steps.take_place(at)
            reason = _fault_of(name, value)
            if reason is None:
                out[name] = self._value(name, value, at, depth, is_schema)
            elif is_schema:
                self._fault(at, reason)
        if is_schema:
            self._note_ignored(node, where)
        self._move_bounds(out, where, is_schema)
        _read_property_names(out)
        pattern = FORMAT_PATTERNS.get(str(out.get("format")))
        if pattern is not None:
            out["allOf"] = [*out.get("allOf", []), {"pattern": pattern}]
        return out

    def _value(self, name: str, value: Any, at: str, depth: int, is_schema: bool) -> Any:
        if name in DATA:
            return value
        if name in OF_NAMES:
            return {
                key: self.read(schema, f"{at}/{escaped(key)}", depth + 1, is_schema=is_schema)
                for key, schema in value.items()
            }
        if name in OF_SCHEMAS or (name == "items" and isinstance(value, list)):
            return [
                self.read(schema, f"{at}/{i}", depth + 1, is_schema=is_schema)
                for i, schema in enumerate(value)
            ]
        if name in OF_SCHEMA:
            return self.read(value, at, depth + 1, is_schema=is_schema)
        if name == "pattern":
            return translated_pattern(value)
        if isinstance(value, dict):
            return self.read(value, at, depth + 1, is_schema=False)
        return _whole(value)

    def _fault(self, where: str, reason: str, *, is_schema: bool = False) -> None:
        fault = SchemaFault(where, reason, is_schema)
        if not self._drops:
            raise BadRequest(f"the JSON schema cannot be followed: {fault}")
        self.faults.append(fault)

    def _note_ignored(self, node: Mapping[str, Any], where: str) -> None:
        for name, without_effect in IGNORED.items():
            if name not in node or any(_equal(node[name], value) for value in without_effect):
                continue
            if name == "if" and not {"then", "else"} & set(node):
                continue
            if name == "unevaluatedProperties" and node[name] is False:
                continue  # `ClosedObjects` enforces it
            if name == "propertyNames" and _names_of(node) is not None:
                continue
            self.ignored[f"{where}/{name}"] = None
        if node.get("format") in UNKNOWN_FORMATS:
            self.ignored[f"{where}/format"] = None
        if "json-schema.org/" in str(node.get("$ref", "")):
            self.ignored[f"{where}/$ref"] = None  # meta-schemas consist of $dynamicRef

    def _move_bounds(self, node: dict[str, Any], where: str, is_schema: bool) -> None:
        """Move bounds that llguidance cannot follow inwards, to the next one that it can."""
        for name, sign in (("minimum", 1), ("maximum", -1)):
            for key in (name, "exclusive" + name.capitalize()):
                bound = node.get(key)
                if isinstance(bound, bool) or not isinstance(bound, int | float):
                    continue
                lower = sign * bound  # an upper bound of x is a lower one of -x
                if lower > _LARGEST_BOUND:
                    if is_schema:
                        self._fault(f"{where}/{key}", "bounds beyond 10^18 cannot be followed")
                    del node[key]
                elif (moved := _moved(lower, is_excluded=key != name)) is not None:
                    del node[key]
                    other = node.get(name)
                    if isinstance(other, int | float) and not isinstance(other, bool):
                        moved = max(moved, sign * other)
                    node[name] = sign * moved


def _moved(lower: int | float, *, is_excluded: bool) -> int | float | None:
    """Return the least bound from `lower` on that llguidance can follow; None for `lower`.

    `is_excluded`: numbers must be greater than `lower`, while they may equal the returned bound.
    """
    if 0 < abs(lower) < _LEAST_BOUND:
        return _LEAST_BOUND if lower > 0 else 0
    if lower < -_LARGEST_BOUND:
        return -_LARGEST_BOUND
    if abs(lower) < _LARGEST_EXACT:
        return None
    near = float(lower)
    if int(near) < lower or (is_excluded and int(near) == lower):
        near = math.nextafter(near, math.inf)
    return int(near) if near != lower else None


def _fault_of(name: str, value: Any) -> str | None:
    """Return why the keyword `name` cannot have this value, or None."""
    if name == "type":
        types = value if isinstance(value, list) else [value]
        for kind in types:
            if not isinstance(kind, str) or kind not in TYPES:
                return f"Invalid type: {str(kind)[:60]}; JSON has {', '.join(sorted(TYPES))}"
        return None if types else "it has no type"
    if name in OF_NAMES and not isinstance(value, dict):
        return f"{name} must be an object"
    if name in OF_SCHEMAS and not (isinstance(value, list) and value):
        return f"{name} must be a list of schemas"
    if name == "required" and not (
        isinstance(value, bool)
        or (isinstance(value, list) and all(isinstance(key, str) for key in value))
    ):
        return "required must be a list of names"
    if name in BOUNDS and not isinstance(value, int | float):
        return f"{name} must be a number"
    if name == "pattern":
        return fault_of_pattern(value) if isinstance(value, str) else "pattern must be text"
    if name == "patternProperties":
        return next(filter(None, map(fault_of_pattern, value)), None)
    if name == "enum" and not (isinstance(value, list) and value):
        return "enum must be a list of values"
    if name in ("const", "enum"):
        return _fault_of_data(value)
    return None


def _fault_of_data(value: Any) -> str | None:
    """Return why an answer cannot be held to this value: a number that llguidance rounds."""
    if isinstance(value, list):
        return next(filter(None, map(_fault_of_data, value)), None)
    if isinstance(value, dict):
        return next(filter(None, map(_fault_of_data, value.values())), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) <= _LARGEST_EXACT:
        return None
    if abs(value) <= _LARGEST_BOUND and int(float(value)) == value:
        return None
    digits = str(value) if abs(value) < 10**20 else f"{str(value)[:20]}..."
    return f"the number {digits} cannot be followed exactly; each number up to 2^53 can"


def _names_of(node: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    """Return the rule of `propertyNames` that `_read_property_names` can express, or None."""
    rule = node.get("propertyNames")
    if not isinstance(rule, dict) or {"properties", "patternProperties"} & set(node):
        return None
    words = set(rule) - {"type", "description", "title", "$schema"}
    if rule.get("type", "string") != "string" or len(words) != 1:
        return None
    (word,) = words
    listed = {"enum": rule.get("enum"), "const": [rule.get("const")]}.get(word)
    if isinstance(listed, list):
        return "properties", [name for name in listed if isinstance(name, str)]
    pattern = rule.get("pattern")
    if word == "pattern" and isinstance(pattern, str) and fault_of_pattern(pattern) is None:
        return "patternProperties", [translated_pattern(pattern)]
    return None


def _read_property_names(node: dict[str, Any]) -> None:
    """Write `propertyNames` as properties, or as a pattern of properties, if that is possible."""
    limits = _names_of(node)
    if limits is not None:
        keyword, names = limits
        node[keyword] = dict.fromkeys(names, node.get("additionalProperties", True))
        node["additionalProperties"] = False


def _equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _whole(value: Any) -> Any:
    """Return a value whose floats without a fraction are integers, e.g. 4 for 4.0, as in JSON."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
        return int(value)
    return value


def canonical(value: Any) -> str:
    """Return JSON text that is equal for equal JSON values, e.g. for 1 and 1.0."""
    return json.dumps(_whole(value), sort_keys=True)
