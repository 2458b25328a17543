"""Turns tokens into an answer's text, cut at stop sequences and never inside a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.sampling.probabilities import ChosenLogprob
from offload.text import TextStream
from specoffload.session.generation import FinishReason, Piece
from specoffload.session.statistics import GenerationStats


class Answer:
    """Turns emitted tokens into pieces of text that may be shown."""

    def __init__(
        self, text: TextStream, stops: Sequence[str], is_end: Callable[[int], bool]
    ) -> None:
        """`is_end` returns True for tokens that end the answer."""
        self._text, self._is_end = text, is_end
        self._stops = StopScanner(stops)
        self.finish: FinishReason = "length"  # the reason if nothing else ends the answer
        self.id_slot = -1  # number of the slot that makes the answer

    def take(self, tokens: Sequence[int], logprobs: Sequence[ChosenLogprob] = ()) -> Piece:
        """The piece for `tokens`, up to the token that ends the answer.

        `logprobs` has an entry for each token but the end token, or is empty.
        """
        shown, n_kept, n_told = "", 0, 0
        for token in tokens:
            n_kept += 1
            if self._is_end(token):
                self.finish = "stop"
                break
            n_told += 1
            shown += self._stops.feed(self._text.feed(token))
            if self._stops.stopped:
                self.finish = "stop"
                break
        return Piece(
            shown, tuple(tokens[:n_kept]), logprobs=tuple(logprobs[:n_told]), id_slot=self.id_slot
        )

    def last_piece(self, stats: GenerationStats) -> Piece:
        """The last piece, with the text held back so far, the finish reason and `stats`."""
        word = self._stops.word
        text = ""
        if word is None:
            text = self._stops.feed(self._text.finish()) + self._stops.finish()
        return Piece(text, (), self.finish, stats, stopping_word=word, id_slot=self.id_slot)


class StopScanner:
    """Removes a stop sequence and all text after it. Holds back text that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.word: str | None = None  # the stop sequence that was found

    @property
    def stopped(self) -> bool:
        return self.word is not None

    def feed(self, text: str) -> str:
        """Add `text`, and return the text that may be shown now; "" after a stop sequence."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.word = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._longest_beginning()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """Return the text held back, at the end of a text without a stop sequence."""
        shown, self._held = self._held, ""
        return shown

    def _longest_beginning(self) -> int:
        best = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self._held)), best, -1):
                if self._held.endswith(stop[:n]):
                    best = n
                    break
        return best
