"""Hard cases for a policy, reproducible from seeds: random curves, poor p, switching texts.

In published curves and Beta texts, p separates good tokens from bad ones. Here p may be noise or
the same for all tokens, and the chance of acceptance may change suddenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.simulation import DraftTrace, fixed_oracle, simulate, synthetic_trace
from specdec.costs.profile import CostProfile
from specdec.policies.throughput import Throughput

CURVES = ("linear", "convex", "concave", "steps", "plateau", "jagged")
# Values of p that the drafter reports in a segment where tokens are accepted with chance a.
SAYINGS = (
    "its chance",  # a ± 0.02
    "noise",  # uniform, independent of a
    "one",  # 1.0 always
    "half",  # 0.5 always
    "constant",  # one value per text, as of n-gram drafters
    "a value per segment",  # differs by segment, but is unrelated to a
    "calibrated",  # texts of `synthetic_trace`, with an informative p
)
_N_MAX = (8, 16, 32, 64)
_TRUE = (0.02, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)


@dataclass(frozen=True)
class StressCase:
    """One curve and one text."""

    profile: CostProfile
    trace: DraftTrace


@dataclass(frozen=True)
class StressScore:
    """Tokens per second, divided by the fixed oracle's and by plain decoding's."""

    to_oracle: float
    to_plain: float


def stress_cases(
    seeds: Sequence[int],
    *,
    n_tokens: int = 4000,
    periods: Sequence[int] = (0, 200),
    sayings: Sequence[str] = SAYINGS,
) -> Iterator[StressCase]:
    """One case for each seed and period. Kinds of curves and texts take turns."""
    for seed in seeds:
        for i, period in enumerate(periods):
            rng = np.random.default_rng((seed, i))
            saying = sayings[(seed // len(CURVES)) % len(sayings)]
            profile = random_curve(rng, CURVES[seed % len(CURVES)])
            trace = stress_trace(rng, saying, n_tokens, period)
            yield StressCase(profile, trace)


def random_curve(rng: np.random.Generator, kind: str) -> CostProfile:
    """T(n) in units of T(1), rising except for "jagged". A draft step takes 0 to 0.5 of T(1)."""
    n = np.arange(int(rng.choice(_N_MAX)), dtype=np.float64)  # drafted tokens
    slope = float(np.exp(rng.uniform(np.log(0.005), np.log(0.8))))
    if kind == "convex":
        extra = slope * n ** rng.uniform(1.1, 1.8)
    elif kind == "concave":
        extra = slope * 3 * n ** rng.uniform(0.3, 0.8)
    elif kind == "steps":
        width = int(rng.choice([2, 4, 8, 16]))
        extra = slope * width * ((n + int(rng.integers(width))) // width)
        extra -= extra[0]
    elif kind == "plateau":
        start = int(rng.choice([1, 2, 4]))
        extra = np.where(n >= start, rng.uniform(0.1, 2.5), 0.0) + 0.002 * n
    else:
        extra = slope * n
    times = 1.0 + extra
    if kind == "jagged":
        times = np.maximum(1.0, times * np.exp(rng.normal(0.0, 0.15, len(n))))
        times[0] = 1.0
    step = float(rng.choice([0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 0.5)]))
    return CostProfile(tuple(times.tolist()), step)


def stress_trace(rng: np.random.Generator, saying: str, n: int, period: int) -> DraftTrace:
    """A text of `n` tokens whose chance of acceptance alternates every `period` tokens.

    The chance is constant if `period` is 0.
    """
    length = period or n
    if saying == "calibrated":
        pair = [("code", "noise"), ("code", "prose"), ("prose", "noise")][int(rng.integers(3))]
        kinds = pair if period else pair[:1]
        return synthetic_trace(n, seed=int(rng.integers(1 << 30)), kinds=kinds, segment=length)
    chances = rng.choice(_TRUE, 2, replace=False)
    values = rng.uniform(0.05, 1.0, 2)
    true = np.empty(n)
    said = np.empty(n)
    segments = []
    for k, start in enumerate(range(0, n, length)):
        stop = min(n, start + length)
        true[start:stop] = chances[k % 2]
        said[start:stop] = _said(rng, saying, stop - start, chances[k % 2], values, k % 2)
        segments.append((start, "ab"[k % 2]))
    accepted = rng.random(n) < true
    return DraftTrace(tuple(said.tolist()), tuple(accepted.tolist()), tuple(segments))


def _said(
    rng: np.random.Generator,
    saying: str,
    n: int,
    chance: float,
    values: NDArray[np.float64],
    turn: int,
) -> NDArray[np.float64]:
    if saying == "its chance":
        return np.clip(chance + rng.uniform(-0.02, 0.02, n), 0.0, 1.0)
    if saying == "noise":
        return rng.random(n)
    fixed = {"one": 1.0, "half": 0.5, "constant": values[0], "a value per segment": values[turn]}
    return np.full(n, fixed[saying])


def stress(cases: Iterator[StressCase]) -> list[StressScore]:
    """Scores of each case with a new `Throughput` policy."""
    scores = []
    for case in cases:
        profile = case.profile
        rate = simulate(case.trace, profile, Throughput(profile)).rate
        oracle = fixed_oracle(case.trace, profile, profile.n_max - 1).rate
        scores.append(StressScore(rate / oracle, rate * profile.step_s[0]))
    return scores
