"""Tokens to text as they come: bytes are held back until a character is whole."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TextStream:
    """Joins the bytes of tokens into text; invalid bytes become U+FFFD, never an error."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that became whole with this token, perhaps none."""
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        """What is left at the end: a truncated character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
