"""One request on its way through the slots: its text, its sampler, its statistics."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from offload.sampling.reasoning_limit import AnswerSampler
from specdec.decoding.loop import BatchMember
from specdec.policies.rules import DraftBounds
from specdec.types import IsEnd, Round
from specoffload.session.answer import Answer
from specoffload.session.generation import GenerateOptions, Piece
from specoffload.session.statistics import EngineCounts, Tally
from specoffload.slots.prompt_logprobs import PromptLogprobs
from specoffload.slots.slot import Slot


class Request:
    """A prompt and what has become of it. `pieces` are for whoever asked, in order; the last has a
    finish reason. After `error`, none follows."""

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
    ) -> None:
        """`beside` has the same prompt, and evaluates it for both."""
        self.n_prompt = len(tokens)
        self.history = list(tokens)  # and what was emitted, past a stop sequence too
        self.n_left = n_predict
        self.options, self.is_end = options, is_end
        self.sampler = sampler
        self.pieces: deque[Piece] = deque()
        self.error: Exception | None = None
        self.is_over = False
        self.slot: Slot | None = None  # while it has one
        self.member: BatchMember | None = None
        self._answer = answer
        self._prompt_logprobs = prompt_logprobs
        self._beside = beside
        self.asked_with: int = id(self) if beside is None else beside.asked_with  # same for a group
        self._tally: Tally | None = None  # since it first had a slot
        self.n_cached = 0
        self._is_evaluated = False
        self._deadline_s: float | None = None

    def begin(self, counts: EngineCounts, n_cached: int, id_slot: int) -> None:
        """It has a slot, perhaps not for the first time, which holds `n_cached` tokens of it."""
        self._answer.id_slot = id_slot
        if self._tally is not None:
            return
        now_s = perf_counter()
        self._tally, self.n_cached = Tally(counts, now_s), n_cached
        if self.options.time_limit_s is not None:
            self._deadline_s = now_s + self.options.time_limit_s

    def read(self) -> None:
        """A part of the prompt was evaluated."""
        logprobs = self._prompt_logprobs
        told = () if logprobs is None else logprobs.take()
        n_read = None if self.slot is None else self.slot.n_held
        self.pieces.append(Piece("", prompt_logprobs=told, n_prompt_read=n_read))

    def evaluated(self) -> None:
        """All of the prompt but its last token has been."""
        if not self._is_evaluated and self._tally is not None:
            self._is_evaluated = True
            self._tally.evaluated(self.n_prompt, self.n_cached, perf_counter())
            if self._prompt_logprobs is not None:
                self.read()  # a prompt of one token has no other part

    @property
    def hear_prompt(self) -> Callable[[int, NDArray[np.float32]], None] | None:
        """For the logits of the prompt, as long as they are wanted: then all of it has to be
        evaluated, whatever is held of it."""
        logprobs = self._prompt_logprobs
        return None if logprobs is None or logprobs.is_complete else logprobs.hear

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """For drafts that are drawn."""
        return np.random.default_rng(self.options.seed)

    @property
    def bounds(self) -> DraftBounds:
        """Of its drafts."""
        options = self.options
        return DraftBounds(options.draft_max, options.draft_min, options.draft_p_min)

    @property
    def may_begin(self) -> bool:
        """False while the prompt is being evaluated for another request."""
        other = self._beside
        return other is None or other.is_over or other._is_evaluated

    @property
    def progress(self) -> tuple[int, int, int]:
        """Tokens of the prompt, of the answer so far, and of what may follow."""
        return self.n_prompt, len(self.history) - self.n_prompt, self.n_left

    @property
    def is_late(self) -> bool:
        """True when its time is up."""
        return self._deadline_s is not None and perf_counter() > self._deadline_s

    def take(self, round_: Round, counts: Callable[[], EngineCounts]) -> bool:
        """A round's tokens become a piece; True when the answer ends with it."""
        assert self._tally is not None
        piece = self._answer.take(round_.emitted, self.sampler.take_logprobs())
        self.n_left -= len(round_.emitted)
        self._tally.count(round_, len(piece.tokens))
        if self.options.timings_per_token:
            piece = replace(piece, so_far=self._tally.stats(counts(), perf_counter()))
        self.pieces.append(piece)
        return self._answer.finish == "stop" or bool(round_.end) or self.is_late

    def finish(self, counts: EngineCounts) -> None:
        """The last piece: what was held back, the reason, and the statistics."""
        assert self._tally is not None
        self.evaluated()
        stats = self._tally.stats(counts, perf_counter())
        self.pieces.append(self._answer.last_piece(stats))
        self.close()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.close()

    def close(self) -> None:
        """Nothing follows. May be called again."""
        self.is_over = True
        self.sampler.close()
