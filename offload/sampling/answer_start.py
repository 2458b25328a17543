"""Finds where an answer begins after its reasoning, in text that is still arriving. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningSpan:
    """The markers around an answer's reasoning. The answer begins after any of `closes`.

    `is_open` is True if the text begins inside the reasoning. Otherwise the text reasons only if it
    begins with `opens`, perhaps after white space.
    """

    opens: str
    closes: tuple[str, ...]
    is_open: bool = False


@dataclass(frozen=True)
class CallSpan:
    """The markers around an answer's tool calls.

    Calls begin with any of `opens`. They end after `closes`, or with the answer if it is empty. If
    `is_open`, the whole answer consists of calls.
    """

    opens: tuple[str, ...]
    closes: str = ""
    is_open: bool = False


class AnswerStart:
    """Follows a text. `at` is the number of its characters before the answer; None if not known."""

    def __init__(self, span: ReasoningSpan | None) -> None:
        """Without a `span`, the whole text is the answer."""
        self.at: int | None = 0 if span is None else None
        self._span = span
        self._is_open = span is not None and span.is_open
        self._n_read = 0
        self._tail = ""  # the text's beginning; inside the reasoning, its last characters

    @property
    def is_reasoning(self) -> bool:
        """True while the text so far ends inside the reasoning."""
        return self.at is None and self._is_open

    def feed(self, text: str) -> None:
        self._n_read += len(text)
        if self.at is not None or self._span is None:
            return
        self._tail += text
        if not self._is_open:
            tail = self._tail.lstrip()
            opens = self._span.opens.strip()
            if tail.startswith(opens):
                self._is_open = True
                self._tail = tail[len(opens) :]
            elif not opens.startswith(tail):
                self.at = 0
        if self._is_open:
            self._look_for_the_end(self._span)

    def finish(self) -> None:
        """End the text. Text that has only begun to look like reasoning is the answer."""
        if self.at is None and not self._is_open:
            self.at = 0

    def _look_for_the_end(self, span: ReasoningSpan) -> None:
        ends = [
            (place + len(closes), len(closes))
            for closes in map(str.strip, span.closes)
            if (place := self._tail.find(closes)) >= 0
        ]
        if ends:
            end, _ = min(ends)
            self.at = self._n_read - len(self._tail) + end
        else:
            self._tail = self._tail[-max(len(closes) for closes in span.closes) :]
