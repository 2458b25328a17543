"""Makes the functions that decode on an engine's contexts, with its threads and device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from offload.ggml.llama import Context
from offload.ggml.row_context import RowContext
from offload.native_experts import NativeExperts
from offload.row_draft import Step
from offload.sequences import Decode
from offload.streaming.device import StreamingDevice
from offload.threads import EngineThreads


def decoder(
    context: Context,
    threads: EngineThreads | None,
    devices: Sequence[StreamingDevice],
    n_ubatch: int,
    native: NativeExperts | None = None,
) -> Decode:
    """Return the decode function for `Sequences`. It raises the errors of `Context.decode`."""

    def decode(
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool],
    ) -> NDArray[np.float32]:
        n_tokens = len(tokens)
        if native is not None:
            native.expect(tokens, n_ubatch)
        for device in devices:
            device.expect(tokens, n_ubatch)
        if devices and devices[0].trace:
            devices[0].decoding(True)
        start_s = perf_counter()
        try:
            if threads is None or not threads.is_bound:
                rows = context.decode(tokens, positions, sequences, wanted)
            else:
                with threads.computing(n_tokens):
                    rows = context.decode(tokens, positions, sequences, wanted)
        finally:
            if devices and devices[0].trace:
                devices[0].decoding(False)
        if len(devices) > 1:
            for device in devices:
                device.is_idle = True in wanted  # logits were read, so all work is complete
        if threads is not None:
            threads.decoded(n_tokens, perf_counter() - start_s)
        return rows

    return decode


def row_step(
    context: RowContext, threads: EngineThreads, devices: Sequence[StreamingDevice]
) -> Step:
    """Return the decode function for drafts from rows, which calls `RowContext.step`."""

    def step(
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool],
        rows: NDArray[np.float32],
        *,
        taken: bool,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        for device in devices:
            device.expect(tokens, len(tokens))
        with threads.computing(len(tokens)) if threads.is_bound else nullcontext():
            return context.step(tokens, positions, sequences, wanted, rows, taken=taken)

    return step
