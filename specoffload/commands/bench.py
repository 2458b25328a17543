"""`specoffload bench`: compares our speeds with llama.cpp's.

Everything is measured in one run on one machine, and compared as ratios. Figures are medians of
repetitions, without the first one, which warms up.
"""

from __future__ import annotations

import functools
import math
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from offload.costs.measuring import streamed_kinds
from offload.device import choose_device, has_gpu
from offload.errors import OffloadError
from offload.ggml.llama import FLASH_ATTN
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.native_build import may_repack
from offload.plan.context import ContextSpec, context_memory
from offload.plan.min_batch import NEVER, VERIFY_MOST, MinBatch
from offload.plan.placement import DEFAULT_UBATCH, LEAST_FREE_BYTES
from offload.streaming.options import free_bytes
from offload.timing import TextWalk
from specdec.costs.profile import CostProfile
from specoffload import report
from specoffload.bench.equal_texts import (
    SPLIT,
    Equality,
    compared,
    equality_words,
    plain_text,
    speculative_text,
    split_text,
)
from specoffload.bench.llama_bench import row_of, written
from specoffload.bench.llama_server import (
    UBATCHES,
    ServerSpeed,
    TunedLlama,
    cache_words,
    measure_server,
    program_of,
    sweep,
    tune_for,
    ways_of,
)
from specoffload.bench.load import Load, Watch, warn_of_load
from specoffload.bench.paths import (
    Llama,
    LlamaPath,
    Measured,
    SessionPath,
    Workload,
    measure_in_turns,
)
from specoffload.bench.why_off import length_words, why_off
from specoffload.bench.workloads import prompts
from specoffload.commands.models import type_name
from specoffload.config.resolution import Config
from specoffload.session.session import SEQUENCE, Session
from specoffload.speculation.draft_model import real_text

PROFILE_SIZES = tuple(range(1, 17))
_NEVER = MinBatch(experts=NEVER, dense=NEVER)
N_PROMPTS = 4
PREFIX = 16  # tokens before the timed ones
LONG_PROMPT = 2048  # tokens of the prompt that measures prefill
_LEAST_REPETITIONS = 3
# Names of our paths in tables.
_SHOWN = {"unwrapped": "plain CPU", "wrapped": "streamed", "spec": "with drafts"}
_MOST_SPREAD = 0.2  # (slowest − fastest) / median of a path's repetitions


def bench_config(
    config: Config,
    *,
    n_predict: int,
    repetitions: int,
    vs: str | None = None,
    n_prompt: int = LONG_PROMPT,
    output: str | None = None,
) -> None:
    """Measure `config` and llama.cpp, and print the comparison.

    `vs`, as `llama-server=PATH`, names the user's own server to compare with over HTTP. With
    `output`, one of llama-bench's formats, only the paths are measured and printed in it.
    """
    llama_server = None if vs is None else program_of(vs)
    if output is not None:
        report.only_data(True)
        _bench_as_llama_bench(config, n_predict, repetitions, n_prompt, output)
        return
    warn_of_load()
    if config.device == "auto" and not has_gpu():
        config = replace(config, device="sim")
        report.note("no GPU here: measuring on sim, the CPU in the place of a GPU")
    result: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "model": config.model.name,
    }
    peers = _tuned_peers(config)
    with report.progress("measuring") as bar:
        work = _workload(config, n_predict, n_prompt)
        result |= _side_by_side(config, peers, work, repetitions)
        bar(0.6)
        result["profile"] = _profile(config, repetitions)
        bar(0.8)
        result["min_batch"], result["counters"] = _both_sides(config, repetitions)
        bar(0.9)
        result["equal_texts"] = {
            way: asdict(found) | {"share": found.share}
            for way, found in _equal_texts(config, n_predict).items()
        }
    if llama_server is not None:
        tuned = next(iter(peers.values()))
        _beside_llama_server(result, config, llama_server, tuned, n_predict)
    _show(result)
    report.data(result)


def _bench_as_llama_bench(
    config: Config, n_predict: int, repetitions: int, n_prompt: int, output: str
) -> None:
    """Measure only the paths, and print them as llama-bench's tests in format `output`."""
    warn_of_load()
    if config.device == "auto" and not has_gpu():
        config = replace(config, device="sim")
    work = _workload(config, n_predict, n_prompt)
    with report.progress("measuring"):
        result = _side_by_side(config, _tuned_peers(config), work, repetitions)
    for doubt in result["unreliable"]:
        report.note(f"not reliable: {doubt}")
    report.raw(written(result["rows"], output))


