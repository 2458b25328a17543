"""The default draft-length policy against every hand-tuned setting, in one run.

Usage: scripts/lab/run policies [--json] [other flags of specoffload bench]

Without a GPU the regime that speculation is for, a decode bound by transfers, is made on `sim`
(`lab.regime`). Then the same pair is run on the plain CPU, where T(n) is nearly
linear, so that nothing can be gained and nothing must be lost.

All policies are judged alike: by prompts that none of them has met, by the median of several
repetitions, each of which begins with the policy as tuning left it, and in an order in which each
comes first, second, ... equally often.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.regime import transfer_bound, ways
from lab.workloads import (
    Kinds,
    adversarial_prompts,
    in_turns,
    judged_prompts,
    tuning_prompts,
)
from offload.device import has_gpu
from offload.streaming.options import StreamingOptions
from specdec.policies.rules import Fixed, PMin
from specdec.types import Policy
from specoffload import report
from specoffload.bench.load import warn_of_load
from specoffload.cli import config_of
from specoffload.commands.bench import commit, machine
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import read_environment
from specoffload.config.options import BenchOptions, OutputOptions
from specoffload.config.resolution import Config
from specoffload.errors import KNOWN, UsageError
from specoffload.session.generation import GenerateOptions, GenerationStats
from specoffload.session.session import Session
from specoffload.speculation.speculation import Speculation

DEFAULT = "throughput"
PLAIN = "fixed 0"
BLOCKS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # fixed lengths that are tried
_N_FINALISTS = 3
# Tokens written after a prompt, in units of -n: half of it while tuning, twice as many to judge by,
# since an answer is longer than what it begins with.
_TUNED, _JUDGED = 0.5, 2
_REPETITIONS = 3

MakePolicy = Callable[[], Policy]


@dataclass
class Tally:
    """Tokens and seconds of one policy, for each prompt and repetition."""

    n_drafted: int = 0
    n_accepted: int = 0
    n_written: int = 0  # tokens of all repetitions
    _runs: defaultdict[tuple[str, str], list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, kind: str, text: str, stats: GenerationStats) -> None:
        """One generation of one prompt."""
        self.n_drafted += stats.n_drafted
        self.n_accepted += stats.n_accepted
        self.n_written += stats.n_tokens
        self._runs[kind, text].append((stats.decode_s / stats.n_tokens, stats.n_tokens))

    def rate(self, *kinds: str) -> float:
        """Tokens per second over the prompts of these kinds, or of all; each prompt takes the
        median of its repetitions."""
        n_tokens = seconds = 0.0
        for (kind, _), runs in self._runs.items():
            if not kinds or kind in kinds:
                n = statistics.fmean([n for _, n in runs])
                n_tokens += n
                seconds += n * statistics.median([token_s for token_s, _ in runs])
        return n_tokens / seconds


def hand_tuned() -> dict[str, MakePolicy]:
    """Settings that a person might try: blocks, and llama.cpp's rule. Length 0 is plain."""
    makes: dict[str, MakePolicy] = {f"fixed {n}": lambda n=n: Fixed(n) for n in BLOCKS}  # type: ignore[misc]
    for n in (8, 16):
        for p in (0.5, 0.75, 0.9):
            makes[f"p-min {p} max {n}"] = lambda n=n, p=p: PMin(n, p)  # type: ignore[misc]
    return makes


def bench_policies(config: Config, *, n_predict: int) -> None:
    """Measure and print. Raises UsageError without a draft."""
    if not config.spec.use_profile:
        raise UsageError("this measures T(n) itself: set no SPECOFFLOAD_WITHOUT=profile")
    if config.draft is None or config.spec.options.policy != DEFAULT:
        raise UsageError("this needs a draft model and the default policy")
    warn_of_load()
    result: dict[str, Any] = {"machine": machine(), "commit": commit(), "model": config.model.name}
    streaming = config
    if not has_gpu() and config.device == "auto":
        streaming, words = transfer_bound(config)
        report.note(words)
        result["regime"] = words
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # Measured in this run, and kept nowhere: no other run has this link.
        spec = replace(config.spec, profile_dir=Path(folder))
        opened = replace(streaming, spec=spec)
        with (
            report.progress("comparing policies") as bar,
            Session(opened, keeps_hits=False) as session,
        ):
            result |= compare(session, n_predict, bar)
        cpu = replace(config, device="cpu", streaming=StreamingOptions(), spec=spec)
        with Session(cpu, keeps_hits=False) as session:
            result["cpu"] = cpu_regime(session, n_predict)
    result["took_s"] = time.perf_counter() - began
    _show(result)
    report.data(result)


