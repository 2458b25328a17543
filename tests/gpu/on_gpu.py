"""What the GPU tests share: options of tiny runs, their logits, budgets, and a census of copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import budget
from numpy.typing import NDArray

from offload.device import DeviceChoice
from offload.engine import Engine, EngineOptions
from offload.ggml.backend import Event
from offload.plan.min_batch import MinBatch
from offload.streaming.copying import DeviceCopier, Transfer
from offload.streaming.executor import Executor
from offload.streaming.options import StreamingOptions

Logits = NDArray[np.float32]

# One token, a few, more than n_ubatch (several graphs in one decode), and small ones again.
BATCHES = (1, 5, 24, 3, 12)
SERIAL = StreamingOptions(depth=0, prefetch=False, bounce=False)


def options(
    gpu: DeviceChoice, streaming: StreamingOptions = SERIAL, **changes: Any
) -> EngineOptions:
    """Flash attention off: a software Vulkan driver takes minutes to compile it.

    The MLA switch is off, too: it rounds otherwise, and has a test of its own.
    """
    settings: dict[str, Any] = {
        "min_batch": MinBatch(experts=1, dense=1),
        "n_ctx": 128,
        "n_ubatch": 16,
        "n_outputs": 128,
        "n_threads": 1,
        "n_threads_batch": 1,
        "flash_attn": "off",
        "mla_crossover": 0,
    }
    return EngineOptions(device=gpu.name, streaming=streaming, **{**settings, **changes})


def logits(engine: Engine, batches: Sequence[int] = BATCHES) -> Logits:
    """Logits of batches of the given sizes in one sequence, then of a batch after a rewind."""
    engine.sequences.rewind(0, 0)
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for n in batches
    ]
    engine.sequences.rewind(0, 4)
    return np.concatenate([*rows, engine.sequences.extend(0, [7, 8, 9])])


def logits_of(path: Path, opened: EngineOptions, batches: Sequence[int] = BATCHES) -> Logits:
    with Engine(path, opened) as engine:
        return logits(engine, batches)


def is_standin(gpu: DeviceChoice) -> bool:
    """True for the stand-in for CUDA (tests/cuda_standin), whose numbers are ggml-cpu's."""
    return "stand-in" in gpu.device.description


def assert_same(gpu: DeviceChoice, got: Logits, expected: Logits) -> None:
    """Bit for bit; on a real CUDA device within 1 %: kernels differ with the number of experts."""
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    if gpu.name.startswith("CUDA") and not is_standin(gpu):
        np.testing.assert_allclose(got, expected, atol=1e-2 * float(expected.std()))
    else:
        differing = int((got != expected).sum())
        assert differing == 0, f"{differing} of {got.size} logits differ"


def half(path: Path, **changes: Any) -> StreamingOptions:
    """Slots for half of what streams, so that slots are used again within a graph.

    The device stages its copies itself: software drivers pin nothing, and would get the ring.
    """
    streaming = StreamingOptions(**{"bounce": False, **changes})
    return replace(streaming, vram_bytes=budget(path, streaming, "half"))


def executor_of(engine: Engine) -> Executor:
    """What serves the one stream that an engine has opened on its device."""
    assert engine.device is not None
    (executor,) = engine.device.executors.values()
    assert isinstance(executor, Executor)
    return executor


@dataclass
class Census:
    """What a DeviceCopier was asked for."""

    copies: int = 0
    fenced_copies: int = 0
    waits: int = 0
    fences: int = 0


def count_orders(patch: pytest.MonkeyPatch) -> Census:
    """Count every copy and every event, then do as always."""
    census = Census()
    copy, wait, fence = DeviceCopier.copy, DeviceCopier.wait, DeviceCopier.fence

    def counted_copy(self: DeviceCopier, transfer: Transfer, after: Any) -> None:
        census.copies += 1
        census.fenced_copies += after is not None
        copy(self, transfer, after)

    def counted_wait(self: DeviceCopier, tickets: Collection[Event]) -> None:
        census.waits += len(tickets)
        wait(self, tickets)

    def counted_fence(self: DeviceCopier) -> Event:
        census.fences += 1
        return fence(self)

    patch.setattr(DeviceCopier, "copy", counted_copy)
    patch.setattr(DeviceCopier, "wait", counted_wait)
    patch.setattr(DeviceCopier, "fence", counted_fence)
    return census
