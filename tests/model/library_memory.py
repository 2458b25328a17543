"""Measure the memory that libllama would allocate for a model, from the file's header alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from library_log import log_lines

from offload.device import choose_device
from offload.ggml.context import Context
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.memory import AnonymousMemory
from offload.ggml.model import Model, ModelPlacement
from offload.model_file import read_facts
from offload.plan.placement import make_plan
from offload.stream.building import ExecutorBuilder
from offload.stream.device import BatchRules, StreamingDevice
from offload.stream.options import StreamingOptions
from offload.stream.ways_in_use import WaysInUse
from offload.times.context_memory import ContextOptions
from offload.times.min_batch import MinBatch
from offload.times.ways import Ways

_MIB = 1 << 20
_CACHE = re.compile(r"size = +([\d.]+) MiB .*K \(")
_BUFFER = re.compile(r"\S+ +(RS|compute) buffer size = +([\d.]+) MiB")


@dataclass(frozen=True)
class Allocated:
    """Bytes, as the library logs them."""

    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int


def allocated(path: Path, spec: ContextOptions) -> Allocated:
    """Open `path` on a wrapped device with its experts in host memory, allocating nothing."""
    pending = Pending()
    host = HostBufferType("SPEC_HOST", AnonymousMemory(), pending)
    choice, plan = choose_device("sim"), make_plan(read_facts(path))
    builder = ExecutorBuilder(choice, StreamingOptions(), [])
    rules = BatchRules(WaysInUse(Ways(MinBatch(1, 1))))
    device = StreamingDevice(choice, host, plan, builder.executors(plan), rules)
    placement = ModelPlacement(
        (device,),
        ((r"ffn_.*_exps\.weight", host),),
        n_gpu_layers=999,
        use_extra_bufts=False,
        load_mode="none",
        no_alloc=True,
    )
    options = replace(spec, n_batch=8192)
    with log_lines() as lines:
        model = Model(path, placement, pending)
        try:
            Context(model, options, pending).close()
        finally:
            model.close()
    caches = [float(m[1]) for m in map(_CACHE.search, lines) if m]
    buffers = [(m[1], float(m[2])) for m in map(_BUFFER.search, lines) if m]
    # The CPU's backend and ours share a buffer type here, so that one size is logged for each.
    return Allocated(
        int(sum(caches) * _MIB),
        int(sum(size for kind, size in buffers if kind == "RS") * _MIB),
        int(max((size for kind, size in buffers if kind == "compute"), default=0.0) * _MIB),
    )
