"""Decoding token by token with a part of the experts in device memory: split layers, and others.

Four ways decode the same running text in turns, all open at once, with the same bytes of device
memory for weights: llama.cpp with as many layers' experts resident as fit (`--n-cpu-moe`), and this
program with `--hybrid` off, on and auto. A llama-server that is given decodes it too, afterwards,
with and without its LRU cache of experts (`--moe-cache-mib`). Which experts the text uses is as
realistic as a random model can be (docs/synth.md).
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
from link import measure_link
from numpy.typing import NDArray
from python_clock import PythonClock

from offload.device import DeviceChoice
from offload.errors import OffloadError
from offload.model import ModelFacts, layer_of
from offload.model_file import read_facts
from offload.native_build import may_repack
from offload.plan.sharing import device_bytes
from offload.synth import plan_preset, write_preset
from offload.synth.routing import drawn_text
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import Environment
from specoffload.config.host import read_host
from specoffload.config.resolution import resolve
from specoffload.peers.llama_server import followed_s, ways_of
from specoffload.peers.process import Llama
from specoffload.peers.tuned import TunedLlama, tune_for
from specoffload.session.session import Session
from specoffload.speculation.profiling import real_text

ALLOWED = 1.0  # |a - b| / |b| of a token's logits: near-ties of routers; unrelated rows have 1.4
# Of llama.cpp's likeliest tokens: kernels round otherwise, and random routers have near-ties, but
# two models of thousands of tokens would agree on none.
AGREEMENT = 0.25
AIM, NEVER_LOSES = 1.2, 0.97  # of llama.cpp's speed, and of --hybrid off's
N_CTX, N_UBATCH = 1024, 512
PEER = "llama.cpp"
_LEAST_ROUNDS = 3
_LEAST_S = 90.0  # of time left, to begin with a model at all

# Published widths, expert sizes and counts; fewer layers, and a vocabulary that is quickly written.
FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": (
        "qwen3-235b-a22b",
        {"size": "full", "n_layer": 8, "n_vocab": 16384, "quant": "q4_K"},
    ),
    "gpt-oss": ("gpt-oss-120b", {"size": "full", "n_layer": 8, "n_vocab": 16384}),
}
_TINY = {"n_layer": 4, "n_embd": 256, "n_ff": 256, "n_ff_exp": 256, "n_expert": 32, "n_vocab": 1024}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3moe", {"size": "tiny", "quant": "q4_K", **_TINY}),
    "gpt-oss": ("gpt-oss", {"size": "tiny", **_TINY}),
}


@dataclass(frozen=True)
class Asked:
    """What to measure, where, and for how long."""

    choice: DeviceChoice
    folder: Path
    n_threads: int
    left_s: Callable[[], float]  # until later parts are left out
    small: bool = False
    routing: str = "drifting"
    share: float = 0.25  # of the expert bytes, in device memory
    llama_server: Path | None = None

    @property
    def n_warm(self) -> int:
        """Tokens that fill the slots and are not timed."""
        return 16 if self.small else 128

    @property
    def n_round(self) -> int:
        """Tokens that one way decodes in its turn."""
        return 8 if self.small else 32

    @property
    def n_rounds(self) -> int:
        return 2 if self.small else 9

    def text(self, n_vocab: int) -> list[int]:
        return drawn_text(n_vocab, self.n_warm + (self.n_rounds + 1) * self.n_round, seed=1)


class Way(Protocol):
    """Something that decodes a text, token by token."""

    following: list[int]  # the likeliest token behind each of the last round's

    def follow(self, tokens: Sequence[int]) -> list[float]:
        """Seconds of each."""
        ...


class LlamaWay:
    """llama.cpp in its own process."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self._at = 0
        self.following: list[int] = []

    def follow(self, tokens: Sequence[int]) -> list[float]:
        seconds, self.following = self._llama.follow(tokens, self._at)
        self._at += len(tokens)
        return seconds


class SessionWay:
    """A session of ours."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.logits: NDArray[np.float32] | None = None  # of the last token
        self.following: list[int] = []
        session.target.sequences.rewind(0, 0)

    def follow(self, tokens: Sequence[int]) -> list[float]:
        seconds, self.following = [], []
        for token in tokens:
            began = time.perf_counter()
            rows = self.session.target.sequences.extend(0, [token], n_logits=1)
            seconds.append(time.perf_counter() - began)
            self.following.append(int(rows[0].argmax()))
        self.logits = rows[0]
        return seconds


@dataclass
class Turns:
    """Seconds of one way's rounds, and what else was seen of it."""

    way: Way
    taken_bytes: int  # of device memory when it was opened
    rounds_s: list[float] = field(default_factory=list)  # of a token, on average
    counted: dict[str, float] = field(default_factory=dict)  # by token
    agreed: list[bool] = field(default_factory=list)  # with llama.cpp on the likeliest next token

    @property
    def token_s(self) -> float:
        return statistics.median(self.rounds_s)


