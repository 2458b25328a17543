"""The reason why speculation drafts nothing where it does not, with the figures. Pure."""

from __future__ import annotations

from specdec.costs.profile import CostProfile
from specoffload.session.generation import GenerationStats


def why_off(stats: GenerationStats, costs: CostProfile) -> str:
    """A sentence where most rounds drafted nothing, else nothing."""
    n_off = sum(rounds for length, rounds in stats.draft_lengths if length == 0)
    if not stats.n_rounds or 2 * n_off < stats.n_rounds:
        return ""
    words = f"speculation was off in {n_off} of {stats.n_rounds} rounds: {price_words(costs)}"
    # Counted reasons have lost their figures, which are in the price.
    reason = next((why for why, _ in stats.decisions if why and "#" not in why), "")
    return f"{words} (the policy: {reason})" if reason else words


def price_words(costs: CostProfile) -> str:
    """The share of drafted tokens that must be accepted for a draft of one to pay."""
    if costs.n_max < 2:
        return "the profile has one batch size only, which leaves no room to draft"
    two, step = costs.step_s[1] / costs.step_s[0], costs.draft_step_s / costs.step_s[0]
    share = max(0.0, two - 1 + step)
    price = f"two tokens take {two:.2f} times as long as one and a draft step {step:.2f} of it"
    if share >= 1:
        return f"{price}, so that not even a draft that is always accepted pays"
    return f"{price}, so that a draft of one token pays from {share:.0%} accepted on"
