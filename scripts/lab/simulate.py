"""`scripts/lab/run simulate`: every policy on measured curves, without a model."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lab.simulation.compare import (
    Make,
    Score,
    applicable,
    compare,
    named_policies,
    synthetic_traces,
)
from lab.simulation.draft_step import StepEffect, in_seconds, step_effects
from lab.simulation.simulate import (
    DraftTrace,
    brute_force_oracle,
    fixed_oracle,
    parse_trace,
    simulate,
)
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import (
    MOST_PROFILE_BYTES,
    load,
    parse_batch_costs,
    parse_batched_bench,
    published_curves,
)
from specdec.errors import BadProfile, SpecDecError
from specdec.whole_file import read_text
from specoffload import report
from specoffload.errors import KNOWN

_N_TOKENS = 2000
_ORACLE_LONGEST = 24
_LONG = 16  # drafted tokens on which a step's share of a decode is shown: llama.cpp's --draft-max


def simulate_policies(
    *,
    profile: Path | None,
    trace: Path | None,
    n_tokens: int | None,
    draft_share: float,
    seed: int | None,
    draft_steps: Sequence[float] = (),
    target_step: float = 0.1,
) -> None:
    """Print a table. Raises BadProfile or SpecDecError for files
    that cannot be read."""
    n_tokens = _N_TOKENS if n_tokens is None else n_tokens
    seed = 1 if seed is None else seed
    curves = published_curves() if profile is None else {profile.stem: read_profile(profile)}
    if draft_steps:
        texts = synthetic_traces(n_tokens, seed) if trace is None else [_read_trace(trace)]
        simulate_draft_steps(curves, texts, draft_steps, target_step)
        return
    makes, left_out = applicable(named_policies(), curves.values())
    for policy, why in left_out.items():
        report.note(f"{policy} is left out: {why}")
    if trace is not None:
        _replay(curves, makes, trace, draft_share)
        return
    texts = synthetic_traces(n_tokens, seed)
    scores = compare(curves, texts, draft_share=draft_share, policies=makes)
    names = ", ".join(curves)
    report.line(
        f"{n_tokens} tokens each of code, prose, noise and code/prose in turns; draft "
        f"probabilities calibrated, over- and under-confident; curves: {names}"
    )
    report.table(
        "tokens per second against the best block per segment in hindsight, and against plain",
        ("policy", "x oracle, mean", "x oracle, least", "x plain, mean", "x plain, least"),
        [_row(score) for score in scores],
    )
    report.data({"simulated": [asdict(score) for score in scores]})


def _row(s: Score) -> tuple[str, ...]:
    values = (s.mean_to_oracle, s.least_to_oracle, s.mean_to_plain, s.least_to_plain)
    return (s.policy, *(f"{v:.3f}" for v in values))


def read_profile(path: Path) -> CostProfile:
    """Our JSON, llama-batched-bench's JSONL or GGML_BATCH_COSTS text. Raises BadProfile."""
    try:
        text = read_text(path, MOST_PROFILE_BYTES)
    except (OSError, UnicodeDecodeError) as e:
        raise BadProfile(f"--profile {path}: cannot be read as UTF-8 text ({e})") from e
    if '"speed_tg"' in text:
        return parse_batched_bench(text)
    if text.lstrip().startswith(("{", "[")):
        return load(path).costs
    line = text.strip()
    return parse_batch_costs((line.partition("=")[2] or line).strip("\"' "))


