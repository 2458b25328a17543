"""Times decodes of one token with a part of the experts in device memory: split layers, and rivals.

Four ways decode the same running text in turns: llama.cpp with as many layers' experts resident as
fit (`--n-cpu-moe`), and this program with `--hybrid` off, on and auto. All four are open at once,
each with the same bytes of device memory for weights. Afterwards a llama-server decodes the text
alone, with and without its LRU cache of experts (`--moe-cache-mib`), if its path is given.
docs/synth.md says how realistic the models' routing is.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from link import measure_link
from logits import divergences, judged
from numpy.typing import NDArray
from setting import Setting

from lab.synth.routing import drawn_text
from offload.errors import OffloadError
from offload.ggml.native_build import may_repack
from offload.model import ModelFacts, layer_of
from offload.model_file import read_facts
from offload.plan.weights import device_bytes
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.steadiness import if_steady
from offload.times.table import entry_of
from specoffload.bench.llama_server import TunedLlama, combined_ways, followed_s, tune_for, ways_of
from specoffload.bench.paths import Llama
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import Environment, read_host
from specoffload.config.resolution import resolve
from specoffload.opening.draft_model import real_text
from specoffload.session.session import Session

AIM, NEVER_LOSES = 1.2, 0.97  # multiples of the best rival's speed; of the speed of --hybrid off
N_CTX = 1024
# Tokens of a ubatch. Slots borrow the compute buffers between prompts. With 512 tokens these would
# hold nearly all experts of a small model, so that nothing would be left to split.
N_UBATCH, N_UBATCH_SMALL = 512, 32
PEER = "llama.cpp"
_LEAST_ROUNDS = 1
_LEAST_S = 90.0  # time left that is needed to begin with a model

# Models with published widths, expert sizes and expert counts. They have fewer layers and a smaller
# vocabulary, so that their files are written faster.
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


@dataclass
class Way:
    """One way of decoding a text token by token, and its measurements."""

    name: str
    taken_bytes: int  # device memory taken by opening it
    llama: Llama | None = None
    session: Session | None = None
    n_decoded: int = 0
    rounds_s: list[float] = field(default_factory=list)  # mean seconds per token, by round
    agreed: list[bool] = field(default_factory=list)  # with llama.cpp's likeliest next token
    logits: NDArray[np.float32] | None = None  # after each token of the last call of `decode`
    kl: list[float] = field(default_factory=list)  # divergence from llama.cpp's logits, by token
    counted: dict[str, float] = field(default_factory=dict)  # counters per token, by name

    def decode(self, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Decode `tokens` one by one. Returns each one's seconds and likeliest next token."""
        if self.llama is not None:
            with tempfile.NamedTemporaryFile(suffix=".npy") as file:
                found = self.llama.follow(tokens, self.n_decoded, file.name)
                self.logits = np.load(file.name)
            self.n_decoded += len(tokens)
            return found
        assert self.session is not None
        seconds, logits = [], []
        for token in tokens:
            began = time.perf_counter()
            rows = self.session.target.sequences.extend(0, [token], n_logits=1)
            seconds.append(time.perf_counter() - began)
            logits.append(rows[0])
        self.logits = np.stack(logits)
        return seconds, [int(token) for token in self.logits.argmax(axis=1)]

    def counters(self) -> dict[str, float]:
        if self.session is None:
            return {}
        c = self.session.target.counters()
        names = ("hits", "misses", "streamed_bytes", "n_pairs_hit", "n_pairs_streamed",
                 "n_pairs_host", "n_promoted", "split_layers", "host_s", "split_s")  # fmt: skip
        return {name: float(getattr(c, name)) for name in names}

    def hit_share(self) -> float | None:
        """The share of (token, expert) pairs in split layers that the device computes without a
        copy. Without split layers: the share of used experts found in slots."""
        c = self.counted
        found = c.get("n_pairs_hit", 0.0)
        others = c.get("n_pairs_streamed", 0.0) + c.get("n_pairs_host", 0.0)
        if not found + others:
            found, others = c.get("hits", 0.0), c.get("misses", 0.0)
        return found / (found + others) if found + others else None

    def times_as_fast_as(self, other: Way) -> float | None:
        """The speed of this way as a multiple of `other`'s, or None if it means nothing. It is the
        median over rounds, because a machine's speed changes between them."""
        ratios = [its / mine for its, mine in zip(other.rounds_s, self.rounds_s, strict=True)]
        return if_steady(statistics.median(ratios), entry_of(ratios).spread)


