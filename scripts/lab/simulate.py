"""`scripts/lab/run simulate`: every policy on measured curves, without a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from lab.simulation.compare import (
    Make,
    Score,
    compare,
    named_policies,
    synthetic_traces,
)
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

_ORACLE_LONGEST = 24


def simulate_policies(
    *,
    profile: Path | None,
    trace: Path | None,
    n_tokens: int,
    draft_share: float,
    seed: int,
) -> None:
    """Print a table. Raises BadProfile or SpecDecError for files
    that cannot be read."""
    curves = published_curves() if profile is None else {profile.stem: read_profile(profile)}
    makes = named_policies()
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/lab/run simulate", description=__doc__)
    flag = parser.add_argument
    flag("--profile", type=Path, help="costs; default: the published curves")
    flag("--trace", type=Path, help="replay recorded rounds")
    flag("--tokens", type=int, default=2000, help="length of synthetic texts")
    flag("--draft-share", type=float, default=0.05, help="a draft step in units of T(1)")
    flag("--seed", type=int, default=1, help="seed of the synthetic texts")
    flag("--json", action="store_true", help="print one line of JSON alone")
    args = parser.parse_args()
    report.only_data(args.json)
    try:
        simulate_policies(
            profile=args.profile,
            trace=args.trace,
            n_tokens=args.tokens,
            draft_share=args.draft_share,
            seed=args.seed,
        )
    except KNOWN as e:
        sys.exit(f"scripts/lab/run simulate: {e}")


if __name__ == "__main__":
    main()
