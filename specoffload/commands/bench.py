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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from offload.backends import SIM, backend_of
from offload.device import choose_device, has_gpu
from offload.ggml.context import FLASH_ATTN
from offload.ggml.native_build import may_repack
from offload.measuring import streamed_kinds
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.notes import NoteKind, kind_of
from offload.plan.context_choice import LEAST_CTX
from offload.plan.placement import LEAST_FREE_BYTES
from offload.stream.options import free_bytes
from offload.times.context import DEFAULT_UBATCH, ContextOptions, context_memory
from offload.times.table import CostTable
from specdec.options import DrafterName
from specoffload import report
from specoffload.bench.drafts import (
    SPLIT,
    Equality,
    compared,
    length_words,
    plain_text,
    speculative_text,
    split_text,
    why_off,
)
from specoffload.bench.llama_bench import row_of, written
from specoffload.bench.llama_server import (
    UBATCHES,
    TunedLlama,
    measure_ways,
    program_of,
    server_name,
    tune_for,
)
from specoffload.bench.load import Load, Watch, warn_of_load
from specoffload.bench.paths import (
    Llama,
    Measured,
    SessionPath,
    Workload,
    measure_in_turns,
)
from specoffload.commands.models import type_name
from specoffload.commands.profile import measuring_config, show_table, ways_as_data
from specoffload.config.options import BenchOptions
from specoffload.config.resolution import Config, demo_prompts
from specoffload.generation.statistics import GenerationStats
from specoffload.opening.drafters import with_usable_drafters
from specoffload.session.session import Session

N_PROMPTS = 4
_LEAST_REPETITIONS = 3
# Names of our paths in tables.
_SHOWN = {"unwrapped": "plain CPU", "wrapped": "without drafts", "spec": "with drafts"}
_MOST_SPREAD = 0.2  # (slowest − fastest) / median of a path's repetitions


def bench_config(config: Config, own: BenchOptions) -> None:
    """Measure `config` and llama.cpp, and print the comparison.

    With `own.output`, one of llama-bench's formats, only the speeds are measured and printed in it.
    """
    program = None if own.vs is None else program_of(own.vs)
    if own.output is not None:
        report.only_data(True)
    warn_of_load()
    config = on_some_device(with_usable_drafters(with_bench_context(config)))
    peers = _tuned_peers(config)
    work = _workload(config, own)
    with report.progress("measuring") as bar:
        result, seen = _side_by_side(config, peers, work, own.repetitions)
        if own.output is None:
            bar(0.8)
            equal = _equal_texts(config, own.n_predict)
            table, chosen = _both_sides(config, seen)
            result["ways"] = ways_as_data(table)
    if own.output is not None:
        for doubt in result["unreliable"]:
            report.note(f"not reliable: {doubt}")
        report.raw(written(result["rows"], own.output))
        return
    result |= {"machine": machine(), "commit": commit(), "model": config.model.name}
    result["equal_texts"] = {way: asdict(e) | {"share": e.share} for way, e in equal.items()}
    if program is not None:
        rows = measure_ways(program, config, next(iter(peers.values())), work.texts, work.n_predict)
        result["llama_server"] = [asdict(row) for row in rows]
        if rows:
            mine = max(result.get("wrapped_tps", 0.0), result.get("spec_tps", 0.0))
            result["vs"]["llama-server"] = mine / max(row.decode_tps for row in rows)
    result["device"] = config.device
    result["why_no_drafts"] = "" if "spec_tps" in result else why_no_drafts(config)
    _show(result, equal, table)
    for line in chosen:
        report.paragraph(line)
    report.data(result)


def on_some_device(config: Config) -> Config:
    """Return `config` on `sim` if it leaves the device open and there is no GPU, and say so."""
    if config.device != "auto" or has_gpu():
        return config
    report.note("no GPU here: measuring on sim, the CPU in the place of a GPU")
    return replace(config, device="sim")