def compare(session: Session, n_predict: int, bar: Callable[[float], None]) -> dict[str, Any]:
    """Tune: every setting writes after the tuning prompts. Judge: the best settings, the default
    and plain decoding write after prompts that none of them has met."""
    speculation = speculation_of(session)
    learning = deepcopy(speculation.policy)  # it learns from the tuning prompts, and is kept
    sizes = ways(session.target)
    tried: dict[str, MakePolicy] = hand_tuned() | {DEFAULT: lambda: learning}
    tuned = run(
        session,
        tried,
        tuning_prompts(),
        round(_TUNED * n_predict),
        1,
        lambda share: bar(0.4 * share),
    )
    sweep = {name: tally.rate() for name, tally in tuned.items()}
    ranked = sorted(tried.keys() - {PLAIN, DEFAULT}, key=lambda name: -sweep[name])
    best_tuned = ranked[:_N_FINALISTS]
    makes = {name: tried[name] for name in (PLAIN, *best_tuned)}
    makes[DEFAULT] = lambda: deepcopy(learning)
    final = run(
        session,
        makes,
        judged_prompts(),
        _JUDGED * n_predict,
        _REPETITIONS,
        lambda share: bar(0.4 + 0.5 * share),
    )
    two = {name: makes[name] for name in (PLAIN, DEFAULT)}
    noise = run(session, two, adversarial_prompts(), n_predict, _REPETITIONS)
    bar(1.0)
    rates = {name: tally.rate() for name, tally in final.items()}
    best = max(best_tuned, key=lambda name: rates[name])
    return {
        "policies": sweep | rates,
        "sizes": [asdict(way) for way in sizes],
        "sweep": sweep,
        "blocks": _blocks(tuned),
        "final": rates,
        "profile": list(speculation.costs.step_s),
        "draft_step_s": speculation.costs.draft_step_s,
        "best_tuned": best,
        "default_vs_best_tuned": rates[DEFAULT] / rates[best],
        "default_vs_plain": rates[DEFAULT] / rates[PLAIN],
        "adversarial_vs_plain": noise[DEFAULT].rate() / noise[PLAIN].rate(),
        "kinds": {
            kind: {name: tally.rate(kind) for name, tally in final.items()}
            for kind in judged_prompts()
        },
    }


def _blocks(tuned: Mapping[str, Tally]) -> list[dict[str, float]]:
    """Drafted and accepted tokens for each token of the text, and tokens/s, by block length."""
    return [
        {
            "length": n,
            "drafted": tally.n_drafted / tally.n_written,
            "accepted": tally.n_accepted / tally.n_written,
            "tps": tally.rate(),
        }
        for n in BLOCKS
        for tally in (tuned[f"fixed {n}"],)
    ]


def cpu_regime(session: Session, n_predict: int) -> dict[str, Any]:
    """Plain CPU: the default beside plain decoding, and how many tokens it drafted."""
    speculation = speculation_of(session)
    learning = deepcopy(speculation.policy)
    run(session, {DEFAULT: lambda: learning}, tuning_prompts(), round(_TUNED * n_predict), 1)
    makes: dict[str, MakePolicy] = {
        PLAIN: lambda: Fixed(0),
        DEFAULT: lambda: deepcopy(learning),
    }
    tallies = run(session, makes, judged_prompts(), n_predict, _REPETITIONS)
    default, plain = tallies[DEFAULT], tallies[PLAIN]
    return {
        "plain_tps": plain.rate(),
        "default_tps": default.rate(),
        "default_vs_plain": default.rate() / plain.rate(),
        "drafted_per_token": default.n_drafted / default.n_written,
        "profile": list(speculation.costs.step_s),
    }


