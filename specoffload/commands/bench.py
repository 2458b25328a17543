"""`specoffload bench`: compares our speeds with llama.cpp's.

Everything is measured in one run on one machine, and compared as ratios. Figures are medians of
repetitions, without the first one, which warms up.
"""

from __future__ import annotations

import functools
import math
import platform
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
from offload.notes import NoteKind, kind_of
from offload.plan.context_choice import LEAST_CTX
from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES
from offload.times.context_memory import DEFAULT_UBATCH, ContextOptions, context_memory
from offload.times.table import CostTable
from specdec.options import DrafterName
from specoffload import report
from specoffload.bench.card_power import watch_of
from specoffload.bench.comparison import (
    SHOWN,
    card_rows,
    doubts,
    measured_words,
    side_by_side,
    speed_rows,
    vs_server,
)
from specoffload.bench.drafts import (
    SPLIT,
    Equality,
    compared,
    length_words,
    off_reason,
    plain_text,
    speculative_text,
    split_text,
)
from specoffload.bench.llama_bench import row_of, written
from specoffload.bench.llama_server import (
    UBATCHES,
    TunedLlama,
    measure_ways,
    program_of,
    tune_for,
)
from specoffload.bench.load import warn_of_load
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
from specoffload.cpu_load import Watch
from specoffload.opening.drafters import usable_drafters
from specoffload.opening.header import target_facts
from specoffload.session.session import Session
from specoffload.session.startup_lines import show_always_shown

N_PROMPTS = 4


def bench_config(config: Config, own: BenchOptions) -> None:
    """Measure `config` and llama.cpp, and print the comparison.

    With `own.output`, one of llama-bench's formats, only the speeds are measured and printed in it.
    """
    program = None if own.vs is None else program_of(own.vs)
    if own.output is not None:
        report.only_data(True)
    warn_of_load()
    config = on_some_device(with_bench_context(config))
    config = replace(config, spec=usable_drafters(target_facts(config), config.spec))
    peers = tuned_peers(config)
    work = workload(config, own)
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
            result["vs"]["llama-server"] = vs_server(result, max(row.decode_tps for row in rows))
    result["device"] = config.device
    result["why_no_drafts"] = "" if "spec_tps" in result else no_drafts_reason(config)
    _show(result, equal, table)
    for line in chosen:
        report.paragraph(line)
    report.data(result)


def on_some_device(config: Config) -> Config:
    """Return `config` on `sim` if it leaves the device open and there is no GPU, and say so."""
    if config.device not in ("auto", "auto:0") or has_gpu():
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
    by_way = {}
    with Session(config, keeps_hits=False) as session:
        target = session.target
        both = [*demo_prompts("code")[:N_PROMPTS], *demo_prompts("prose")[:N_PROMPTS]]
        texts = [session.tokenize(t, add_special=True, parse_special=False) for t in both]
        room = max(1, target.n_ctx - n_predict - SPLIT)
        plain = [plain_text(target, text[:room], n_predict) for text in texts]
        by_way[f"plain in batches of {SPLIT}"] = compared(
            plain, [split_text(target, t) for t in plain]
        )
        if session.speculation is not None:
            drafted = [speculative_text(session, t.prompt, n_predict) for t in plain]
            by_way["speculative"] = compared(plain, drafted)
    return by_way


def _rows_of(
    config: Config,
    peers: Mapping[str, TunedLlama],
    by_way: Mapping[str, Measured],
    work: Workload,
) -> list[dict[str, Any]]:
    """The measured times as rows of llama-bench.

    Its tests are prefill of the long prompt, and decoding after short prompts.
    """
    conditions = row_conditions(config)
    rows = []
    for name, measured in by_way.items():
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
    facts, choice = target_facts(config), choose_device(config.device)
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
        "cpu_mask": config.decode_on.mask,
        "cpu_strict": config.decode_on.strict,
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
    if config.spec.has_steps:
        ours["spec"] = config
    choice = choose_device(config.device)
    if choice.sim is not None and choice.sim.vram_bytes is None and not config.device_bytes:
        # Compare the same loop with and without the wrapped device, while nothing streams.
        ours["unwrapped"] = replace(config.without_drafts, device="cpu", gpu_flags=())
        ours["wrapped"] = replace(ours["wrapped"], stream_experts=False)
    seen: dict[str, Any] = {}
    watch, card = Watch(), watch_of(choice)
    by_way = measure_in_turns(
        {name: functools.partial(_open_llama, config, t) for name, t in peers.items()}
        | {name: functools.partial(open_session, c, name, seen) for name, c in ours.items()},
        work,
        repetitions=repetitions,
        together=(together := fit_together(config, len(peers) + len(ours))),
        on_left_out=lambda name, e: report.note(f"{SHOWN.get(name, name)} is left out: {e}"),
        on_measured=lambda name, nth, stats, s: report.note(
            measured_words(name, nth, stats, s, of=repetitions, n_long=work.n_long)
        ),
        card=card,
    )
    load = watch.others()
    result = side_by_side(by_way, work.n_long) | {"in_turns": together}
    result["unreliable"], result["others_share"] = doubts(by_way, load), load.others
    result["card"] = {n: asdict(m.card) for n, m in by_way.items() if m.card is not None}
    result["why_no_card"] = card.why_not
    if choice.on_gpu:
        result["card_rows"] = card_rows(by_way)
    result["rows"] = _rows_of(config, peers, by_way, work)
    if "spec" in seen:
        result["why_off"] = off_reason(by_way["spec"].median, seen["spec"])
        result["pays"] = length_words(seen["spec"])
    result |= {key: seen[key] for key in ("profile", "counters") if key in seen}
    result["peers"] = {
        name: asdict(tuned) | {"command": tuned.command_line(config.model.name)}
        for name, tuned in peers.items()
    }
    return result, seen


