"""Counts how often the kernel ends a server whose model is larger than its control group's memory.

    scripts/lab/run disk-kills              30 runs with a mixture of 2.0 GB
    ... --layers 8                          half of its layers: 1.0 GB, half of the time
    ... --model FILE                        another model, for example the one of `disk`
    ... --shares 0.3,0.4,0.6                memory of the group, as shares of the file's size
    ... --prompts 512,4096 --streams 1,8    tokens of a prompt, and prompts at once
    ... --runs 30                           runs in all; cells repeat until there are enough
    ... --tokens 8 --threads 1 --device cpu|sim
    ... --json FILE                         writes all rows there, too, and makes only missing runs

Each run starts our server in a control group of version 1, which takes root. A cold run has an
empty profile folder and nothing of the file in the page cache. A warm run follows it with the same
profile and with a part of the file in the page cache. The server gets prompts of `--prompts` tokens
for `--streams` requests at once, and then the same with other texts.

A smaller model is the harder case: the group's memory shrinks with the file, and what the server
takes besides weights and KV cache stays as large. A measurement that was interrupted continues
where its `--json` ends. If the last run there is cold, it is repeated, because the warm run after
it needs its profile.

A row says how much of the limit the group took at most, how many allocations met the limit, how
many processes the kernel ended, and how the run went: `served`, `refused` (the server did not start
or a request failed, with its sentence), or `killed`. The exit code is 1 if a run was killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab import disk
from lab.synth import write_preset
from lab.synth.routing import drawn_text
from offload.errors import OffloadError
from offload.model_file import read_facts
from specoffload.bench.llama_server import post, running_server

_PATIENCE_S = 600.0
_SHAPE: dict[str, Any] = {
    "n_layer": 16, "n_embd": 1024, "n_ff_exp": 512, "n_expert": 128, "n_expert_used": 2,
    "n_vocab": 8192, "n_head": 8, "n_head_kv": 1, "n_ctx": 65536, "routing": "skewed",
    "quant": "Q4_K_M",
}  # fmt: skip
_PAGE_BYTES = mmap.PAGESIZE  # limits of groups are whole pages
_CHAT_TOKENS = 64  # context beside a prompt


@dataclass(frozen=True)
class Run:
    """One start of the server."""

    share: float  # memory of the group ÷ size of the file
    n_prompt: int  # tokens of each prompt
    n_streams: int  # requests at once
    is_warm: bool  # the profile and the page cache are those of the run before


@dataclass(frozen=True)
class Outcome:
    """What happened in a run."""

    run: Run
    result: str  # "served", "refused: ..." or "killed"
    seconds: float
    limit_bytes: int
    most_bytes: int
    n_at_limit: int
    n_killed: int

    def row(self) -> str:
        """Return a row of a table in Markdown."""
        run = self.run
        start = "warm" if run.is_warm else "cold"
        return (
            f"| {run.share:.0%} | {run.n_prompt} | {run.n_streams} | {start} "
            f"| {self.most_bytes / self.limit_bytes:.3f} | {self.n_at_limit} | {self.n_killed} "
            f"| {self.result} | {self.seconds:.0f} |"
        )


HEADER = (
    "| memory ÷ file | prompt | streams | start | most ÷ limit | at limit | killed | result | s |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def runs_of(
    shares: Sequence[float], prompts: Sequence[int], streams: Sequence[int], n_runs: int
) -> list[Run]:
    """Return `n_runs` runs. Each cell is a cold run and a warm one after it.

    Cells repeat in the same order until there are enough.
    """
    cells = list(itertools.product(prompts, streams, shares))
    found = (
        Run(share, n_prompt, n_streams, is_warm)
        for n_prompt, n_streams, share in itertools.cycle(cells)
        for is_warm in (False, True)
    )
    return list(itertools.islice(found, n_runs))


def kept(path: Path | None, runs: Sequence[Run], model_bytes: int) -> list[Outcome]:
    """Return the outcomes that an interrupted measurement has written to `path`.

    A cold run at the end is left out: the warm run after it needs the same profile and page cache.
    Raises ValueError if the file is that of other runs or of another model.
    """
    if path is None or not path.exists():
        return []
    rows = json.loads(path.read_text())
    found = [Outcome(**(row | {"run": Run(**row["run"])})) for row in rows]
    for outcome, run in zip(found, runs, strict=False):
        limit_bytes = int(run.share * model_bytes)
        is_same_limit = abs(outcome.limit_bytes - limit_bytes) < _PAGE_BYTES
        if outcome.run != run or not is_same_limit:
            raise ValueError(f"{path} has {outcome.run} with {outcome.limit_bytes} bytes, and "
                             f"these arguments ask for {run} with {limit_bytes}")  # fmt: skip
    if found and len(found) < len(runs) and not found[-1].run.is_warm:
        found.pop()
    return found[: len(runs)]


def outcomes(runs: Sequence[Run], args: argparse.Namespace, log: Path) -> Iterator[Outcome]:
    """Play the runs in their order."""
    with tempfile.TemporaryDirectory() as folder:
        for i, run in enumerate(runs):
            if not run.is_warm:
                disk.drop(args.model)
                profiles = Path(folder) / str(i)
                profiles.mkdir()
            yield played(run, args, profiles, log)


def played(run: Run, args: argparse.Namespace, profiles: Path, log: Path) -> Outcome:
    """Start a server in a control group, and ask it twice."""
    n_ctx = run.n_streams * (run.n_prompt + args.tokens + _CHAT_TOKENS)
    command = [
        "env", f"SPECOFFLOAD_PROFILE_DIR={profiles}", sys.executable, "-m", "specoffload", "serve",
        "-m", str(args.model), "-t", str(args.threads), "-c", str(n_ctx), "-np",
        str(run.n_streams), "--device", args.device, "--spec-type", "none",
    ]  # fmt: skip
    began_s = time.monotonic()
    with disk.control_group(int(run.share * args.model.stat().st_size)) as group:
        try:
            with running_server(disk.inside(group, command), log, _PATIENCE_S) as (_, port):
                for turn in range(2):
                    _ask(port, run, args, seed=turn * run.n_streams)
            result = "served"
        except (OffloadError, OSError) as e:
            result = f"refused: {str(e).splitlines()[0][:400]}" if str(e) else "refused"
        use = disk.memory_use(group)
    if use["n_killed"]:
        result = "killed"
    return Outcome(run, result, round(time.monotonic() - began_s, 1), **use)


def _ask(port: int, run: Run, args: argparse.Namespace, seed: int) -> None:
    """Send one prompt per stream, all at once. Raises the first error."""

    def one(nth: int) -> None:
        text = drawn_text(args.n_vocab - 300, run.n_prompt, seed + nth)
        post(port, {"prompt": text, "n_predict": args.tokens, "ignore_eos": True,
                    "cache_prompt": False})  # fmt: skip

    requests = ThreadPoolExecutor(run.n_streams)
    try:
        list(requests.map(one, range(run.n_streams)))
    finally:  # answers that are still open end with the server
        requests.shutdown(wait=False, cancel_futures=True)


def lab_model(n_layers: int) -> Path:
    """Return the path of a mixture of 0.12 GB a layer, which is written if it does not exist."""
    name = "disk-kills" if n_layers == _SHAPE["n_layer"] else f"disk-kills-{n_layers}"
    path = Path.home() / ".cache" / "specoffload" / "lab" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_preset("qwen3moe", path, **(_SHAPE | {"n_layer": n_layers}))
    return path


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def floats(text: str) -> list[float]:
        return [float(word) for word in text.split(",")]

    def ints(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, default=_SHAPE["n_layer"])
    parser.add_argument("--shares", type=floats, default=[0.3, 0.4, 0.6])
    parser.add_argument("--prompts", type=ints, default=[512, 4096])
    parser.add_argument("--streams", type=ints, default=[1, 8])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path)
    return parser.parse_args(words)


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends, too
    args.model = args.model or lab_model(args.layers)
    args.n_vocab = read_facts(args.model).header.lengths.get("tokenizer.ggml.tokens", 8192)
    runs = runs_of(args.shares, args.prompts, args.streams, args.runs)
    model_bytes = args.model.stat().st_size
    try:
        found = kept(args.json, runs, model_bytes)
    except ValueError as e:
        print(f"disk-kills: {e}", file=sys.stderr)
        return 2
    print(f"{model_bytes / 1e9:.2f} GB, device {args.device}\n\n{HEADER}", flush=True)
    for outcome in found:
        print(outcome.row(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for outcome in outcomes(runs[len(found) :], args, args.log or Path(folder) / "log"):
            found.append(outcome)
            print(outcome.row(), flush=True)
            if args.json:
                args.json.write_text(json.dumps([asdict(o) for o in found], indent=1) + "\n")
    n_killed, n_served = (sum(o.result == r for o in found) for r in ("killed", "served"))
    print(f"\n{len(found)} runs: {n_served} served, {n_killed} killed")
    return 1 if n_killed else 0


if __name__ == "__main__":
    sys.exit(main())
