"""`specoffload bench`: ceilings, measurements, distances, and one JSON object on the last line.

Everything is measured in one run on one machine and compared as ratios; medians of repetitions,
the first repetition dropped as warm-up.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from offload.device import MinBatch
from offload.timing import median_decode_s
from specoffload import report
from specoffload.config.resolution import Config, demo_file
from specoffload.session.generation import GenerateOptions, GenerationStats
from specoffload.session.session import SEQUENCE, Session

PROFILE_SIZES = tuple(range(1, 17))
_NEVER = MinBatch(experts=1 << 30, dense=1 << 30)
N_PROMPTS = 4


def prompts(kind: str = "code") -> list[str]:
    """The embedded pair's held-out prompts of one kind: code or prose."""
    rows = json.loads(demo_file("prompts.json").read_text(encoding="utf-8"))
    return [row["text"] for row in rows if row["kind"] == kind]


def bench_config(config: Config, *, n_predict: int, repetitions: int) -> None:
    """Measure what `config` asks for and print it."""
    if config.device == "auto" and not has_gpu():
        config = replace(config, device="sim")
        report.note("no GPU here: the wrapped device is measured on sim, the CPU posing as one")
    result: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "model": config.model.name,
        "overlap": [],  # filled by --overlap
        "policies": {},  # filled by --policies
    }
    texts = prompts()[:N_PROMPTS]
    plain_config = replace(config, device="cpu" if config.device.startswith("sim") else
                           config.device, draft=None)  # fmt: skip
    paths = {"plain": plain_config, "wrapped": replace(config, draft=None, stream_experts=False)}
    if config.draft is not None:
        paths["spec"] = config
    result["in_turns"] = _fit_together(config, len(paths))
    with report.progress("measuring") as bar:
        done = _generations(paths, texts, n_predict, repetitions, in_turns=result["in_turns"])
        bar(0.6)
        plain, wrapped, spec = done["plain"], done["wrapped"], done.get("spec")
        result |= {
            "plain_tps": plain.tokens_per_s,
            "wrapped_tps": wrapped.tokens_per_s,
            "wrapped_ratio": plain.decode_s / wrapped.decode_s,
        }
        if spec is not None:
            result |= {
                "spec_tps": spec.tokens_per_s,
                "acceptance_rate": spec.acceptance_rate,
                "tokens_per_round": spec.tokens_per_round,
            }
        best = max(result["wrapped_tps"], result.get("spec_tps", 0.0))
        result["vs"] = {"llama.cpp": best / plain.tokens_per_s}
        result["profile"] = _profile(config, repetitions)
        bar(0.8)
        result["min_batch"], result["counters"] = _both_sides(config, repetitions)
    _show(result)
    report.line(json.dumps(result))


def machine() -> dict[str, Any]:
    """The machine that the numbers were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def commit() -> str | None:
    """The source's commit, None outside a checkout."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def has_gpu() -> bool:
    from offload.device import devices

    return any(device.on_gpu for device in devices())


def _fit_together(config: Config, n_paths: int) -> bool:
    """True if all paths can be open at once, so that repetitions take turns: no GPU's memory to
    share, and copies of the weights in a quarter of the free memory."""
    on_cpu = config.device == "cpu" or config.device.startswith("sim")
    size_bytes = n_paths * config.model.stat().st_size
    return on_cpu and 4 * size_bytes < psutil.virtual_memory().available


