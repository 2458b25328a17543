"""Reads text that arrives in pieces, and collects the parts of the answer found in it.

`ReadingSteps` is a generator that yields when it needs more text, so a parser is written as if all
text were there. Its decisions depend on the text alone, never on the boundaries of the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from specoffload.chat.conversation import CallPiece, Content, Delta, Reasoning

T = TypeVar("T")
ReadingSteps = Generator[None, None, T]
Show = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[^\s,{}\[\]\"<]*")


class TextReader:
    """Holds the text that is not read yet, and the text read since `mark`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._marked = False
        self._ended = False
        self._cut = False

    def feed(self, text: str) -> None:
        if not self._marked:
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def end(self, *, cut: bool) -> None:
        """Record that no text follows.

        `cut`: a limit ended the text, so it may stop inside a marker or a call.
        """
        self._ended, self._cut = True, cut

    @property
    def is_cut(self) -> bool:
        """True if a limit has ended the text and all of it is read."""
        return self._cut and self._at == len(self._text)

    # ---- for parsers

    def mark(self) -> None:
        """Remember this position, so that `back` can return to it."""
        self._text, self._at = self._text[self._at :], 0
        self._marked = True

    def release(self) -> None:
        self._marked = False

    def back(self) -> None:
        """Return to the mark."""
        self._at = 0
        self._marked = False

    def back_unless_cut(self) -> None:
        """Return to the mark, unless a limit has ended the text and all of it is read.

        The text since the mark is then the beginning of a call or marker, and stays read.
        """
        if self.is_cut:
            self._marked = False
        else:
            self.back()

    def space(self) -> ReadingSteps[None]:
        """Take all white space."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or self._ended:
                return
            yield

    def put_back(self, text: str) -> None:
        """Make `text`, the last text that was taken, unread again."""
        self._at -= len(text)

    def peek(self) -> ReadingSteps[str]:
        """Return the next character without taking it; empty at the end."""
        return self._text[self._at] if (yield from self._has(1)) else ""

    def takes(self, literal: str) -> ReadingSteps[bool]:
        """Take `literal` if it comes next, and return True. Otherwise return False.

        If a limit ended the text within `literal`, its beginning is taken.
        """
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

    def until(self, markers: Sequence[str], show: Show) -> ReadingSteps[str | None]:
        """Pass the text before the first of `markers` to `show`. Take and return that marker.

        The text is passed on as it arrives. Returns None if the text ends without a marker. All
        text has then been passed on, except the beginning of a marker that a limit cut.
        """
        while True:
            is_whole = self._ended and not self._cut
            at, marker = _first(self._text, self._at, markers, is_whole)
            if at > self._at:
                self._take(at - self._at, show)
            if marker is not None:
                self._at += len(marker)
                return marker
            if self._ended:
                self._at = len(self._text)
                return None
            yield

    def within(self, markers: Sequence[str]) -> ReadingSteps[tuple[str, str | None]]:
        """Take and return the text before the first of `markers`, and that marker or None."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        return "".join(parts), marker

    def json_value(self, show: Show, stops: Sequence[str] = ()) -> ReadingSteps[bool]:
        """Pass one JSON value to `show` as it arrives, without checking that it is valid.

        Returns False if the text ends inside the value, or if one of `stops` comes outside of a
        string.
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

    def json_string(self) -> ReadingSteps[str | None]:
        """Take and return a JSON string with its quotes; None if there is none, or it is cut."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        whole = yield from self._json_string(parts.append)
        return "".join(parts) if whole else None

    def _json_string(self, show: Show) -> ReadingSteps[bool]:
        self._take(1, show)
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] not in '"\\':
                end += 1
            self._take(end - self._at, show)
            if not (yield from self._has(1)):
                return False
            if self._text[self._at] == '"':
                self._take(1, show)
                return True
            if self._text[self._at] == "\\":
                if not (yield from self._has(2)):
                    self._take(1, show)
                    return False
                self._take(2, show)

    def _scalar(self, show: Show) -> ReadingSteps[None]:
        """Take a number or a word."""
        while True:
            match = _SCALAR.match(self._text, self._at)
            assert match is not None
            at_edge = match.end() == len(self._text)
            self._take(match.end() - self._at, show)
            if not at_edge or self._ended:
                return
            yield

    def _has(self, n: int) -> ReadingSteps[bool]:
        """Wait until `n` characters can be read. False if the text ends before that."""
        while len(self._text) - self._at < n:
            if self._ended:
                return False
            yield
        return True

    def _take(self, n: int, show: Show) -> None:
        if n:
            show(self._text[self._at : self._at + n])
            self._at += n