def _replay(
    curves: dict[str, CostProfile], makes: Mapping[str, Make], file: Path, draft_share: float
) -> None:
    trace = _read_trace(file)
    results: dict[str, dict[str, float]] = {}
    asked: dict[str, dict[str, int]] = {}
    for name, curve in curves.items():
        step_s = curve.draft_step_s or draft_share * curve.step_s[0]
        costs = replace(curve, draft_step_s=step_s)
        plain = 1.0 / costs.step_s[0]
        longest = min(_ORACLE_LONGEST, costs.n_max - 1)
        runs = {p: simulate(trace, costs, make(costs)) for p, make in makes.items()}
        rates = {policy: run.rate / plain for policy, run in runs.items()}
        asked[name] = {policy: run.n_unknown for policy, run in runs.items()}
        rates["(best fixed block in hindsight)"] = fixed_oracle(trace, costs, longest).rate / plain
        rates["(knows every outcome)"] = brute_force_oracle(trace, costs, longest).rate / plain
        results[name] = rates
        report.table(
            f"{len(trace.p)} recorded tokens on {name}",
            ("policy", "x plain", "drafts cut short"),
            [
                (p, f"{r:.3f}", str(asked[name].get(p, "")))
                for p, r in sorted(rates.items(), key=lambda x: -x[1])
            ],
        )
    found = {"n_tokens": len(trace.p), "n_unknown": len(trace.unknown), "n_cut_short": asked}
    report.data({"replayed": results, **found})


def _read_trace(file: Path) -> DraftTrace:
    """A recorded text, with a line on what is not known of it. Raises SpecDecError."""
    try:
        trace = parse_trace(read_text(file))
    except (OSError, UnicodeDecodeError) as e:
        raise SpecDecError(f"--trace {file}: cannot be read as UTF-8 text ({e})") from e
    _say_unknown(trace)
    return trace


def _say_unknown(trace: DraftTrace) -> None:
    """The lines on what a replay cannot tell, since the recording policy did not ask."""
    if trace.unknown:
        report.line(
            f"{len(trace.unknown)} of {len(trace.p)} tokens are unknown: nobody drafted them when "
            "this was recorded. Drafts are cut short there, so policies that draft longer look "
            "worse than they are; record with --spec-policy fixed --spec-draft-n-max 16"
        )


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
            [_step_row(effect) for effect in effects if effect.draft_step_s == step_s],
        )
    found = {"draft_steps": [asdict(effect) for effect in effects], "target_step_s": one_s}
    report.data(found)


def _percent(least: float, most: float) -> str:
    return f"{least:.0%}" if most - least < 0.005 else f"{least:.0%} to {most:.0%}"


def _step_row(e: StepEffect) -> tuple[str, ...]:
    return (
        e.curve,
        f"{e.tokens_per_s:.2f}",
        f"{e.plain_tokens_per_s:.2f}",
        f"{e.tokens_per_s / e.plain_tokens_per_s:.3f}",
        f"{e.round_drafted:.2f}",
        f"{e.draft_share:.1%}",
    )


def seconds(text: str) -> tuple[float, ...]:
    """Times, comma separated."""
    values = tuple(map(float, text.split(",")))
    if not all(0 < value < math.inf for value in values):
        raise ValueError("must be above 0")
    return values


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/lab/run simulate", description=__doc__)
    parser.add_argument("--profile", type=Path, help="costs; default: the published curves")
    parser.add_argument("--trace", type=Path, help="replay what --record-trace wrote")
    parser.add_argument("--tokens", type=int, help="length of synthetic texts; default: 2000")
    parser.add_argument(
        "--draft-share", type=float, default=0.05, help="a draft step in units of T(1)"
    )
    parser.add_argument(
        "--draft-step", type=seconds, default=(), help="what steps of S,... seconds make of them"
    )
    parser.add_argument(
        "--target-step", type=float, default=0.1, help="T(1) in seconds of curves without a unit"
    )
    parser.add_argument("--seed", type=int, help="seed of the synthetic texts; default: 1")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    args = parser.parse_args()
    report.only_data(args.json)
    try:
        simulate_policies(
            profile=args.profile,
            trace=args.trace,
            n_tokens=args.tokens,
            draft_share=args.draft_share,
            draft_steps=args.draft_step,
            target_step=args.target_step,
            seed=args.seed,
        )
    except KNOWN as e:
        sys.exit(f"scripts/lab/run simulate: {e}")


if __name__ == "__main__":
    main()
