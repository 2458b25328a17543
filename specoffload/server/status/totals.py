"""Sums over all finished answers of a server. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from specoffload.session.generation import GenerationStats


@dataclass
class Totals:
    """Counted since the server was started, restarts of its engine included. Times in seconds."""

    n_answers: int = 0
    n_prompt_tokens: int = 0  # evaluated, so without those from a cache
    n_cached_tokens: int = 0
    n_prefilled: int = 0  # those evaluated in `prompt_s`
    prompt_s: float = 0.0
    n_tokens: int = 0
    decode_s: float = 0.0
    n_rounds: int = 0
    n_tokens_max: int = 0  # of a prompt with its answer
    n_drafts: int = 0  # rounds that drafted anything
    n_drafted: int = 0
    n_accepted: int = 0
    n_draft_steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    decisions: Counter[str] = field(default_factory=Counter)  # why a draft had its length -> rounds
    draft_lengths: Counter[int] = field(default_factory=Counter)  # length -> rounds
    accepted_by_source: Counter[str] = field(default_factory=Counter)  # drafter -> tokens

    def add(self, stats: GenerationStats) -> None:
        self.n_answers += 1
        self.n_prompt_tokens += stats.n_prompt_tokens - stats.n_cached_tokens
        self.n_cached_tokens += stats.n_cached_tokens
        self.n_prefilled += stats.n_prefilled
        self.prompt_s += stats.prefill_s
        self.n_tokens += stats.n_tokens
        self.decode_s += stats.decode_s
        self.n_rounds += stats.n_rounds
        self.n_tokens_max = max(self.n_tokens_max, stats.n_prompt_tokens + stats.n_tokens)
        self.n_drafts += sum(rounds for length, rounds in stats.draft_lengths if length > 0)
        self.n_drafted += stats.n_drafted
        self.n_accepted += stats.n_accepted
        self.n_draft_steps += stats.n_draft_steps
        self.draft_s += stats.draft_s
        self.verify_s += stats.verify_s
        self.rollback_s += stats.rollback_s
        self.decisions.update(dict(stats.decisions))
        self.draft_lengths.update(dict(stats.draft_lengths))
        self.accepted_by_source.update(dict(stats.accepted_by_source))
