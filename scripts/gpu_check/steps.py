"""Times of one step: resident, serial, overlapped, and llama.cpp's own offload of the same file."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.device import DeviceChoice
from offload.engine import Engine, EngineOptions
from offload.errors import DeviceFailed
from offload.ggml.memory import AnonymousMemory, Pinner
from offload.ggml.tensor import host_bytes, new_tensor
from offload.plan.min_batch import MinBatch
from offload.streaming.options import StreamingOptions
from specoffload.bench.paths import Llama

PREFIX = 16  # tokens before every step
ALLOWED = 1.0  # |a - b| / |b| of a step's logits: near-ties of routers; unrelated rows have 1.4
_LINK_REPETITIONS = 7


def measure_link(choice: DeviceChoice, size_bytes: int) -> dict[str, Any]:
    """Bytes per second of the fastest copy to the device, from pinned and from pageable memory.

    If pinning is refused, both are from pageable memory, and `why_not_pinned` says why.
    """
    stream = choice.device.open()
    buffer = choice.device.allocate(size_bytes, "the link's measurement")
    host, pinner = AnonymousMemory(), Pinner(choice.device)
    memory = host.allocate(size_bytes)
    target, source = new_tensor("i8", (size_bytes, 1, 1, 1), (buffer, 0)), host_bytes(memory)

    def bytes_per_s() -> float:
        times = []
        for _ in range(_LINK_REPETITIONS):
            start = time.perf_counter()
            stream.copy(target, 0, source, 0, size_bytes)
            stream.synchronize()
            times.append(time.perf_counter() - start)
        return size_bytes / min(times)

    try:
        pageable = bytes_per_s()
        pinned = pinner.pin(memory)
        fastest = bytes_per_s() if pinned.ok else pageable
    finally:
        pinner.unpin(memory)
        host.free(memory)
        buffer.close()
        stream.close()
    return {
        "pinned_bytes_per_s": fastest,
        "pageable_bytes_per_s": pageable,
        "why_not_pinned": "" if pinned.ok else pinned.reason,
    }


@dataclass(frozen=True)
class Workload:
    """The model that exceeds `vram_bytes`, and the batches to time."""

    path: Path
    choice: DeviceChoice
    vram_bytes: int
    batches: tuple[int, ...]
    repetitions: int
    n_threads: int
    flash_attn: str

    @property
    def n_ctx(self) -> int:
        return -(-(PREFIX + max(self.batches)) // 256) * 256

    def options(self, streaming: StreamingOptions, *, streams: bool) -> EngineOptions:
        """Options with which the device computes everything, from one token on."""
        return EngineOptions(
            device=self.choice.name,
            streaming=streaming,
            stream_experts=streams,
            min_batch=MinBatch(experts=1, dense=1),
            n_ctx=self.n_ctx,
            n_batch=max(self.batches),
            n_ubatch=max(self.batches),
            n_outputs=PREFIX,
            n_threads=self.n_threads,
            n_threads_batch=self.n_threads,
            flash_attn=self.flash_attn,
        )


@dataclass
class Steps:
    """What one way of computing took, by batch size."""

    step_s: dict[int, float] = field(default_factory=dict)
    streamed_bytes: dict[int, float] = field(default_factory=dict)
    hit_share: dict[int, float] = field(default_factory=dict)
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)


def tokens_of(n: int, repetition: int, n_vocab: int) -> list[int]:
    """The same tokens for every way; other ones in every repetition, so that experts differ."""
    drawn = np.random.default_rng((n, repetition)).integers(0, n_vocab, n)
    return [int(token) for token in drawn]


def measure_ways(load: Workload) -> tuple[dict[str, Steps], str]:
    """Times of resident, serial and overlapped; and the line about where the weights lie."""
    serial = StreamingOptions(vram_bytes=load.vram_bytes, depth=0, prefetch=False)
    overlapped = StreamingOptions(vram_bytes=load.vram_bytes)
    ways, line = {}, ""
    for name, streaming, streams in (
        ("resident", serial, False),
        ("serial", serial, True),
        ("overlapped", overlapped, True),
    ):
        with Engine(load.path, load.options(streaming, streams=streams)) as engine:
            ways[name] = time_steps(engine, load)
            if engine.store is not None and engine.store.report is not None:
                line = engine.store.report.sentence()
            assert streams == (engine.counters().cuts > 0)
    return ways, line


def time_steps(engine: Engine, load: Workload) -> Steps:
    """Medians by batch size, without the first repetition."""
    steps = Steps()
    engine.sequences.extend(0, tokens_of(PREFIX, 0, engine.n_vocab), n_logits=0)
    for n in load.batches:
        times = []
        for repetition in range(load.repetitions + 1):
            if repetition == 1:
                before = engine.counters()
            tokens = tokens_of(n, repetition, engine.n_vocab)
            start = time.perf_counter()
            rows = engine.sequences.extend(0, tokens, n_logits=1)
            times.append(time.perf_counter() - start)
            engine.sequences.rewind(0, PREFIX)
        after = engine.counters()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        steps.step_s[n] = statistics.median(times[1:])
        streamed_bytes = after.streamed_bytes - before.streamed_bytes
        steps.streamed_bytes[n] = streamed_bytes / load.repetitions
        steps.hit_share[n] = hits / max(1, hits + misses)
        steps.logits[n] = rows[0]
    return steps


def measure_peers(
    load: Workload, left_s: Callable[[], float]
) -> dict[str, dict[int, float] | None]:
    """llama.cpp with all experts in host memory: offloading every batch, and with its default.

    Each runs in its own process, since the threshold is read when the backend is loaded. None for
    one that failed or had too little time (`left_s`).
    """
    peers: dict[str, dict[int, float] | None] = {}
    for name, min_batch in (("offload", "1"), ("default", None)):
        try:
            peers[name] = _peer(load, min_batch, max(10.0, left_s()))
        except DeviceFailed as e:
            sys.stderr.write(f"llama.cpp by itself ({name}) is left out: {e}\n")
            peers[name] = None
    return peers


def _peer(load: Workload, min_batch: str | None, timeout_s: float) -> dict[int, float]:
    environment = {k: v for k, v in os.environ.items() if k != "GGML_OP_OFFLOAD_MIN_BATCH"}
    if min_batch is not None:
        environment["GGML_OP_OFFLOAD_MIN_BATCH"] = min_batch
    options = {
        "path": str(load.path),
        "device": load.choice.name if load.choice.on_gpu else None,
        "cpu_weights": r"\.ffn_(up|down|gate|gate_up)_exps\.weight$",
        "repack": False,
        "flash_attn": {"auto": -1, "off": 0}[load.flash_attn],
        "n_ctx": load.n_ctx,
        "n_batch": max(*load.batches, PREFIX),
        "n_ubatch": max(load.batches),
        "n_threads": load.n_threads,
        "n_threads_batch": load.n_threads,
    }
    end = time.monotonic() + timeout_s
    medians = {}
    with Llama(options, environment) as llama:
        llama.prefill(tokens_of(PREFIX, 0, llama.n_vocab))
        for n in load.batches:
            times = []
            for repetition in range(load.repetitions + 1):
                if time.monotonic() > end:
                    raise DeviceFailed(f"no time left for batches of {n} tokens")
                tokens = tokens_of(n, repetition, llama.n_vocab)
                times.append(llama.prefill(tokens, start=PREFIX)[0])
            medians[n] = statistics.median(times[1:])
    return medians


def step_rows(
    load: Workload,
    ways: dict[str, Steps],
    peers: dict[str, dict[int, float] | None],
    link_bytes_per_s: float,
) -> list[dict[str, Any]]:
    """A row per batch size: the ceiling, the measurement, and their ratio."""
    resident, serial, overlapped = ways["resident"], ways["serial"], ways["overlapped"]
    rows = []
    for n in load.batches:
        transfer_s = overlapped.streamed_bytes[n] / link_bytes_per_s
        step_s = overlapped.step_s[n]
        expected = resident.logits[n]
        differences = [
            float(np.linalg.norm(way.logits[n] - expected) / np.linalg.norm(expected))
            for way in (serial, overlapped)
        ]
        row: dict[str, Any] = {
            "n": n,
            "compute_s": resident.step_s[n],
            "transfer_s": transfer_s,
            "serial_s": serial.step_s[n],
            "step_s": step_s,
            "streamed_bytes": overlapped.streamed_bytes[n],
            "hit_share": overlapped.hit_share[n],
            "ratio": step_s / max(transfer_s, resident.step_s[n]),
            "max_difference": max(differences),
            "allowed": ALLOWED,
        }
        for name, times in peers.items():
            row[f"{name}_s"] = None if times is None else times[n]
            row[f"vs_{name}"] = None if times is None else times[n] / step_s
        rows.append(row)
    return rows
