"""Finds the arguments that a tool's schema describes, for formats that write each in its own tags.

Such formats write an object's properties one by one. Its schema may describe them behind a `$ref`,
in parts of `allOf`, or in branches of `anyOf` and `oneOf`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.sampling.schema_places import at_pointer, escaped, has_ref, moved
from offload.sampling.schema_text import target_of

_MOST_FORMS = 16
_DEEPEST = 8
Places = dict[str, tuple[str, ...]]
"""JSON pointers to the schemas that an argument has to follow, by the argument's name."""


@dataclass(frozen=True)
class Form:
    """One way to call a tool: its arguments in order, and those that it requires."""

    places: Places = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    def with_(self, other: Form) -> Form:
        places = dict(self.places)
        for name, where in other.places.items():
            places[name] = tuple(dict.fromkeys((*places.get(name, ()), *where)))
        return Form(places, self.required | other.required)


class Arguments:
    """The arguments of one tool.

    `forms` has one entry, or one for each branch of the schema's choices. `faults` has the places
    of what the forms do not say, with reasons.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.faults: dict[str, str] = {}
        self._root = parameters
        self.forms = tuple(self._forms(parameters, "#", 0))

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types of an argument in any form; empty if they are not restricted."""
        kinds = [
            types_of(self.schema(f.places[name]), self._root)
            for f in self.forms
            if name in f.places
        ]
        return frozenset().union(*kinds) if all(kinds) else frozenset()

    def schema(self, places: tuple[str, ...]) -> dict[str, Any]:
        """Return the schema of all `places`. Its references are those of the whole document."""
        if len(places) > 1:
            return {"allOf": [{"$ref": place} for place in places]}
        schema = at_pointer(self._root, places[0]) if places else True
        return (
            dict(schema)
            if isinstance(schema, Mapping)
            else {}
            if schema is not False
            else {"enum": []}
        )

    def alone(self, places: tuple[str, ...]) -> dict[str, Any]:
        """Return the schema of all `places` as a document of its own."""
        schema = self.schema(places)
        if not has_ref(schema):
            return schema
        one = moved(self._root, places[0])
        if len(places) > 1:
            refs = [moved(self._root, place)["$ref"] for place in places]
            one = {"allOf": [{"$ref": ref} for ref in refs], "$defs": one["$defs"]}
        return one

    def _forms(self, node: Any, where: str, depth: int) -> list[Form]:
        if not isinstance(node, Mapping):
            return [Form()]
        if depth > _DEEPEST:
            self.faults[where] = f"over {_DEEPEST} schemas describe one object"
            return [Form()]
        forms = [_own(node, where)]
        ref = node.get("$ref")
        if isinstance(ref, str):
            target = target_of(self._root, ref)
            if target is None:
                self.faults[f"{where}/$ref"] = "its target was not found"
            forms = _combined(forms, self._forms(target, ref or "#", depth + 1))
        for i, part in _listed(node, "allOf"):
            forms = _combined(forms, self._forms(part, f"{where}/allOf/{i}", depth + 1))
        for word in ("anyOf", "oneOf"):
            branches = [
                form
                for i, part in _listed(node, word)
                for form in self._forms(part, f"{where}/{word}/{i}", depth + 1)
            ]
            if len(forms) * len(branches) > _MOST_FORMS:
                self.faults[f"{where}/{word}"] = f"there are over {_MOST_FORMS} forms of a call"
            elif branches:
                forms = _combined(forms, branches)
        self._note_faults(node, where, forms)
        return forms

    def _note_faults(self, node: Mapping[str, Any], where: str, forms: Sequence[Form]) -> None:
        least, most = node.get("minProperties"), node.get("maxProperties")
        if isinstance(least, int) and any(len(form.required) < least for form in forms):
            self.faults[f"{where}/minProperties"] = "optional arguments are not counted"
        if isinstance(most, int) and any(len(form.places) > most for form in forms):
            self.faults[f"{where}/maxProperties"] = "optional arguments are not counted"
        for word in ("const", "enum"):
            if word in node:
                self.faults[f"{where}/{word}"] = "a choice of whole calls cannot be followed"


def _own(node: Mapping[str, Any], where: str) -> Form:
    properties, required = node.get("properties"), node.get("required")
    names = [
        name
        for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
        if schema is not False
    ]
    wanted = required if isinstance(required, list) else []
    places = {name: (f"{where}/properties/{escaped(name)}",) for name in names}
    # A required name that no part declares may have any value.
    return Form(places | {name: () for name in wanted if name not in places}, frozenset(wanted))


def _combined(forms: Sequence[Form], others: Sequence[Form]) -> list[Form]:
    combined = [form.with_(other) for form in forms for other in others]
    return [form for i, form in enumerate(combined) if form not in combined[:i]]


def _listed(node: Mapping[str, Any], name: str) -> list[tuple[int, Any]]:
    value = node.get(name)
    return list(enumerate(value)) if isinstance(value, list) else []


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    kinds = {str: "string", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def types_of(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that `schema` allows; empty if it does not restrict them.

    `root` is the whole schema, in which a `$ref` names a place.
    """
    if depth > 8:
        return frozenset()
    kinds: set[str] = set()
    kind = schema.get("type")
    if isinstance(kind, str):
        kinds.add(kind)
    elif isinstance(kind, list):
        kinds |= {k for k in kind if isinstance(k, str)}
    elif isinstance(schema.get("enum"), list):
        kinds |= {type_of(value) for value in schema["enum"]}
    elif "const" in schema:
        kinds.add(type_of(schema["const"]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types = types_of(part, root, depth + 1) if isinstance(part, Mapping) else frozenset()
        kinds = kinds & types if kinds and types else kinds | types
    others = [schema.get(word) for word in ("anyOf", "oneOf")]
    branches = [branch for listed in others if isinstance(listed, list) for branch in listed]
    where = schema.get("$ref")
    if isinstance(where, str):
        branches.append(target_of(root, where))
    for branch in branches:
        if isinstance(branch, Mapping):
            kinds |= types_of(branch, root, depth + 1)
    if "number" in kinds:
        kinds.add("integer")
    return frozenset(kinds)
