"""Server-sent events that differ in one text alone, as most of a stream do. Pure."""

from __future__ import annotations

import json

MARK = "‡"  # stands in for a text

_quoted = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes an encoder at each call


class TextLine:
    """An event made once by pydantic, cut where its text is, filled in."""

    def __init__(self, json_with_mark: str) -> None:
        """`json_with_mark` is the JSON where the text is MARK, once."""
        head, tail = json_with_mark.rsplit(f'"{MARK}"', 1)
        self._head, self._tail = b"data: " + head.encode(), tail.encode() + b"\n\n"

    def sent(self, text: str) -> bytes:
        """The event with `text`. JSON has no raw line feed, so one data line is enough."""
        return self._head + _quoted(text).encode() + self._tail
