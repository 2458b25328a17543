"""Finds, removes and moves parts of a JSON schema by their JSON pointers (RFC 6901). Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from offload.sampling.schema_words import DATA

_INDEX = re.compile("0|[1-9][0-9]{0,8}")


def escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def at_pointer(root: Any, pointer: str) -> Any:
    """Return the part of a document at a pointer such as `#/properties/a`; None if it has none."""
    node = root
    for part in _parts(pointer):
        if isinstance(node, list) and _INDEX.fullmatch(part) and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, Mapping) and part in node:
            node = node[part]
        else:
            return None
    return node


def without(
    root: Mapping[str, Any], keywords: Iterable[str], schemas: Iterable[str] = ()
) -> dict[str, Any]:
    """Return a copy of a schema without `keywords`, and with `true` in the place of `schemas`.

    Both are pointers to parts of the schema.
    """
    result: dict[str, Any] = copy.deepcopy(dict(root))
    for pointer in keywords:
        parent, last = _parent(result, pointer)
        parent.pop(last, None)
    for pointer in schemas:
        parent, last = _parent(result, pointer)
        parent[int(last) if isinstance(parent, list) else last] = True
    return result


def _parent(root: Any, pointer: str) -> tuple[Any, str]:
    *parents, last = _parts(pointer)
    return at_pointer(root, "#" + "".join(f"/{escaped(part)}" for part in parents)), last


def moved(root: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """Return a schema that means the part of `root` at `pointer`, with all that it refers to."""
    whole = _with_refs_in(dict(root), "#/$defs/root")
    return {"$ref": "#/$defs/root" + pointer.removeprefix("#"), "$defs": {"root": whole}}


def has_ref(node: Any) -> bool:
    """True if a part of the schema refers to another one by its place."""
    if isinstance(node, list):
        return any(map(has_ref, node))
    if not isinstance(node, Mapping):
        return False
    return "$ref" in node or any(has_ref(value) for key, value in node.items() if key not in DATA)


def _with_refs_in(node: Any, place: str) -> Any:
    """Return a copy in which references to places of the document begin with `place`."""
    if isinstance(node, list):
        return [_with_refs_in(item, place) for item in node]
    if not isinstance(node, Mapping):
        return node
    out = {key: v if key in DATA else _with_refs_in(v, place) for key, v in node.items()}
    ref = out.get("$ref")
    if isinstance(ref, str) and (ref in ("", "#") or ref.startswith("#/")):
        out["$ref"] = place + ref.removeprefix("#")
    return out


def _parts(pointer: str) -> list[str]:
    return [
        unquote(part).replace("~1", "/").replace("~0", "~")
        for part in pointer.removeprefix("#").split("/")[1:]
    ]
