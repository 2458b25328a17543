"""Holds one request: its text, its sampler, the pieces of its answer and its statistics.

An answer's text is cut at stop sequences, and its pieces never end inside a character.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from offload.images.place_tokens import image_spans
from offload.sampling.answers import AnswerSampler, ChosenLogprob, TokenLogprob
from offload.sampling.logprobs import raw_logprobs
from offload.sequences.text import TextStream
from specdec.decoding.member import BatchMember
from specdec.policies.rules import DraftBounds
from specdec.types import IsEnd, Round
from specoffload.generation.generation import FinishReason, GenerateOptions, TextPiece
from specoffload.generation.statistics import EngineCounts, GenerationStats, Tally
from specoffload.slots.slot import Slot
from specoffload.slots.stopping import LineLimits, StopScanner


class PromptLogprobs:
    """Collects log probabilities of a prompt's tokens and of the `n_top` likeliest at each place.

    OpenAI's `echo` with `logprobs` returns them. Logits are not kept.
    """

    def __init__(self, tokens: Sequence[int], n_top: int, piece: Callable[[int], bytes]) -> None:
        self._tokens, self._n_top, self._piece = tuple(tokens), n_top, piece
        self._n_known = 1  # the first token has no probability
        first = TokenLogprob(tokens[0], piece(tokens[0]), math.nan)
        self._untold = [ChosenLogprob(first, ())]

    @property
    def is_complete(self) -> bool:
        """True when the logits are no longer needed."""
        return self._n_known == len(self._tokens)

    def hear(self, start: int, rows: NDArray[np.float32]) -> None:
        """Take the logits `rows` [n, n_vocab] of n prompt tokens, the first at index `start`.

        A token that is evaluated again, for example after a failure, counts once.
        """
        for at, row in enumerate(rows, start + 1):
            if at == self._n_known and not self.is_complete:
                logprobs = raw_logprobs(row, self._tokens[at], self._n_top, self._piece)
                self._untold.append(logprobs)
                self._n_known += 1

    def take(self) -> tuple[ChosenLogprob, ...]:
        """Return the entries added since the last `take`, in the prompt's order."""
        untold, self._untold = tuple(self._untold), []
        return untold