def measure(setting: Setting) -> bool:
    """Fill `split` of the report with a row per model. Returns True if all models passed."""
    rows, args = setting.report["split"], setting.args
    took_s = _LEAST_S
    shapes = SMALL if args.small else FULL
    for name, (preset, changes) in ((name, shapes[name]) for name in args.models):
        if not args.small and setting.left_s() < took_s:
            left_out = f"{setting.left_s():.0f} s are left"
            setting.say(f"split layers of {name} are left out: {left_out}")
            rows.append({"model": name, "left_out": left_out})
            continue
        began_s = time.monotonic()
        file = f"split-{name}-{args.routing}{'-small' if args.small else ''}"
        path = setting.model(file, preset, 11, routing=args.routing, **changes)
        rows.append({"model": name, "routing": args.routing, **_measure(setting, path)})
        _show(setting, rows[-1])
        if args.model_dir is None:
            path.unlink()  # the next model needs the disk
        took_s = time.monotonic() - began_s
        setting.save()
    if not args.small:  # speeds of tiny models mean nothing
        setting.report["aims"] |= aims(rows)
    return passed(rows, all_of_them=args.part == "split")


def _show(setting: Setting, row: dict[str, Any]) -> None:
    title = (f"{row['model']}, routing {row['routing']}: {row['cached_share']:.0%} of "
             f"{row['expert_bytes'] / 1e9:.2f} GB of experts on the device; per token")  # fmt: skip
    setting.show(title, row["ways"])
    setting.show("llama-server", row["llama_server"])
    names = ("n_cpu_moe", "n_layers", "one_expert_bytes", "expert_copy_bytes_per_s",
             "best_rival", "best_rival_s", "max_difference")  # fmt: skip
    setting.show("rivals and sizes", [{name: row[name] for name in names} | row["vs_best_rival"]])


def lengths(setting: Setting) -> tuple[int, int, int]:
    """Returns the untimed tokens that fill the slots, the tokens per turn of a way, and the
    turns."""
    return (16, 8, 2) if setting.args.small else (128, 32, setting.args.rounds)


def n_ubatch(setting: Setting) -> int:
    return N_UBATCH_SMALL if setting.args.small else N_UBATCH


def weights_budget(facts: ModelFacts, share: float) -> tuple[int, int]:
    """Returns bytes of device memory for weights, and the number of layers whose experts fit.

    The bytes hold all weights but experts, and about the share `share` of the layers' experts.
    """
    layers = sorted({layer_of(e.name) for e in facts.expert_weights})
    n_fit = max(1, round(share * len(layers)))
    chosen = set(layers[-n_fit:])
    fitting = sum(e.size_bytes for e in facts.expert_weights if layer_of(e.name) in chosen)
    return device_bytes(facts) - facts.expert_bytes + fitting, n_fit


def _measure(setting: Setting, path: Path) -> dict[str, Any]:
    facts = read_facts(path)
    vram_bytes, n_fit = weights_budget(facts, setting.args.share)
    n_layers = len({layer_of(e.name) for e in facts.expert_weights})
    one = facts.expert_bytes // n_layers // facts.n_experts
    tuned = tune_for(
        facts,
        vram_bytes=vram_bytes if setting.choice.on_gpu else None,
        reserve_bytes=0,  # all ways have the same context, which is not counted
        n_ubatch=n_ubatch(setting),
    )
    row: dict[str, Any] = {
        "size_bytes": facts.size_bytes,
        "expert_bytes": facts.expert_bytes,
        "one_expert_bytes": one,
        "vram_bytes": vram_bytes,
        "cached_share": n_fit / n_layers,
        "n_layers": n_layers,
        "n_cpu_moe": tuned.n_cpu_moe,
        "expert_copy_bytes_per_s": measure_link(setting.choice, one)["pinned_bytes_per_s"],
    }
    n_warm, n_round, n_rounds = lengths(setting)
    n_tokens = n_warm + (n_rounds + 1) * n_round
    text = drawn_text(facts.number("vocab_size"), n_tokens, seed=1)
    with ExitStack() as stack:
        ways = _open_ways(stack, setting, facts, tuned, vram_bytes, text)
        row["max_difference"] = _take_turns(setting, ways, text)
        row["notes"] = {
            name: list(way.session.notes) for name, way in ways.items() if way.session is not None
        }
    row["ways"] = [
        {
            "way": name,
            "token_s": statistics.median(way.rounds_s),
            "tokens_per_s": 1 / statistics.median(way.rounds_s),
            "vs_llama": way.times_as_fast_as(ways[PEER]),
            "vs_off": way.times_as_fast_as(ways["off"]),
            "taken_bytes": way.taken_bytes,
            "agreement": statistics.fmean(way.agreed),
            **judged(np.array(way.kl)),
            "hit_share": way.hit_share(),
            **way.counted,
        }
        for name, way in ways.items()
    ]
    row["llama_server"] = server_rows(setting, facts, tuned, text)
    return row | compared_with_best(row)


