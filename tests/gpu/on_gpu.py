"""Helpers of the GPU tests: engine options, logits of a model, and comparisons of logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from budgets import limited
from numpy.typing import NDArray

from lab.options import Streaming, engine_options
from offload.backends import CUDA
from offload.device import DeviceChoice
from offload.engine import Engine, EngineOptions, open_engine
from offload.times.min_batch import MinBatch

Logits = NDArray[np.float32]

# Tokens per batch. 24 exceeds n_ubatch, so that its decode computes several graphs.
BATCHES = (1, 5, 24, 3, 12)


def options(gpu: DeviceChoice, streaming: Streaming | None = None, **changes: Any) -> EngineOptions:
    """Options with which the device computes batches of every size.

    By default all streamed weights have slots. Flash attention is off, because a software Vulkan
    driver takes minutes to compile it. The MLA switch is off and the CPU's weights keep the file's
    layout, because these round differently.
    """
    settings: dict[str, Any] = {
        "min_batch": MinBatch(experts=1, dense=1),
        "n_ctx": 128,
        "n_ubatch": 16,
        "n_outputs": 128,
        "n_threads": 1,
        "repack": False,
        "n_threads_batch": 1,
        "flash_attn": "off",
        "mla": False,
    }
    streaming = Streaming(bounce=False) if streaming is None else streaming
    return engine_options(device=gpu.name, streaming=streaming, **{**settings, **changes})


def slots_for(path: Path, slots: str, **changes: Any) -> Streaming:
    """Streaming options with slots for "all", "half" or the "least" of the streamed weights.

    Bounce buffers are off by default, because software drivers pin no memory and would get them.
    """
    streaming = Streaming(**{"bounce": False, **changes})
    if slots == "all":
        return streaming
    return limited(path, streaming, slots)


def logits(engine: Engine, batches: Sequence[int] = BATCHES) -> Logits:
    """Logits [n_tokens, n_vocab] of batches of the given sizes in one sequence.

    The last 3 rows are those of one more batch, after a rewind to 4 tokens.
    """
    engine.sequences.rewind(0, 0)
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for n in batches
    ]
    engine.sequences.rewind(0, 4)
    return np.concatenate([*rows, engine.sequences.extend(0, [7, 8, 9])])


def logits_of(path: Path, opened: EngineOptions, batches: Sequence[int] = BATCHES) -> Logits:
    with open_engine(path, opened) as engine:
        return logits(engine, batches)


def is_standin(gpu: DeviceChoice) -> bool:
    """True for the stand-in for CUDA (tests/cuda_standin), which computes with ggml-cpu."""
    return "stand-in" in gpu.device.description


def assert_same(gpu: DeviceChoice, got: Logits, expected: Logits) -> None:
    """Check that logits are equal bit for bit, or within 1 % on a real CUDA device.

    CUDA chooses other kernels for other numbers of experts. The 1 % is of the logits' standard
    deviation.
    """
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    if gpu.device.backend is CUDA and not is_standin(gpu):
        np.testing.assert_allclose(got, expected, atol=1e-2 * float(expected.std()))
    else:
        differing = int((got != expected).sum())
        assert differing == 0, f"{differing} of {got.size} logits differ"


def assert_close(got: Logits, expected: Logits, within: float = np.inf) -> None:
    """Check that logits [n_rows, n_vocab] differ only by rounding.

    In 90 % of the rows, the largest difference is at most `within` standard deviations of the
    logits. The CPU rounds activations to 8 bits, and a GPU rounds them differently or not at all.
    Rounding decides near-ties of random routers, so a few rows may use another expert.
    """
    off = np.abs(got - expected).max(axis=1) / expected.std()
    assert np.quantile(off, 0.9) < within, off
    alike = [np.corrcoef(mine, its)[0, 1] for mine, its in zip(got, expected, strict=True)]
    assert np.median(alike) > 0.99
    assert min(alike) > 0.5
