"""The reason why speculation drafts nothing where it does not, with the figures. Pure."""

from __future__ import annotations

from specdec.costs.profile import CostProfile
from specoffload.session.statistics import GenerationStats


def why_off(stats: GenerationStats, costs: CostProfile) -> str:
    """A sentence with the reason if most rounds drafted nothing, else nothing."""
    n_off = sum(rounds for length, rounds in stats.draft_lengths if length == 0)
    if not stats.n_rounds or 2 * n_off < stats.n_rounds:
        return ""
    words = f"nothing was drafted in {n_off} of {stats.n_rounds} rounds: {price_words(costs)}"
    # Counted reasons have lost their figures, which are in the price.
    reason = next((why for why, _ in stats.decisions if why and "#" not in why), "")
    return f"{words} (the policy: {reason})" if reason else words


def pays_from(costs: CostProfile) -> int | None:
    """The shortest draft that pays if all of it is accepted; None if none does."""
    plain = costs.step_s[0]
    lengths = range(1, costs.n_max)
    return next((m for m in lengths if _round_s(costs, m) < (1 + m) * plain), None)


def pays_up_to(costs: CostProfile, accepted: float) -> int | None:
    """The longest draft that pays where each token is accepted with this chance if those before it
    were: a longer one is slower than no draft. None if none pays."""
    plain, n_tokens, found = costs.step_s[0], 1.0, None
    for m in range(1, costs.n_max):
        n_tokens += accepted**m
        if _round_s(costs, m) < n_tokens * plain:
            found = m
    return found


def _round_s(costs: CostProfile, m: int) -> float:
    """Seconds of drafting m tokens and verifying them."""
    return costs.step_s[m] + m * costs.draft_step_s


def length_words(costs: CostProfile, accepted_first: float | None) -> str:
    """From and up to which length a draft pays; `accepted_first` is the share of first tokens that
    were accepted, None where nothing was drafted."""
    first = pays_from(costs)
    if first is None:
        return "no draft saves time, whatever its length"
    unit = "token" if first == 1 else "tokens"
    words = f"drafts of {first} {unit} or more save time if all of it is accepted"
    if accepted_first is None:
        return words
    last = pays_up_to(costs, accepted_first)
    if last is None:
        return f"{words}; none does with {accepted_first:.0%} accepted, as measured"
    end = "of any length" if last == costs.n_max - 1 else f"of up to {last} tokens"
    return f"{words}, and those {end} with {accepted_first:.0%} accepted, as measured"


def price_words(costs: CostProfile) -> str:
    """The share of drafted tokens that must be accepted for a draft of one to pay."""
    if costs.n_max < 2:
        return "only one batch size was measured, so nothing can be drafted"
    two, step = costs.step_s[1] / costs.step_s[0], costs.draft_step_s / costs.step_s[0]
    share = max(0.0, two - 1 + step)
    price = f"two tokens take {two:.2f} times as long as one, and drafting one takes {step:.2f}"
    if share >= 1:
        return f"{price}, so not even drafts that are always accepted save time"
    return f"{price}, so a draft of one token saves time if over {share:.0%} are accepted"
