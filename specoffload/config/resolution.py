"""Command line, environment, stored tuning and machine resolved into one Config, in one pass.

Frozen, with the reason of everything chosen automatically. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from offload.mla.decision import Crossover
from offload.numa_plan import NumaPlan
from offload.plan.min_batch import MinBatch
from offload.plan.placement import PlanForSplits
from offload.plan.sharing import UBATCHES
from offload.streaming.options import StreamingOptions
from offload.trace import NO_TRACE, Trace
from specdec.options import DrafterName
from specoffload.config.host import Host
from specoffload.config.hybrid_choice import HybridChoice, choose_hybrid
from specoffload.config.numa_choice import choose_threads
from specoffload.config.options import Options, ServeOptions, Toggle
from specoffload.config.remarks import Remarks
from specoffload.config.speculation import SpecConfig, resolve_speculation, uses_draft_model


@dataclass(frozen=True)
class Config:
    """Everything a session needs to open; nobody changes it later."""

    model: Path
    alias: str | None
    draft: Path | None
    device: str
    min_batch: MinBatch | None  # None: measured when it is opened
    ctx_size: int
    batch_size: int
    ubatch_size: int | None  # None: what the plan chooses, up to most_ubatch
    most_ubatch: int
    threads: int
    threads_batch: int
    flash_attn: Toggle
    type_k: str
    type_v: str | None  # None: f16, with MLA as `type_k`
    swa_full: bool
    spec: SpecConfig
    streaming: StreamingOptions
    trace: Path | None
    mla_crossover: Crossover | None
    mmap: bool
    stream_experts: bool
    ctx_checkpoints: int
    reasons: tuple[str, ...]
    hybrid: HybridChoice = HybridChoice()
    numa: NumaPlan | None = None  # None: nothing is pinned
    parallel: int = 1  # requests that run at once
    cache_ram_bytes: int | None = 0  # host memory for prompts whose slots others needed
    slot_save_path: Path | None = None
    slot_similarity: float = ServeOptions.slot_similarity
    pooling: str | None = None  # of embeddings; None: there are none


def demo_file(name: str) -> Path:
    """A file of the embedded pair: target.gguf, draft.gguf, CARD.md."""
    return Path(str(resources.files("specoffload") / "demo" / name))


def resolve(options: Options, host: Host) -> Config:
    """Fill in what was not said, each choice with its reason.

    Raises UsageError, BadOption, and NoSuchNode for a memory node that does not exist.
    """
    remarks = Remarks(options.strict)
    for remark in options.remarks:
        remarks.reason(remark)
    for name, why in options.idle:
        remarks.no_effect(name, why)
    model, draft = _models(options, remarks)
    threads = choose_threads(options, host, remarks)
    return Config(
        model=model,
        alias=options.alias,
        draft=draft,
        device=options.device,
        min_batch=options.min_batch if isinstance(options.min_batch, MinBatch) else None,
        ctx_size=options.ctx_size,
        batch_size=options.batch_size,
        ubatch_size=options.ubatch_size and min(options.ubatch_size, options.batch_size),
        most_ubatch=options.batch_size if "batch_size" in options.given else UBATCHES[-1],
        threads=threads.n_decode,
        threads_batch=threads.n_batch,
        flash_attn=options.flash_attn,
        type_k=options.type_k,
        type_v=options.type_v,
        swa_full=options.swa_full,
        spec=resolve_speculation(
            options,
            has_draft=draft is not None,
            environment=host.environment,
            strict=options.strict,
        ),
        streaming=_streaming(options),
        hybrid=choose_hybrid(options),
        trace=options.trace,
        mla_crossover=options.mla_crossover,
        mmap=options.mmap,
        stream_experts=True,
        ctx_checkpoints=options.ctx_checkpoints,
        reasons=remarks.lines,
        numa=threads.plan,
    )


def _models(options: Options, remarks: Remarks) -> tuple[Path, Path | None]:
    """The target, and the draft model where one is used."""
    model, draft = options.model, options.draft
    if model is None:
        remarks.reason("no model was given: using the embedded demo pair")
        model = demo_file("target.gguf")
        if draft is None and uses_draft_model(options.spec):
            draft = demo_file("draft.gguf")
    if draft is not None and not uses_draft_model(options.spec):
        by = options.spec.name("drafters")
        nothing = options.spec.drafters == (DrafterName.NONE,)
        why = f"nothing drafts with {by}" if nothing else f"{by} does not name draft"
        remarks.no_effect(options.name("draft"), why)
        draft = None
    return model, draft


def _plan_for_hybrid(options: Options) -> PlanForSplits:
    """A plan is made before anything is measured: auto may yet find that nothing is split."""
    toggle = choose_hybrid(options).toggle
    if toggle is Toggle.OFF:
        return False
    return True if toggle is Toggle.ON else "auto"


def _streaming(options: Options) -> StreamingOptions:
    return StreamingOptions(
        device_bytes=options.vram_bytes,
        n_cpu_moe="fit" if options.n_cpu_moe is None else options.n_cpu_moe,
        n_gpu_layers=options.n_gpu_layers,
        mix=options.plan_for,
        depth=options.prefetch_depth,
        prefetch=options.prefetch,
        chunks=options.expert_chunks,
        band=options.slot_band,
        bounce=options.bounce,
        native=options.native_placement,
        warmup=options.warmup,
        hybrid=choose_hybrid(options).toggle is not Toggle.OFF,
        ahead=options.hybrid_ahead,
        plan_for_hybrid=_plan_for_hybrid(options),
        trace=Trace() if options.trace is not None else NO_TRACE,
    )