def _first(text: str, start: int, markers: Sequence[str], ended: bool) -> tuple[int, str | None]:
    """Find the first marker in `text` from `start` on. Returns its index and the marker.

    If no marker is complete, returns the index before which no marker can begin, and None. Unless
    `ended`, a marker may begin at the end of the text and continue in later text. No marker may be
    the beginning of another.
    """
    at, first = len(text), None
    for marker in markers:
        place = text.find(marker, start)
        if 0 <= place < at:
            at, first = place, marker
    if not ended:
        for marker in markers:
            for n in range(min(len(marker) - 1, len(text) - start), len(text) - at, -1):
                if text.endswith(marker[:n]):
                    at, first = len(text) - n, None
                    break
    return at, first


class DeltaCollector:
    """Collects the parts that parsers find, in the order of the text.

    White space before a tool call, and after reasoning or a call, belongs to the format and is
    dropped. White space at the end of other text is kept.
    """

    def __init__(
        self,
        new_id: Callable[[], str],
        most_calls: int | None = None,
        *,
        hides_reasoning: bool = False,
    ) -> None:
        """`new_id` makes the ids of calls without one. Calls beyond `most_calls` are dropped.

        With `hides_reasoning`, there are no deltas of reasoning.
        """
        self._hides_reasoning = hides_reasoning
        self.n_calls = 0
        self.is_reasoning = False  # True inside the reasoning, after its first text
        self._most_calls = most_calls
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._held = ""  # trailing white space of content; dropped if a call follows
        self._held_reasoning = ""  # trailing white space of reasoning; dropped at its end
        self._at_start = False  # True while white space is dropped
        self._has_arguments = False

    def take(self) -> list[Delta]:
        """Return the deltas added since the last `take`."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def content(self, text: str) -> None:
        text = self._held + (text.lstrip() if self._at_start else text)
        if text:
            self._at_start = False
            self._held = self._add(Content, text)

    def reasoning(self, text: str) -> None:
        if not self.is_reasoning:
            text = text.lstrip()
        if text:
            self.is_reasoning = True
        if text and not self._hides_reasoning:
            self._held_reasoning = self._add(Reasoning, self._held_reasoning + text)

    def end_reasoning(self) -> None:
        self.is_reasoning, self._held_reasoning, self._at_start = False, "", True

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self._held, self._at_start = "", True
        self._has_arguments = False
        if self._most_calls is None or self.n_calls < self._most_calls:
            self._deltas.append(CallPiece(self.n_calls, call_id or self._new_id(), name, ""))
        self.n_calls += 1

    def arguments(self, text: str) -> None:
        """Add `text` to the last call's arguments."""
        if not text or (self._most_calls is not None and self.n_calls > self._most_calls):
            return
        self._has_arguments = True
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, CallPiece):
            self._deltas[-1] = CallPiece(last.index, last.id, last.name, last.arguments + text)
        else:
            self._deltas.append(CallPiece(self.n_calls - 1, None, None, text))

    def end_call(self) -> None:
        """Record that the last call is complete. A call without arguments gets an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    def end(self) -> None:
        """Record that no text follows. White space that was held back becomes content."""
        if self._held:
            self._deltas.append(Content(self._held))
        self._held = ""

    def _add(self, kind: type[Content] | type[Reasoning], text: str) -> str:
        """Add `text` without its trailing white space. Returns that white space."""
        shown = text.rstrip()
        if shown:
            last = self._deltas[-1] if self._deltas else None
            if isinstance(last, Content | Reasoning) and type(last) is kind:
                self._deltas[-1] = kind(last.text + shown)
            else:
                self._deltas.append(kind(shown))
        return text[len(shown) :]
