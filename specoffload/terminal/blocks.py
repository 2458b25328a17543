"""Markdown that is still being written: which of its blocks are whole. Pure."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(```+|~~~+)")


def whole_blocks(text: str) -> tuple[str, str]:
    """`text` cut in two: blocks to which nothing can be added, and the rest.

    Blocks end at an empty line outside of a fence; a list goes on behind one, so it is whole only
    where something else has begun.
    """
    cut = at = 0
    fence = ""
    after_empty = False
    for line in text.splitlines(keepends=True):
        is_whole = line.endswith("\n")
        if after_empty and not fence and is_whole and line.strip() and not _goes_on(line):
            cut = at
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence) and line.strip() == found[1]:
            fence = ""
        after_empty = is_whole and not line.strip()
        at += len(line)
    return text[:cut], text[cut:]


def _goes_on(line: str) -> bool:
    """True for a line that may belong to a list above it."""
    return bool(re.match(r"\s+\S|\s*([-*+]|\d+[.)])\s", line))