def _generations(
    paths: Mapping[str, Config],
    texts: Sequence[str],
    n_predict: int,
    repetitions: int,
    *,
    in_turns: bool,
) -> dict[str, GenerationStats]:
    """All prompts once per repetition on every path; the repetition of median decode time.

    Paths that take turns share what a busy machine does to them.
    """
    groups = [list(paths)] if in_turns else [[name] for name in paths]
    found: dict[str, GenerationStats] = {}
    for group in groups:
        totals: dict[str, list[GenerationStats]] = {name: [] for name in group}
        with ExitStack() as stack:
            sessions = {name: stack.enter_context(Session(paths[name])) for name in group}
            for _ in range(repetitions + 1):
                for name, session in sessions.items():
                    totals[name].append(_total(session, texts, n_predict))
        for name, all_stats in totals.items():
            measured = sorted(all_stats[1:], key=lambda stats: stats.decode_s)
            found[name] = measured[len(measured) // 2]
    return found


def _total(session: Session, texts: Sequence[str], n_predict: int) -> GenerationStats:
    options = GenerateOptions(n_predict=n_predict, ignore_eos=True)
    done = [_last_stats(session, text, options) for text in texts]
    names = ("n_prompt_tokens", "n_tokens", "prefill_s", "decode_s", "n_rounds",
             "n_drafted", "n_accepted", "streamed_bytes")  # fmt: skip
    return GenerationStats(**{n: sum(getattr(s, n) for s in done) for n in names})


def _last_stats(session: Session, text: str, options: GenerateOptions) -> GenerationStats:
    stats = None
    for piece in session.generate(text, options):
        stats = piece.stats
    assert stats is not None
    return stats


def _profile(config: Config, repetitions: int) -> list[float]:
    """T(n) in seconds for n = 1..16 behind a short real prompt."""
    with Session(replace(config, draft=None)) as session:
        return [_decode_s(session, n, repetitions) for n in PROFILE_SIZES]


def _decode_s(session: Session, n: int, repetitions: int) -> float:
    engine, sequences = session.target, session.target.sequences
    tokens = engine.tokenize(prompts()[0] * 4)
    start = min(16, len(tokens) // 2)
    if sequences.length(SEQUENCE) < start:
        sequences.rewind(SEQUENCE, 0)
        sequences.extend(SEQUENCE, tokens[:start], n_logits=0)
    batch = (tokens[start:] * n)[:n]
    return median_decode_s(sequences, SEQUENCE, [batch] * (repetitions + 1))


def _both_sides(config: Config, repetitions: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """For sizes around the threshold: the CPU's time, streaming's time, and what is chosen."""
    threshold = config.min_batch.experts
    sizes = sorted({1, 2, 3, 4, 8, 16, 32, threshold} - {0})
    sizes = [n for n in sizes if n <= 64]
    always = replace(config, draft=None, min_batch=MinBatch(experts=1, dense=1))
    with Session(replace(config, draft=None, min_batch=_NEVER)) as session:
        if not session.target.facts.n_experts:
            return [], {}
        cpu = {n: _decode_s(session, n, repetitions) for n in sizes}
    with Session(always) as session:
        streamed = {n: _decode_s(session, n, repetitions) for n in sizes}
        counters = asdict(session.target.counters())
    rows = [
        {
            "n": n,
            "cpu_s": cpu[n],
            "streamed_s": streamed[n],
            "chosen": "stream" if n >= threshold else "cpu",
        }
        for n in sizes
    ]
    return rows, counters


def _show(result: dict[str, Any]) -> None:
    rows = [("plain", f"{result['plain_tps']:.1f}", "1.00")]
    for name in ("wrapped", "spec"):
        tps = result.get(f"{name}_tps")
        if tps is not None:
            rows.append((name, f"{tps:.1f}", f"{tps / result['plain_tps']:.2f}"))
    report.table("decoding", ("path", "tokens/s", "x plain"), rows)
    if result.get("acceptance_rate") is not None:
        report.line(
            f"acceptance {result['acceptance_rate']:.0%}, "
            f"{result['tokens_per_round']:.2f} tokens per round"
        )
    one = result["profile"][0]
    report.table(
        "T(n), the time of one decode of n tokens",
        ("n", "ms", "T(n)/T(1)"),
        [
            (str(n), f"{t * 1e3:.2f}", f"{t / one:.2f}")
            for n, t in zip(PROFILE_SIZES, result["profile"], strict=True)
        ],
    )
    if result["min_batch"]:
        report.table(
            "both sides of --min-batch",
            ("n", "CPU ms", "streamed ms", "chosen", "faster"),
            [
                (
                    str(row["n"]),
                    f"{row['cpu_s'] * 1e3:.2f}",
                    f"{row['streamed_s'] * 1e3:.2f}",
                    row["chosen"],
                    "stream" if row["streamed_s"] < row["cpu_s"] else "cpu",
                )
                for row in result["min_batch"]
            ],
        )
