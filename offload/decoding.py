"""Decodes on an engine's contexts: for logits, with its threads and device; and for embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from offload.errors import DoesNotFit
from offload.ggml.library.callback import Pending
from offload.ggml.llama import Context, EmbeddingContext, Model
from offload.plan.context import POOLINGS, ContextOptions
from offload.sequences import Decode
from offload.streaming.device import StreamingDevice
from offload.threads import EngineThreads


class Decoder:
    """The decoding that `Sequences` needs."""

    def __init__(
        self,
        context: Context,
        threads: EngineThreads | None,
        device: StreamingDevice | None,
        n_ubatch: int,
    ) -> None:
        self._context, self._threads, self._device = context, threads, device
        self._n_ubatch = n_ubatch

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool],
    ) -> NDArray[np.float32]:
        """Logits [number wanted, n_vocab]. Raises what `Context.decode` raises."""
        device, threads, n_tokens = self._device, self._threads, len(tokens)
        if device is not None:
            device.expect(min(n_tokens, self._n_ubatch))
            if device.trace:
                device.decoding(True)
        start_s = perf_counter()
        try:
            if threads is None or not threads.is_bound:
                rows = self._context.decode(tokens, positions, sequences, wanted)
            else:
                with threads.computing(n_tokens):
                    rows = self._context.decode(tokens, positions, sequences, wanted)
        finally:
            if device is not None and device.trace:
                device.decoding(False)
        if threads is not None:
            threads.decoded(n_tokens, perf_counter() - start_s)
        return rows


class Embedder:
    """Embeds one text at a time, in a context of its own. Close it before the model.

    An embedding is made of the model's last hidden states. llama.cpp pools them within one ubatch,
    so a longer text cannot be embedded.
    """

    def __init__(
        self, model: Model, options: ContextOptions, pooling: str, pending: Pending
    ) -> None:
        """`options` are those of the context that generates. Raises DoesNotFit."""
        n = min(options.n_ubatch, options.n_ctx)
        own = replace(
            options, n_ctx=n, n_batch=n, n_ubatch=n, n_sequences=1, n_outputs=n, n_rs_seq=0
        )
        self.pooling = pooling
        self.n_most = n  # most tokens of a text
        self.context = EmbeddingContext(model, own, pending, POOLINGS.index(pooling))
        self.decode: Decode = self.context.decode

    def close(self) -> None:
        self.context.close()

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding [1, width], or [number of tokens, width] without pooling.

        Embeddings are not normalised. Raises DoesNotFit for more than `n_most` tokens.
        """
        n = len(tokens)
        if n > self.n_most:
            raise DoesNotFit(
                f"a text of {n} tokens cannot be embedded: at most {self.n_most} are read at once; "
                "raise --ubatch-size"
            )
        try:
            return self.decode(tokens, range(n), [0] * n, [True] * n)
        finally:
            self.context.remove(0, 0)
