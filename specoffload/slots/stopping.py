"""Cuts an answer's text at stop sequences, which do not count inside its reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from offload.sampling.answer_start import AnswerStart, ReasoningSpan


class StopScanner:
    """Removes a stop sequence and all text after it. Holds back text that may begin one.

    A stop sequence of a client limits the answer alone. A model may well write it while it reasons
    (vLLM #38499, #52393).
    """

    def __init__(
        self, stops: Sequence[str], span: ReasoningSpan | None = None, ends: Sequence[str] = ()
    ) -> None:
        """`stops` count after the reasoning in `span`. `ends` count anywhere."""
        self._anywhere = _Scanner(ends)
        self._in_answer = _Scanner(stops)
        self._start = AnswerStart(span if self._in_answer.stops else None)
        self._n_passed = 0  # characters that did not end the text
        self._undecided = ""  # a text's beginning that may begin the reasoning

    @property
    def word(self) -> str | None:
        """The stop sequence that was found, or None."""
        return self._anywhere.word or self._in_answer.word

    @property
    def stopped(self) -> bool:
        return self.word is not None

    def feed(self, text: str) -> str:
        """Add `text`, and return the text that may be shown now; "" after a stop sequence."""
        if self.stopped:
            return ""
        return self._after_start(self._anywhere.feed(text))

    def finish(self) -> str:
        """Return the text held back, at the end of a text without a stop sequence."""
        shown = self._after_start(self._anywhere.finish())
        self._start.finish()
        return shown + self._after_start("") + self._in_answer.finish()

    def _after_start(self, text: str) -> str:
        """Return the text to be shown of `text`, which no end cuts."""
        start = self._start
        start.feed(text)
        if start.at is None and not start.is_reasoning:
            self._undecided += text
            return ""
        text, self._undecided = self._undecided + text, ""
        n_reasoning = len(text) if start.at is None else max(0, start.at - self._n_passed)
        self._n_passed += len(text)
        return text[:n_reasoning] + self._in_answer.feed(text[n_reasoning:])


class _Scanner:
    """Finds the first of some texts in a text that is still arriving."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.word: str | None = None

    def feed(self, text: str) -> str:
        if not self.stops:
            return text
        if self.word is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.word = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        cut = len(self._held) - self._longest_beginning()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        shown, self._held = self._held, ""
        return shown

    def _longest_beginning(self) -> int:
        """Return the length of the longest beginning of a stop that ends the text held back."""
        best = 0
        for stop in self.stops:
            for n in range(min(len(stop) - 1, len(self._held)), best, -1):
                if self._held.endswith(stop[:n]):
                    best = n
                    break
        return best
