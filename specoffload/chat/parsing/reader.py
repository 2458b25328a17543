"""Text that arrives in pieces, read by coroutines that wait for more where it is too short to tell.

A `Reading` is a generator that yields when it needs more text, so a parser is written as if all
text were there. Decisions depend on the text alone, never on where it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Show = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[^\s,{}\[\]\"<]*")


class Reader:
    """The text that is not read yet, and what was read since `mark`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._marked = False
        self._ended = False
        self._cut = False

    # ---- from outside

    def feed(self, text: str) -> None:
        if not self._marked:
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def end(self, *, cut: bool) -> None:
        """No text follows. `cut`: a limit ended it, so it may stop within a marker or a call."""
        self._ended, self._cut = True, cut

    @property
    def is_cut(self) -> bool:
        """True where a limit has ended the text, and all of it is read."""
        return self._cut and self._at == len(self._text)

    # ---- for parsers

    def mark(self) -> None:
        """Keep what is read from here on, so that `back` can return to it."""
        self._text, self._at = self._text[self._at :], 0
        self._marked = True

    def release(self) -> None:
        self._marked = False

    def back(self) -> None:
        """To the mark."""
        self._at = 0
        self._marked = False

    def back_unless_cut(self) -> None:
        """To the mark, unless a limit cut what was read since: that is the beginning of a call."""
        if self.is_cut:
            self._marked = False
        else:
            self.back()

    def more(self, n_least: int = 1) -> Reading[bool]:
        """Wait until `n_least` characters can be read; False if the text ends before."""
        while len(self._text) - self._at < n_least:
            if self._ended:
                return False
            yield
        return True

    def space(self) -> Reading[str]:
        """Take white space, all there is."""
        taken = ""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            taken += found[0]
            self._at = found.end()
            if self._at < len(self._text) or self._ended:
                return taken
            yield

    def put_back(self, text: str) -> None:
        """Undo the taking of `text`, which was the last thing taken."""
        self._at -= len(text)

    def peek(self) -> Reading[str]:
        """The next character, not taken; empty at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def takes(self, literal: str) -> Reading[bool]:
        """True, and taken, if `literal` comes next. Its beginning is taken too where a limit cut it
        short."""
        while not self._text.startswith(literal, self._at):
            rest = self._text[self._at :]
            if not literal.startswith(rest):
                return False
            if self._ended:
                self._at += len(rest) if self._cut else 0
                return False
            yield
        self._at += len(literal)
        return True

    def takes_one(self, literals: Sequence[str]) -> Reading[str | None]:
        """The first of `literals` that comes next, taken; None if none does."""
        for literal in literals:
            if (yield from self.takes(literal)):
                return literal
        return None

    def until(self, markers: Sequence[str], show: Show) -> Reading[str | None]:
        """Shows the text before the first of `markers` as it comes, takes that one and gives it.

        None where the text ends without; then all of it was shown, but for the beginning of a
        marker that a limit cut short.
        """
        while True:
            is_whole = self._ended and not self._cut
            at, marker = _first(self._text, self._at, markers, is_whole)
            if at > self._at:
                show(self._text[self._at : at])
                self._at = at
            if marker is not None:
                self._at += len(marker)
                return marker
            if self._ended:
                self._at = len(self._text)
                return None
            yield

    def within(self, markers: Sequence[str]) -> Reading[tuple[str, str | None]]:
        """The text before the first of `markers`, and that marker, taken."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        return "".join(parts), marker

    def json_value(self, show: Show, stops: Sequence[str] = ()) -> Reading[bool]:
        """Shows one JSON value as it comes, its brackets and strings counted, not checked.

        False where the text ends within, or one of `stops` comes where no string is open.
        """
        depth = 0
        while True:
            first = yield from self.peek()
            if not first:
                return False
            for stop in stops:
                if first == stop[0] and (yield from self.takes(stop)):
                    self.put_back(stop)
                    return False
            if first == '"':
                if not (yield from self._json_string(show)):
                    return False
            elif first in "{[":
                self._take(1, show)
                depth += 1
            elif first in "}]":
                if depth == 0:
                    return False
                self._take(1, show)
                depth -= 1
            elif first in ",:<" or first.isspace():
                if depth == 0 and first != "<":
                    return False
                self._take(1, show)
                continue
            else:
                yield from self._scalar(show)
            if depth == 0:
                return True

    def json_string(self) -> Reading[str | None]:
        """A JSON string as it is written, quotes included; None where none comes or it is cut."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        whole = yield from self._json_string(parts.append)
        return "".join(parts) if whole else None

    def _json_string(self, show: Show) -> Reading[bool]:
        self._take(1, show)
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] not in '"\\':
                end += 1
            self._take(end - self._at, show)
            if not (yield from self.more()):
                return False
            if self._text[self._at] == '"':
                self._take(1, show)
                return True
            if self._text[self._at] == "\\":
                if not (yield from self.more(2)):
                    self._take(1, show)
                    return False
                self._take(2, show)

    def _scalar(self, show: Show) -> Reading[None]:
        """A number or a word: up to what cannot be part of one."""
        while True:
            found = _SCALAR.match(self._text, self._at)
            assert found is not None
            at_edge = found.end() == len(self._text)
            self._take(found.end() - self._at, show)
            if not at_edge or self._ended:
                return
            yield

    def _take(self, n: int, show: Show) -> None:
        if n:
            show(self._text[self._at : self._at + n])
            self._at += n


def _first(text: str, start: int, markers: Sequence[str], ended: bool) -> tuple[int, str | None]:
    """Where the first marker is, with that marker; or up to where none can begin, with None.

    A beginning of a marker at the end of the text counts as long as more may come. No marker
    begins another.
    """
    at, found = len(text), None
    for marker in markers:
        place = text.find(marker, start)
        if 0 <= place < at:
            at, found = place, marker
    if not ended:
        for marker in markers:
            for n in range(min(len(marker) - 1, len(text) - start), len(text) - at, -1):
                if text.endswith(marker[:n]):
                    at, found = len(text) - n, None
                    break
    return at, found