class Request:
    """A prompt and the state of its answer.

    `pieces` are for the client, in order. The last piece has a finish reason. If the request fails,
    `error` is set and no piece follows.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        n_predict: int,
        options: GenerateOptions,
        sampler: AnswerSampler,
        answer: Answer,
        is_end: IsEnd,
        beside: Request | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        *,
        drafts_after_images: bool = False,
    ) -> None:
        """`beside` is another request with the same prompt. It evaluates the prompt for both.

        `drafts_after_images` is False if a draft model would read the numbers of images.
        """
        self.n_prompt = len(tokens)
        self._prompt = tokens  # keeps the images of an ImagePrompt until the request is over
        self.images = tuple((span.start, span.end) for span in image_spans(tokens))
        self._may_draft = drafts_after_images or not self.images
        self.history = list(tokens)  # prompt and emitted tokens, also those after a stop sequence
        self.n_left = n_predict
        # True: `n_predict` is the room in the context, and less than what was asked for.
        self._may_fill_context = options.n_predict is None or options.n_predict > n_predict
        self.options, self.is_end = options, is_end
        self.sampler = sampler
        self.pieces: deque[TextPiece] = deque()
        self.error: Exception | None = None
        self.is_over = False
        self.slot: Slot | None = None  # None while the request waits or is over
        self.member: BatchMember | None = None
        self._answer = answer
        self._prompt_logprobs = prompt_logprobs
        self._beside = beside
        self.asked_with: int = (
            id(self) if beside is None else beside.asked_with
        )  # id shared by all answers to one prompt
        self._tally: Tally | None = None  # None until the request first gets a slot
        self.n_cached = 0
        self.n_from_disk = 0
        self._is_evaluated = False
        self._deadline_s: float | None = None

    def begin(
        self,
        counts: EngineCounts,
        n_cached: int,
        id_slot: int,
        n_from_disk: int = 0,
        copied_back_s: float = 0.0,
    ) -> None:
        """Record that the request got a slot, which holds `n_cached` of its tokens.

        `n_from_disk` of them were read from the disk. Copying them back from RAM took
        `copied_back_s`. May be called again, for a request that lost
        its slot. Times count from the first call.
        """
        self._answer.id_slot = id_slot
        if self._tally is not None:
            return
        now_s = perf_counter()
        self._tally, self.n_cached = Tally(counts, now_s), n_cached
        self.n_from_disk = min(n_cached, n_from_disk)
        self._tally.copied_back(copied_back_s)
        if self.options.time_limit_s is not None:
            self._deadline_s = now_s + self.options.time_limit_s

    def read(self) -> None:
        """Add a piece without text for an evaluated part of the prompt."""
        logprobs = self._prompt_logprobs
        told = () if logprobs is None else logprobs.take()
        n_read = None if self.slot is None else self.slot.n_held
        self.pieces.append(TextPiece("", prompt_logprobs=told, n_prompt_read=n_read))

    def passes(self, n_idle_cells: int) -> None:
        """Record that the next decode passes over cells that no running request needs."""
        if self._tally is not None:
            self._tally.passes(n_idle_cells)

    @property
    def may_come_back(self) -> bool:
        """True if the request may reuse kept text, such as its own that has left its slot."""
        return self.options.cache_prompt and self.hear_prompt is None

    def evaluated(self) -> None:
        """Record that all of the prompt but its last token has been evaluated."""
        if not self._is_evaluated and self._tally is not None:
            self._is_evaluated = True
            self._answer.limits.begin()
            n_kept = max(self.options.keep_at, default=0)
            self._tally.evaluated(
                self.n_prompt, self.n_cached, perf_counter(), self.n_from_disk, n_kept
            )
            if self._prompt_logprobs is not None:
                self.read()  # the only report for a prompt of one token

    def __repr__(self) -> str:
        state = "over" if self.is_over else f"{self.n_left} left"
        where = "no slot" if self.slot is None else f"slot {self.slot.number}"
        return f"Request({self.n_prompt} prompt tokens, {state}, {where})"

    @property
    def reads_prompt(self) -> bool:
        """True while the request has a slot, and its prompt is not evaluated."""
        return self.slot is not None and not self._is_evaluated

    @property
    def awaits_first_token(self) -> bool:
        """True while the prompt is evaluated and the answer is empty."""
        return self._is_evaluated and len(self.history) == self.n_prompt

    @property
    def hear_prompt(self) -> Callable[[int, NDArray[np.float32]], None] | None:
        """The function that takes the prompt's logits, or None if they are not wanted.

        While it is not None, the whole prompt has to be evaluated, even if a slot holds part of it.
        """
        logprobs = self._prompt_logprobs
        return None if logprobs is None or logprobs.is_complete else logprobs.hear

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """Random numbers for drawing drafts and for judging them."""
        return np.random.default_rng(self.options.seed)

    @property
    def bounds(self) -> DraftBounds:
        """Limits on the lengths and probabilities of the request's drafts."""
        options = self.options
        if not self._may_draft:
            return DraftBounds(0)
        return DraftBounds(options.draft_max, options.draft_min, options.draft_p_min)

    @property
    def may_begin(self) -> bool:
        """False while the prompt is being evaluated for another request."""
        other = self._beside
        return other is None or other.is_over or other._is_evaluated

    @property
    def progress(self) -> tuple[int, int, int]:
        """Numbers of tokens: in the prompt, in the answer so far, and at most still to come."""
        return self.n_prompt, len(self.history) - self.n_prompt, self.n_left

    @property
    def is_late(self) -> bool:
        """True if the request's time limit has passed."""
        return self._deadline_s is not None and perf_counter() > self._deadline_s

    def take(self, round_: Round, counts: Callable[[], EngineCounts]) -> bool:
        """Add a piece with a round's tokens. Returns True if the answer ends with this piece."""
        assert self._tally is not None
        piece = self._answer.take(round_.emitted, self.sampler.take_logprobs())
        self.n_left -= len(round_.emitted)
        self._tally.count(round_, len(piece.tokens))
        if self.options.timings_per_token:
            piece = replace(piece, so_far=self._tally.stats(counts(), perf_counter()))
        self.pieces.append(piece)
        return self._answer.is_over or bool(round_.end) or self.is_late

    def finish(self, counts: EngineCounts) -> None:
        """Add the last piece: text that was held back, the finish reason, and the statistics."""
        assert self._tally is not None
        self.evaluated()
        stats = self._tally.stats(counts, perf_counter())
        fills = self._may_fill_context and self.n_left <= 0
        self.pieces.append(self._answer.last_piece(stats, fills_context=fills))
        self.close()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.close()

    def close(self) -> None:
        """Mark the request as over and free its sampler. May be called again."""
        self.is_over = True
        self._prompt = ()
        self.sampler.close()


# -- the answer's text


class Answer:
    """Turns emitted tokens into pieces of text that may be shown."""

    def __init__(
        self,
        text: TextStream,
        stops: StopScanner,
        limits: LineLimits,
        is_end: Callable[[int], bool],
    ) -> None:
        """`is_end` returns True for tokens that end the answer."""
        self._text, self._is_end, self._stops, self.limits = text, is_end, stops, limits
        self.finish: FinishReason = "length"  # the reason if nothing else ends the answer
        self.id_slot = -1  # number of the slot that makes the answer

    @property
    def is_over(self) -> bool:
        """True if a token, a stop sequence or a limit has ended the answer."""
        return self.finish == "stop" or self.limits.stopped

    def take(self, tokens: Sequence[int], logprobs: Sequence[ChosenLogprob] = ()) -> TextPiece:
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
            shown += self.limits.feed(self._stops.feed(self._text.feed(token)))
            if self._stops.stopped and not self.limits.stopped:
                self.finish = "stop"
            if self.is_over:
                break
        return TextPiece(
            shown, tuple(tokens[:n_kept]), logprobs=tuple(logprobs[:n_told]), id_slot=self.id_slot
        )

    def last_piece(self, stats: GenerationStats, *, fills_context: bool = False) -> TextPiece:
        """The last piece, with the text held back so far, the finish reason and `stats`.

        `fills_context`: the context has no room for another token.
        """
        text = ""
        if not (self._stops.stopped or self.limits.stopped):
            text = self._stops.feed(self._text.finish()) + self._stops.finish()
            text = self.limits.feed(text)
        word = None if self.limits.stopped else self._stops.word
        if word is not None:
            self.finish = "stop"
        return TextPiece(
            text,
            finish_reason=self.finish,
            stats=stats,
            stopping_word=word,
            fills_context=fills_context and self.finish == "length",
            id_slot=self.id_slot,
        )
