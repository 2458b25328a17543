"""Compares the default draft-length policy with hand-tuned settings, in one run.

Usage: scripts/lab/run policies [--json] [other flags of specoffload bench]

Speculation is meant for decodes that are bound by transfers. Without a GPU, such a decode is made
on `sim`.

All policies are judged in the same way. No policy has met the prompts before. The median of several
repetitions counts, and each repetition begins with the policy as tuning left it. The order changes
with each prompt, so that each policy is equally often first, second, and so on.

The prompts are held-out code and prose of the embedded pair, and `data/workloads.json`. That file
has the log of a coding agent's tool calls before each repeated writing of a file, and functions to
rewrite with one change.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.device import has_gpu
from offload.engine import Engine, EngineOptions
from offload.errors import DoesNotFit
from offload.plan.min_batch import MinBatch
from offload.plan.placement import PlanRequest, make_plan
from offload.streaming.options import StreamingOptions
from offload.timing import median_decode_s
from specdec.policies.rules import Fixed, PMin
from specdec.types import Policy
from specoffload import report
from specoffload.bench.load import warn_of_load
from specoffload.bench.workloads import prompts
from specoffload.cli import config_of
from specoffload.commands.bench import commit, machine
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import read_environment
from specoffload.config.options import BenchOptions, OutputOptions
from specoffload.config.resolution import Config, HybridChoice
from specoffload.errors import KNOWN, UsageError
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.session.statistics import GenerationStats
from specoffload.speculation.draft_model import SEQUENCE, real_text
from specoffload.speculation.speculation import Speculation

DEFAULT = "throughput"
PLAIN = "fixed 0"
BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # fixed draft lengths to try
_N_FINALISTS = 3
_REPETITIONS = 3

_COPY_SHARE = 16.0  # one token's copy time, in units of its computation time
_SLOT_SHARES = (0.35, 0.5, 0.75)  # shares of the streamed weights that get slots
_WORKLOADS = Path(__file__).parent / "data" / "workloads.json"
_N_TUNED_ON = 2  # prompts of each kind for tuning
_N_JUDGED_BY = 4
Kinds = Mapping[str, Sequence[str]]  # prompts by kind
MakePolicy = Callable[[], Policy]


@dataclass
class Tally:
    """Tokens and seconds of one policy, for each prompt and repetition."""

    n_drafted: int = 0
    n_accepted: int = 0
    n_written: int = 0  # tokens generated in all repetitions
    _runs: defaultdict[tuple[str, str], list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, kind: str, text: str, stats: GenerationStats) -> None:
        """Count one generation of one prompt."""
        self.n_drafted += stats.n_drafted
        self.n_accepted += stats.n_accepted
        self.n_written += stats.n_tokens
        self._runs[kind, text].append((stats.decode_s / stats.n_tokens, stats.n_tokens))

    def rate(self, *kinds: str) -> float:
        """Tokens per second over the prompts of these kinds, or of all kinds.

        Each prompt's time per token is the median of its repetitions.
        """
        n_tokens = seconds = 0.0
        for (kind, _), runs in self._runs.items():
            if not kinds or kind in kinds:
                n = statistics.fmean([n for _, n in runs])
                n_tokens += n
                seconds += n * statistics.median([token_s for token_s, _ in runs])
        return n_tokens / seconds


def settings(learnt: Policy) -> dict[str, MakePolicy]:
    """Constructors of policies by name: the default as learnt so far, plain decoding, fixed
    lengths, and llama.cpp's rule with several settings."""
    makes: dict[str, MakePolicy] = {DEFAULT: lambda: deepcopy(learnt), PLAIN: lambda: Fixed(0)}
    for n in BLOCKS:
        makes[f"fixed {n}"] = lambda n=n: Fixed(n)  # type: ignore[misc]
    for n in (8, 16):
        for p in (0.5, 0.75, 0.9):
            makes[f"p-min {p} max {n}"] = lambda n=n, p=p: PMin(n, p)  # type: ignore[misc]
    return makes


