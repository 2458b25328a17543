"""All policies side by side in the simulator: over curves, kinds of text and miscalibrations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lab.simulation.simulate import DraftTrace, fixed_oracle, simulate, synthetic_trace
from specdec.build import build_policy
from specdec.costs.profile import CostProfile
from specdec.options import PolicyName, SpecOptions
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.types import Policy

TEXTS: Mapping[str, tuple[str, ...]] = {
    "code": ("code",),
    "prose": ("prose",),
    "noise": ("noise",),
    "switching": ("code", "prose"),
}
CONFIDENCES = (1.0, 1.6, 0.6)
_ORACLE_LONGEST = 24

Make = Callable[[CostProfile], Policy]


@dataclass(frozen=True)
class Score:
    """A policy over all cases, as ratios of tokens per second; means are geometric."""

    policy: str
    mean_to_oracle: float
    least_to_oracle: float
    mean_to_plain: float
    least_to_plain: float


def named_policies() -> dict[str, Make]:
    """Every policy by name with its defaults, and fixed blocks of 8 beside those of 4."""
    makes: dict[str, Make] = {name: _named(name) for name in PolicyName if name != "throughput"}
    makes["fixed-8"] = lambda profile: Fixed(8)
    # The simulator's times are the profile's own, so there is nothing to refresh.
    makes["throughput"] = lambda profile: Throughput(profile, refresh=False)
    return makes


def _named(name: PolicyName) -> Make:
    options = SpecOptions(policy=name)
    return lambda profile: build_policy(options, profile)


def synthetic_traces(n_tokens: int, seed: int) -> list[DraftTrace]:
    """Every kind of text, calibrated, over-confident and under-confident."""
    return [
        synthetic_trace(n_tokens, seed=seed + i, kinds=kinds, confidence=confidence)
        for confidence in CONFIDENCES
        for i, kinds in enumerate(TEXTS.values())
    ]


def compare(
    curves: Mapping[str, CostProfile],
    traces: Sequence[DraftTrace],
    *,
    draft_share: float = 0.05,
    policies: Mapping[str, Make] | None = None,
) -> list[Score]:
    """Scores, best first. A draft step takes `draft_share` of T(1) unless the curve says."""
    makes = named_policies() if policies is None else policies
    logs: dict[str, list[tuple[float, float]]] = {name: [] for name in makes}
    for curve in curves.values():
        step_s = curve.draft_step_s or draft_share * curve.step_s[0]
        profile = replace(curve, draft_step_s=step_s)
        for trace in traces:
            oracle = fixed_oracle(trace, profile, min(_ORACLE_LONGEST, profile.n_max - 1)).rate
            for name, make in makes.items():
                rate = simulate(trace, profile, make(profile)).rate
                logs[name].append((math.log(rate / oracle), math.log(rate * profile.step_s[0])))
    scores = [_score(name, pairs) for name, pairs in logs.items()]
    return sorted(scores, key=lambda s: -s.mean_to_oracle)


def _score(name: str, logs: Sequence[tuple[float, float]]) -> Score:
    oracle, plain = zip(*logs, strict=True)
    n = len(logs)
    return Score(
        name,
        math.exp(sum(oracle) / n),
        math.exp(min(oracle)),
        math.exp(sum(plain) / n),
        math.exp(min(plain)),
    )
