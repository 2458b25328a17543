"""Measures the server under load and beside llama-server; prints one JSON object.

    scripts/lab/run bench-server            64 streams for 60 s, drafts off and on, then 1 and 8
    ... --vs PATH                           llama-server to compare with; `none`: without;
                                            default: what scripts/build-llama-server made
    ... --streams 0                         without the load
    ... --threads 1 --rounds 7 --tokens 128 --model FILE -- SERVE_FLAGS...

Both servers run the same file on the CPU with the same threads and without drafts. They take turns
`--rounds` times. In a turn, each stream sends `--requests` requests, one after another. The ratio
compares the medians. `header_ms` and `first_text_ms` are the median times from the request to the
first byte of the answer's header, and to its first text. Prompts repeat, so both servers have most
of them in their cache. With `--fresh` each prompt begins with another number. `token_delay_ms` is
the median time from the engine's token to its client's socket, from /metrics.

Under load, the tokens of each stream are compared with those that a single client gets. If they
differ, each token has to be the likeliest after those before it, except for near-ties. The load
runs without drafts, and with drafts of 4 tokens in every round. It also runs on llama-server, with
and without a unified KV cache, because our server has one cache for all slots. If our server makes
an error, it is printed to stderr and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.attack.program import Program, serving
from lab.bench_server.client import Report, alone, load, speed
from lab.bench_server.judge import Judge, unexplained
from specoffload.config.resolution import demo_prompts

DEMO = ROOT / "specoffload" / "demo"
N_CTX = 16384
N_PARALLEL = 8
LOAD_PATIENCE_S = 120.0


def prompts() -> list[str]:
    """Beginnings of Python files that the embedded pair has not seen."""
    return demo_prompts("code")[:16]


def asks(n_streams: int, n_requests: int, mark: str = "") -> list[list[str]]:
    """The prompts of each stream. With a `mark`, each has a first line of its own."""
    texts = prompts()

    def ask(stream: int, turn: int) -> str:
        head = f"# {mark}.{stream}.{turn}\n" if mark else ""
        return head + texts[(stream + turn) % len(texts)]

    return [[ask(stream, turn) for turn in range(n_requests)] for stream in range(n_streams)]


def llama_server(given: str | None) -> Path | None:
    if given == "none":
        return None
    if given is not None:
        return Path(given)
    made = subprocess.run(
        [ROOT / "scripts" / "build-llama-server"], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(made.stdout.strip())


def ours(options: argparse.Namespace, n_parallel: int, flags: Sequence[str]) -> list[str]:
    """Flags of `specoffload serve` for `n_parallel` slots, followed by `flags`."""
    return [
        *("-m", str(options.model), "--device", "cpu", "-t", str(options.threads)),
        *("-np", str(n_parallel), "-c", str(N_CTX), *flags),
    ]


def theirs(
    options: argparse.Namespace, program: Path, n_parallel: int, flags: Sequence[str]
) -> list[str]:
    """The command line of llama-server with the same meaning as `ours`."""
    return [
        *(str(program), "-m", str(options.model)),
        *("-t", str(options.threads), "-tb", str(options.threads)),
        *("-np", str(n_parallel), "-c", str(N_CTX), *flags),
    ]


def ways(options: argparse.Namespace, program: Path | None) -> dict[str, list[str]]:
    """Command lines of the servers under load by name, each with drafts off and on.

    llama-server runs in both ways with one KV cache for all slots, and with one per slot.
    """
    drafts = ["-md", str(options.draft), "--spec-draft-n-max", "4", "--spec-draft-p-min", "0"]
    found: dict[str, list[str]] = {}
    for name, own, flags in (
        ("drafts off", ["--spec-type", "none"], []),
        ("drafts on", ["--spec-policy", "fixed", *drafts[:4]], drafts),
    ):
        own = [*own, "--max-queue", "64", "--metrics", *options.flags]
        found[name] = ours(options, N_PARALLEL, own)
        if program is None:
            continue
        for cache in ("-kvu", "-no-kvu"):
            command = theirs(options, program, N_PARALLEL, [cache, *flags])
            found[f"llama-server {cache}, {name}"] = command
    return found


def under_load(server: Program, options: argparse.Namespace) -> tuple[dict[str, Any], Report]:
    """Run many streams at once. Returns the figures to print, and the report with the texts."""
    known = asyncio.run(alone(server.port, prompts(), options.load_tokens))
    again = asyncio.run(alone(server.port, prompts(), options.load_tokens))
    report = asyncio.run(
        load(server.port, known, options.load_tokens, options.streams, options.seconds)
    )
    result = {
        "streams": report.n_streams,
        "seconds": round(report.took_s, 1),
        "answers": report.n_answers,
        "tokens": report.n_tokens,
        "tokens_per_s": round(report.tokens_per_s, 1),
        "errors": sum(report.errors.values()),
        "differing_alone": sum(known[p].tokens != again[p].tokens for p in known),
        "differing_texts": sum(report.differing.values()),
    }
    return result, report


def judged(report: Report, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Check the texts that differ from a single client's. Returns figures and errors.

    Call this when no server runs, because it opens the model in this process.
    """
    if not report.differing:
        return {}, []
    with closing(Judge(options.model, options.threads, N_CTX)) as judge:
        bad, most = unexplained(judge, report.differing)
    result = {
        "of_them_not_by_near_ties": len(bad),
        "largest_near_tie": round(most, 4),
    }
    return result, bad