def measure_split(asked: Asked, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each model, with rows of its ways; models for which no time is left say so."""
    rows: list[dict[str, Any]] = []
    took_s = _LEAST_S
    for name, (preset, changes) in (SMALL if asked.small else FULL).items():
        if not asked.small and asked.left_s() < took_s:
            rows.append({"model": name, "left_out": f"{asked.left_s():.0f} s are left"})
            continue
        began = time.monotonic()
        path = asked.folder / f"split-{name}-{asked.routing}{'-small' if asked.small else ''}.gguf"
        was_there = path.exists()
        written = {} if was_there else _write(path, preset, changes, asked.routing, say)
        rows.append({"model": name, "routing": asked.routing, **written, **_measure(asked, path)})
        if not was_there:
            path.unlink()  # the next one needs the disk
        took_s = time.monotonic() - began
    return rows


def _write(
    path: Path, preset: str, changes: dict[str, Any], routing: str, say: Callable[[str], None]
) -> dict[str, Any]:
    planned = plan_preset(preset, routing=routing, **changes)
    say(f"writing {planned.size_bytes / 1e9:.2f} GB: {preset}, routing {routing}")
    began = time.monotonic()
    write_preset(preset, path, seed=11, routing=routing, **changes)
    took_s = time.monotonic() - began
    return {"write_s": took_s, "write_bytes_per_s": planned.size_bytes / took_s}


def weights_budget(facts: ModelFacts, share: float) -> tuple[int, int]:
    """(bytes of device memory for weights, layers of them whose experts fit): everything but the
    experts, and of those as many whole layers as are nearest to `share`."""
    layers = sorted({layer_of(e.name) for e in facts.expert_weights})
    n_fit = max(1, round(share * len(layers)))
    chosen = set(layers[-n_fit:])
    fitting = sum(e.size_bytes for e in facts.expert_weights if layer_of(e.name) in chosen)
    experts = sum(e.size_bytes for e in facts.expert_weights)
    return device_bytes(facts) - experts + fitting, n_fit


def _measure(asked: Asked, path: Path) -> dict[str, Any]:
    facts = read_facts(path)
    vram_bytes, n_fit = weights_budget(facts, asked.share)
    experts = sum(e.size_bytes for e in facts.expert_weights)
    n_layers = len({layer_of(e.name) for e in facts.expert_weights})
    one = experts // n_layers // facts.n_experts
    tuned = tune_for(
        facts,
        vram_bytes=vram_bytes if asked.choice.on_gpu else None,
        reserve_bytes=0,  # the context is the same for all, and not counted
        n_ubatch=N_UBATCH,
    )
    row: dict[str, Any] = {
        "size_bytes": facts.size_bytes,
        "expert_bytes": experts,
        "one_expert_bytes": one,
        "vram_bytes": vram_bytes,
        "cached_share": n_fit / n_layers,
        "n_layers": n_layers,
        "n_cpu_moe": tuned.n_cpu_moe,
        "expert_copy_bytes_per_s": measure_link(asked.choice, one)["pinned_bytes_per_s"],
    }
    text = asked.text(facts.number("vocab_size"))
    with ExitStack() as stack:
        ways = _open_ways(stack, asked, facts, tuned, vram_bytes, text)
        row["max_difference"] = _take_turns(asked, ways, text)
        on = ways["on"].way
        assert isinstance(on, SessionWay)
        row["python_s_per_layer"] = _python_s(on, text[-asked.n_round :]) / n_layers
        row["notes"] = {
            name: _notes(turns.way.session)
            for name, turns in ways.items()
            if isinstance(turns.way, SessionWay)
        }
    row["allowed"] = ALLOWED
    row["ways"] = [_way_row(name, ways) for name in ways]
    row["llama_server"] = server_rows(asked, facts, tuned, text)
    return row | compared_with_best(row)


def server_rows(
    asked: Asked, facts: ModelFacts, tuned: TunedLlama, text: Sequence[int]
) -> list[dict[str, Any]]:
    """The llama-server's times of the same tokens, a row for each of its ways; a way that fails
    says why. One runs at a time, when all else is closed."""
    if asked.llama_server is None:
        return []
    rows: list[dict[str, Any]] = []
    for way in ways_of(asked.llama_server, facts, tuned):
        row: dict[str, Any] = {"way": shlex.join(["llama-server", *way.arguments()])}
        try:
            seconds = followed_s(
                asked.llama_server, facts.path, way, text, n_warm=asked.n_warm, n_ctx=N_CTX,
                n_threads=asked.n_threads,
            )  # fmt: skip
            n = asked.n_round
            rounds_s = [statistics.fmean(seconds[at : at + n]) for at in range(0, len(seconds), n)]
            token_s = statistics.median(rounds_s)
            row |= {"token_s": token_s, "tokens_per_s": 1 / token_s}
        except OffloadError as e:
            row["left_out"] = str(e)
        rows.append(row)
    return rows


def compared_with_best(row: dict[str, Any]) -> dict[str, Any]:
    """The fastest rival and its time, and how many times its speed `on` and `auto` have."""
    ways = {way["way"]: way["token_s"] for way in row["ways"]}
    rivals = {PEER: ways[PEER]}
    rivals |= {its["way"]: its["token_s"] for its in row["llama_server"] if "token_s" in its}
    best = min(rivals, key=lambda name: rivals[name])
    ratios = {name: rivals[best] / ways[name] for name in ("on", "auto")}
    return {"best_rival": best, "best_rival_s": rivals[best], "vs_best_rival": ratios}


def _open_ways(
    stack: ExitStack,
    asked: Asked,
    facts: ModelFacts,
    tuned: TunedLlama,
    vram_bytes: int,
    text: list[int],
) -> dict[str, Turns]:
    ways: dict[str, Turns] = {}

    def opened(name: str, open_way: Callable[[], Way]) -> None:
        free = asked.choice.device.memory_bytes()[0]
        way = open_way()
        ways[name] = Turns(way, free - asked.choice.device.memory_bytes()[0])

    opened(PEER, lambda: LlamaWay(stack.enter_context(Llama(_peer_options(asked, facts, tuned)))))
    with _reading(text):
        for hybrid in ("off", "on", "auto"):
            opened(hybrid, lambda: SessionWay(
                stack.enter_context(_session(asked, facts.path, hybrid, vram_bytes))  # noqa: B023
            ))  # fmt: skip
    return ways


def _peer_options(asked: Asked, facts: ModelFacts, tuned: TunedLlama) -> dict[str, Any]:
    return {
        "path": str(facts.path),
        "device": asked.choice.name if tuned.on_gpu else None,
        "cpu_weights": tuned.cpu_weights(),
        "repack": may_repack(facts.weights, None).works,
        "flash_attn": 0 if asked.small else -1,
        "n_ctx": N_CTX,
        "n_batch": tuned.n_batch,
        "n_ubatch": tuned.n_ubatch,
        "n_threads": asked.n_threads,
        "n_threads_batch": asked.n_threads,
    }


def _session(asked: Asked, path: Path, hybrid: str, vram_bytes: int) -> Session:
    """As the command line opens it, but for the budget, which is that of the weights alone."""
    words = (
        *("--model", str(path), "--device", asked.choice.name, "--hybrid", hybrid, "--no-spec"),
        *("--plan-for", "decode"),
        *("--ctx-size", str(N_CTX), "--ubatch-size", str(N_UBATCH)),
        *("--threads", str(asked.n_threads), "--flash-attn", "off" if asked.small else "auto"),
    )
    line = read_command_line("run", words, Environment(variables={}))
    config = resolve(line.options, read_host())
    config = replace(
        config,
        streaming=replace(config.streaming, vram_bytes=vram_bytes, device_bytes=None),
        spec=replace(config.spec, use_profile=False),  # nothing kept is used: all is measured now
    )
    return Session(config)


@contextmanager
def _reading(text: list[int]) -> Iterator[None]:
    """What sessions measure as they open is measured on text of this kind.

    A byte-level vocabulary spells natural text with tokens of all topics at once, of which an
    expert cache finds half as much.
    """
    modules = [m for m in sys.modules.values() if getattr(m, "real_text", None) is real_text]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "real_text", lambda engine, file=None: text))
        yield


def _take_turns(asked: Asked, ways: dict[str, Turns], text: list[int]) -> float:
    """All ways decode the text, a round each in turn; the worst difference of our ways' logits."""
    for turns in ways.values():
        turns.way.follow(text[: asked.n_warm])
    before = {name: _counters(turns.way) for name, turns in ways.items()}
    names, n_done, worst = list(ways), 0, 0.0
    for i in range(asked.n_rounds):
        if i >= _LEAST_ROUNDS and asked.left_s() < 0:
            break
        at = asked.n_warm + i * asked.n_round
        for name in (*names[i % len(names) :], *names[: i % len(names)]):  # nobody is always last
            seconds = ways[name].way.follow(text[at : at + asked.n_round])
            ways[name].rounds_s.append(statistics.fmean(seconds))
        n_done += asked.n_round
        worst = max(worst, _difference(ways))
        theirs = ways[PEER].way.following
        for turns in ways.values():
            turns.agreed += [a == b for a, b in zip(turns.way.following, theirs, strict=True)]
    for name, turns in ways.items():
        after = _counters(turns.way)
        turns.counted = {key: (after[key] - before[name][key]) / n_done for key in after}
    return worst


def _counters(way: Way) -> dict[str, float]:
    if not isinstance(way, SessionWay):
        return {}
    c = way.session.target.counters()
    names = ("hits", "misses", "streamed_bytes", "n_pairs_hit", "n_pairs_streamed", "n_pairs_host",
             "n_promoted", "split_layers", "host_s", "split_s")  # fmt: skip
    return {name: float(getattr(c, name)) for name in names}


def _difference(ways: dict[str, Turns]) -> float:
    rows = [t.way.logits for t in ways.values() if isinstance(t.way, SessionWay)]
    first, *others = [row for row in rows if row is not None]
    size = float(np.linalg.norm(first))
    return max(float(np.linalg.norm(other - first)) / size for other in others)


def _python_s(way: SessionWay, tokens: Sequence[int]) -> float:
    """Python's median of a token's decode; no timed one is among them."""
    device = way.session.target.device
    assert device is not None
    clock, found = PythonClock(), []
    with clock.watching(device):
        for token in tokens:
            before_s = clock.python_s
            way.follow([token])
            found.append(clock.python_s - before_s)
    return statistics.median(found)


def _notes(session: Session) -> list[str]:
    return [
        line for line in session.notes if "hybrid" in line or "split" in line or "slots" in line
    ]


def _way_row(name: str, ways: dict[str, Turns]) -> dict[str, Any]:
    turns = ways[name]

    def faster_than(other: str) -> float:
        """The median of what each round says, since a machine changes between rounds."""
        pairs = zip(ways[other].rounds_s, turns.rounds_s, strict=True)
        return statistics.median(its / mine for its, mine in pairs)

    return {
        "way": name,
        "token_s": turns.token_s,
        "tokens_per_s": 1 / turns.token_s,
        "vs_llama": faster_than(PEER),
        "vs_off": faster_than("off"),
        "taken_bytes": turns.taken_bytes,
        "agreement": statistics.fmean(turns.agreed),
        "hit_share": _hit_share(turns.counted),
        **turns.counted,
    }


def _hit_share(counted: dict[str, float]) -> float | None:
    """Of split layers the share of pairs (token, expert) that the device computes without a copy,
    else of the experts that were wanted in slots."""
    found = counted.get("n_pairs_hit", 0.0)
    others = counted.get("n_pairs_streamed", 0.0) + counted.get("n_pairs_host", 0.0)
    if not found + others:
        found, others = counted.get("hits", 0.0), counted.get("misses", 0.0)
    return found / (found + others) if found + others else None


def passed(rows: Sequence[dict[str, Any]], *, all_of_them: bool) -> bool:
    """True if what was measured is what it is called: layers were split, and no way's logits are
    another model's. `all_of_them`: no model may have been left out."""
    for row in rows:
        if "left_out" in row:
            if all_of_them:
                return False
            continue
        on = next(way for way in row["ways"] if way["way"] == "on")
        if not on["split_layers"] or not row["max_difference"] < row["allowed"]:
            return False
        if min(way["agreement"] for way in row["ways"]) < AGREEMENT:
            return False
    return bool(rows) or not all_of_them


def aims(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """The figures that were hoped for; a miss is a number to report, not a failure."""
    found = {}
    for row in rows:
        for way in row.get("ways", ()):
            at = f"{row['model']}, {row['routing']}, {row['cached_share']:.0%} cached"
            if way["way"] == "on":
                ratio = way["vs_llama"]
                if row["best_rival"] != PEER:  # not by turns with ours, as PEER is
                    ratio = row["vs_best_rival"]["on"]
                found[f"{at}: split {AIM} x {row['best_rival']} ({ratio:.2f})"] = ratio >= AIM
            if way["way"] == "auto":
                found[f"{at}: auto no slower than off ({way['vs_off']:.2f})"] = (
                    way["vs_off"] >= NEVER_LOSES
                )
    return found
