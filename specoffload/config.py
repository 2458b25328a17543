"""What was asked for, resolved once: frozen, with the reason of everything chosen automatically."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import psutil

from offload.device import MinBatch
from offload.streaming import StreamingOptions
from offload.trace import NO_TRACE, Trace
from offload.units import parse_bytes
from specoffload.errors import UsageError

DEFAULT_MIN_BATCH = 32  # llama.cpp's GGML_OP_OFFLOAD_MIN_BATCH


@dataclass(frozen=True)
class Options:
    """The command line as typed; None where nothing was said."""

    model: Path | None = None
    draft: Path | None = None
    device: str = "auto"
    min_batch: str | None = None
    ctx_size: int | None = None
    batch_size: int = 2048
    ubatch_size: int = 512
    threads: int | None = None
    threads_batch: int | None = None
    flash_attn: str = "auto"
    spec: bool = True
    draft_max: int | None = None
    vram: str | None = None
    n_gpu_layers: int | None = None
    expert_cache: str = "lru"
    prefetch_depth: int = 8
    overlap: bool = True
    prefetch: bool = True
    trace: Path | None = None


@dataclass(frozen=True)
class Config:
    """Everything a session needs to open; nobody changes it later."""

    model: Path
    draft: Path | None
    device: str
    min_batch: MinBatch
    ctx_size: int
    batch_size: int
    ubatch_size: int
    threads: int
    threads_batch: int
    flash_attn: str
    draft_max: int
    streaming: StreamingOptions
    min_batch_auto: bool
    trace: Path | None
    reasons: tuple[str, ...]


def demo_file(name: str) -> Path:
    """A file of the embedded pair: target.gguf, draft.gguf, CARD.md."""
    return Path(str(resources.files("specoffload") / "demo" / name))


def parse_min_batch(text: str | None) -> MinBatch:
    """`3`, or per kind `dense=8,experts=24`. Raises UsageError."""
    if text is None or text == "auto":
        return MinBatch(DEFAULT_MIN_BATCH, DEFAULT_MIN_BATCH)
    values = {"experts": DEFAULT_MIN_BATCH, "dense": DEFAULT_MIN_BATCH}
    for part in text.split(","):
        kind, equals, number = part.rpartition("=")
        if not number.strip().isdecimal() or int(number) < 1:
            raise UsageError(
                f"--min-batch {text}: {number.strip() or part!r} must be a whole number from 1"
            )
        if not equals:
            values = dict.fromkeys(values, int(number))
        elif kind.strip() in values:
            values[kind.strip()] = int(number)
        else:
            raise UsageError(f"--min-batch {text}: kinds are dense and experts, not {kind.strip()}")
    return MinBatch(**values)


def _streaming(options: Options) -> StreamingOptions:
    if options.expert_cache not in ("lru", "lfu", "static"):
        raise UsageError(f"--expert-cache {options.expert_cache}: must be lru, lfu or static")
    if options.prefetch_depth < 0:
        raise UsageError(f"--prefetch-depth {options.prefetch_depth}: must be 0 or more")
    if options.n_gpu_layers is not None and options.n_gpu_layers < 0:
        raise UsageError(f"--n-gpu-layers {options.n_gpu_layers}: must be 0 or more")
    try:
        vram = None if options.vram is None else parse_bytes(options.vram)
    except ValueError as e:
        raise UsageError(f"--vram: {e}") from e
    return StreamingOptions(
        vram_bytes=vram,
        n_gpu_layers=options.n_gpu_layers,
        overlap=options.overlap,
        depth=options.prefetch_depth,
        prefetch=options.prefetch,
        cache=options.expert_cache,
        trace=Trace() if options.trace is not None else NO_TRACE,
    )


def default_threads() -> tuple[int, str]:
    """Physical cores this process may use; SMT siblings add nothing to bandwidth-bound work."""
    allowed = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or allowed
    n = max(1, min(physical, allowed))
    return n, f"{n} threads: {physical} physical cores, {allowed} allowed to this process"


def resolve(options: Options) -> Config:
    """Fill in what was not said, each choice with its reason. Raises UsageError."""
    reasons: list[str] = []
    model, draft = options.model, options.draft
    if model is None:
        model = demo_file("target.gguf")
        reasons.append("no model was given: using the embedded demo pair")
        if draft is None:
            draft = demo_file("draft.gguf")
    if not options.spec:
        if options.draft is not None:
            raise UsageError("--draft and --no-spec exclude each other")
        draft = None
    threads = options.threads
    if threads is None:
        threads, why = default_threads()
        reasons.append(why)
    for name, value in (("--threads", threads), ("--threads-batch", options.threads_batch)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: must be 1 or more")
    if options.ctx_size is not None and options.ctx_size < 0:
        raise UsageError(f"--ctx-size {options.ctx_size}: must be 0 (the model's) or more")
    if options.draft_max is not None and not 0 <= options.draft_max <= 63:
        raise UsageError(f"--draft-max {options.draft_max}: must lie between 0 and 63")
    if options.draft_max is not None and draft is None:
        raise UsageError("--draft-max has no effect without a draft: add --draft DRAFT.gguf")
    return Config(
        model=model,
        draft=draft,
        device=options.device,
        min_batch=parse_min_batch(options.min_batch),
        ctx_size=4096 if options.ctx_size is None else options.ctx_size,
        batch_size=options.batch_size,
        ubatch_size=min(options.ubatch_size, options.batch_size),
        threads=threads,
        threads_batch=options.threads_batch or threads,
        flash_attn=options.flash_attn,
        draft_max=4 if options.draft_max is None else options.draft_max,
        streaming=_streaming(options),
        min_batch_auto=options.min_batch == "auto",
        trace=options.trace,
        reasons=tuple(reasons),
    )
