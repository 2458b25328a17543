"""Measures a day of agents beside llama-server, and writes its table into docs/results.md.

    scripts/lab/run agents-day              about 5 minutes, once llama-server is compiled
    ... --vs PATH                           llama-server to compare with; `none`: without;
                                            default: what scripts/build-llama-server made
    ... --rounds 3 --threads 2 --model FILE --ctx-size N --print

A day has four conversations with one long system prompt. Each has eight turns of 40 to 400 words,
as results of tools, and two run at a time. In the middle of the day an older message is edited. A
client leaves in the middle of a prompt, and a document is asked two questions. Answers are greedy
and have a fixed length. A conversation goes on from its own answers.

Both servers run the same file on the CPU with the same threads, four slots and no drafts. They take
turns, and each round has other texts. Wall times and counts are medians of rounds, and times to
first tokens are those of all rounds together.

Then our server runs a shorter day in the exact setting with four slots and with one: a copy of the
model in f32, caches in f32, and no flash attention. Texts are compared up to the first difference
of each conversation.

The table is printed, and written unless there is `--print`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.agents_script import N_TALKS, AskOnce, Day, DaySize, Leaves, Turn, day_of
from lab.attack.client import ask_for
from lab.attack.program import LOOPBACK, Program, serving
from lab.bench_server.__main__ import DEMO, LOAD_PATIENCE_S, llama_server, metrics
from lab.bench_server.client import Answer, ask
from lab.synth.library import write_f32
from lab.tables import conditions, page_of, publish
from offload.model_file import read_facts
from specoffload.config.resolution import demo_prompts
from specoffload.cpu_load import Load, Watch

PAGE = page_of("agents-day")
OURS, THEIRS = "ours", "llama-server"
_LEAVES_AFTER_S = 0.15
_EXACT = ("--flash-attn", "off", "-ctk", "f32", "-ctv", "f32")
_EXACT_TURNS = 3  # a day in the exact setting is shorter, because f32 is slow


@dataclass
class DayReport:
    """Times and counts of clients in a day. `texts` has each answer's tokens by conversation."""

    wall_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_cached: int = 0
    n_others: int | None = None  # cells read of others; None: the server does not tell
    texts: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)

    def add(self, talk: int, answer: Answer) -> None:
        self.first_s.append(answer.content_s - answer.sent_s)
        self.n_tokens += answer.n_tokens
        self.n_cached += answer.n_cached
        self.texts.setdefault(talk, []).append(answer.tokens)


# -- one day --------------------------------------------------------------------------------------


