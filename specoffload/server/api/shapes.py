"""The wording of an answer, as a stream asks for it, and lines that differ in one text. Pure."""

from __future__ import annotations

import json
from typing import Protocol

from specoffload.session.generation import Piece


class Shape(Protocol):
    """Takes the pieces of a request's answers, and gives JSON texts. `created` is in Unix
    seconds."""

    def opening(self) -> list[str]:
        """The chunks before those of the first piece."""
        ...

    def add(self, piece: Piece) -> list[str]:
        """The chunks that a piece makes."""
        ...

    def whole(self) -> str:
        """All pieces as one object."""
        ...


MARK = "‡"  # stands in for a text


class TextLine:
    """JSON that differs in one text: made once by pydantic, cut where the text is, filled in."""

    def __init__(self, json_with_mark: str) -> None:
        """`json_with_mark` is the JSON where the text is MARK, once."""
        self._head, self._tail = json_with_mark.rsplit(f'"{MARK}"', 1)

    def fill(self, text: str) -> str:
        return f"{self._head}{json.dumps(text, ensure_ascii=False)}{self._tail}"
