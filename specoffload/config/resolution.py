"""What was asked for, resolved once: frozen, with the reason of everything chosen automatically."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import psutil

from offload.device import MinBatch
from offload.mla.decision import Crossover
from offload.nodes.numa_plan import NumaPlan
from offload.streaming.options import StreamingOptions
from offload.trace import NO_TRACE, Trace
from offload.units import parse_bytes
from specdec.options import MOST_DRAFTED, Value, drafter_names
from specoffload.config.environment import LLAMA_DRAFT, Environment, read_environment
from specoffload.config.speculation import SpecConfig, resolve_speculation
from specoffload.errors import UsageError

NUMA_STRATEGIES = ("auto", "none", "single", "interleave", "rows", "distribute")
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
    draft_max: int | None = None  # as spec_given["--spec-draft-n-max"]
    spec_given: Mapping[str, Value] = field(default_factory=dict)  # specdec.options, as typed
    draft_params: str | None = None
    use_profile: bool = True
    record_trace: Path | None = None
    vram: str | None = None
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    expert_cache: str = "lru"
    prefetch_depth: int = 8
    overlap: bool = True
    prefetch: bool = True
    trace: Path | None = None
    mla_crossover: str | None = None
    mmap: bool = False
    ctx_checkpoints: int = 32
    numa: str = "auto"
    numa_node: int | None = None


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
    spec: SpecConfig
    streaming: StreamingOptions
    min_batch_auto: bool
    trace: Path | None
    mla_crossover: Crossover
    mmap: bool
    stream_experts: bool
    ctx_checkpoints: int
    reasons: tuple[str, ...]
    numa: NumaPlan | None = None  # specoffload.numa_choice fills it in; None: nothing is pinned


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


def parse_crossover(text: str | None) -> Crossover:
    """`auto`, or a number of tokens; 0 switches it off. Raises UsageError."""
    if text is None:
        return "heads"
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise UsageError(f"--mla-crossover {text}: must be auto or a whole number, 0 for off")
    return int(text)


def _streaming(options: Options) -> StreamingOptions:
    if options.expert_cache not in ("lru", "lfu"):
        raise UsageError(f"--expert-cache {options.expert_cache}: must be lru or lfu")
    if options.prefetch_depth < 0:
        raise UsageError(f"--prefetch-depth {options.prefetch_depth}: must be 0 or more")
    if options.n_gpu_layers is not None and options.n_gpu_layers < 0:
        raise UsageError(f"--n-gpu-layers {options.n_gpu_layers}: must be 0 or more")
    try:
        vram = None if options.vram is None else parse_bytes(options.vram)
    except ValueError as e:
        raise UsageError(f"--vram: {e}") from e
    if options.n_cpu_moe is not None and options.n_cpu_moe < 0:
        raise UsageError(f"--n-cpu-moe {options.n_cpu_moe}: must be 0 or more")
    return StreamingOptions(
        vram_bytes=vram,
        n_cpu_moe="fit" if options.n_cpu_moe is None else options.n_cpu_moe,
        n_gpu_layers=options.n_gpu_layers,
        overlap=options.overlap,
        depth=options.prefetch_depth,
        prefetch=options.prefetch,
        cache=options.expert_cache,
        trace=Trace() if options.trace is not None else NO_TRACE,
    )


def _check_numa(options: Options) -> None:
    if options.numa not in NUMA_STRATEGIES:
        raise UsageError(f"--numa {options.numa}: must be one of {', '.join(NUMA_STRATEGIES)}")
    if options.numa_node is not None and options.numa not in ("auto", "single"):
        raise UsageError(
            f"--numa-node {options.numa_node} keeps everything on one node and excludes"
            f" --numa {options.numa}"
        )


def default_threads() -> tuple[int, str]:
    """Physical cores this process may use; SMT siblings add nothing to bandwidth-bound work."""
    allowed = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or allowed
    n = max(1, min(physical, allowed))
    return n, f"{n} threads: {physical} physical cores, {allowed} allowed to this process"


def _may_use_a_draft(options: Options, environment: Environment) -> bool:
    names = options.spec_given.get("--spec-type", environment.spec.get("--spec-type"))
    return names is None or "draft" in drafter_names(str(names))


def _speculation(options: Options, environment: Environment, *, has_draft: bool) -> SpecConfig:
    given = dict(options.spec_given)
    if options.draft_max is not None:
        given["--spec-draft-n-max"] = options.draft_max
    longest = given.get("--spec-draft-n-max", 0)
    if not isinstance(longest, int) or not 0 <= longest <= MOST_DRAFTED:
        raise UsageError(f"--draft-max {longest}: must lie between 0 and {MOST_DRAFTED}")
    if not options.spec:
        typed = {**given, "--draft-params": options.draft_params,
                 "--record-trace": options.record_trace,
                 "--no-profile": None if options.use_profile else True}  # fmt: skip
        inert = [name for name, value in typed.items() if value is not None]
        if inert:
            raise UsageError(f"{inert[0]} takes no effect with --no-spec")
        return SpecConfig()
    return resolve_speculation(
        given,
        has_draft=has_draft,
        use_profile=options.use_profile,
        draft_params=options.draft_params,
        record_trace=options.record_trace,
        environment=environment,
    )


def resolve(options: Options) -> Config:
    """Fill in what was not said, each choice with its reason. Raises UsageError."""
    reasons: list[str] = []
    environment = read_environment()
    model, draft = options.model, options.draft
    if model is None:
        model = demo_file("target.gguf")
        reasons.append("no model was given: using the embedded demo pair")
        if draft is None and environment.draft is None and _may_use_a_draft(options, environment):
            draft = demo_file("draft.gguf")
    if draft is None and environment.draft is not None and options.spec:
        if _may_use_a_draft(options, environment):
            draft = Path(environment.draft)
        else:
            reasons.append(f"{LLAMA_DRAFT} has no effect: --spec names no draft model")
    if draft is not None and str(draft).isdecimal() and not draft.exists():
        raise UsageError(f"--draft {draft}: no such file; the longest draft is --draft-max {draft}")
    if not options.spec:
        if options.draft is not None:
            raise UsageError("--draft and --no-spec exclude each other")
        draft = None
    if environment.unread:
        unread = ", ".join(environment.unread)
        reasons.append(f"set in the environment and not read here: {unread}")
    threads = options.threads
    if threads is None:
        threads, why = default_threads()
        reasons.append(why)
    for name, value in (("--threads", threads), ("--threads-batch", options.threads_batch)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: must be 1 or more")
    if options.ctx_size is not None and options.ctx_size < 0:
        raise UsageError(f"--ctx-size {options.ctx_size}: must be 0 (the model's) or more")
    _check_numa(options)
    if options.ctx_checkpoints < 0:
        raise UsageError(f"--ctx-checkpoints {options.ctx_checkpoints}: must be 0 or more")
    spec = _speculation(options, environment, has_draft=draft is not None)
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
        spec=spec,
        streaming=_streaming(options),
        min_batch_auto=options.min_batch == "auto",
        trace=options.trace,
        mla_crossover=parse_crossover(options.mla_crossover),
        mmap=options.mmap,
        stream_experts=True,
        ctx_checkpoints=options.ctx_checkpoints,
        reasons=tuple(reasons),
    )
