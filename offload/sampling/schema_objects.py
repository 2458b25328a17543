"""Closes a JSON schema's objects: one without a rule for other properties has no others. Pure.

llama.cpp's converter reads schemas so, because small models would add properties for ever
(llama.cpp, PR 8199). Several parts of a schema may describe one object: `properties` beside
`allOf`, `anyOf`, `oneOf` and `$ref`. Such parts are closed together, as by `unevaluatedProperties`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.errors import BadRequest
from offload.sampling.schema_choices import are_exclusive
from offload.sampling.schema_refs import References, StepLimit
from offload.sampling.schema_words import OF_NAMES, OF_SCHEMA

MOST_PARTS = 20_000
_MOST_PROOF_STEPS = 200_000  # limit for all proofs that branches of a oneOf exclude each other
# llguidance compares each property of an object with all others: 4,000 take it a second.
_PAIRS_PER_STEP = 16
_DEEPEST = 160
_CHOICES = ("anyOf", "oneOf")
_NOT_REQUIRED = ("then", "else")


@dataclass(frozen=True)
class Known:
    """The properties that parts of a schema know for one object.

    `names` are declared, and `wanted` are required without being declared. `is_object` is True if a
    part certainly declares properties. `is_open` is True if a part allows others. `is_unknown` is
    True if a part lies outside of the document.
    """

    names: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    is_object: bool = False
    is_open: bool = False
    is_unknown: bool = False
    is_strict: bool = False  # True inside of unevaluatedProperties: false
    patterns: tuple[str, ...] = ()  # of patternProperties

    def is_closed(self, *, closes: bool) -> bool:
        """True if the object has no other properties. `closes`: objects are closed by default."""
        if not self.is_object or self.is_open:
            return False
        return self.is_strict or (closes and not self.patterns)


NOTHING = Known()


def _all(parts: Iterable[Known], steps: StepLimit) -> Known:
    """Return what is known of an object that all of `parts` describe. Each name is a step."""
    parts = list(parts)
    for part in parts:
        steps.take(1 + len(part.names) + len(part.wanted) + len(part.patterns))
    return Known(
        tuple(dict.fromkeys(name for part in parts for name in part.names)),
        tuple(dict.fromkeys(name for part in parts for name in part.wanted)),
        any(part.is_object for part in parts),
        any(part.is_open for part in parts),
        any(part.is_unknown for part in parts),
        any(part.is_strict for part in parts),
        tuple(dict.fromkeys(pattern for part in parts for pattern in part.patterns)),
    )


class ClosedObjects:
    """Closes the objects of one schema. `ignored` gets the places of what cannot be enforced."""

    def __init__(
        self, root: Mapping[str, Any], ignored: dict[str, None], steps: StepLimit, *, closes: bool
    ) -> None:
        """With `closes` False, only `unevaluatedProperties: false` closes objects."""
        self._ignored, self._steps, self._closes = ignored, steps, closes
        self._resolved = References(root).resolved
        self._proof_steps = StepLimit(_MOST_PROOF_STEPS)
        self._known: dict[int, Known] = {}
        self._n_parts = 0

    def close(
        self,
        node: Any,
        beside: Known = NOTHING,
        where: str = "#",
        chain: frozenset[str] = frozenset(),
        depth: int = 0,
    ) -> Any:
        """Return the schema `node` with closed objects.

        `beside` is what other parts know of the same object. `chain` has the references that led
        here without leaving the object.
        """
        self._count_part(depth)
        self._steps.take(1 + len(beside.names))
        if node is True and beside.is_closed(closes=self._closes):
            node = {}
        if not isinstance(node, dict):
            return node
        own = self._own(node)
        if node.get("unevaluatedProperties") is False:
            beside = Known(is_object=True, is_strict=True)
        out = self._inner(node, where, depth)
        target = self._resolved(node.get("$ref"))
        also = [self._of(part) for part in node.get("allOf", ())]
        linked = NOTHING if "$ref" not in node else self._of(node, ref_alone=True)
        choices = {
            name: self._any([self._of(p) for p in node[name]]) for name in _CHOICES if name in node
        }
        if beside.is_strict and any(p.is_unknown for p in (linked, *also, *choices.values())):
            self._ignored[f"{where}/unevaluatedProperties"] = None

        def others(but: object) -> Known:
            """Return what all parts know, except one."""
            parts = [beside, own]
            parts += [known for i, known in enumerate(also) if i != but]
            parts += [known for name, known in choices.items() if name != but]
            return self._all(parts if but == "$ref" else [*parts, linked])

        if "allOf" in node:
            out["allOf"] = [
                self.close(part, others(i), f"{where}/allOf/{i}", chain, depth + 1)
                for i, part in enumerate(node["allOf"])
            ]
        for name in choices:
            context = others(name)
            out[name] = [
                self.close(part, context, f"{where}/{name}/{i}", chain, depth + 1)
                for i, part in enumerate(node[name])
            ]
            if name == "oneOf":
                closed = context if self._closes else None
                names = None if closed is None else closed.names
                if not are_exclusive(node[name], self._resolved, names, self._proof_steps):
                    self._ignored[f"{where}/oneOf"] = None
        if target is not None and (context := others("$ref")) != NOTHING:
            ref = node["$ref"]
            if ref in chain:
                raise BadRequest(f"the JSON schema refers to itself without an end: {ref[:80]}")
            copy = self.close(target, context, ref, chain | {ref}, depth + 1)
            del out["$ref"]
            out["allOf"] = [*out.get("allOf", []), copy]
        has_parts = bool(also) or "$ref" in node
        if not choices and (own != NOTHING or not has_parts):  # otherwise its parts are closed
            self._close_own(node, out, self._all([beside, own, linked, *also]))
        return out

    def _count_part(self, depth: int) -> None:
        self._n_parts += 1
        if self._n_parts > MOST_PARTS or depth > _DEEPEST:
            raise BadRequest(
                f"the JSON schema has over {MOST_PARTS} parts once its references are followed, or "
                f"is nested over {_DEEPEST} deep"
            )

    def _all(self, parts: Iterable[Known]) -> Known:
        return _all(parts, self._steps)

    def _any(self, parts: list[Known]) -> Known:
        """Return what is known if one of `parts` describes the object."""
        is_object = bool(parts) and all(part.is_object for part in parts)
        return replace(self._all(parts), is_object=is_object)

    def _close_own(self, node: Mapping[str, Any], out: dict[str, Any], known: Known) -> None:
        """Allow only the properties that all parts together know, if they are to be closed."""
        if not known.is_closed(closes=self._closes):
            return
        types = node.get("type", "object")
        if "object" not in types or "additionalProperties" in node:
            return
        names = known.names if known.is_strict else (*known.names, *known.wanted)
        properties = out.setdefault("properties", {})
        for name in names:
            properties.setdefault(name, True)
        if known.patterns:
            rules = out.setdefault("patternProperties", {})
            for pattern in known.patterns:
                rules.setdefault(pattern, True)
        out["additionalProperties"] = False

    def _inner(self, node: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        """Return a copy of `node` with the schemas of its values' parts closed."""
        out: dict[str, Any] = {}
        for name, value in node.items():
            at = f"{where}/{name}"
            self._steps.take_place(at)
            if name == "properties":
                self._steps.take(len(value) ** 2 // _PAIRS_PER_STEP)
            if name in OF_NAMES:
                out[name] = {
                    key: self.close(part, NOTHING, f"{at}/{key}", depth=depth + 1)
                    for key, part in value.items()
                }
            elif isinstance(value, list) and name in ("prefixItems", "items"):
                out[name] = [
                    self.close(part, NOTHING, f"{at}/{i}", depth=depth + 1)
                    for i, part in enumerate(value)
                ]
            elif name in OF_SCHEMA:
                out[name] = self.close(value, NOTHING, at, depth=depth + 1)
            elif isinstance(value, dict) and name not in ("const", "default"):
                # Under an unknown keyword; only a $ref can lead here.
                out[name] = self.close(value, NOTHING, at, depth=depth + 1)
            else:
                out[name] = value
        return out

    def _of(self, node: Any, *, ref_alone: bool = False, depth: int = 0) -> Known:
        """Return what `node` knows of the object that it describes, with all its parts.

        With `ref_alone`, return what its `$ref` knows.
        """
        if not isinstance(node, dict):
            return NOTHING
        self._steps.take()
        if depth > _DEEPEST:
            raise BadRequest(f"the JSON schema has over {_DEEPEST} references one after another")
        linked = NOTHING
        ref = node.get("$ref")
        if isinstance(ref, str):
            target = self._resolved(ref)
            linked = (
                Known(is_open=True, is_unknown=True)
                if target is None
                else self._of(target, depth=depth + 1)
            )
        if ref_alone:
            return linked
        if id(node) not in self._known:
            self._known[id(node)] = NOTHING  # for references that lead back here
            parts = [self._of(part, depth=depth + 1) for part in node.get("allOf", ())]
            for name in _CHOICES:
                if isinstance(node.get(name), list):
                    parts.append(
                        self._any([self._of(part, depth=depth + 1) for part in node[name]])
                    )
            self._known[id(node)] = self._all([self._own(node), linked, *parts])
        return self._known[id(node)]

    def _own(self, node: Mapping[str, Any]) -> Known:
        """Return what the keywords of `node` itself know of the object that it describes."""
        properties, others = node.get("properties"), node.get("additionalProperties")
        required = node.get("required")
        later = [node.get(name) for name in _NOT_REQUIRED]
        for name in ("dependentSchemas", "dependencies"):
            if isinstance(node.get(name), dict):
                later += node[name].values()
        declared = tuple(properties if isinstance(properties, dict) else ())
        patterns = tuple(node.get("patternProperties", ()))
        self._steps.take(len(declared) + len(patterns))
        return Known(
            (*declared, *self._all(self._of(part) for part in later).names),
            tuple(required) if isinstance(required, list) else (),
            isinstance(properties, dict) or others is False,
            others not in (None, False) or node.get("unevaluatedProperties", False) is not False,
            patterns=patterns,
        )
