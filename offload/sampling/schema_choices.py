"""Decides whether the branches of a `oneOf` exclude each other, so that it is an `anyOf`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import Any

from offload.sampling.schema_parts import canonical
from offload.sampling.schema_words import TYPES

Resolve = Callable[[Any], Any]
Names = Collection[str] | None
_DEEPEST = 6
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf")


def are_exclusive(branches: Sequence[Any], resolved: Resolve, names: Names) -> bool:
    """True if no value can satisfy two of `branches`, as far as that can be proved.

    `resolved` returns the schema that a `$ref` names. `names` are the properties that other parts
    of the schema know; None if objects are not closed.
    """
    if len(branches) > 200:
        return False
    return all(_exclude(a, b, resolved, names, 0) for a, b in combinations(branches, 2))


def _exclude(a: Any, b: Any, resolved: Resolve, names: Names, depth: int) -> bool:
    a, b = _followed(a, resolved), _followed(b, resolved)
    if a is False or b is False:
        return True
    if depth > _DEEPEST or not isinstance(a, dict) or not isinstance(b, dict):
        return False
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return values.isdisjoint(others)
    types = _types(a) & _types(b)
    if not types:
        return True
    return types == {"object"} and (
        _excludes_objects(a, b, resolved, names, depth)
        or _excludes_objects(b, a, resolved, names, depth)
    )


def _excludes_objects(
    a: dict[str, Any],
    b: dict[str, Any],
    resolved: Resolve,
    names: Collection[str] | None,
    depth: int,
) -> bool:
    """True if a property that `a` requires cannot be in an object of `b`."""
    required = a.get("required")
    mine, theirs = a.get("properties", {}), b.get("properties")
    if not isinstance(required, list) or not isinstance(theirs, dict):
        return False
    is_closed = names is not None and not any(word in b for word in (*_OPEN, "oneOf", "$ref"))
    is_closed = is_closed or b.get("additionalProperties") is False
    for name in required:
        if name in theirs:
            if _exclude(mine.get(name, True), theirs[name], resolved, (), depth + 1):
                return True
        elif is_closed and name not in (names or ()) and name not in b.get("required", ()):
            return True
    return False


def _followed(node: Any, resolved: Resolve) -> Any:
    for _ in range(_DEEPEST):
        if not isinstance(node, dict) or "$ref" not in node:
            return node
        node = resolved(node["$ref"])
    return None


def _values(node: dict[str, Any]) -> set[str] | None:
    """Return the values that `const` or `enum` list, as text; None if neither is there."""
    if "const" in node:
        return {canonical(node["const"])}
    return {canonical(value) for value in node["enum"]} if "enum" in node else None


def _types(node: dict[str, Any]) -> set[str]:
    listed = node.get("type", sorted(TYPES))
    types = {listed} if isinstance(listed, str) else set(listed)
    if (values := _values(node)) is not None:
        types &= {kind for value in values for kind in _types_of(value)}
    return types | {"integer"} if "number" in types else types


def _types_of(value: str) -> tuple[str, ...]:
    """Return the types of a value that is given as JSON."""
    starts = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean"}
    if value == "null":
        return ("null",)
    return (starts[value[0]],) if value[0] in starts else ("number", "integer")