def _equal_texts(config: Config, n_predict: int) -> dict[str, Equality]:
    """How far greedy texts equal plain decoding's, with other batch sizes and with drafts."""
    found = {}
    can_draft = config.draft is not None
    with Session(config if can_draft else replace(config, draft=None), keeps_hits=False) as session:
        target = session.target
        both = [*prompts()[:N_PROMPTS], *prompts("prose")[:N_PROMPTS]]
        texts = [session.tokenize(t, add_special=True, parse_special=False) for t in both]
        room = max(1, target.n_ctx - n_predict - SPLIT)
        plain = [plain_text(target, text[:room], n_predict) for text in texts]
        found[f"plain in batches of {SPLIT}"] = compared(
            plain, [split_text(target, t) for t in plain]
        )
        if session.speculation is not None:
            drafted = [speculative_text(session, t.prompt, n_predict) for t in plain]
            found["speculative"] = compared(plain, drafted)
    return found


def _rows_of(
    config: Config,
    peers: Mapping[str, TunedLlama],
    found: Mapping[str, Measured],
    work: Workload,
) -> list[dict[str, Any]]:
    """The measured times as llama-bench's tests: prefill of the long prompt, and decoding after
    short prompts."""
    facts, choice = read_facts(config.model), choose_device(config.device)
    conditions = {
        "build_commit": commit() or "unknown",
        "cpu_info": _cpu_name(),
        "gpu_info": choice.description if choice.on_gpu else "",
        "backends": choice.name if choice.on_gpu else "CPU",
        "model_filename": str(config.model),
        "model_type": f"{facts.architecture} {type_name(facts.header.metadata)}".strip(),
        "model_size": facts.size_bytes,
        "model_n_params": sum(math.prod(p.entry.shape) for p in facts.weights.values()),
        "n_threads": config.threads,
        "type_k": config.type_k,
        "type_v": config.type_v or "f16",
        "n_gpu_layers": facts.n_layers if choice.on_gpu else 0,
        "flash_attn": FLASH_ATTN[config.flash_attn],
        "devices": choice.name,
        "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    rows = []
    for name, measured in found.items():
        tuned = peers.get(name)
        here = conditions | {
            "n_batch": config.batch_size if tuned is None else tuned.n_batch,
            "n_ubatch": config.ubatch_size or DEFAULT_UBATCH if tuned is None else tuned.n_ubatch,
            "n_cpu_moe": 0 if tuned is None else tuned.n_cpu_moe,
        }
        rows.append(row_of(here, name, measured.prefills_s, n_prompt=work.n_long))
        decodes_s = [stats.decode_s / len(work.texts) for stats in measured.written]
        depth = measured.median.n_prompt_tokens // len(work.texts)
        rows.append(row_of(here, name, decodes_s, n_gen=work.n_predict, n_depth=depth))
    return rows


def _side_by_side(
    config: Config, peers: Mapping[str, TunedLlama], work: Workload, repetitions: int
) -> dict[str, Any]:
    """Measure llama.cpp, and our device with and without a draft, on the same prompts."""
    ours = {"wrapped": replace(config, draft=None)}
    if config.draft is not None:
        ours["spec"] = config
    choice = choose_device(config.device)
    if (
        choice.sim is not None
        and choice.sim.vram_bytes is None
        and not config.streaming.device_bytes
    ):
        # Compare the same loop with and without the wrapped device, while nothing streams.
        ours["unwrapped"] = replace(config, draft=None, device="cpu")
        ours["wrapped"] = replace(ours["wrapped"], stream_experts=False)
    prices: dict[str, CostProfile] = {}
    watch = Watch()
    found = measure_in_turns(
        {name: functools.partial(_open_llama, config, t) for name, t in peers.items()}
        | {name: functools.partial(_open_session, c, name, prices) for name, c in ours.items()},
        work,
        repetitions=repetitions,
        together=(together := _fit_together(config, len(peers) + len(ours))),
        on_left_out=lambda name, e: report.note(f"{name} is left out: {e}"),
    )
    load = watch.others()
    result = side_by_side(found, work.n_long) | {"in_turns": together}
    result["unreliable"], result["others_share"] = doubts(found, load), load.others
    result["rows"] = _rows_of(config, peers, found, work)
    if "spec" in prices:
        result["why_off"] = why_off(found["spec"].median, prices["spec"])
        per_position = found["spec"].median.acceptance_per_position
        result["pays"] = length_words(prices["spec"], per_position[0] if per_position else None)
    result["peers"] = {
        name: asdict(tuned) | {"command": tuned.command_line(config.model.name)}
        for name, tuned in peers.items()
    }
    return result


def doubts(found: Mapping[str, Measured], load: Load) -> list[str]:
    """A sentence for each reason why these speeds may be far off. Pure."""
    words = []
    n = min((len(measured.written) for measured in found.values()), default=0)
    if n < _LEAST_REPETITIONS:
        words.append(f"with {n} measured repetitions the spread is unknown (-r N)")
    if load.is_busy:
        words.append(load.words)
    for name, measured in found.items():
        for what, times_s in (
            ("decoding", [stats.decode_s for stats in measured.written]),
            ("prefill", measured.prefills_s),
        ):
            spread = (max(times_s) - min(times_s)) / statistics.median(times_s)
            if spread > _MOST_SPREAD:
                words.append(f"{what} by {_SHOWN.get(name, name)} varied by {spread:.0%}")
    return words


def side_by_side(found: Mapping[str, Measured], n_long_prompt: int) -> dict[str, Any]:
    """Speeds in tokens/s, and ratios of ours to llama.cpp's. Pure.

    `plain_tps` is llama.cpp's best speed over the ubatch sizes that were measured.
    """
    speeds = {name: measured.median.tokens_per_s for name, measured in found.items()}
    prefills = {name: n_long_prompt / measured.prefill_s for name, measured in found.items()}
    peers = [name for name in found if name.startswith("llama.cpp")]
    ours = [name for name in ("wrapped", "spec") if name in found]
    out: dict[str, Any] = {"prefill_tps": prefills, "decode_tps": speeds, "vs": {}}
    out |= {f"{name}_tps": speeds[name] for name in found if name not in peers}
    if peers:
        out["plain_tps"] = max(speeds[name] for name in peers)
    if spec := found.get("spec"):
        out["acceptance_rate"] = spec.median.acceptance_rate
        out["tokens_per_round"] = spec.median.tokens_per_round
    if "unwrapped" in found and "wrapped" in found:
        out["wrapped_ratio"] = found["unwrapped"].median.decode_s / found["wrapped"].median.decode_s
    for name in peers if ours else ():
        out["vs"][name] = max(speeds[n] for n in ours) / speeds[name]
        out["vs"][f"{name}, prefill"] = max(prefills[n] for n in ours) / prefills[name]
    return out


def _n_ctx(config: Config, facts: ModelFacts) -> int:
    return config.ctx_size or facts.number("context_length", 4096)


def _tuned_peers(config: Config) -> dict[str, TunedLlama]:
    """llama.cpp with a ubatch of 512 and with larger ones, each tuned for the same device memory
    as ours."""
    facts = read_facts(config.model)
    choice = choose_device(config.device)
    n_ctx = _n_ctx(config, facts)
    vram = None
    if choice.on_gpu:
        asked = config.streaming.device_bytes
        most = choice.device.memory_bytes()[0] - LEAST_FREE_BYTES  # as our own plan leaves free
        vram = free_bytes(choice) if asked is None else min(asked, most)
    ubatches = UBATCHES if choice.on_gpu else UBATCHES[:1]
    peers = {}
    for n in ubatches:
        if n <= max(n_ctx, UBATCHES[0]):
            context = context_memory(facts, ContextSpec(n_ctx=n_ctx, n_ubatch=n))
            peers[f"llama.cpp -ub {n}"] = tune_for(
                facts, vram_bytes=vram, reserve_bytes=context.total_bytes, n_ubatch=n
            )
    return peers


@contextmanager
def _open_llama(config: Config, tuned: TunedLlama) -> Iterator[LlamaPath]:
    facts = read_facts(config.model)
    options = {
        "path": str(config.model),
        "device": choose_device(config.device).name if tuned.on_gpu else None,
        "cpu_weights": tuned.cpu_weights(),
        "repack": may_repack(facts.weights, config.spec.profile_dir).works,
        "flash_attn": FLASH_ATTN[config.flash_attn],
        "n_ctx": _n_ctx(config, facts),
        "n_batch": tuned.n_batch,
        "n_ubatch": tuned.n_ubatch,
        "n_threads": config.threads,
        "n_threads_batch": config.threads_batch,
    }
    with Llama(options) as llama:
        yield LlamaPath(llama)


@contextmanager
def _open_session(
    config: Config, name: str, prices: dict[str, CostProfile]
) -> Iterator[SessionPath]:
    """Open a session as a path. If it speculates, its cost profile is put into `prices[name]`."""
    with Session(config, keeps_hits=False) as session:
        if session.speculation is not None:
            prices[name] = session.speculation.costs
        yield SessionPath(session)


def _beside_llama_server(
    result: dict[str, Any], config: Config, program: Path, tuned: TunedLlama, n_predict: int
) -> None:
    """Measure the user's own llama-server and add it to `result`.

    It runs as tuned, and with an expert cache if it has one. The faster of the two then runs with
    each setting of the draft's flags.
    """
    rows: list[ServerSpeed] = []

    def measure(way: TunedLlama, flags: Sequence[str]) -> None:
        try:
            rows.append(
                measure_server(program, config, way, flags, prompts()[:N_PROMPTS], n_predict)
            )
        except OffloadError as e:
            cache = cache_words(way.n_cpu_moe, way.moe_cache_mib)
            words = " ".join(("llama-server", *cache, *flags))
            report.note(f"{words} is left out: {e}")

    plain, *drafting = sweep(config.draft)
    try:
        ways = ways_of(program, read_facts(config.model), tuned)
    except OffloadError as e:
        report.note(f"llama-server is left out: {e}")
        ways = []
    for way in ways:
        measure(way, plain)
    if rows:
        best = max(rows, key=lambda row: row.decode_tps)
        fastest = next(way for way in ways if way.moe_cache_mib == best.moe_cache_mib)
        for flags in drafting:
            measure(fastest, flags)
    result["llama_server"] = [asdict(row) for row in rows]
    if rows:
        best_tps = max(row.decode_tps for row in rows)
        mine = max(result.get("wrapped_tps", 0.0), result.get("spec_tps", 0.0))
        result["vs"]["llama-server"] = mine / best_tps


def _workload(config: Config, n_predict: int, n_prompt: int) -> Workload:
    """The embedded pair's held-out prompts: they do not repeat themselves."""
    n_ctx = config.ctx_size or n_prompt
    return Workload(
        texts=tuple(prompts()[:N_PROMPTS]),
        long_text="\n".join([*prompts(), *prompts("prose")]),
        n_predict=n_predict,
        n_long=max(1, min(n_prompt, n_ctx - n_predict - 1)),
    )


def machine() -> dict[str, Any]:
    """Facts about this machine, for the results."""
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
    """The source's short commit hash; None outside a checkout."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def _fit_together(config: Config, n_paths: int) -> bool:
    """True if all paths can be open at once, so that their repetitions can take turns.

    No path may use a GPU, and a copy of the weights for each must fit a quarter of the free memory.
    """
    on_cpu = config.device == "cpu" or config.device.startswith("sim")
    size_bytes = n_paths * config.model.stat().st_size
    return on_cpu and 4 * size_bytes < psutil.virtual_memory().available


def _profile(config: Config, repetitions: int) -> list[float]:
    """T(n) in seconds for n = 1..16 behind a short real prompt."""
    with Session(replace(config, draft=None), keeps_hits=False) as session:
        walk = _walk(session)
        return [_median_s(walk, n, repetitions) for n in PROFILE_SIZES]


def _walk(session: Session) -> TextWalk:
    """A walk over a text in new tokens, so that each batch uses other experts than the last."""
    target = session.target
    span = max(VERIFY_MOST, target.options.n_ubatch or 0)
    return TextWalk(target.sequences, SEQUENCE, real_text(target), PREFIX, span)


def _median_s(walk: TextWalk, n: int, repetitions: int) -> float:
    """Median seconds of decodes of `n` new tokens; the first warms up and does not count."""
    if n > VERIFY_MOST:  # prefill, which needs one row of logits and takes long
        return [walk.time_s(n, n_logits=1) for _ in range(2)][1]
    return statistics.median([walk.time_s(n) for _ in range(repetitions + 1)][1:])


def _both_sides(config: Config, repetitions: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Decode times on the CPU and streamed for batch sizes around min-batch, with the choice made.

    Also returns the streaming counters. Both are empty if no experts stream.
    """
    with Session(replace(config, draft=None), keeps_hits=False) as session:
        if "experts" not in streamed_kinds(session.target):
            return [], {}
        if session.target.hybrid is not None:
            session.target.hybrid.switch.is_active = False  # a split layer would use both sides
        chosen = session.target.min_batch
        edges = {chosen.experts, chosen.prefill_experts or 1}
        most = min(session.target.options.n_ubatch or VERIFY_MOST, session.target.n_ctx - PREFIX)
        sizes = sorted(n for n in {1, 2, 3, 4, 8, 16, 32, *edges} if n <= most)
        session.target.set_min_batch_by_decoding(_NEVER)
        walk = _walk(session)
        cpu = {n: _median_s(walk, n, repetitions) for n in sizes}
        session.target.set_min_batch_by_decoding(MinBatch(experts=1, dense=1))
        streamed = {n: _median_s(walk, n, repetitions) for n in sizes}
        counters = asdict(session.target.counters())
    rows = [
        {
            "n": n,
            "cpu_s": cpu[n],
            "streamed_s": streamed[n],
            "chosen": "stream" if chosen.streams(n, experts=True) else "cpu",
        }
        for n in sizes
    ]
    return rows, counters


def _rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of the table of speeds: the measured paths, then the user's own llama-server.

    The last column is decoding relative to llama.cpp at its best. It has a question mark if the
    measurement is not reliable.
    """
    plain, mark = result.get("plain_tps"), " ?" if result.get("unreliable") else ""
    speeds = [(name, result["decode_tps"][name], p) for name, p in result["prefill_tps"].items()]
    for row in result.get("llama_server", ()):
        draft = row["flags"][2:]  # flags after -md FILE
        cache = cache_words(row["n_cpu_moe"], row["moe_cache_mib"])
        name = " ".join(("llama-server", *cache, *draft))
        speeds.append((name, row["decode_tps"], row["prefill_tps"]))
    return [
        (
            _SHOWN.get(name, name),
            f"{tps:.1f}",
            f"{prefill:.0f}",
            f"{tps / plain:.2f}{mark}" if plain else "-",
        )
        for name, tps, prefill in speeds
    ]


def _speculation_lines(result: dict[str, Any]) -> list[str]:
    """Sentences on why speculation is off if it is, and on how far texts equal plain decoding's."""
    lines = [result[key] for key in ("why_off", "pays") if result.get(key)]
    if "spec_tps" not in result:
        lines.append("no drafts: no draft model was given (--draft)")
    for way, found in result["equal_texts"].items():
        lines.append(
            equality_words(way, Equality(**{k: v for k, v in found.items() if k != "share"}))
        )
    return lines


def _show(result: dict[str, Any]) -> None:
    report.table("speed", ("", "answer t/s", "prompt t/s", "x llama.cpp"), _rows(result))
    for doubt in result["unreliable"]:
        report.paragraph(f"not reliable (?): {doubt}")
    if result.get("acceptance_rate") is not None:
        report.line(
            f"drafts {result['acceptance_rate']:.0%} accepted, "
            f"{result['tokens_per_round']:.2f} tokens per round"
        )
    for sentence in _speculation_lines(result):
        report.paragraph(sentence)
    one = result["profile"][0]
    report.table(
        "time of a decode by number of tokens",
        ("tokens", "ms", "x one token"),
        [
            (str(n), f"{t * 1e3:.2f}", f"{t / one:.2f}")
            for n, t in zip(PROFILE_SIZES, result["profile"], strict=True)
        ],
    )
    if result["min_batch"]:
        report.table(
            "CPU or GPU, by number of tokens",
            ("tokens", "CPU ms", "GPU ms", "chosen", "faster"),
            [
                (
                    str(row["n"]),
                    f"{row['cpu_s'] * 1e3:.2f}",
                    f"{row['streamed_s'] * 1e3:.2f}",
                    "GPU" if row["chosen"] == "stream" else "CPU",
                    "GPU" if row["streamed_s"] < row["cpu_s"] else "CPU",
                )
                for row in result["min_batch"]
            ],
        )
    else:
        report.line("no experts are streamed, so CPU and GPU are not compared")
