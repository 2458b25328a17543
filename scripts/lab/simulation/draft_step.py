"""The price of a draft step: what `throughput` makes of each curve at several prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lab.simulation.simulate import DraftTrace, Simulated, simulate
from specdec.costs.profile import CostProfile
from specdec.policies.throughput import Throughput


@dataclass(frozen=True)
class StepEffect:
    """Decoding at one price of a draft step. `round_drafted` is the mean length of the rounds'
    drafts; `draft_share` the share of the time that drafting took."""

    curve: str
    draft_step_s: float
    tokens_per_s: float
    plain_tokens_per_s: float
    round_drafted: float
    draft_share: float


def in_seconds(curve: CostProfile, one_s: float) -> CostProfile:
    """A curve without a unit, its T(1) taken as `one_s`; others as they are."""
    if not curve.relative:
        return curve
    factor = one_s / curve.step_s[0]
    return replace(
        curve,
        step_s=tuple(t * factor for t in curve.step_s),
        draft_step_s=curve.draft_step_s * factor,
        relative=False,
    )


def step_effects(
    curves: Mapping[str, CostProfile],
    traces: Sequence[DraftTrace],
    steps_s: Sequence[float],
    one_s: float,
) -> list[StepEffect]:
    """`throughput` on every curve at every price, over all traces, which it has never seen."""
    out = []
    for name, curve in curves.items():
        for step_s in steps_s:
            profile = replace(in_seconds(curve, one_s), draft_step_s=step_s)
            runs = [simulate(t, profile, Throughput(profile, refresh=False)) for t in traces]
            out.append(_effect(name, profile, runs))
    return out


def _effect(name: str, profile: CostProfile, runs: Sequence[Simulated]) -> StepEffect:
    time_s = sum(run.time for run in runs)
    n_steps = sum(run.n_steps for run in runs)
    return StepEffect(
        name,
        profile.draft_step_s,
        sum(run.n_tokens for run in runs) / time_s,
        1.0 / profile.step_s[0],
        sum(run.n_drafted for run in runs) / sum(run.n_rounds for run in runs),
        n_steps * profile.draft_step_s / time_s,
    )