def with_bench_context(config: Config, n_needed: int = 0) -> Config:
    """Return `config` with a context of 4,096 tokens, or `n_needed`, if the user gave none.

    Several sessions are open at once, so a context of its own size would take several times its
    memory and change what fits.
    """
    if config.ctx_size is not None:
        return config
    return replace(config, ctx_size=max(LEAST_CTX, n_needed))


def _both_sides(config: Config, seen: Mapping[str, Any]) -> tuple[CostTable, list[str]]:
    """Return the times of both sides of --min-batch, and a sentence for each of its values.

    `seen` holds what the session without a draft measured. Another session is opened only where
    that one measured one side: on `sim`, or with a value that the user gave. The sentences say
    which side a batch takes: with the user's value if one was given, and with `auto`.
    """
    table, chosen = seen.get("table", CostTable()), seen.get("chosen", [])
    choice = choose_device(config.device)
    knows_both = chosen or (config.min_batch is None and choice.sim is None)
    if knows_both or not choice.wrapped:
        return table, chosen
    auto = measuring_config(replace(config.without_drafts, min_batch=None))
    with Session(auto, keeps_hits=False, prices=True) as session:
        kinds = streamed_kinds(session.target)
        if not kinds:
            return table, []
        chosen = _chosen(session)
        if config.min_batch is not None:
            chosen.insert(
                0, f"--min-batch as given: the GPU computes {config.min_batch.words(kinds)}"
            )
        return session.costs.run.table, chosen


def _chosen(session: Session) -> list[str]:
    """Return the sentences on --min-batch that the session's measured costs imply."""
    return [note for note in session.costs.notes if kind_of(note) is NoteKind.MIN_BATCH]


def _equal_texts(config: Config, n_predict: int) -> dict[str, Equality]:
    """Compare the greedy texts of plain decoding with those of other batch sizes and of drafts."""
    found = {}
    with Session(config, keeps_hits=False) as session:
        target = session.target
        both = [*demo_prompts("code")[:N_PROMPTS], *demo_prompts("prose")[:N_PROMPTS]]
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
    """The measured times as rows of llama-bench.

    Its tests are prefill of the long prompt, and decoding after short prompts.
    """
    conditions = row_conditions(config)
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


