r"""Replaces halves of surrogate pairs in JSON text, such as a lone \ud83d.

JavaScript counts such a pair as two characters. A program that cuts a text between them sends half
of an emoji, and sends it again with each later request of the conversation (claude-code #3277).
"""

from __future__ import annotations

import re

_MOST = 10_000  # halves in a body; a text has one at each end of a cut
_REPLACEMENT = rb"\ufffd"

# Text up to the next half, or to the end. It never gives back what it has read, so that a body is
# read once. Group 1 is the half.
_UP_TO_HALF = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
    rb"(?:(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\Z)",
    re.DOTALL,
)


def without_half_pairs(data: bytes | bytearray) -> bytes | None:
    """Return JSON text with U+FFFD in place of each half; None if it has none, or too many."""
    parts: list[bytes] = []
    at = 0
    while match := _UP_TO_HALF.match(data, at):
        if match[1] is None:
            return b"".join([*parts, data[at:]]) if parts else None
        if len(parts) == 2 * _MOST:
            return None
        parts += [bytes(data[at : match.start(1)]), _REPLACEMENT]
        at = match.end()
    return None
