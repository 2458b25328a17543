"""One decode on an engine's context, with its threads bound and its trace told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from offload.ggml.llama import Context
from offload.nodes.threads import PinnedThreads
from offload.streaming.device import StreamingDevice


class Decoder:
    """The decoding that `Sequences` needs."""

    def __init__(
        self,
        context: Context,
        threads: PinnedThreads | None,
        device: StreamingDevice | None,
        n_ubatch: int,
    ) -> None:
        self._context, self._threads, self._device = context, threads, device
        self._n_ubatch = n_ubatch

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> NDArray[np.float32]:
        """Logits [number wanted, n_vocab]. Raises what `Context.decode` raises."""
        with self._threads.computing(len(tokens)) if self._threads else nullcontext():
            device = self._device
            if device is not None:
                device.expect(min(len(tokens), self._n_ubatch))
            if device is None or not device.trace:
                return self._context.decode(tokens, positions, sequences, wanted)
            device.decoding(True)
            try:
                return self._context.decode(tokens, positions, sequences, wanted)
            finally:
                device.decoding(False)
