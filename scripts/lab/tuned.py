"""Compares what `specoffload tune` finds with an exhaustive search, on a simulated device.

    scripts/lab/run tuned                 a random mixture of 0.4 GB on sim, slots for half of it
    ... --model FILE --device sim:vram=200MiB,bw=2GB/s --minutes 4 --prompt 1024 --tokens 96

The search tries every combination of threads, ubatch, and how small batches are computed (by the
CPU in place, streamed from n tokens on, split). Each is opened as a user would with flags, reads a
prompt that it has not seen, and writes an answer, greedily and without drafts. `tune` runs before
that, and chooses all of these itself, in an empty folder of profiles. At the end, what `tune` found
and the best five combinations are measured by turns, three times each. A JSON object is printed:
`ratio` is the median time of the best combination divided by that of the tuned start, so 1 means
that nothing was missed, and less than 1 that a combination was faster. All seconds are medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lab.synth import write_preset
from lab.timing import seconds
from specoffload.commands.tune import tune_all
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import read_environment, read_host
from specoffload.config.resolution import Config, resolve
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

UBATCHES = (256, 512, 1024, 2048)
WAYS = (
    *(("--min-batch", str(n), "--hybrid", "off") for n in (1, 4, 16, 64)),
    ("--min-batch", "100000", "--hybrid", "off"),
    ("--min-batch", "64", "--hybrid", "on"),
)
N_BEST = 5
N_TURNS = 3
_SHAPE: dict[str, Any] = {
    "n_layer": 10, "n_embd": 1024, "n_ff_exp": 512, "n_expert": 64, "n_expert_used": 6,
    "n_vocab": 8192, "n_head": 16, "n_head_kv": 4, "n_ctx": 8192, "routing": "skewed",
    "quant": "Q4_K_M",
}  # fmt: skip


def config_of(args: argparse.Namespace, flags: Sequence[str] = ()) -> Config:
    words = ["-m", str(args.model), "--device", args.device, "-c", "4096", *flags]
    line = read_command_line("run", [*words, "--spec-type", "none"], read_environment())
    return resolve(line.options, read_host(line.environment))


def answer_s(config: Config, args: argparse.Namespace, seed: int) -> float:
    """Seconds of a new prompt and its answer, after a short prompt that warms up."""
    rng = random.Random(seed)
    with Session(config, keeps_hits=False) as session:
        n_vocab = session.target.n_vocab
        for n_prompt, n_tokens in ((64, 8), (args.prompt, args.tokens)):
            prompt = [rng.randrange(n_vocab) for _ in range(n_prompt)]
            options = GenerateOptions(n_predict=n_tokens)
            took_s = seconds(partial(list, session.generate(prompt, options)))
    return took_s


def lab_model() -> Path:
    """Return the path of the random mixture, which is written if it does not exist."""
    path = Path.home() / ".cache" / "specoffload" / "lab" / "tuned.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_preset("qwen3moe", path, **_SHAPE)
    return path


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="sim:vram=120MiB,bw=2GB/s")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    args.model = args.model or lab_model()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPECOFFLOAD_PROFILE_DIR"] = folder
        print(json.dumps(compared(args), indent=1))


def compared(args: argparse.Namespace) -> dict[str, Any]:
    tune_s = seconds(lambda: tune_all(config_of(args), args.minutes))
    n_most = len(os.sched_getaffinity(0))
    threads = sorted({1, max(1, n_most // 2), n_most})
    every: list[tuple[str, ...]] = [
        ("-t", str(t), "-tb", str(t), "-ub", str(ubatch), *way)
        for t, ubatch, way in itertools.product(threads, UBATCHES, WAYS)
    ]
    once: dict[tuple[str, ...], float] = {}
    for i, flags in enumerate(every):
        once[flags] = answer_s(config_of(args, flags), args, seed=1)
        print(f"{i + 1} of {len(every)}: {once[flags]:.2f} s {' '.join(flags)}", file=sys.stderr)
    best = sorted(once, key=lambda flags: once[flags])[:N_BEST]
    turns: dict[tuple[str, ...], list[float]] = {flags: [] for flags in ((), *best)}
    for turn in range(N_TURNS):
        for flags, times in turns.items():
            times.append(answer_s(config_of(args, flags), args, seed=2 + turn))
    medians = {flags: median(times) for flags, times in turns.items()}
    fastest = min(best, key=lambda flags: medians[flags])
    return {
        "model": args.model.name,
        "device": args.device,
        "n_combinations": len(every),
        "tune_s": round(tune_s, 1),
        "tuned_s": round(medians[()], 3),
        "best_s": round(medians[fastest], 3),
        "worst_s": round(max(once.values()), 3),
        "best": " ".join(fastest),
        "others": {" ".join(flags): round(medians[flags], 3) for flags in best},
        "ratio": round(medians[fastest] / medians[()], 3),
    }


if __name__ == "__main__":
    main()
