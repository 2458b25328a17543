"""Times a step of one file in four ways: resident, serial, overlapped, llama.cpp's own offload."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from link import measure_link
from logits import divergences, judged
from numpy.typing import NDArray
from setting import Setting

from lab.options import Streaming, engine_options
from offload.engine import Engine, open_engine
from offload.errors import DeviceFailed
from offload.model_file import read_facts
from offload.times.min_batch import MinBatch
from offload.times.steadiness import if_steady
from offload.times.table import entry_of
from offload.units import parse_bytes
from specoffload.bench.paths import Llama

# DeepSeek-V3's widths with fewer layers and experts: the experts of 7 layers are 11 GB at q4_K.
BIG: dict[str, Any] = {
    "size": "full", "n_layer": 8, "n_expert": 64, "n_vocab": 32000, "quant": "q4_K",
    "metadata": {"leading_dense_block_count": 1},
}  # fmt: skip
PREFIX = 16  # tokens before every step
_LEAST_S = 60.0  # to write the model and time its steps


@dataclass
class Steps:
    """The times of one way of computing, by batch size."""

    step_s: dict[int, float] = field(default_factory=dict)
    spread: dict[int, float] = field(default_factory=dict)  # relative, of the repetitions
    streamed_bytes: dict[int, float] = field(default_factory=dict)
    hit_share: dict[int, float] = field(default_factory=dict)
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # of the last tokens


def measure(setting: Setting) -> bool:
    """Fill `model` and `steps` of the report. True if all ways give equal logits."""
    setting.least_s(_LEAST_S)
    args, report = setting.args, setting.report
    report["link"] = report["link"] or measure_link(
        setting.choice, (4 if args.small else 256) << 20
    )
    path = setting.model("small" if args.small else "big", "deepseek-v3", 7,
                         **({"size": "tiny-vulkan"} if args.small else BIG))  # fmt: skip
    facts = read_facts(path)
    expert_bytes = facts.expert_bytes
    vram_bytes = facts.size_bytes - expert_bytes // 2 if args.small else parse_bytes(args.vram)
    batches = [int(n) for n in args.batches.split(",")]
    model = report["model"] = {"name": path.name, "size_bytes": facts.size_bytes,
                               "expert_bytes": expert_bytes, "vram_bytes": vram_bytes}  # fmt: skip
    ways, model["store"] = measure_ways(setting, path, vram_bytes, batches)
    setting.show("model", [report["model"]])
    sim = setting.choice.sim
    rate = (sim.bandwidth_bytes_per_s if sim else None) or report["link"]["pinned_bytes_per_s"]
    peers = {name: measure_peer(setting, path, batches, name, least)
             for name, least in (("offload", "1"), ("default", None))}  # fmt: skip
    rows = report["steps"] = [step_row(n, ways, peers, rate) for n in batches]
    setting.show("one step; ratio = step / max(compute, transfer)", rows)
    if args.model_dir is None:
        path.unlink()  # later parts need the disk
    return all(row["same"] for row in rows)


def n_ctx_of(batches: list[int]) -> int:
    return -(-(PREFIX + max(batches)) // 256) * 256


def tokens_of(n: int, repetition: int, n_vocab: int) -> list[int]:
    """`n` tokens: the same for every way, but different in each repetition, so experts differ."""
    drawn = np.random.default_rng((n, repetition)).integers(0, n_vocab, n)
    return [int(token) for token in drawn]


def measure_ways(
    setting: Setting, path: Path, vram_bytes: int, batches: list[int]
) -> tuple[dict[str, Steps], str]:
    """Returns the times of resident, serial and overlapped, and a line on where the weights are."""
    serial = Streaming(vram_bytes=vram_bytes, depth=0, prefetch=False)
    overlapped = Streaming(vram_bytes=vram_bytes)
    ways, line = {}, ""
    for name, streaming in (("resident", serial), ("serial", serial), ("overlapped", overlapped)):
        options = engine_options(
            device=setting.choice.name,
            streaming=streaming,
            stream_experts=name != "resident",
            min_batch=MinBatch(experts=1, dense=1),  # the device computes all batches
            n_ctx=n_ctx_of(batches),
            n_batch=max(batches),
            n_ubatch=max(batches),
            n_outputs=PREFIX,
            n_threads=setting.args.threads,
            n_threads_batch=setting.args.threads,
            flash_attn="off" if setting.args.small else "auto",
        )
        with open_engine(path, options) as engine:
            ways[name] = time_steps(engine, batches, setting.args.repetitions)
            setting.report["model"][f"{name}_s"] = ways[name].step_s
            setting.save()
            if (
                engine.opened.weights.store is not None
                and engine.opened.weights.store.report is not None
            ):
                line = engine.opened.weights.store.report.sentence()
            assert (name != "resident") == (engine.counters().cuts > 0)
    return ways, line


def time_steps(engine: Engine, batches: list[int], repetitions: int) -> Steps:
    """Time steps of each batch size. Takes medians, without the first repetition."""
    steps = Steps()
    engine.sequences.extend(0, tokens_of(PREFIX, 0, engine.n_vocab), n_logits=0)
    for n in batches:
        times = []
        for repetition in range(repetitions + 1):
            if repetition == 1:
                before = engine.counters()
            tokens = tokens_of(n, repetition, engine.n_vocab)
            start = time.perf_counter()
            engine.sequences.extend(0, tokens, n_logits=1)
            times.append(time.perf_counter() - start)
            engine.sequences.rewind(0, PREFIX)
        after = engine.counters()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        steps.step_s[n] = statistics.median(times[1:])
        steps.spread[n] = entry_of(times[1:]).spread
        steps.streamed_bytes[n] = (after.streamed_bytes - before.streamed_bytes) / repetitions
        steps.hit_share[n] = hits / max(1, hits + misses)
        steps.logits[n] = engine.sequences.extend(0, tokens, n_logits=min(n, PREFIX))
        engine.sequences.rewind(0, PREFIX)
    return steps


def measure_peer(
    setting: Setting, path: Path, batches: list[int], name: str, min_batch: str | None
) -> Steps | None:
    """Times of llama.cpp with all experts in host memory, in its own process.

    llama.cpp reads `min_batch` (None: its default) when the backend is loaded. Returns None, and
    prints why, if it fails or has too little time.
    """
    environment = {k: v for k, v in os.environ.items() if k != "GGML_OP_OFFLOAD_MIN_BATCH"}
    if min_batch is not None:
        environment["GGML_OP_OFFLOAD_MIN_BATCH"] = min_batch
    args = setting.args
    options = {
        "path": str(path),
        "device": setting.choice.name if setting.choice.on_gpu else None,
        "cpu_weights": r"\.ffn_(up|down|gate|gate_up)_exps\.weight$",
        "repack": False,
        "flash_attn": 0 if args.small else -1,
        "n_ctx": n_ctx_of(batches),
        "n_batch": max(*batches, PREFIX),
        "n_ubatch": max(batches),
        "n_threads": args.threads,
        "n_threads_batch": args.threads,
    }
    end_s = time.monotonic() + max(10.0, setting.left_s())
    steps = Steps()
    try:
        with Llama(options, environment) as llama:
            llama.prefill(tokens_of(PREFIX, 0, llama.n_vocab))
            for n in batches:
                times = []
                for repetition in range(args.repetitions + 1):
                    if time.monotonic() > end_s:
                        raise DeviceFailed(f"no time left for batches of {n} tokens")
                    tokens = tokens_of(n, repetition, llama.n_vocab)
                    times.append(llama.prefill(tokens, start=PREFIX)[0])
                steps.step_s[n] = statistics.median(times[1:])
                steps.spread[n] = entry_of(times[1:]).spread
    except DeviceFailed as e:
        setting.say(f"llama.cpp ({name}) is left out: {e}")
        return None
    return steps


def step_row(
    n: int,
    ways: dict[str, Steps],
    peers: dict[str, Steps | None],
    link_bytes_per_s: float,
) -> dict[str, Any]:
    """The row of one batch size: the times, the ceiling's parts, and the ratio to the ceiling.

    A ratio that means nothing is None.
    """
    resident, serial, overlapped = ways["resident"], ways["serial"], ways["overlapped"]
    transfer_s = overlapped.streamed_bytes[n] / link_bytes_per_s
    step_s, expected = overlapped.step_s[n], resident.logits[n]
    row: dict[str, Any] = {
        "n": n,
        "compute_s": resident.step_s[n],
        "transfer_s": transfer_s,
        "serial_s": serial.step_s[n],
        "step_s": step_s,
        "streamed_bytes": overlapped.streamed_bytes[n],
        "hit_share": overlapped.hit_share[n],
        "ratio": if_steady(
            step_s / max(transfer_s, resident.step_s[n]), overlapped.spread[n], resident.spread[n]
        ),
        "max_difference": max(
            float(np.linalg.norm(way.logits[n] - expected) / np.linalg.norm(expected))
            for way in (serial, overlapped)
        ),
        **judged(np.concatenate(
            [divergences(way.logits[n], expected) for way in (serial, overlapped)]
        )),
    }  # fmt: skip
    for name, peer in peers.items():
        row[f"{name}_s"] = row[f"vs_{name}"] = None
        if peer is not None:
            peer_s = row[f"{name}_s"] = peer.step_s[n]
            row[f"vs_{name}"] = if_steady(peer_s / step_s, peer.spread[n], overlapped.spread[n])
    return row
