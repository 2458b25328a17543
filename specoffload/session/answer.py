"""Tokens become the text of an answer: whole characters, stop sequences, why it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.sampling.probabilities import ChosenLogprob
from offload.text import TextStream
from specoffload.session.generation import FinishReason, GenerationStats, Piece
from specoffload.session.stopping import StopScanner


class Answer:
    """Takes emitted tokens and gives the pieces that may be shown."""

    def __init__(
        self, text: TextStream, stops: Sequence[str], is_end: Callable[[int], bool]
    ) -> None:
        """`is_end` says which tokens end the answer; none where they are ignored."""
        self._text, self._is_end = text, is_end
        self._stops = StopScanner(stops)
        self.finish: FinishReason = "length"  # until something else ends it
        self.id_slot = -1  # of the slot that it is made in

    def take(self, tokens: Sequence[int], logprobs: Sequence[ChosenLogprob] = ()) -> Piece:
        """The piece that these tokens add; it has those of them up to the end of the answer, and
        their logprobs but that of an end token."""
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
        """The text held back, when no token follows, and how it ended."""
        word = self._stops.word
        text = ""
        if word is None:
            text = self._stops.feed(self._text.finish()) + self._stops.finish()
        return Piece(text, (), self.finish, stats, stopping_word=word, id_slot=self.id_slot)