def server_rows(
    setting: Setting, facts: ModelFacts, tuned: TunedLlama, text: Sequence[int]
) -> list[dict[str, Any]]:
    """Times of llama-server for the same tokens, a row per way. If a way fails, its row says why.

    Servers run one at a time, after everything else is closed.
    """
    if setting.args.llama_server is None:
        return []
    rows: list[dict[str, Any]] = []
    speeds: dict[TunedLlama, float] = {}
    n_warm, n, _ = lengths(setting)

    def measure(way: TunedLlama) -> None:
        row: dict[str, Any] = {"way": shlex.join(["llama-server", *way.arguments()])}
        try:
            seconds = followed_s(
                setting.args.llama_server, facts.path, way, text, n_warm=n_warm, n_ctx=N_CTX,
                n_threads=setting.args.threads,
            )  # fmt: skip
            rounds_s = [statistics.fmean(seconds[at : at + n]) for at in range(0, len(seconds), n)]
            token_s = statistics.median(rounds_s)
            row |= {"token_s": token_s, "tokens_per_s": 1 / token_s}
            speeds[way] = 1 / token_s
        except OffloadError as e:
            row["left_out"] = str(e)
        rows.append(row)

    for way in ways_of(setting.args.llama_server, facts, tuned):
        measure(way)
    for way in combined_ways(speeds):
        measure(way)
    return rows


def compared_with_best(row: dict[str, Any]) -> dict[str, Any]:
    """The fastest rival, its seconds per token, and the speeds of `on` and `auto` as multiples."""
    ways = {way["way"]: way["token_s"] for way in row["ways"]}
    rivals = {PEER: ways[PEER]}
    rivals |= {its["way"]: its["token_s"] for its in row["llama_server"] if "token_s" in its}
    best = min(rivals, key=lambda name: rivals[name])
    ratios = {name: rivals[best] / ways[name] for name in ("on", "auto")}
    return {"best_rival": best, "best_rival_s": rivals[best], "vs_best_rival": ratios}


def _open_ways(
    stack: ExitStack,
    setting: Setting,
    facts: ModelFacts,
    tuned: TunedLlama,
    vram_bytes: int,
    text: list[int],
) -> dict[str, Way]:
    ways: dict[str, Way] = {}

    def free_bytes() -> int:
        return setting.choice.device.memory_bytes()[0]

    before = free_bytes()
    llama = stack.enter_context(Llama(_peer_options(setting, facts, tuned)))
    ways[PEER] = Way(PEER, before - free_bytes(), llama=llama)
    with _measuring_on(text):
        for hybrid in ("off", "on", "auto"):
            before = free_bytes()
            profiles = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            session = stack.enter_context(
                _session(setting, facts.path, hybrid, vram_bytes, profiles)
            )
            session.target.sequences.rewind(0, 0)
            ways[hybrid] = Way(hybrid, before - free_bytes(), session=session)
    return ways


def _peer_options(setting: Setting, facts: ModelFacts, tuned: TunedLlama) -> dict[str, Any]:
    return {
        "path": str(facts.path),
        "device": setting.choice.name if tuned.on_gpu else None,
        "cpu_weights": tuned.cpu_weights(),
        "repack": may_repack(facts.weights, None).works,
        "flash_attn": 0 if setting.args.small else -1,
        "n_ctx": N_CTX,
        "n_batch": tuned.n_batch,
        "n_ubatch": tuned.n_ubatch,
        "n_threads": setting.args.threads,
        "n_threads_batch": setting.args.threads,
    }


