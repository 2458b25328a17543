"""The request for a plan. Pure: it has no path, no callable and no switch of a run."""

from __future__ import annotations

from dataclasses import dataclass

from offload.plan.objective import MeasuredDecode
from offload.plan.placement import NCpuMoe, Passes
from offload.plan.ranges import Order
from offload.plan.workload import TokenMix
from offload.routing.routing import HitCurve, UnionCurve
from offload.times.context_memory import ContextOptions
from offload.times.machine import TYPICAL, Machine
from offload.times.min_batch import MinBatch


@dataclass(frozen=True)
class Wanted:
    """The request that a layout is decided from, made once. Most fields have the name of a flag.

    No flag sets `vram_bytes`. Experiments and tests that compare runs with a certain number of
    slots need it. With --vram, a GPU's slots get what a warm-up leaves of the budget, and that
    depends on the driver.
    """

    context: ContextOptions = ContextOptions()  # n_ctx 0: the model's own
    tensor_split: tuple[float, ...] = ()  # devices' shares of the layers; (): planned
    min_batch: MinBatch = MinBatch()
    vram_bytes: int | None = None  # budget of weights and slots alone; None: see device_bytes
    device_bytes: int | None = None  # --vram: the whole budget on a GPU; None: what is free
    each_device_bytes: tuple[int, ...] = ()  # --vram with a size for each device
    ram_bytes: int | None = None  # --ram: most memory for streamed weights; None: what is free
    keep_page_cache: bool = False  # --mmap: weights stay in the page cache
    draft_device: str | None = None  # -devd: the draft model's; None: the plan chooses
    order: Order = "auto"  # whether remote devices have the first or the last layers
    wrapped: bool = True  # False: libllama sees the real device, as for a draft
    stream_experts: bool = True  # False: the whole model is resident on the device
    n_gpu_layers: int | None = None  # layers whose dense weights stay resident; None: all that fit
    n_cpu_moe: NCpuMoe = None  # as for PlanRequest
    passes: Passes = "auto"  # rule for batches whose experts do not fit the slots at once
    most_ubatch: int | None = None  # largest ubatch to choose; None: the context's
    tuned_ubatch: int | None = None  # the ubatch that was fastest when prompts were measured
    chooses_cache: bool = False  # the plan may put the KV cache into RAM, if `kv_offload` is True
    hybrid: bool = False  # layers of small batches may be split between the CPU and the device
    plan_for_splits: bool = False  # decodes are expected to split layers
    lend: bool = True  # cache experts in the compute buffer between prompts
    prefetch: bool = True  # experts are guessed, for which the CPU keeps the routers
    mtp: bool = False  # load the layers for multi-token prediction, if the file has usable ones
    repack: bool | None = None  # --repack; None: by measured times
    # Device memory for other models: a draft with its context, and a projector of images.
    reserve_bytes: int = 0
    projector_bytes: int = 0  # the projector's part of `reserve_bytes`
    host_projector_bytes: int = 0  # RAM of a projector that the CPU computes beside a GPU
    hits: HitCurve | None = None  # hits counted with this model
    unions: UnionCurve | None = None  # experts of batches, counted with this model
    decodes: tuple[MeasuredDecode, ...] = ()  # decodes timed by earlier starts, the latest last
    mix: TokenMix | None = None  # proportion of prompt to generated tokens; None: `USUAL`
    machine: Machine = TYPICAL  # rates that are not measured
