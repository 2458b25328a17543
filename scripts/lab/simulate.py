"""Simulates every policy on measured cost curves, texts and miscalibrations, without a model.

Usage: scripts/lab/run simulate [--profile FILE] [--trace FILE] [other flags]
       scripts/lab/run simulate --record FILE -p TEXT [flags of specoffload run]

The second form answers a prompt, and records the drafted and accepted tokens for --trace. A record
has the most tokens if drafts are long: --spec-policy fixed --draft-max 16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lab.simulation import (
    DraftTrace,
    curves_with_unions,
    fixed_oracle,
    parse_trace,
    published_curves,
    simulate,
    synthetic_trace,
)
from specdec.build import build_policy
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import load
from specdec.errors import BadProfile, SpecDecError
from specdec.options import PolicyName, SpecOptions
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.types import Policy, Round
from specdec.whole_file import read_text, write_text
from specoffload import report
from specoffload.cli import config_of
from specoffload.config.command_line import read_command_line
from specoffload.config.options import RunOptions
from specoffload.errors import KNOWN, UsageError
from specoffload.generation.generation import AskedOptions
from specoffload.session.session import Session

_ORACLE_LONGEST = 24
TEXTS: Mapping[str, tuple[str, ...]] = {
    "code": ("code",),
    "prose": ("prose",),
    "noise": ("noise",),
    "switching": ("code", "prose"),
}
CONFIDENCES = (1.0, 1.6, 0.6)
Make = Callable[[CostProfile], Policy]


@dataclass(frozen=True)
class Score:
    """The result of a policy over all cases: ratios of tokens per second, as geometric means."""

    policy: str
    mean_to_oracle: float
    least_to_oracle: float
    mean_to_plain: float
    least_to_plain: float


def named_policies() -> dict[str, Make]:
    """Every policy by name with its defaults, also `fixed` of 8 tokens and `costs` that look ahead.

    1 and 6 are the look-aheads that llama.cpp #17034 recommends for its jagged curves.
    """
    makes: dict[str, Make] = {name: _named(name) for name in PolicyName if name != "throughput"}
    makes["fixed-8"] = lambda profile: Fixed(8)
    for sizes in (1, 6):
        makes[f"costs-{sizes}"] = _named(PolicyName.COSTS, look_ahead=sizes)
    # The simulator's times are the profile's own, so there is nothing to refresh.
    makes["throughput"] = Throughput
    return makes


def _named(name: PolicyName, look_ahead: int = 0) -> Make:
    options = SpecOptions(policy=name, look_ahead=look_ahead)
    return lambda profile: build_policy(options, profile)


def buildable(makes: Mapping[str, Make], curves: Mapping[str, CostProfile]) -> dict[str, Make]:
    """The policies that can be built on all `curves`. A line names each of the others, and why."""
    built = {}
    for name, make in makes.items():
        try:
            for curve in curves.values():
                make(curve)
        except BadProfile as e:
            report.line(f"{name} left out: {e}")
        else:
            built[name] = make
    return built


def synthetic_traces(n_tokens: int, seed: int) -> list[DraftTrace]:
    """A trace of each kind of text by a calibrated, an over- and an under-confident drafter."""
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
    """Scores, best first. A draft step takes `draft_share` of T(1) if the curve has no time for
    it."""
    makes = buildable(named_policies(), curves) if policies is None else policies
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


def simulate_policies(
    *,
    profile: Path | None,
    trace: Path | None,
    n_tokens: int,
    draft_share: float,
    seed: int,
) -> None:
    """Print a table of scores. Raises BadProfile or SpecDecError for unreadable files."""
    curves = (
        published_curves() | curves_with_unions()
        if profile is None
        else {profile.stem: load(profile, "--profile")}
    )
    makes = buildable(named_policies(), curves)
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
    """Read a recorded text, and print a line on its unknown tokens. Raises SpecDecError."""
    try:
        trace = parse_trace(read_text(file))
    except (OSError, UnicodeDecodeError) as e:
        raise SpecDecError(f"--trace {file}: cannot be read as UTF-8 text ({e})") from e
    if trace.unknown:
        report.line(
            f"{len(trace.unknown)} of {len(trace.p)} tokens are unknown: nobody drafted them when "
            "this was recorded. Drafts are cut short there, so policies that draft longer look "
            "worse than they are; record with --spec-policy fixed --spec-draft-n-max 16"
        )
    return trace


def record(file: Path, words: Sequence[str]) -> None:
    """Continue the prompt of `run`'s command line. Write the drafted and accepted tokens to `file`.

    Raises UsageError without a prompt, and all errors that `run` raises.
    """
    line = read_command_line("run", words)
    run = line.of(RunOptions)
    if run.prompt is None:
        raise UsageError("--record needs a prompt: add -p TEXT")
    config = config_of(line)
    options = replace(line.of(AskedOptions), n_predict=run.n_predict)
    lines: list[str] = []
    with Session(config) as session:
        session.batcher.on_step.append(
            lambda report: lines.extend(
                line for _, each in report.rounds for line in trace_lines(each)
            )
        )
        for _ in session.generate(run.prompt, options):
            pass
    try:
        write_text(file, "".join(f"{line}\n" for line in lines))
    except OSError as e:
        raise UsageError(f"--record {file}: {e}") from e


def trace_lines(round_: Round) -> list[str]:
    """The lines of a trace for a round, as JSON: `p`, `accepted` and `source` of each token.

    `p` and `accepted` are null for tokens that were not drafted: the target's own token after a
    wholly accepted draft, and the tokens of rounds without a draft.
    """
    n_own = len(round_.emitted) - len(round_.evidence)
    return [
        json.dumps({"p": p, "accepted": accepted, "source": round_.draft.source})
        for p, accepted in [
            *((min(1.0, p), accepted) for p, accepted in round_.evidence),
            *[(None, None)] * n_own,
        ]
    ]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="scripts/lab/run simulate", description=__doc__, formatter_class=form
    )
    flag = parser.add_argument
    flag("--record", type=Path, help="record rounds of a prompt that is continued")
    flag(
        "--profile",
        type=Path,
        help="costs; default: the published curves, and mixtures' with unions",
    )
    flag("--trace", type=Path, help="replay recorded rounds")
    flag("--tokens", type=int, default=2000, help="length of synthetic texts")
    flag("--draft-share", type=float, default=0.05, help="a draft step in units of T(1)")
    flag("--seed", type=int, default=1, help="seed of the synthetic texts")
    flag("--json", action="store_true", help="print one line of JSON alone")
    args, rest = parser.parse_known_args()
    if rest and args.record is None:
        parser.error(f"unexpected {rest[0]}")
    report.only_data(args.json)
    try:
        if args.record is not None:
            record(args.record, rest)
            return
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
