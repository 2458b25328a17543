"""Options and logits of engines that may use devices of other machines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lab.options import engine_options
from offload.engine import Engine, EngineOptions
from offload.remote.address import RemoteOptions
from offload.times.min_batch import MinBatch

BATCHES = (1, 5, 40, 3, 64, 1)
NO_WORKERS = RemoteOptions()


def options(device: str, remote: RemoteOptions = NO_WORKERS) -> EngineOptions:
    return engine_options(
        device=device, remote=remote, min_batch=MinBatch(1, 1),
        tensor_split=(1.0, 1.0) if remote.workers and device.startswith("sim") else (),
        n_ctx=512, n_ubatch=64, n_outputs=64, n_threads=1, n_threads_batch=1,
    )  # fmt: skip


def logits(engine: Engine, batches: Sequence[int] = BATCHES) -> NDArray[np.float32]:
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for n in batches
    ]
    engine.sequences.rewind(0, 4)
    return np.concatenate([*rows, engine.sequences.extend(0, [7, 8, 9])])
