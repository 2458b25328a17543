"""Sums up the statistics of a generation, round by round, and adds its rounds to a trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from offload.trace.trace import ROUND, TOKEN, Trace

if TYPE_CHECKING:  # these import numpy, and all processes of the server import this file
    from specdec.decoding.loop import StepReport
    from specdec.types import Round


@dataclass(slots=True)
class GenerationStats:
    """Counters of one generation; times in seconds."""

    n_prompt_tokens: int = 0
    n_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    waited_s: float = 0.0  # time before `prefill_s`, in a server's queue and for other requests
    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_could_accept: int = 0  # drafted, unverified tokens that equal the text that followed
    streamed_bytes: int = 0
    # Uses of an expert by a token, where routers prefer cached experts (--route-cached). With other
    # requests beside this one, theirs count too.
    n_choices: int = 0
    n_choices_kept: int = 0  # those that the router would have made, too
    n_choices_cached: int = 0  # those of experts that were in slots before
    n_own_cached: int = 0  # the router's own choices of such experts
    n_draft_steps: int = 0  # decodes of the draft model
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    n_checkpoints: int = 0  # checkpoints of a recurrent memory
    n_restores: int = 0
    acceptance_per_position: tuple[float, ...] = ()  # share accepted by position in the draft
    draft_lengths: tuple[tuple[int, int], ...] = ()  # (length, rounds)
    accepted_by_source: tuple[tuple[str, int], ...] = ()  # (drafter, accepted tokens)
    decisions: tuple[tuple[str, int], ...] = ()  # (reason of a length, rounds), commonest first
    last_reasons: tuple[str, ...] = ()  # the last reason of each of `decisions`, with its numbers
    n_trees: int = 0  # rounds that verified a tree instead of a chain
    n_cached_tokens: int = 0  # prompt tokens that were cached, and not evaluated again
    n_from_disk: int = 0  # those of the cached tokens that were read from the disk
    n_kept_tokens: int = 0  # prompt tokens up to the last place that the client wants kept
    copied_back_s: float = 0.0  # copying cached tokens back from RAM, before `prefill_s`
    n_idle_cells: int = 0  # most cells that a decode passed, and that no running request needed
    idle_cells_s: float = 0.0  # time of attention over such cells, by the machine model

    @property
    def reasons(self) -> list[tuple[str, int, str]]:
        """(kind, rounds, last reason) of each of `decisions`, in the same order."""
        decisions = zip(self.decisions, self.last_reasons, strict=True)
        return [(kind, n_rounds, last) for (kind, n_rounds), last in decisions]

    @property
    def n_prefilled(self) -> int:
        """Number of prompt tokens evaluated in `prefill_s`.

        Cached tokens do not count, nor does the last token, which the first decode evaluates.
        """
        return max(0, self.n_prompt_tokens - self.n_cached_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def tokens_per_round(self) -> float:
        return self.n_tokens / self.n_rounds if self.n_rounds else 0.0


@dataclass(frozen=True)
class EngineCounts:
    """Counters of an engine since it was opened."""

    streamed_bytes: int = 0
    n_checkpoints: int = 0  # checkpoints of a recurrent memory
    n_restores: int = 0
    idle_cells_s: float = 0.0
    n_choices: int = 0  # this and the next three: as in GenerationStats
    n_choices_kept: int = 0
    n_choices_cached: int = 0
    n_own_cached: int = 0


NO_COUNTS = EngineCounts()


class Tally:
    """Adds up the rounds of a generation. The caller reads the clock."""

    def __init__(self, before: EngineCounts = NO_COUNTS, now_s: float = 0.0) -> None:
        """`before` are the engine's counts at `now_s`, when the generation begins."""
        self._before = before
        self._start_s = self._first_s = now_s
        self._sums = GenerationStats()
        self._per_position: list[list[int]] = []  # drafted and accepted tokens
        self._lengths: Counter[int] = Counter()  # rounds by draft length
        self._sources: Counter[str] = Counter()  # accepted tokens by drafter
        self._reasons: Counter[str] = Counter()
        self._last_reasons: dict[str, str] = {}  # by kind
        # Lists of dropped tokens that later rounds may still emit.
        self._unverified: list[tuple[int, ...]] = []

    def evaluated(
        self,
        n_prompt_tokens: int,
        n_cached_tokens: int,
        now_s: float,
        n_from_disk: int = 0,
        n_kept_tokens: int = 0,
    ) -> None:
        """Record that the prompt is evaluated, except the token that the first round decodes."""
        self._sums.n_prompt_tokens, self._sums.n_cached_tokens = n_prompt_tokens, n_cached_tokens
        self._sums.n_from_disk, self._sums.n_kept_tokens = n_from_disk, n_kept_tokens
        self._first_s = now_s

    def copied_back(self, seconds: float) -> None:
        """Record how long cached tokens were copied from RAM."""
        self._sums.copied_back_s = seconds

    def passes(self, n_idle_cells: int) -> None:
        """Record a decode that passes over cells that no running request needs."""
        self._sums.n_idle_cells = max(self._sums.n_idle_cells, n_idle_cells)

    def count(self, round_: Round, n_kept: int) -> None:
        """Add a round. The answer has the first `n_kept` of its tokens."""
        sums, draft = self._sums, round_.draft
        n = len(draft.tokens)
        sums.n_rounds += 1
        sums.n_tokens += n_kept
        sums.draft_s += round_.draft_s
        sums.verify_s += round_.verify_s
        self._lengths[n] += 1
        reason = reason_kind(draft.decision.reason)
        if reason in self._reasons or len(self._reasons) < _MAX_REASONS:
            self._reasons[reason] += 1
            self._last_reasons[reason] = draft.decision.reason
        if self._unverified or draft.dropped:
            self._follow(round_)
        if not (n or draft.dropped or draft.n_steps):
            return
        sums.n_drafted += n
        sums.n_accepted += round_.n_accepted
        sums.n_draft_steps += draft.n_steps
        sums.rollback_s += round_.rollback_s
        sums.n_trees += bool(draft.parents)
        n_positions = draft.n_deep
        while len(self._per_position) < n_positions:
            self._per_position.append([0, 0])
        for i in range(n_positions):
            self._per_position[i][0] += 1
            self._per_position[i][1] += i < round_.n_accepted
        self._sources[draft.source] += round_.n_accepted

    def _follow(self, round_: Round) -> None:
        """Count dropped tokens that the target would have accepted.

        These are the tokens dropped after a wholly accepted draft, up to the first that differs
        from the text.
        """
        draft, emitted = round_.draft, round_.emitted
        followed = [(tokens, emitted) for tokens in self._unverified]
        if draft.dropped and round_.n_accepted == len(draft.tokens):
            dropped = tuple([token for token, _ in draft.dropped])
            followed.append((dropped, emitted[round_.n_accepted :]))
        self._unverified = []
        for tokens, text in followed:
            pairs = zip(tokens, text, strict=False)
            n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(text)))
            self._sums.n_could_accept += n
            if n == len(text) < len(tokens):
                self._unverified.append(tokens[n:])

    def stats(self, after: EngineCounts = NO_COUNTS, now_s: float = 0.0) -> GenerationStats:
        """Return the statistics at `now_s`, when the engine's counts are `after`."""
        before = self._before
        return replace(
            self._sums,
            prefill_s=self._first_s - self._start_s,
            decode_s=now_s - self._first_s,
            streamed_bytes=after.streamed_bytes - before.streamed_bytes,
            n_checkpoints=after.n_checkpoints - before.n_checkpoints,
            n_restores=after.n_restores - before.n_restores,
            idle_cells_s=after.idle_cells_s - before.idle_cells_s,
            n_choices=after.n_choices - before.n_choices,
            n_choices_kept=after.n_choices_kept - before.n_choices_kept,
            n_choices_cached=after.n_choices_cached - before.n_choices_cached,
            n_own_cached=after.n_own_cached - before.n_own_cached,
            acceptance_per_position=tuple(a / d for d, a in self._per_position),
            draft_lengths=tuple(sorted(self._lengths.items())),
            accepted_by_source=tuple(sorted(self._sources.items())),
            decisions=tuple(self._reasons.most_common()),
            last_reasons=tuple(self._last_reasons[kind] for kind, _ in self._reasons.most_common()),
        )


