"""`specoffload simulate --draft-step`: what a draft step costs, and how long drafts get by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from specdec.costs.profile import CostProfile
from specdec.simulation.draft_step import StepEffect, in_seconds, step_effects
from specdec.simulation.simulate import DraftTrace
from specoffload import report

_LONG = 16  # drafted tokens on which a step's share of a decode is shown: llama.cpp's --draft-max


def simulate_draft_steps(
    curves: Mapping[str, CostProfile],
    texts: Sequence[DraftTrace],
    steps_s: Sequence[float],
    one_s: float,
) -> None:
    """Print tokens per second of `throughput` at every price.

    `one_s` is T(1) of curves that have no unit.
    """
    without = [name for name, curve in curves.items() if curve.relative]
    if without:
        report.line(
            f"curves without a unit are taken with T(1) = {one_s * 1e3:g} ms (--target-step)"
        )
    effects = step_effects(curves, texts, steps_s, one_s)
    for step_s in steps_s:
        shares = {n: _LONG * step_s / in_seconds(c, one_s).step_s[0] for n, c in curves.items()}
        least, most = min(shares.values()), max(shares.values())
        report.table(
            f"draft step {step_s * 1e3:g} ms: {_LONG} of them take {_percent(least, most)} of T(1)",
            ("curve", "tokens/s", "plain", "x plain", "drafted per round", "time drafting"),
            [_row(effect) for effect in effects if effect.draft_step_s == step_s],
        )
    found = {"draft_steps": [asdict(effect) for effect in effects], "target_step_s": one_s}
    report.data(found)


def _percent(least: float, most: float) -> str:
    return f"{least:.0%}" if most - least < 0.005 else f"{least:.0%} to {most:.0%}"


def _row(e: StepEffect) -> tuple[str, ...]:
    return (
        e.curve,
        f"{e.tokens_per_s:.2f}",
        f"{e.plain_tokens_per_s:.2f}",
        f"{e.tokens_per_s / e.plain_tokens_per_s:.3f}",
        f"{e.round_drafted:.2f}",
        f"{e.draft_share:.1%}",
    )
