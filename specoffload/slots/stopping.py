"""Cuts an answer's text at stop sequences, which do not count in its reasoning and its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from offload.sampling.answer_start import AnswerStart, CallSpan, ReasoningSpan


class StopScanner:
    """Removes a stop sequence and all text after it. Holds back text that may begin one.

    A stop sequence of a client limits the answer's text. A model may well write it while it reasons
    (vLLM #38499, #52393), and a call that is cut in the middle is of no use.
    """

    def __init__(
        self,
        stops: Sequence[str],
        span: ReasoningSpan | None = None,
        ends: Sequence[str] = (),
        calls: CallSpan | None = None,
    ) -> None:
        """`stops` count after the reasoning in `span` and outside `calls`, `ends` anywhere."""
        self._anywhere = _Scanner(ends)
        self._in_answer = _Scanner(stops, calls)
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
        if start.at is None:
            start.feed(text)
        if start.at is None and not start.is_reasoning:
            self._undecided += text
            return ""
        text, self._undecided = self._undecided + text, ""
        n_reasoning = len(text) if start.at is None else max(0, start.at - self._n_passed)
        self._n_passed += len(text)
        return text[:n_reasoning] + self._in_answer.feed(text[n_reasoning:])


class LineLimits:
    """Ends an answer by its lines, as llama-server's `n_indent` and `t_max_predict_ms` do.

    Editors' plug-ins send both with /infill. Each line after the first has to begin with at least
    `n_indent` blanks or tabs. After `t_max_predict_ms`, the answer ends with the current line.
    Source: llama.cpp tools/server/README.md, "POST /completion".
    """

    def __init__(
        self, n_indent: int, most_ms: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        """0 or less: no limit."""
        self._n_indent, self._most_s, self._clock = n_indent, most_ms / 1000.0, clock
        self._deadline_s: float | None = None
        self._n_blanks: int | None = None  # at the beginning of the line; None: it has begun
        self.stopped = False

    def begin(self) -> None:
        """Let the time of the answer begin."""
        if self._most_s > 0.0 and self._deadline_s is None:
            self._deadline_s = self._clock() + self._most_s

    def feed(self, text: str) -> str:
        """Add a token's text, and return what may be shown of it."""
        if self.stopped:
            return ""
        if self._n_indent > 0:
            text = self._within_indent(text)
        if self._deadline_s is not None and "\n" in text and self._clock() > self._deadline_s:
            self.stopped = True
        return text

    def _within_indent(self, text: str) -> str:
        """Return `text` up to the first line with too little indentation."""
        for at, letter in enumerate(text):
            if self._n_blanks is not None:
                if letter in " \t":
                    self._n_blanks += 1
                elif self._n_blanks < self._n_indent:
                    self.stopped = True
                    return text[:at]
                else:
                    self._n_blanks = None
            if letter == "\n":
                self._n_blanks = 0
        return text


class _Scanner:
    """Finds the first of some texts in a text that is still arriving, outside of calls."""

    def __init__(self, stops: Sequence[str], calls: CallSpan | None = None) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.word: str | None = None
        self._held = ""
        self._opens, self._closes = (calls.opens, calls.closes) if calls else ((), "")
        self._is_in_call = calls is not None and calls.is_open

    def feed(self, text: str) -> str:
        """Add `text`, and return the text that may be shown now; "" after a stop sequence."""
        if not self.stops:
            return text
        if self.word is not None:
            return ""
        self._held += text
        shown = ""
        while (part := self._part()) is not None:
            shown += part
        return shown

    def finish(self) -> str:
        """Return the text held back, at the end of the text."""
        at, word = (len(self._held), None) if self._is_in_call else self._first(self.stops)
        self.word = word
        shown, self._held = self._held[:at], ""
        return shown

    def _part(self) -> str | None:
        """Take text up to the next marker. Returns None if no more can be taken yet.

        A marker of a call has priority over a stop sequence that begins with it or in it.
        """
        if self.word is not None or not self._held:
            return None
        if self._is_in_call:
            return self._part_of_call()
        stop_at, stop = self._first(self.stops)
        open_at, opener = self._first(self._opens)
        if opener is not None and open_at <= stop_at:
            self._is_in_call = True
            return self._taken(open_at + len(opener))
        may_open_at = self._begins(self._opens)
        if stop is None:
            return self._taken(min(may_open_at, self._begins(self.stops)))
        if may_open_at <= stop_at:
            return self._taken(may_open_at)
        self.word = stop
        return self._taken(stop_at)

    def _part_of_call(self) -> str | None:
        closes = (self._closes,) if self._closes else ()
        at, marker = self._first(closes)
        if marker is None:
            return self._taken(self._begins(closes))
        self._is_in_call = False
        return self._taken(at + len(marker))

    def _first(self, markers: Sequence[str]) -> tuple[int, str | None]:
        """Return the first marker in the text and where it begins; (the text's end, None)."""
        places = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        return min(places) if places else (len(self._held), None)

    def _begins(self, markers: Sequence[str]) -> int:
        """Return where a marker may begin whose rest is still to come."""
        best = 0
        for marker in markers:
            for n in range(min(len(marker) - 1, len(self._held)), best, -1):
                if self._held.endswith(marker[:n]):
                    best = n
                    break
        return len(self._held) - best

    def _taken(self, n: int) -> str | None:
        shown, self._held = self._held[:n], self._held[n:]
        return shown or None