def run(
    session: Session,
    makes: Mapping[str, MakePolicy],
    kinds: Kinds,
    n_predict: int,
    repetitions: int,
    bar: Callable[[float], None] = lambda share: None,
) -> dict[str, Tally]:
    """Every prompt with every policy. Each repetition begins with policies made anew, and who
    comes first moves on with each prompt, so that the machine's moods hit all alike."""
    options = GenerateOptions(n_predict=max(2, n_predict), ignore_eos=True)
    tallies = {name: Tally() for name in makes}
    speculation = speculation_of(session)
    before = speculation.policy
    first, turns = 0, in_turns(kinds)
    try:
        for _ in range(repetitions):
            policies = [(name, make()) for name, make in makes.items()]
            for kind, text in turns:
                for i in range(len(policies)):
                    name, speculation.policy = policies[(first + i) % len(policies)]
                    session.forget()
                    stats = [piece.stats for piece in session.generate(text, options)][-1]
                    assert stats is not None
                    tallies[name].add(kind, text, stats)
                first += 1
                bar(first / (repetitions * len(turns)))
    finally:
        speculation.policy = before
    return tallies


def speculation_of(session: Session) -> Speculation:
    """A session opened with a draft speculates."""
    assert session.speculation is not None
    return session.speculation


def _show(result: dict[str, Any]) -> None:
    profile: Sequence[float] = result["profile"]
    sizes = [n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 17, 24, 32, 33) if n <= len(profile)]
    rows = [
        (str(n), f"{profile[n - 1] * 1e3:.2f}", f"{profile[n - 1] / profile[0]:.2f}") for n in sizes
    ]
    report.table("T(n) as the default reads it", ("n", "ms", "T(n)/T(1)"), rows)
    report.table(
        "what a batch of each size did, by the counters of one decode",
        ("n", "ms", "way"),
        [(str(s["n"]), f"{s['decode_s'] * 1e3:.2f}", s["words"]) for s in result["sizes"]],
    )
    report.table(
        "blocks: drafted and accepted for each token of the text",
        ("length", "drafted", "accepted", "accepted/drafted", "tokens/s"),
        [
            (
                str(b["length"]),
                f"{b['drafted']:.2f}",
                f"{b['accepted']:.2f}",
                f"{b['accepted'] / b['drafted']:.2f}" if b["drafted"] else "-",
                f"{b['tps']:.1f}",
            )
            for b in result["blocks"]
        ],
    )
    plain = result["sweep"][PLAIN]
    swept = sorted(result["sweep"].items(), key=lambda item: -item[1])
    report.table(
        "sweep over the tuning prompts",
        ("policy", "tokens/s", "x plain"),
        [(name, f"{rate:.1f}", f"{rate / plain:.3f}") for name, rate in swept],
    )
    kinds = result["kinds"]
    report.table(
        "the best of them, the default and plain on prompts that are new (tokens/s)",
        ("policy", "all", *kinds, "x plain"),
        [
            (
                name,
                f"{rate:.1f}",
                *(f"{kinds[kind][name]:.1f}" for kind in kinds),
                f"{rate / result['final'][PLAIN]:.3f}",
            )
            for name, rate in result["final"].items()
        ],
    )
    report.line(
        f"default: {result['default_vs_best_tuned']:.3f} x the best hand-tuned "
        f"({result['best_tuned']}; wanted 1.05), {result['default_vs_plain']:.3f} x plain, "
        f"{result['adversarial_vs_plain']:.3f} x plain on random bytes (wanted 0.98)"
    )
    cpu = result["cpu"]
    report.line(
        f"on the plain CPU, where T(2) is {cpu['profile'][1] / cpu['profile'][0]:.2f} T(1): "
        f"default {cpu['default_vs_plain']:.3f} x plain, "
        f"{cpu['drafted_per_token']:.2f} drafted per token"
    )


def main() -> None:
    try:
        line = read_command_line("bench", sys.argv[1:], read_environment())
        report.only_data(line.of(OutputOptions).as_json)
        bench_policies(config_of(line), n_predict=line.of(BenchOptions).n_predict)
    except KNOWN as e:
        sys.exit(f"scripts/lab/run policies: {e}")


if __name__ == "__main__":
    main()
