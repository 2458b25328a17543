"""Finds the parts of a JSON schema that its references name, and counts the steps of reading it.

The bytes of a schema do not bound its time: a thousand references to a thousand names are a million
steps. So whoever walks a schema counts steps here. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.errors import BadRequest
from offload.sampling.schema_places import at_pointer

MOST_STEPS = 500_000  # about a second; the largest published schemas take a tenth
_CHARS_PER_STEP = 64  # characters of a place that are copied in the time of a step


class StepLimit:
    """Counts the steps of reading one schema. A step takes about a microsecond."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.n = 0
        self.most = most

    def count(self, n: int = 1) -> bool:
        """Count `n` steps. Returns False if there are too many."""
        self.n += n
        return self.n <= self.most

    def take(self, n: int = 1) -> None:
        """Count `n` steps. Raises BadRequest if there are too many."""
        if not self.count(n):
            raise BadRequest(
                f"the JSON schema takes over {self.most} steps to read, because its references, "
                "choices or long names multiply: simplify it"
            )

    def take_place(self, where: str) -> None:
        """Count a step for a part of the schema, and more if the JSON pointer to it is long."""
        self.take(1 + len(where) // _CHARS_PER_STEP)


class References:
    """Resolves the references of one document. Walks it once, and each reference once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._found: dict[str, Any] = {}  # parts by reference
        self._anchors: dict[str, Any] = {}
        self._has_other_ids = False  # True if a part has an identifier of its own
        self._index()

    def resolved(self, ref: Any) -> Any:
        """Return the schema that a `$ref` names within this document; None if there is none."""
        if not isinstance(ref, str) or self._has_other_ids:
            return None
        if ref not in self._found:
            self._found[ref] = self._resolve(ref)
        return self._found[ref]

    def _resolve(self, ref: str) -> Any:
        root_id = self._root.get("$id")
        if isinstance(root_id, str):
            ref = ref.removeprefix(root_id.rstrip("#"))
        if ref in ("", "#"):
            return self._root
        if not ref.startswith("#/"):
            return self._anchors.get(ref[1:]) if ref.startswith("#") else None
        target = at_pointer(self._root, ref)
        return target if isinstance(target, dict | bool) else None

    def _index(self) -> None:
        """Note the anchors, of equal ones the first, and whether a part has an identifier."""
        to_visit: list[Any] = [self._root]
        while to_visit:
            node = to_visit.pop()
            if isinstance(node, list):
                to_visit += reversed(node)
            elif isinstance(node, dict):
                anchor = node.get("$anchor")
                if isinstance(anchor, str):
                    self._anchors.setdefault(anchor, node)
                self._has_other_ids |= node is not self._root and isinstance(node.get("$id"), str)
                to_visit += reversed(node.values())
