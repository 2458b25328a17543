"""The statistics of a generation, added up round by round: plain data in and out."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.decoding.stats import SpecStats
from specdec.types import Round
from specoffload.session.generation import GenerationStats


@dataclass(frozen=True)
class EngineCounts:
    """Counters of an engine since it was opened."""

    streamed_bytes: int
    n_checkpoints: int  # of a recurrent memory
    n_restores: int


class Tally:
    """Adds rounds up. Times are seconds of one clock, which the caller reads."""

    def __init__(self, before: EngineCounts, now_s: float) -> None:
        """`before` is what the engine had counted when the generation began, at `now_s`."""
        self._before = before
        self._n_prompt = self._n_cached = 0
        self._start_s = self._first_s = now_s
        self._spec = SpecStats()
        self._n_tokens = 0

    def evaluated(self, n_prompt_tokens: int, n_cached_tokens: int, now_s: float) -> None:
        """The prompt has been, but for its last token, which the first round decodes."""
        self._n_prompt, self._n_cached = n_prompt_tokens, n_cached_tokens
        self._first_s = now_s

    def count(self, round_: Round, n_kept: int) -> None:
        """A round, of whose tokens the answer has the first `n_kept`."""
        self._spec.add(round_)
        self._n_tokens += n_kept

    def stats(self, after: EngineCounts, now_s: float) -> GenerationStats:
        before, spec = self._before, self._spec
        return GenerationStats(
            n_prompt_tokens=self._n_prompt,
            n_cached_tokens=self._n_cached,
            n_tokens=self._n_tokens,
            prefill_s=self._first_s - self._start_s,
            decode_s=now_s - self._first_s,
            n_rounds=spec.n_rounds,
            n_drafted=spec.n_drafted,
            n_accepted=spec.n_accepted,
            n_could_accept=spec.n_could_accept,
            streamed_bytes=after.streamed_bytes - before.streamed_bytes,
            n_checkpoints=after.n_checkpoints - before.n_checkpoints,
            n_restores=after.n_restores - before.n_restores,
            n_draft_steps=spec.n_draft_steps,
            draft_s=spec.draft_s,
            verify_s=spec.verify_s,
            rollback_s=spec.rollback_s,
            acceptance_per_position=spec.acceptance_per_position,
            draft_lengths=tuple(sorted(spec.lengths.items())),
            accepted_by_source=tuple(sorted(spec.sources.items())),
            decisions=tuple(spec.reasons.most_common()),
        )