def _session(setting: Setting, path: Path, hybrid: str, vram_bytes: int, profiles: Path) -> Session:
    """A session as the command line opens it. Its memory has room for the weights and a context.

    `profiles`: an empty folder, so that everything is measured now.
    """
    words = (
        *("--model", str(path), "--device", setting.choice.name, "--hybrid", hybrid, "--no-spec"),
        *("--plan-for", "decode"),
        *("--ctx-size", str(N_CTX), "--ubatch-size", str(n_ubatch(setting))),
        *(
            "--threads",
            str(setting.args.threads),
            "--flash-attn",
            "off" if setting.args.small else "auto",
        ),
    )
    line = read_command_line("run", words, Environment(variables={}))
    config = resolve(line.options, read_host())
    context = context_memory(read_facts(path), ContextOptions(N_CTX, N_UBATCH))
    config = replace(
        config,
        device_bytes=vram_bytes + (context.total_bytes if setting.choice.on_gpu else 0),
        spec=replace(config.spec, profile_dir=profiles),
    )
    return Session(config)


@contextmanager
def _measuring_on(text: list[int]) -> Iterator[None]:
    """Have sessions measure on this text as they open.

    Natural text would not do: a byte-level vocabulary spells it with tokens of all topics at once,
    so an expert cache would have half as many hits.
    """
    modules = [m for m in sys.modules.values() if getattr(m, "real_text", None) is real_text]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "real_text", lambda engine, file=None: text))
        yield


def _take_turns(setting: Setting, ways: dict[str, Way], text: list[int]) -> float:
    """Let all ways decode the text in turns of one round. Returns the largest relative difference
    between the logits of our ways."""
    n_warm, n_round, n_rounds = lengths(setting)
    for way in ways.values():
        way.decode(text[:n_warm])
    before = {name: way.counters() for name, way in ways.items()}
    names, n_done, worst = list(ways), 0, 0.0
    for i in range(n_rounds):
        if i >= _LEAST_ROUNDS and setting.left_s() < 0:
            break
        at = n_warm + i * n_round
        likeliest: dict[str, list[int]] = {}
        for name in (*names[i % len(names) :], *names[: i % len(names)]):  # no way is always last
            seconds, likeliest[name] = ways[name].decode(text[at : at + n_round])
            ways[name].rounds_s.append(statistics.fmean(seconds))
        n_done += n_round
        ours = [way.logits for way in ways.values() if way.session is not None]
        first, *others = [logits[-1] for logits in ours if logits is not None]
        worst = max(
            worst, *(float(np.linalg.norm(o - first) / np.linalg.norm(first)) for o in others)
        )
        for name, way in ways.items():
            assert way.logits is not None
            assert ways[PEER].logits is not None
            way.kl += divergences(way.logits, ways[PEER].logits).tolist()
            way.agreed += [a == b for a, b in zip(likeliest[name], likeliest[PEER], strict=True)]
    for name, way in ways.items():
        after = way.counters()
        way.counted = {key: (after[key] - before[name][key]) / n_done for key in after}
    return worst


def passed(rows: Sequence[dict[str, Any]], *, all_of_them: bool) -> bool:
    """True if layers were split and the ways' logits agree.

    With `all_of_them`, also requires that no model was left out.
    """
    for row in rows:
        if "left_out" in row:
            if all_of_them:
                return False
            continue
        on = next(way for way in row["ways"] if way["way"] == "on")
        if not on["split_layers"] or not all(way["same"] for way in row["ways"]):
            return False
    return bool(rows) or not all_of_them


def _ratio_words(ratio: float | None) -> str:
    return "no steady time" if ratio is None else f"{ratio:.2f}"


def aims(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Whether each speed aim was reached. A missed aim does not fail the check."""
    found = {}
    for row in rows:
        for way in row.get("ways", ()):
            at = f"{row['model']}, {row['routing']}, {row['cached_share']:.0%} cached"
            if way["way"] == "on":
                # Only llama.cpp takes turns with our ways; other rivals run alone.
                is_peer = row["best_rival"] == PEER
                ratio = way["vs_llama"] if is_peer else row["vs_best_rival"]["on"]
                aim = f"{at}: split {AIM} x {row['best_rival']}"
                found[f"{aim} ({_ratio_words(ratio)})"] = ratio is not None and ratio >= AIM
            if way["way"] == "auto":
                ratio = way["vs_off"]
                found[f"{at}: auto no slower than off ({_ratio_words(ratio)})"] = (
                    ratio is not None and ratio >= NEVER_LOSES
                )
    return found
