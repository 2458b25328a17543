"""Bounds on a grammar's text, checked before libllama reads it: its parser recurses and expands
repetitions without limits of its own, and ends the process where memory does. Pure."""

from __future__ import annotations

import re

from offload.errors import BadRequest

_MOST_BYTES = 256 * 1024
_DEEPEST = 64
_MOST_REPEATED = 2000  # llama.cpp refuses more
# Strings, character classes and comments, in which brackets mean nothing.
_OPAQUE = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_REPEATED = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


def check_grammar(text: str) -> None:
    """Raises BadRequest with the bound that a GBNF text exceeds."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise BadRequest(f"the grammar is no valid text: {e}") from e
    if size > _MOST_BYTES:
        raise BadRequest(f"the grammar has {size} bytes; at most {_MOST_BYTES} are read")
    if "\0" in text:
        raise BadRequest("the grammar holds a NUL character")
    rest = _OPAQUE.sub(" ", text)
    depth = deepest = 0
    for character in rest:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if deepest > _DEEPEST:
        raise BadRequest(f"the grammar nests {deepest} brackets; at most {_DEEPEST} are read")
    for number in (n for found in _REPEATED.findall(rest) for n in found if n):
        if len(number) > 6 or int(number) > _MOST_REPEATED:
            raise BadRequest(
                f"the grammar repeats {number} times; at most {_MOST_REPEATED} can be followed"
            )