def _n_ctx(config: Config, facts: ModelFacts) -> int:
    return config.ctx_size or facts.number("context_length", 4096)


def tuned_peers(config: Config) -> dict[str, TunedLlama]:
    """Settings of llama.cpp with a ubatch of 512 and with larger ones, by name.

    Each is tuned for the device memory that we use.
    """
    facts = target_facts(config)
    choice = choose_device(config.device)
    n_ctx = _n_ctx(config, facts)
    vram = None
    if choice.on_gpu:
        asked = config.device_bytes
        free = choice.device.memory_bytes()[0]  # as much is left free as by our plan
        vram = max(0, free - MARGIN_BYTES) if asked is None else min(asked, free - LEAST_FREE_BYTES)
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
    facts = target_facts(config)
    options = {
        "path": str(config.model),
        "device": choose_device(config.device).name if tuned.on_gpu else None,
        "cpu_weights": tuned.cpu_weights(),
        "kv_overrides": [*map(str, facts.overrides)],
        "repack": may_repack(facts.weights, config.spec.profile_dir).works,
        "flash_attn": FLASH_ATTN[config.flash_attn],
        "n_ctx": _n_ctx(config, facts),
        "n_batch": tuned.n_batch,
        "n_ubatch": tuned.n_ubatch,
        "n_threads": config.threads,
        "n_threads_batch": config.threads_batch,
    }
    return Llama(options, cpus=config.decode_on.cpus)


@contextmanager
def open_session(config: Config, name: str, seen: dict[str, Any]) -> Iterator[SessionPath]:
    """Open a session as a path. Its own measurements are put into `seen` at the end."""
    is_plain = name == "wrapped"
    with Session(config, keeps_hits=False, prices=is_plain) as session:
        if is_plain:
            show_always_shown(session.notes)
        try:
            yield SessionPath(session)
        finally:  # an interrupted measurement keeps what was seen so far
            if is_plain:
                target, costs = session.target, session.costs
                seen["profile"] = list(costs.drafts.profile.step_s)
                seen["table"], seen["chosen"] = costs.run.table, _chosen(session)
                seen["split"] = costs.run.split
                seen["counters"] = asdict(target.counters()) | target.disk_counters()
            elif session.speculation is not None:
                seen[name] = session.speculation.costs


def workload(config: Config, own: BenchOptions) -> Workload:
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


def no_drafts_reason(config: Config) -> str:
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
        return SHOWN["spec"]
    return texts.replace("plain", SHOWN["wrapped"])


def _draft_words(result: Mapping[str, Any]) -> str:
    """Say how many drafted tokens were right. Few may be drafted, so the share has its counts."""
    counts = f"{result['n_accepted']} of {result['n_drafted']}"
    each = f"{result['tokens_per_round']:.2f} tokens per round"
    return f"drafts {result['acceptance_rate']:.0%} accepted ({counts}), {each}"


def _show(result: dict[str, Any], equal: Mapping[str, Equality], table: CostTable) -> None:
    is_sim = backend_of(result["device"]) is SIM
    title = "speed on sim: the CPU in the place of a GPU" if is_sim else "speed"
    report.table(title, ("", "answer t/s", "prompt t/s", "x llama.cpp"), speed_rows(result))
    for doubt in result["unreliable"]:
        report.paragraph(f"? not reliable: {doubt}")
    _show_card(result)
    if result.get("acceptance_rate") is not None:
        report.line(_draft_words(result))
    for sentence in filter(None, (result.get("why_off"), result.get("pays"))):
        report.paragraph(sentence)
    if result["why_no_drafts"]:
        report.paragraph(result["why_no_drafts"])
    for way, equality in equal.items():
        report.paragraph(equality.words(_shown_name(way)))
    show_table(table)


def _show_card(result: Mapping[str, Any]) -> None:
    """Show what the card took, or why that is not known. Other devices than cards have no table."""
    if result["card"]:
        heads = ("", "copied", "power of the card", "core clock", "memory clock")
        report.table("the card while answers were written", heads, result["card_rows"])
    elif "card_rows" in result:
        report.paragraph(result["why_no_card"])