_MAX_REASONS = 32
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@lru_cache(maxsize=256)
def reason_kind(reason: str) -> str:
    """A reason without its numbers, so that equal kinds are counted together."""
    return _NUMBER.sub("#", reason)


# -- steps in a trace

_SHOWN = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})
_MOST_NAME = 24  # characters of a token's text


class StepTrace:
    """Records each step of a batcher."""

    def __init__(self, trace: Trace, text_of: Callable[[int], bytes]) -> None:
        """`text_of` gives the bytes of one token."""
        self._trace, self._text_of = trace, text_of

    def add(self, report: StepReport) -> None:
        """Record a step: one slice with its parts, and the tokens of each slot.

        Tokens of a round get equal shares of its time, since they arrive together.
        """
        start_s, end_s, rounds = report.began_s, report.ended_s, [each for _, each in report.rounds]
        name = " and ".join(["round"] * bool(rounds) + ["prompt"] * bool(report.read))
        n_requests = len({id(member) for member in (*report.read, *(m for m, _ in report.rounds))})
        self._trace.sample("requests", start_s, running=n_requests)
        self._trace.add(
            ROUND, name or "step", start_s, end_s,
            n_requests=n_requests,
            n_drafted=sum(round_.n_drafted for round_ in rounds),
            n_accepted=sum(round_.n_accepted for round_ in rounds),
            n_tokens=sum(len(round_.emitted) for round_ in rounds),
        )  # fmt: skip
        if rounds:
            self._add_parts(start_s, end_s, rounds[0])
        for member, round_ in report.rounds:
            self._add_tokens(start_s, end_s, member.sequence, round_)

    def _add_parts(self, start_s: float, end_s: float, round_: Round) -> None:
        """Record the parts of a step. All rounds of a step share one decode and its times."""
        drafted_s = round_.draft_s + round_.draft.catch_up_s
        parts = (
            ("draft", drafted_s),
            ("verify", round_.verify_s),
            ("roll back", round_.rollback_s),
        )
        for name, duration_s in parts:
            until_s = min(end_s, start_s + duration_s)
            if duration_s > 0:
                details = {"drafter": round_.draft.source, "decision": round_.draft.decision.reason}
                self._trace.add(
                    ROUND, name, start_s, until_s, **(details if name == "draft" else {})
                )
            start_s = until_s

    def _add_tokens(self, start_s: float, end_s: float, slot: int, round_: Round) -> None:
        share_s = (end_s - start_s) / max(1, len(round_.emitted))
        for i, token in enumerate(round_.emitted):
            text = self._text_of(token).decode("utf-8", "replace").translate(_SHOWN)
            self._trace.add(
                TOKEN, text[:_MOST_NAME] or f"token {token}",
                start_s + i * share_s, start_s + (i + 1) * share_s,
                slot=slot, token=token, drafted=int(i < round_.n_accepted),
            )  # fmt: skip
