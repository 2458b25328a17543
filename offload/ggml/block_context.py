"""The context of a block draft (DFlash, DFlash2 or DSpark; `src/models/dflash.cpp` of llama.cpp).

Its graph has two modes. A batch of rows of the target writes their keys and values into the cache,
at the positions of their tokens. A batch of tokens holds a block for each sequence: the text's last
token and mask tokens, which see the cache and each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from offload.decode import Batch, Rows
from offload.ggml.context import Context, LlamaBatch
from offload.ggml.library.callback import Pending
from offload.ggml.model import Model
from offload.ggml.row_context import RowContext
from offload.plan.block_draft import BlockShape
from offload.times.context_memory import ContextOptions

_MROPE = 8  # LLAMA_ROPE_TYPE_MROPE


class BlockContext(RowContext):
    """A context that takes rows of the target into its cache, and computes blocks of tokens."""

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        pending: Pending,
        target: Context,
        layers: Sequence[int],
        shape: BlockShape,
    ) -> None:
        """`layers`: the target's layers whose inputs are taken. Raises DoesNotFit."""
        super().__init__(model, options, pending, target, layers=layers)
        self.shape = shape
        self._in = np.zeros((self.n_batch, self.taken_width), np.float32)
        self._injected = LlamaBatch(self._lib.structs.llama_batch, self.n_batch, 1)
        has_mrope = self._lib.llama_model_rope_type(model.handle) == _MROPE
        self._injected.take_placed_rows(self._in, has_mrope=has_mrope)
        if shape.n_candidates:
            self.keep_rows()
        elif shape.has_confidence:
            self.keep_rows(masked=True)
        self.attend_causally(shape.is_causal)

    def step(self, batch: Batch, rows: Rows, *, taken: bool) -> tuple[Rows, Rows]:
        """Write the target's `rows` into the cache if `taken`. Otherwise compute blocks of tokens.

        Blocks of a batch must have equally many tokens, and `rows` is not read. Returns the logits
        of all tokens, or none of them with a lattice, and the rows of the lattice or of the
        confidence (`place_scores`). Raises what `decode` raises.
        """
        if taken:
            self._inject(batch, rows)
            return rows[:0], rows[:0]
        logits = self.decode(batch)
        has_rows = self.shape.n_candidates or self.shape.has_confidence
        return logits, self.rows(batch.n_tokens) if has_rows else rows[:0]

    def _inject(self, batch: Batch, rows: Rows) -> None:
        n = batch.n_tokens
        self._in[:n] = rows
        sequences = cast(Sequence[int], batch.sequences)
        filled = self._injected.fill([0] * n, batch.positions, sequences, [False] * n)
        status = self._compute_whole(
            self._lib.llama_decode, filled, lambda: self._take_back(sequences, batch.positions)
        )
        if status != 0:
            self._raise(status, n)
