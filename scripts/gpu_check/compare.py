"""The equality checks: the device against the CPU, streamed against resident, both streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload.device import DeviceChoice
from offload.engine import Engine, EngineOptions
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import make_plan
from offload.streaming.options import StreamingOptions
from offload.synth import write_preset

Logits = NDArray[np.float32]
BATCHES = (1, 4, 40, 3, 16)
# Relative to a row's own size. The CPU rounds activations otherwise; CUDA's kernels differ with the
# number of experts they are given; on other devices the bits are the same.
CPU_ERROR = 0.15
CUDA_ERROR = 1e-2


@dataclass(frozen=True)
class Equality:
    """One comparison of the logits of the same tokens."""

    what: str
    model: str
    equal_share: float  # of the logits that have the same bits
    error: float  # of the row that differs most, but for near-ties: |a - b| / |b|
    allowed: float
    near_ties: int  # rows left out because a router may have chosen otherwise
    passed: bool


def equality_of(choice: DeviceChoice, folder: Path) -> Iterator[Equality]:
    """Run the comparisons on a tiny mixture of experts and a tiny dense model."""
    moe = write_preset("deepseek-v3", folder / "tiny_moe.gguf", size="tiny-vulkan", seed=1)
    dense = write_preset(
        "mistral-large", folder / "tiny_dense.gguf", size="tiny", n_layer=8, seed=2
    )
    cuda = choice.name.startswith("CUDA")
    same = CUDA_ERROR if cuda else 0.0
    for path, layers in ((moe, None), (dense, 1)):
        name, experts = path.stem, layers is None
        plain = _options(choice.name, StreamingOptions(overlap=False))
        cpu = _run(path, replace(plain, device="cpu"))
        resident = _run(path, replace(plain, stream_experts=False))
        yield compare("device = CPU", name, resident, cpu, CPU_ERROR, ties_allowed=experts)
        streaming = StreamingOptions(n_gpu_layers=layers, overlap=False)
        serial = _run(path, replace(plain, streaming=streaming), streams=True)
        ties = experts and cuda
        yield compare("streamed = resident", name, serial, resident, same, ties_allowed=ties)
        for kind in ("all", "half"):
            chosen = replace(streaming, overlap=True)
            if kind == "half":
                chosen = replace(chosen, vram_bytes=_half(path, layers))
            overlapped = _run(path, replace(plain, streaming=chosen), streams=True)
            what = f"overlapped = serial, {kind} slots"
            yield compare(what, name, overlapped, serial, same, ties_allowed=ties)


def compare(
    what: str,
    model: str,
    got: Logits,
    expected: Logits,
    allowed: float,
    *,
    ties_allowed: bool = False,
) -> Equality:
    """`ties_allowed`: leave out rows, up to a quarter of them, in which a router flipped."""
    size = np.linalg.norm(expected, axis=1)
    errors = np.sort(np.linalg.norm(got - expected, axis=1) / np.maximum(size, 1e-30))
    near_ties = 0
    if ties_allowed:
        near_ties = min(int((errors > allowed).sum()), len(errors) // 4)
    error = float(errors[len(errors) - 1 - near_ties])
    passed = bool(np.isfinite(got).all() and size.min() > 0 and error <= allowed)
    share = float(np.mean(got == expected))
    return Equality(what, model, share, error, allowed, near_ties, passed)


def _half(path: Path, layers: int | None) -> int:
    whole = make_plan(read_facts(path), budget_bytes=None, n_gpu_layers=layers)
    return whole.resident_bytes + whole.slot_bytes // 2


def _options(device: str, streaming: StreamingOptions) -> EngineOptions:
    return EngineOptions(device=device, streaming=streaming, min_batch=MinBatch(1, 1), n_ctx=256,
                         n_ubatch=32, flash_attn="off")  # fmt: skip


def _run(path: Path, options: EngineOptions, *, streams: bool = False) -> Logits:
    with Engine(path, options) as engine:
        rows = [
            engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
            for n in BATCHES
        ]
        assert streams == (engine.counters().cuts > 0), "another path ran than was to be compared"
    return np.concatenate(rows)
