"""Embeddings: the states that a model ends with, one vector for a text or one for each token.

They come out of a second context of the same weights. llama.cpp pools within one ubatch, so a text
that is longer cannot be embedded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from offload.errors import DoesNotFit
from offload.ggml.library.callback import Pending
from offload.ggml.llama import ContextOptions, EmbeddingContext, Model
from offload.plan.pooling import POOLINGS
from offload.sequences import Decode


class Embedder:
    """Embeds one text at a time. Close it before the model."""

    def __init__(
        self, model: Model, options: ContextOptions, pooling: str, pending: Pending
    ) -> None:
        """`options` are those of the context that generates. Raises DoesNotFit."""
        n = min(options.n_ubatch, options.n_ctx)
        own = replace(
            options, n_ctx=n, n_batch=n, n_ubatch=n, n_sequences=1, n_outputs=n, n_rs_seq=0
        )
        self.pooling = pooling
        self.n_most = n  # tokens of a text
        self.context = EmbeddingContext(model, own, pending, POOLINGS.index(pooling))
        self.decode: Decode = self.context.decode

    def close(self) -> None:
        self.context.close()

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[1, width], or without pooling [number of tokens, width]; of any length.

        Raises DoesNotFit for a text that is too long.
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