def bench_policies(config: Config, *, n_predict: int) -> None:
    """Measure all policies and print the results. Raises UsageError without a draft."""
    if not config.spec.use_profile:
        raise UsageError("this measures T(n) itself: set no SPECOFFLOAD_WITHOUT=profile")
    if config.draft is None or config.spec.options.policy != DEFAULT:
        raise UsageError("this needs a draft model and the default policy")
    warn_of_load()
    result: dict[str, Any] = {"machine": machine(), "commit": commit(), "model": config.model.name}
    if not has_gpu() and config.device == "auto":
        config, result["regime"] = transfer_bound(config)
        report.note(result["regime"])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # The profile is measured in this run and not kept, because no other run has this link.
        spec = replace(config.spec, profile_dir=Path(folder))
        with (
            report.progress("comparing policies") as bar,
            Session(replace(config, spec=spec), keeps_hits=False) as session,
        ):
            result |= compare(session, n_predict, bar)
    result["took_s"] = time.perf_counter() - began
    _show(result)
    report.data(result)


def compare(session: Session, n_predict: int, bar: Callable[[float], None]) -> dict[str, Any]:
    """Tokens per second of all settings on the tuning prompts, and of the best ones, the default
    and plain decoding on prompts that none of them has met."""
    speculation = speculation_of(session)
    learning = deepcopy(speculation.policy)  # the default policy, which learns while tuning
    tried = settings(learning) | {DEFAULT: lambda: learning}
    tuned = run(session, tried, tuning_prompts(), n_predict // 2, 1, lambda share: bar(share / 2))
    sweep = {name: tally.rate() for name, tally in tuned.items()}
    ranked = sorted(tried.keys() - {PLAIN, DEFAULT}, key=lambda name: -sweep[name])
    best_tuned = ranked[:_N_FINALISTS]
    makes = {name: settings(learning)[name] for name in (PLAIN, *best_tuned, DEFAULT)}
    final = run(session, makes, judged_prompts(), 2 * n_predict, _REPETITIONS)
    rates = {name: tally.rate() for name, tally in final.items()}
    best = max(best_tuned, key=lambda name: rates[name])
    two = {name: makes[name] for name in (PLAIN, DEFAULT)}
    noise = run(session, two, adversarial_prompts(), n_predict, _REPETITIONS)
    return {
        "sweep": sweep,
        "final": rates,
        "profile": list(speculation.costs.step_s),
        "best_tuned": best,
        "default_vs_best_tuned": rates[DEFAULT] / rates[best],
        "default_vs_plain": rates[DEFAULT] / rates[PLAIN],
        "adversarial_vs_plain": noise[DEFAULT].rate() / noise[PLAIN].rate(),
        "kinds": {
            kind: {name: tally.rate(kind) for name, tally in final.items()}
            for kind in judged_prompts()
        },
    }


def run(
    session: Session,
    makes: Mapping[str, MakePolicy],
    kinds: Kinds,
    n_predict: int,
    repetitions: int,
    bar: Callable[[float], None] = lambda share: None,
) -> dict[str, Tally]:
    """Generate from every prompt with every policy; returns a tally for each policy.

    Each repetition begins with new policies. The order rotates with each prompt, so that changes of
    the machine's speed affect all policies alike.
    """
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
    """The session's speculation. The session must have been opened with a draft."""
    assert session.speculation is not None
    return session.speculation


def _show(result: dict[str, Any]) -> None:
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


# -- the regime that speculation is for: a decode bound by transfers -------------------------------


def transfer_bound(config: Config) -> tuple[Config, str]:
    """`config` changed to `sim` with a slow link, and a sentence that describes the change.

    Batches of every size stream, through the smallest of `_SLOT_SHARES` at which all experts of a
    layer have slots. If no share is enough, larger batches are divided into chunks of tokens.
    Raises UsageError if no share fits.
    """
    with Engine(config.model, EngineOptions(device="sim", stream_experts=False)) as engine:
        compute_s = _token_s(engine)[0]
        facts = engine.facts
    whole = make_plan(facts, PlanRequest(n_gpu_layers=0))
    found: tuple[float, StreamingOptions, float] | None = None
    for share in _SLOT_SHARES:
        vram = whole.resident_bytes + int(whole.slot_bytes * share)
        streaming = StreamingOptions(vram_bytes=vram, n_gpu_layers=0, chunks="on")
        options = EngineOptions(device="sim", streaming=streaming, min_batch=MinBatch(1, 1))
        try:
            with Engine(config.model, options) as engine:
                found = share, streaming, _token_s(engine)[1]
                assert engine.plan is not None
                if not engine.plan.chunk_tokens:
                    break
        except DoesNotFit:
            continue
    if found is None:
        raise UsageError("no budget of slots fits this model on sim; name a device with --device")
    share, streaming, copied = found
    bandwidth = copied / (_COPY_SHARE * compute_s)
    words = (
        f"no GPU here: sim with a link of {bandwidth / 1e6:.0f} MB/s, at which one token's copies "
        f"({report.bytes_text(copied)}) take {_COPY_SHARE:.0f} times its computation; batches of "
        f"every size stream all layers through slots for {share:.0%} of them"
    )
    changed = replace(
        config,
        device=f"sim:bw={bandwidth:.0f}B/s",
        streaming=streaming,
        min_batch=MinBatch(1, 1),
        hybrid=HybridChoice(),  # a split layer does not stream
    )
    return changed, words


def _token_s(engine: Engine, n: int = 24) -> tuple[float, float]:
    """Median seconds and mean copied bytes of decoding one token after real text."""
    text = real_text(engine)
    engine.sequences.extend(SEQUENCE, text[:32], n_logits=0)
    before = engine.counters().streamed_bytes
    batches = [[token] for token in text[32 : 32 + n]]
    one_s = median_decode_s(engine.sequences, SEQUENCE, batches, grow=True)
    return one_s, (engine.counters().streamed_bytes - before) / n


# -- texts -----------------------------------------------------------------------------------------


def tuning_prompts() -> Kinds:
    """Prompts for choosing settings, from which an adaptive policy may learn."""
    code, prose = prompts("code"), prompts("prose")
    return _kinds(0, _N_TUNED_ON, code, prose, list(zip(code[2:], prose, strict=False)))


def judged_prompts() -> Kinds:
    """Prompts for the final comparison, which no policy has met before."""
    code, prose = prompts("code")[2 * _N_TUNED_ON :], prompts("prose")[_N_TUNED_ON:]
    pairs = list(zip(code[_N_JUDGED_BY:], prose[_N_JUDGED_BY:], strict=False))
    return _kinds(_N_TUNED_ON, _N_JUDGED_BY, code, prose, pairs)


def _kinds(
    first: int,
    n: int,
    code: Sequence[str],
    prose: Sequence[str],
    pairs: Sequence[tuple[str, str]],
) -> Kinds:
    """`n` prompts of each kind. Prompts of workloads.json begin with number `first`."""
    return {
        "code": code[:n],
        "prose": prose[:n],
        "switching": ["\n\n".join(pair[:: -1 if i % 2 else 1]) for i, pair in enumerate(pairs[:n])],
        "agent": _workload("agent")[first : first + n],
        "rewrite": _workload("rewrite")[first : first + n],
    }


def adversarial_prompts(n_prompts: int = 3, n_bytes: int = 120) -> Kinds:
    """Prompts of random bytes, which cannot be predicted."""
    draw = random.Random(7)
    return {
        "adversarial": [draw.randbytes(n_bytes).decode("latin-1") for _ in range(n_prompts)],
    }


def in_turns(kinds: Kinds) -> list[tuple[str, str]]:
    """All (kind, prompt) pairs, with the kinds in turns."""
    longest = max(map(len, kinds.values()))
    return [
        (kind, texts[i]) for i in range(longest) for kind, texts in kinds.items() if i < len(texts)
    ]


def _workload(kind: str) -> list[str]:
    rows = json.loads(_WORKLOADS.read_text(encoding="utf-8"))
    return [row["text"] for row in rows if row["kind"] == kind]


def main() -> None:
    try:
        line = read_command_line("bench", sys.argv[1:], read_environment())
        report.only_data(line.of(OutputOptions).as_json)
        bench_policies(config_of(line), n_predict=line.of(BenchOptions).n_predict)
    except KNOWN as e:
        sys.exit(f"scripts/lab/run policies: {e}")


if __name__ == "__main__":
    main()