def metrics(server: Program) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def n_drafted(server: Program) -> int:
    """Number of tokens drafted since the server's start."""
    found = re.search(r"^\S*spec_decode_num_draft_tokens\S* (\S+)$", metrics(server), re.M)
    return int(float(found[1])) if found else 0


def delay_ms(server: Program) -> float:
    """Median milliseconds from the engine's token to its client's socket, since the server's
    start."""
    page = metrics(server)
    found = re.findall(r'^specoffload:token_delay_seconds_bucket{le="(.+)"} (.+)$', page, re.M)
    return round(1e3 * median([(float(bound), float(n)) for bound, n in found]), 3)


def median(buckets: Sequence[tuple[float, float]]) -> float:
    """The median of a histogram, interpolated linearly between bounds as Prometheus does.

    `buckets` are (upper bound, number of values up to it), the last for all values.
    """
    half = buckets[-1][1] / 2 if buckets else 0.0
    low = n_below = 0.0
    for bound, n in buckets:
        if n >= half > n_below:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (half - n_below) / (n - n_below)
        low, n_below = bound, n
    return 0.0


def by_turns(
    servers: dict[str, Program], n_streams: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Speeds of `n_streams` streams on each server; the servers take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in servers}
    header_ms: dict[str, list[float]] = {name: [] for name in servers}
    text_ms: dict[str, list[float]] = {name: [] for name in servers}
    shares: list[float] = []  # the API's processor time by the engine's, by round
    for n in range(options.rounds + 1):  # one more, because the first warms up
        mark = f"{n_streams}.{n}" if options.fresh else ""
        asked = asks(n_streams, options.requests, mark)
        for name, server in servers.items():
            api_s, engine_s = server.cpu_s()
            found, answers = asyncio.run(speed(server.port, asked, options.tokens))
            if n == 0:
                continue
            speeds[name].append(found)
            header_ms[name] += [1e3 * (a.first_s - a.sent_s) for a in answers]
            text_ms[name] += [1e3 * (a.content_s - a.sent_s) for a in answers]
            if name == "ours":
                after_s = server.cpu_s()
                # The system counts time in ticks of 10 ms, so a short round may show no time.
                if after_s[1] > engine_s:
                    shares.append((after_s[0] - api_s) / (after_s[1] - engine_s))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    result: dict[str, Any] = {name: round(found, 1) for name, found in medians.items()}
    result |= {
        "spread": {n: [round(min(f), 1), round(max(f), 1)] for n, f in speeds.items()},
        "header_ms": {n: round(statistics.median(ms), 2) for n, ms in header_ms.items()},
        "first_text_ms": {n: round(statistics.median(ms), 2) for n, ms in text_ms.items()},
        "token_delay_ms": delay_ms(servers["ours"]),
        "api_cpu_over_engine_cpu": round(statistics.median(shares), 4) if shares else None,
    }
    if len(servers) == 2:
        result["ratio"] = round(medians["ours"] / medians["llama-server"], 3)
    return result


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vs", metavar="PATH|none")
    parser.add_argument("--model", type=Path, default=DEMO / "target.gguf")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft.gguf", help="under load")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--load-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="of a stream in a turn")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--fresh", action="store_true", help="in a turn, no prompt is cached")
    parser.add_argument("flags", nargs="*", help="of serve, after --")
    return parser.parse_args(words)


def main() -> int:
    options = arguments()
    result: dict[str, Any] = {"model": options.model.name, "threads": options.threads}
    wrong: list[str] = []
    program = llama_server(options.vs)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, command in ways(options, program).items() if options.streams else ():
            is_ours = not name.startswith("llama-server")
            with serving(logs / "load.log", command, patience_s=LOAD_PATIENCE_S) as one:
                found, report = under_load(one, options)
                if is_ours:
                    found |= {"token_delay_ms": delay_ms(one), "drafted": n_drafted(one)}
            verdict, bad = judged(report, options)
            result.setdefault("load", {})[name] = found | verdict
            if is_ours:
                bad += [f"{n} x {error}" for error, n in report.errors.items()]
                wrong += [f"{name}: {words}" for words in bad]
        if options.turns:
            n_parallel = max([N_PARALLEL, *options.turns])
            flags = ["--spec-type", "none", "--max-queue", "64", "--metrics", *options.flags]
            command = ours(options, n_parallel, flags)
            commands = {"ours": command}
            if program is not None:
                commands["llama-server"] = theirs(options, program, n_parallel, ["-kvu"])
            servers = {
                name: stack.enter_context(
                    serving(logs / f"{name}.log", command, patience_s=LOAD_PATIENCE_S)
                )
                for name, command in commands.items()
            }
            result["turns"] = {n: by_turns(servers, n, options) for n in options.turns}
    print(json.dumps(result, indent=1))
    for line in wrong:
        print(f"bench-server: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
