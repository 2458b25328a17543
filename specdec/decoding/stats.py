"""Statistics of speculation: what the rounds of one or many generations amounted to."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from specdec.types import Round

_MAX_REASONS = 32
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(slots=True)
class SpecStats:
    """Sums over rounds. Times in seconds; `per_position[i]` counts (drafted, accepted) there."""

    n_rounds: int = 0
    n_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_draft_steps: int = 0
    n_dropped: int = 0  # drafted and then not worth verifying
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    per_position: list[list[int]] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)  # draft length -> rounds
    sources: Counter[str] = field(default_factory=Counter)  # drafter -> accepted tokens
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, round_: Round) -> None:
        draft = round_.draft
        n = len(draft.tokens)
        self.n_rounds += 1
        self.n_tokens += len(round_.emitted)
        if not (n or draft.dropped or draft.n_steps):
            self.draft_s += round_.draft_s
            self.verify_s += round_.verify_s
            self.lengths[0] += 1
            self._add_reason(draft.decision.reason)
            return
        self.n_drafted += n
        self.n_accepted += round_.n_accepted
        self.n_draft_steps += draft.n_steps
        self.n_dropped += len(draft.dropped)
        self.draft_s += round_.draft_s
        self.verify_s += round_.verify_s
        self.rollback_s += round_.rollback_s
        n_positions = round_.n_positions
        while len(self.per_position) < n_positions:
            self.per_position.append([0, 0])
        for i in range(n_positions):
            self.per_position[i][0] += 1
            self.per_position[i][1] += i < round_.n_accepted
        self.lengths[n] += 1
        self.sources[draft.source] += round_.n_accepted
        self._add_reason(draft.decision.reason)

    def _add_reason(self, reason: str) -> None:
        kind = reason_kind(reason)
        if kind in self.reasons or len(self.reasons) < _MAX_REASONS:
            self.reasons[kind] += 1

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def tokens_per_round(self) -> float:
        return self.n_tokens / self.n_rounds if self.n_rounds else 0.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of drafted tokens accepted at each position of a draft."""
        return tuple(a / d for d, a in self.per_position)

    def line(self) -> str:
        """The line that llama.cpp logs per request."""
        if not self.n_drafted:
            return "draft acceptance: nothing was drafted"
        return (
            f"draft acceptance = {self.acceptance_rate:.5f} ({self.n_accepted:5d} accepted / "
            f"{self.n_drafted:5d} generated), mean len = {self.tokens_per_round:.2f}"
        )

    def as_data(self) -> dict[str, Any]:
        """Plain data for the server and for JSON."""
        return {
            "n_rounds": self.n_rounds,
            "n_tokens": self.n_tokens,
            "draft_n": self.n_drafted,
            "draft_n_accepted": self.n_accepted,
            "n_draft_steps": self.n_draft_steps,
            "n_dropped": self.n_dropped,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_per_position": list(self.acceptance_per_position),
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "rollback_s": self.rollback_s,
            "lengths": {str(n): c for n, c in sorted(self.lengths.items())},
            "accepted_by_source": dict(self.sources),
            "reasons": dict(self.reasons.most_common()),
        }


@lru_cache(maxsize=256)
def reason_kind(reason: str) -> str:
    """A reason without its numbers, so that equal kinds are counted together."""
    return _NUMBER.sub("#", reason)