class Clients:
    """The clients of a day. Histories are tokens, so both servers get texts of the same length.

    All texts are tokenised before the first request, because a server at work may answer late.
    """

    def __init__(self, port: int, day: Day, n_predict: int) -> None:
        self._port, self._day, self._n_predict = port, day, n_predict
        self._system = _tokens(port, day.system, add_special=True)
        self._ids = {text: _tokens(port, text) for text in day.texts}
        self._talks: list[list[list[int]]] = [[] for _ in range(N_TALKS)]  # results and answers
        self.report = DayReport()

    async def play(self) -> DayReport:
        began_s = time.perf_counter()
        for step in self._day.steps:
            await asyncio.gather(*map(self._do, step))
        self.report.wall_s = time.perf_counter() - began_s
        return self.report

    async def _do(self, act: Turn | Leaves | AskOnce) -> None:
        if isinstance(act, Leaves):
            await self._leave([*self._system, *self._ids[act.text]])
        elif isinstance(act, AskOnce):
            answer = await self._ask([*self._system, *self._ids[act.text]])
            self.report.add(-1, answer)
        else:
            messages = self._talks[act.talk]
            if act.edited and messages:
                messages[0] = self._ids[act.edited]
            messages.append(self._ids[act.text])
            answer = await self._ask([*self._system, *(t for m in messages for t in m)])
            messages.append([*answer.tokens])
            self.report.add(act.talk, answer)

    async def _ask(self, prompt: Sequence[int]) -> Answer:
        return await ask(self._port, self._body(prompt), "/completion")

    async def _leave(self, prompt: Sequence[int]) -> None:
        _, writer = await asyncio.open_connection(LOOPBACK, self._port)
        request = ask_for("/completion", {**self._body(prompt), "stream": True})
        writer.write(request.raw(self._port))
        await writer.drain()
        await asyncio.sleep(_LEAVES_AFTER_S)
        writer.close()

    def _body(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {
            "prompt": [*prompt], "n_predict": self._n_predict, "temperature": 0.0,
            "ignore_eos": True, "cache_prompt": True,
        }  # fmt: skip


def _tokens(port: int, text: str, *, add_special: bool = False) -> list[int]:
    body = json.dumps({"content": text, "add_special": add_special}).encode()
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/tokenize", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[int] = json.load(answer)["tokens"]
    return found


def played(server: Program, day: Day, n_predict: int, *, tells: bool) -> DayReport:
    """Play a day on a server. `tells`: its /metrics counts the cells read of others."""
    before = _cells_of_others(server) if tells else 0
    report = asyncio.run(Clients(server.port, day, n_predict).play())
    if tells:
        report.n_others = _cells_of_others(server) - before
    return report


def _cells_of_others(server: Program) -> int:
    found = re.search(r"^specoffload:internal_idle_cells_read\S* (\S+)$", metrics(server), re.M)
    if found is None:
        raise SystemExit("agents-day: /metrics does not count cells of other conversations")
    return int(float(found[1]))


def n_equal(one: DayReport, other: DayReport) -> tuple[int, int]:
    """Return how many answers are equal, and how many are compared.

    Of each conversation, those up to the first difference are compared: later ones follow other
    texts.
    """
    equal = compared = 0
    for talk, texts in one.texts.items():
        for mine, theirs in zip(texts, other.texts[talk], strict=True):
            compared += 1
            equal += mine == theirs
            if mine != theirs and talk >= 0:
                break
    return equal, compared


# -- the table ------------------------------------------------------------------------------------


def table(reports: Mapping[str, Sequence[DayReport]], exact: tuple[int, int] | None) -> str:
    """The table of both servers' days. `exact`: the result of `n_equal` in the exact setting."""
    names = [*reports]
    heads = ["", *names, *([f"{OURS} ÷ {THEIRS}"] if len(names) == 2 else [])]
    rows = [("wall time", [statistics.median(r.wall_s for r in its) for its in reports.values()])]
    firsts = [sorted(s for r in its for s in r.first_s) for its in reports.values()]
    for what, share in (("median", 0.5), ("p90", 0.9), ("worst", 1.0)):
        rows.append((f"first token, {what}", [quantile(found, share) for found in firsts]))
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for what, seconds in rows:
        ratio = [f"{seconds[0] / seconds[1]:.2f}"] if len(seconds) == 2 else []
        lines.append(f"| {' | '.join([what, *(f'{s:.3f} s' for s in seconds), *ratio])} |")
    for what, name in (
        ("tokens written", "n_tokens"), ("tokens read from cache", "n_cached"),
        ("cells read of others", "n_others"),
    ):  # fmt: skip
        counts = [_count([getattr(r, name) for r in its]) for its in reports.values()]
        lines.append(f"| {' | '.join([what, *counts, *[''] * (len(names) == 2)])} |")
    if exact is not None:
        words = f"{exact[0]} of {exact[1]}"
        cells = ["texts equal to those of `-np 1`, exact setting", words, *[""] * (len(heads) - 2)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def quantile(ascending: Sequence[float], share: float) -> float:
    """The least value that this share of the values does not exceed."""
    return ascending[max(0, -int(-share * len(ascending) // 1) - 1)]


def _count(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):,.0f}" if known else "not told"


# -- the servers ----------------------------------------------------------------------------------


def command_of(options: argparse.Namespace, program: Path | None = None, *more: str) -> list[str]:
    """The command line of llama-server, or flags of `specoffload serve` if `program` is None."""
    words = ["-m", str(options.model), "-t", str(options.threads), "-c", str(options.ctx_size)]
    facts = read_facts(options.model)
    if facts.n_ctx_train < options.ctx_size:  # llama-server gives a slot no more than that
        words += ["--override-kv", f"{facts.architecture}.context_length=int:{options.ctx_size}"]
    if program is not None:
        return [str(program), *words, "-tb", str(options.threads), "-np", str(N_TALKS), "-kvu"]
    own = ["--device", "cpu", "--spec-type", "none", "--metrics"]
    return [*words, *own, *([] if "-np" in more else ["-np", str(N_TALKS)]), *more]


def by_turns(
    options: argparse.Namespace, size: DaySize, logs: Path
) -> tuple[dict[str, list[DayReport]], Load]:
    """Play days on both servers in turns. Also returns the load by other programs meanwhile."""
    commands = {OURS: command_of(options)}
    if (program := llama_server(options.vs)) is not None:
        commands[THEIRS] = command_of(options, program)
    reports: dict[str, list[DayReport]] = {name: [] for name in commands}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                serving(logs / f"{name}.log", command, patience_s=LOAD_PATIENCE_S)
            )
            for name, command in commands.items()
        }
        warm_up = replace(size, n_turns=1)
        for server in servers.values():
            played(server, day_of(warm_up, vocabulary(), 0), size.n_predict, tells=False)
        watch = Watch()
        for n in range(1, options.rounds + 1):
            day = day_of(size, vocabulary(), n)
            for name in (*servers,) if n % 2 else (*reversed(servers),):
                found = played(servers[name], day, size.n_predict, tells=name == OURS)
                reports[name].append(found)
                print(f"round {n}, {name}: {found.wall_s:.1f} s", file=sys.stderr)
        # The servers still run: a process that ended without being waited for would count as
        # another program.
        return reports, watch.others()


def exact_texts(options: argparse.Namespace, size: DaySize, logs: Path) -> tuple[int, int]:
    """Play a short day in the exact setting with four slots and with one. Returns `n_equal`."""
    in_f32 = argparse.Namespace(
        **{**vars(options), "model": write_f32(options.model, logs / "f32.gguf")}
    )
    short = replace(size, n_turns=min(size.n_turns, _EXACT_TURNS))
    day, found = day_of(short, vocabulary(), 1), []
    for n_slots in (N_TALKS, 1):
        command = command_of(in_f32, None, *_EXACT, "-np", str(n_slots))
        log = logs / f"exact-{n_slots}.log"
        with serving(log, command, patience_s=LOAD_PATIENCE_S) as server:
            found.append(played(server, day, short.n_predict, tells=False))
    return n_equal(*found)


def vocabulary() -> list[str]:
    return " ".join(demo_prompts()).split()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    usual = DaySize()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vs", metavar="PATH|none")
    parser.add_argument("--model", type=Path, default=DEMO / "target.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ctx-size", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=usual.n_turns)
    parser.add_argument("--words", type=int, nargs=2, default=usual.n_words)
    parser.add_argument("--system-words", type=int, default=usual.n_system_words)
    parser.add_argument("--document-words", type=int, default=usual.n_document_words)
    parser.add_argument("--tokens", type=int, default=usual.n_predict, help="of an answer")
    parser.add_argument("--no-exact", action="store_true", help="compare no texts")
    parser.add_argument("--print", action="store_true", dest="only_prints")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    size = DaySize(
        options.turns, (options.words[0], options.words[1]), options.system_words,
        options.document_words, options.tokens,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        reports, load = by_turns(options, size, Path(name))
        exact = None if options.no_exact else exact_texts(options, size, Path(name))
    where = conditions(options.model, options.threads, options.rounds, load)
    text = f"{where}\n\n{table(reports, exact)}"
    publish(PAGE, "agents day", text, only_prints=options.only_prints)


if __name__ == "__main__":
    main()
