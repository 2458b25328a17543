"""Decides whether the branches of a `oneOf` exclude each other, so that it is an `anyOf`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import Any

from offload.sampling.schema_parts import canonical
from offload.sampling.schema_refs import StepLimit
from offload.sampling.schema_words import TYPES

Resolve = Callable[[Any], Any]
Names = frozenset[str] | None
_DEEPEST = 6
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf")


def are_exclusive(
    branches: Sequence[Any], resolved: Resolve, names: Collection[str] | None, steps: StepLimit
) -> bool:
    """True if no value can satisfy two of `branches`, as far as that can be proved quickly.

    `resolved` returns the schema that a `$ref` names. `names` are the properties that other parts
    of the schema know; None if objects are not closed. Nothing is proved once `steps` are used up.
    Each pair takes two, and one more for each value or name that is looked up.
    """
    proof = _Proof(resolved, steps)
    known = None if names is None else frozenset(names)
    return all(proof.exclude(a, b, known, 0) for a, b in combinations(branches, 2))


class _Proof:
    """Compares schemas in pairs."""

    def __init__(self, resolved: Resolve, steps: StepLimit) -> None:
        self._resolved, self._steps = resolved, steps
        # By the id of a schema:
        self._values: dict[int, set[str] | None] = {}
        self._types: dict[int, set[str]] = {}
        self._required: dict[int, frozenset[str]] = {}

    def exclude(self, a: Any, b: Any, names: Names, depth: int) -> bool:
        if not self._steps.count(2):
            return False
        a, b = _followed(a, self._resolved), _followed(b, self._resolved)
        if a is False or b is False:
            return True
        if depth > _DEEPEST or not isinstance(a, dict) or not isinstance(b, dict):
            return False
        values, others = self._values_of(a), self._values_of(b)
        if values is not None and others is not None:
            can = self._steps.count(min(len(values), len(others)))
            return can and values.isdisjoint(others)
        types = self._types_of(a, values) & self._types_of(b, others)
        if not types:
            return True
        return types == {"object"} and (
            self._exclude_objects(a, b, names, depth) or self._exclude_objects(b, a, names, depth)
        )

    def _exclude_objects(
        self, a: dict[str, Any], b: dict[str, Any], names: Names, depth: int
    ) -> bool:
        """True if a property that `a` requires cannot be in an object of `b`."""
        mine, theirs = a.get("properties", {}), b.get("properties")
        if not isinstance(theirs, dict):
            return False
        is_closed = names is not None and not any(word in b for word in (*_OPEN, "oneOf", "$ref"))
        is_closed = is_closed or b.get("additionalProperties") is False
        inside: Names = None if names is None else frozenset()
        required = self._required_by(a)
        if not self._steps.count(len(required)):
            return False
        for name in required:
            if name in theirs:
                if self.exclude(mine.get(name, True), theirs[name], inside, depth + 1):
                    return True
            elif is_closed and name not in (names or ()) and name not in self._required_by(b):
                return True
        return False

    def _required_by(self, node: dict[str, Any]) -> frozenset[str]:
        if id(node) not in self._required:
            listed = node.get("required")
            self._required[id(node)] = frozenset(listed if isinstance(listed, list) else ())
        return self._required[id(node)]

    def _types_of(self, node: dict[str, Any], values: set[str] | None) -> set[str]:
        if id(node) not in self._types:
            self._types[id(node)] = _types(node, values)
        return self._types[id(node)]

    def _values_of(self, node: dict[str, Any]) -> set[str] | None:
        """Return the values that `const` or `enum` list, as text; None if neither is there."""
        if id(node) not in self._values:
            listed = [node["const"]] if "const" in node else node.get("enum")
            self._values[id(node)] = None if listed is None else set(map(canonical, listed))
        return self._values[id(node)]


def _followed(node: Any, resolved: Resolve) -> Any:
    for _ in range(_DEEPEST):
        if not isinstance(node, dict) or "$ref" not in node:
            return node
        node = resolved(node["$ref"])
    return None


def _types(node: dict[str, Any], values: set[str] | None) -> set[str]:
    listed = node.get("type", sorted(TYPES))
    types = {listed} if isinstance(listed, str) else set(listed)
    if values is not None:
        types &= {kind for value in values for kind in _types_of(value)}
    return types | {"integer"} if "number" in types else types


def _types_of(value: str) -> tuple[str, ...]:
    """Return the types of a value that is given as JSON."""
    starts = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean"}
    if value == "null":
        return ("null",)
    return (starts[value[0]],) if value[0] in starts else ("number", "integer")
