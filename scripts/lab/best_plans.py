"""Fills a table of docs/plans.md: default plans beside the best prompts and answers of any plan.

It reads headers only and takes seconds: all ways to divide a card's memory are computed at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.default_plans import CARDS_GIB
from lab.hybrid_model import GIB
from lab.plans import PAGE, README_TITLES
from lab.synth.published import published_facts
from lab.tables import filled
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.plan.candidates import candidates
from offload.plan.placement import Plan, PlannedModel, PlanRequest, make_plan
from offload.plan.sharing import UBATCHES
from offload.times.context_memory import ContextOptions

N_CTX = 8192
ANSWERS, PROMPTS = 0.95, 0.90  # shares of the best plan's speed that a default plan should have
BUFFERS, MIX = "no plan has both", "the mix"


@dataclass(frozen=True)
class Row:
    """A default plan beside the best of any plan. Speeds are tokens/s at the mean of both hits."""

    title: str
    gib: int
    plan: Plan
    prompt_tps: float
    decode_tps: float
    prompt_share: float  # of the best prompt of any plan
    decode_share: float
    nearest: tuple[int, float, float]  # ubatch and both shares of the plan that is nearest to both

    @property
    def reason(self) -> str:
        """Why the default plan has less than a goal, or "" if it has both."""
        if has_both(self.prompt_share, self.decode_share):
            return ""
        return MIX if has_both(*self.nearest[1:]) else BUFFERS

    @property
    def line(self) -> str:
        n_ubatch, prompt_share, decode_share = self.nearest
        nearest = f"{prompt_share:.2f} and {decode_share:.2f} with {n_ubatch:,}"
        return (
            f"| {self.title} | {self.gib} | {self.plan.n_ubatch:,} | {self.prompt_tps:,.0f} | "
            f"{self.decode_tps:.1f} | {self.prompt_share:.2f} | {self.decode_share:.2f} | "
            f"{self.reason} | {nearest if self.reason else ''} |"
        )


def has_both(prompt_share: float, decode_share: float) -> bool:
    return prompt_share >= PROMPTS and decode_share >= ANSWERS


def rows(
    folder: Path, titles: Sequence[str] = README_TITLES, cards: Sequence[int] = CARDS_GIB
) -> Iterator[Row]:
    """Compare the default plans that stream: PCIe 4.0 and two channels of DDR5."""
    for title in titles:
        facts = published_facts(title, folder)
        for gib in cards:
            found = row(facts, title, gib)
            if found is not None:
                yield found


def request_of(gib: int) -> PlanRequest:
    return PlanRequest(
        budget_bytes=(gib - 1) * GIB, n_cpu_moe="fit", context=ContextOptions(N_CTX),
        most_ubatch=UBATCHES[-1], plan_for_splits=True,
    )  # fmt: skip


def row(facts: ModelFacts, title: str, gib: int) -> Row | None:
    """Return the comparison, or None if the model does not fit the card, or as a whole."""
    request = request_of(gib)
    try:
        plan = make_plan(facts, request)
    except DoesNotFit:
        return None
    if not plan.streamed:
        return None
    model = PlannedModel(facts, request)
    weights, budget_bytes = model.weights, (gib - 1) * GIB
    ubatches = np.array(request.ubatches)[:, None]
    sizes = ubatches.ravel().tolist()
    rooms = np.array([[budget_bytes - request.reserve_of(facts, n)] for n in sizes])
    works = np.array([[request.working_of(facts, n).device_bytes] for n in sizes])
    lent = np.array([[request.lent_bytes(facts, n)] for n in sizes])
    found = candidates(weights.whole, request.limits(weights.whole), rooms, works, lent)
    seconds = request.objective.seconds(
        request.machine, model.work, found.sharing, ubatches,
        prompt_work=model.prompt_work(request),
    )  # fmt: skip
    prompt_s, decode_s = (
        np.where(found.fits, np.broadcast_to(s, found.fits.shape), np.inf)
        for s in (seconds.prompt_s, seconds.mean_decode_s)
    )
    its = model.seconds(request, plan.sharing, plan.n_ubatch)
    best_prompt_s, best_decode_s = (
        min(s.min(), float(own))
        for s, own in ((prompt_s, its.prompt_s), (decode_s, its.mean_decode_s))
    )
    shares = best_prompt_s / prompt_s, best_decode_s / decode_s
    nearest = np.unravel_index(
        np.minimum(shares[0] / PROMPTS, shares[1] / ANSWERS).argmax(), prompt_s.shape
    )
    return Row(
        title, gib, plan, N_CTX / float(its.prompt_s), 1 / float(its.mean_decode_s),
        best_prompt_s / float(its.prompt_s), best_decode_s / float(its.mean_decode_s),
        (int(ubatches[nearest[0], 0]), float(shares[0][nearest]), float(shares[1][nearest])),
    )  # fmt: skip


def table(found: Sequence[Row]) -> str:
    heads = ("model", "card", "ubatch", "prompts", "answers", "prompts ÷ best", "answers ÷ best",
             "reason", "the nearest plan")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(its.line for its in found)]
    n_both = sum(not its.reason for its in found)
    counts = {why: sum(its.reason == why for its in found) for why in (BUFFERS, MIX)}
    lines += ["", f"{n_both} of {len(found)} plans have both. {counts[BUFFERS]} lack one because "
              f"no plan has both, and {counts[MIX]} because of the mix."]  # fmt: skip
    return "\n".join(lines)


def page(found: Sequence[Row]) -> str:
    """The text of docs/plans.md with a new table."""
    return filled(PAGE, {"best": table(found)})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        PAGE.write_text(page([*rows(Path(name))]), encoding="utf-8")