def row_conditions(config: Config) -> dict[str, Any]:
    """The keys of a row of llama-bench that are known before `config` is measured."""
    facts, choice = read_facts(config.model), choose_device(config.device)
    return {
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


def _side_by_side(
    config: Config, peers: Mapping[str, TunedLlama], work: Workload, repetitions: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure llama.cpp, and our device with and without a draft, on the same prompts.

    Returns the results, and what the sessions measured of themselves.
    """
    ours = {"wrapped": config.without_drafts}
    if config.has_steps:
        ours["spec"] = config
    choice = choose_device(config.device)
    if (
        choice.sim is not None
        and choice.sim.vram_bytes is None
        and not config.streaming.device_bytes
    ):
        # Compare the same loop with and without the wrapped device, while nothing streams.
        ours["unwrapped"] = replace(config.without_drafts, device="cpu", gpu_flags=())
        ours["wrapped"] = replace(ours["wrapped"], stream_experts=False)
    seen: dict[str, Any] = {}
    watch = Watch()
    found = measure_in_turns(
        {name: functools.partial(_open_llama, config, t) for name, t in peers.items()}
        | {name: functools.partial(_open_session, c, name, seen) for name, c in ours.items()},
        work,
        repetitions=repetitions,
        together=(together := fit_together(config, len(peers) + len(ours))),
        on_left_out=lambda name, e: report.note(f"{_SHOWN.get(name, name)} is left out: {e}"),
        on_measured=lambda name, nth, stats, s: report.note(
            measured_words(name, nth, stats, s, of=repetitions, n_long=work.n_long)
        ),
    )
    load = watch.others()
    result = side_by_side(found, work.n_long) | {"in_turns": together}
    result["unreliable"], result["others_share"] = doubts(found, load), load.others
    result["rows"] = _rows_of(config, peers, found, work)
    if "spec" in seen:
        result["why_off"] = why_off(found["spec"].median, seen["spec"])
        result["pays"] = length_words(seen["spec"])
    result |= {key: seen[key] for key in ("profile", "counters") if key in seen}
    result["peers"] = {
        name: asdict(tuned) | {"command": tuned.command_line(config.model.name)}
        for name, tuned in peers.items()
    }
    return result, seen


def shown_name(name: str, streamed_bytes: int) -> str:
    """The name of a path in tables: ours without drafts is "streamed" if weights were copied."""
    return "streamed" if name == "wrapped" and streamed_bytes else _SHOWN.get(name, name)


def measured_words(
    name: str, nth: int, stats: GenerationStats, prefill_s: float, of: int, n_long: int
) -> str:
    """The line that is shown as soon as a repetition of a path is measured. Pure."""
    shown = shown_name(name, stats.streamed_bytes)
    return (
        f"{shown}, {nth} of {of}: answer {stats.tokens_per_s:.1f} tokens/s, "
        f"prompt {n_long / prefill_s:.0f} tokens/s"
    )


def doubts(found: Mapping[str, Measured], load: Load, *, of_prefill: bool = True) -> list[str]:
    """A sentence for each reason why these speeds may be far off. Pure.

    `of_prefill`: the speeds of prompts matter, too.
    """
    words = []
    n = min((len(measured.written) for measured in found.values()), default=0)
    if n < _LEAST_REPETITIONS:
        each = "each path was measured once" if n == 1 else f"each path was measured {n} times"
        words.append(f"{each}, so the spread is unknown; -r {_LEAST_REPETITIONS} shows it")
    if load.is_busy:
        words.append(load.words)
    for name, measured in found.items():
        for what, times_s in (
            ("decoding", [stats.decode_s for stats in measured.written]),
            ("prefill", measured.prefills_s if of_prefill else ()),
        ):
            if not times_s:
                continue
            shown = shown_name(name, measured.median.streamed_bytes)
            spread = (max(times_s) - min(times_s)) / statistics.median(times_s)
            if spread > _MOST_SPREAD:
                words.append(f"{shown}: {what} varied by {spread:.0%}")
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
    out["streamed_bytes"] = {n: measured.median.streamed_bytes for n, measured in found.items()}
    out |= {f"{name}_tps": speeds[name] for name in found if name not in peers}
    if peers:
        out["plain_tps"] = max(speeds[name] for name in peers)
    if spec := found.get("spec"):
        out["acceptance_rate"] = spec.median.acceptance_rate
        out["n_drafted"], out["n_accepted"] = spec.median.n_drafted, spec.median.n_accepted
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
    """Settings of llama.cpp with a ubatch of 512 and with larger ones, by name.

    Each is tuned for the device memory that we use.
    """
    facts = read_facts(config.model)
    choice = choose_device(config.device)
    n_ctx = _n_ctx(config, facts)
    vram = None
    if choice.on_gpu:
        asked = config.streaming.device_bytes
        most = choice.device.memory_bytes()[0] - LEAST_FREE_BYTES  # free as in our plan
        vram = free_bytes(choice) if asked is None else min(asked, most)
    ubatches = UBATCHES if choice.on_gpu else UBATCHES[:1]
    peers = {}
    for n in ubatches:
        if n <= max(n_ctx, UBATCHES[0]):
            context = context_memory(facts, ContextOptions(n_ctx=n_ctx, n_ubatch=n))
            peers[f"llama.cpp -ub {n}"] = tune_for(
                facts, vram_bytes=vram, reserve_bytes=context.total_bytes, n_ubatch=n
            )
    return peers


def _open_llama(config: Config, tuned: TunedLlama) -> Llama:
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
    return Llama(options)


@contextmanager
def _open_session(config: Config, name: str, seen: dict[str, Any]) -> Iterator[SessionPath]:
    """Open a session as a path. Its own measurements are put into `seen` at the end."""
    is_plain = name == "wrapped"
    with Session(config, keeps_hits=False, prices=is_plain) as session:
        yield SessionPath(session)
        if is_plain:
            seen["profile"] = list(session.costs.drafts.profile.step_s)
            seen["table"], seen["chosen"] = session.costs.run.table, _chosen(session)
            seen["counters"] = asdict(session.target.counters()) | session.target.disk_counters()
        elif session.speculation is not None:
            seen[name] = session.speculation.costs


def _workload(config: Config, own: BenchOptions) -> Workload:
    """The work to measure, with the embedded pair's held-out prompts."""
    n_ctx = config.ctx_size or own.n_prompt
    return Workload(
        texts=tuple(demo_prompts("code")[:N_PROMPTS]),
        long_text="\n".join([*demo_prompts("code"), *demo_prompts("prose")]),
        n_predict=own.n_predict,
        n_long=max(1, min(own.n_prompt, n_ctx - own.n_predict - 1)),
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


def fit_together(config: Config, n_paths: int) -> bool:
    """True if all paths can be open at once, so that their repetitions can take turns.

    No path may use a GPU, and a copy of the weights for each must fit a quarter of the free memory.
    """
    on_cpu = backend_of(config.device).on_cpu
    size_bytes = n_paths * config.model.stat().st_size
    return on_cpu and 4 * size_bytes < psutil.virtual_memory().available


def _rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of the table of speeds: the measured paths, then the user's own llama-server.

    The last column is the speed of decoding relative to llama.cpp at its best. It has a question
    mark if the measurement is not reliable.
    """
    plain, mark = result.get("plain_tps"), " ?" if result.get("unreliable") else ""
    speeds = [(name, result["decode_tps"][name], p) for name, p in result["prefill_tps"].items()]
    for row in result.get("llama_server", ()):
        flags = row["flags"]
        drafting = flags if "draft-mtp" in flags else flags[2:]  # flags after -md FILE
        further = (row.get("cache_flags", ()), row.get("load_flags", ()))
        name = server_name(drafting, row["n_cpu_moe"], row["moe_cache_mib"], *further)
        speeds.append((name, row["decode_tps"], row["prefill_tps"]))
    return [
        (
            shown_name(name, result["streamed_bytes"].get(name, 0)),
            f"{tps:.1f}",
            f"{prefill:.0f}",
            f"{tps / plain:.2f}{mark}" if plain else "-",
        )
        for name, tps, prefill in speeds
    ]


def why_no_drafts(config: Config) -> str:
    """The sentence on why no path drafts. Pure."""
    spec = config.spec.options
    if spec.drafters == (DrafterName.NONE,):
        return f"no drafts: nothing drafts with {spec.name('drafters')} none"
    if spec.drafters:
        return f"no drafts here by {', '.join(spec.drafters)}: --drafters compares drafters"
    return "no drafts: no draft model was given (--draft), nor has the model layers that draft"


def _shown_name(texts: str) -> str:
    """The table's name for the way that decoded `texts`, a key of `_equal_texts`."""
    if texts == "speculative":
        return _SHOWN["spec"]
    return texts.replace("plain", _SHOWN["wrapped"])


def _draft_words(result: Mapping[str, Any]) -> str:
    """Say how many drafted tokens were right. Few may be drafted, so the share has its counts."""
    counts = f"{result['n_accepted']} of {result['n_drafted']}"
    each = f"{result['tokens_per_round']:.2f} tokens per round"
    return f"drafts {result['acceptance_rate']:.0%} accepted ({counts}), {each}"


def _show(result: dict[str, Any], equal: Mapping[str, Equality], table: CostTable) -> None:
    is_sim = backend_of(result["device"]) is SIM
    title = "speed on sim: the CPU in the place of a GPU" if is_sim else "speed"
    report.table(title, ("", "answer t/s", "prompt t/s", "x llama.cpp"), _rows(result))
    for doubt in result["unreliable"]:
        report.paragraph(f"? not reliable: {doubt}")
    if result.get("acceptance_rate") is not None:
        report.line(_draft_words(result))
    for sentence in filter(None, (result.get("why_off"), result.get("pays"))):
        report.paragraph(sentence)
    if result["why_no_drafts"]:
        report.paragraph(result["why_no_drafts"])
    for way, found in equal.items():
        report.paragraph(found.words(_shown_name(way)))
    show_table(table)
