"""Measures fresh prompts one after the other on servers with four slots, beside llama-server.

    scripts/lab/run four-slots --model FILE       about 10 minutes on 2 cores
    ... --vs PATH       llama-server to compare with; default: scripts/build-llama-server's
    ... --rounds 3 --threads 2 --lengths N,N --print

Each prompt is new to the server, and the slots keep the earlier ones. So a server that passes over
their cells takes longer and longer. The servers are llama-server with one KV cache for all slots
(`-kvu`), llama-server with a cache for each slot, and ours in the same two ways. All run the same
file on the CPU, with the same threads and without drafts. They take turns: in each round, each
server starts anew, and reads all prompts. The table has medians over the rounds. It is written into
docs/results.md unless there is `--print`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.attack.program import LOOPBACK, serving
from lab.bench_server.__main__ import DEMO, LOAD_PATIENCE_S, llama_server
from lab.tables import conditions, page_of, publish
from offload.model_file import read_facts
from specoffload.cpu_load import Load, Watch

PAGE = page_of("four-slots")
N_SLOTS = 4
N_PREDICT = 32
LENGTHS = (300, 1000, 3000, 3000, 6000, 3000, 12000)
_FIRST_TEXT_ID = 1000  # ids below it are often control tokens
OURS = "ours"
_REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Took:
    """Times of one request: the prompt until the first token, and tokens/s of the answer."""

    prompt_s: float
    answer_tps: float


def commands(options: argparse.Namespace, program: Path) -> dict[str, list[str]]:
    """The command line of each server. Ours begins with a flag, since it needs no program."""
    words = ["-m", str(options.model), "-t", str(options.threads), "-c", str(options.ctx_size)]
    words += ["-np", str(N_SLOTS)]
    theirs = [str(program), *words, "-tb", str(options.threads)]
    own = [*words, "--device", "cpu", "--spec-type", "none"]
    return {
        "llama-server `-kvu`": [*theirs, "-kvu"],
        "llama-server": theirs,
        OURS: own,
        "ours `--no-kv-unified`": [*own, "--no-kv-unified"],
    }


def ask(port: int, ids: Sequence[int]) -> Took:
    body = {
        "prompt": [*ids], "n_predict": N_PREDICT, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/completion", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    began_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S) as answer:
        timings: dict[str, Any] = json.load(answer)["timings"]
    wall_s = time.perf_counter() - began_s
    return Took(wall_s - timings["predicted_ms"] / 1e3, timings["predicted_per_second"])


def prompts(lengths: Sequence[int], n_vocab: int, seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    first = min(_FIRST_TEXT_ID, n_vocab // 4)
    return [[drawn.randrange(first, n_vocab - first) for _ in range(n)] for n in lengths]


def by_turns(options: argparse.Namespace) -> tuple[dict[str, list[list[Took]]], Load]:
    """Returns the times by server and round. Also returns the load by other programs meanwhile."""
    if (program := llama_server(options.vs)) is None:
        raise SystemExit("four-slots: needs llama-server; make it with scripts/build-llama-server")
    servers = commands(options, program)
    taken: dict[str, list[list[Took]]] = {name: [] for name in servers}
    others, n_cpus = [], 1
    n_vocab = read_facts(options.model).header.lengths["tokenizer.ggml.tokens"]
    with tempfile.TemporaryDirectory() as logs:
        for n in range(options.rounds):
            for name in (*servers,) if n % 2 == 0 else (*reversed(servers),):
                log = Path(logs) / "server.log"
                with serving(log, servers[name], patience_s=LOAD_PATIENCE_S) as server:
                    watch = Watch()
                    round_ = [ask(server.port, p) for p in prompts(options.lengths, n_vocab, n)]
                    load = watch.others()
                taken[name].append(round_)
                others.append(load.others)
                n_cpus = load.n_cpus
                print(f"round {n + 1}, {name}: {sum(t.prompt_s for t in round_):.1f} s",
                      file=sys.stderr)  # fmt: skip
    return taken, Load(statistics.median(others), n_cpus)


def table(lengths: Sequence[int], taken: dict[str, list[list[Took]]]) -> str:
    """Rows of prompts in their order, in seconds, and a row of answers, in tokens/s."""
    theirs = [name for name in taken if not name.startswith(OURS)]
    names = [*taken]
    ours = [name for name in taken if name.startswith(OURS)]
    head = ["prompt tokens", *names, "better of ours ÷ better of llama-server's"]
    rows = [head, ["---"] * len(head)]
    for n, length in enumerate(lengths):
        prompt_s = {
            name: statistics.median(round_[n].prompt_s for round_ in taken[name]) for name in names
        }
        ratio = min(prompt_s[name] for name in ours) / min(prompt_s[name] for name in theirs)
        shown = [f"{prompt_s[name]:.2f} s" for name in names]
        rows.append([f"{length:,} ({n + 1}.)", *shown, f"{ratio:.2f}"])
    tps = {
        name: statistics.median(t.answer_tps for round_ in taken[name] for t in round_)
        for name in names
    }
    ratio = max(tps[name] for name in theirs) / max(tps[name] for name in ours)
    answers = [f"{tps[name]:.0f} tokens/s" for name in names]
    rows.append(["answers", *answers, f"{ratio:.2f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO / "target.gguf")
    parser.add_argument("--vs", metavar="PATH")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ctx-size", type=int, default=65536)
    parser.add_argument(
        "--lengths", type=lambda text: tuple(map(int, text.split(","))), default=LENGTHS
    )
    parser.add_argument("--print", action="store_true", dest="only_prints")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    taken, load = by_turns(options)
    where = conditions(options.model, options.threads, options.rounds, load)
    text = f"{where}\n\n{table(options.lengths, taken)}"
    publish(PAGE, "four slots", text, only_prints=options.only_prints)


if __name__ == "__main__":
    main()
