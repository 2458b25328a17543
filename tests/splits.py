"""Shared by the tests of split layers: splitters, and engines of which each computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from budgets import limited
from numpy.typing import NDArray

from lab.options import Streaming, engine_options
from offload.engine import Engine, EngineOptions
from offload.schedule.division import SplitCosts
from offload.schedule.splitter import ByCosts, Splitter, all_on_device
from offload.times.min_batch import NEVER, MinBatch

__all__ = ["SPLITTERS", "all_host", "at_random", "logits_of", "sim_options", "split_streaming"]


def flat_costs(copy_s: float, device_s: float = 1.0) -> ByCosts:
    """Costs at which an expert takes the CPU 1 s, however many rows it has."""
    second = np.array([0.0, 1.0, 1.0])
    return ByCosts(SplitCosts(second, device_s * second, 0.0, 0.0, copy_s))


# Copies are so dear that nothing is ever copied into a slot.
all_host = flat_costs(1e6)


def at_random(seed: int) -> ByCosts:
    """Costs at which about half of the missing experts are copied."""
    return flat_costs(np.random.default_rng(seed).uniform(0.6, 1.6), 0.1)


def by_costs() -> Splitter:
    rows_s = np.arange(65) * 1e-4
    return ByCosts(SplitCosts(rows_s, rows_s / 10, 0.0, 0.0, 1e-3, 1.2, 1.1, (0.3, 0.3, 0.4)))


SPLITTERS: dict[str, Callable[[], Splitter]] = {
    "all-host": lambda: all_host,
    "all-device": lambda: all_on_device,
    "random": lambda: at_random(1),
    "by-costs": by_costs,
}


def sim_options(
    streaming: Streaming, min_batch: int = NEVER, *, n_ubatch: int, n_outputs: int
) -> EngineOptions:
    return engine_options(
        device="sim",
        streaming=streaming,
        min_batch=MinBatch(min_batch, min_batch),
        n_ctx=512,
        n_ubatch=n_ubatch,
        n_outputs=n_outputs,
        n_threads=1,
        n_threads_batch=1,
    )


def split_streaming(splitter: Splitter, path: Path, slots: str) -> Streaming:
    """Options with which `splitter` divides layers; `slots` as `limited` takes them, or "all"."""
    streaming = Streaming(hybrid=True, splitter=splitter)
    return streaming if slots == "all" else limited(path, streaming, slots)


def logits_of(engine: Engine, batches: Sequence[int]) -> NDArray[np.float32]:
    """The logits of batches of these sizes, one after the other."""
    return np.concatenate(
        [
            engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
            for n in batches
        ]
    )
