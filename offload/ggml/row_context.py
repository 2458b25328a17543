"""Contexts that draft from a target's hidden rows.

In those of MTP layers and EAGLE-3 files each token comes with a hidden row: one that the target
computed at the position before it, or, for drafted tokens, the row that this context gave there.
They compute (token, row) -> (logits, row). Block drafts have a context of another kind
(`block_context.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offload.decode import Batch, Rows
from offload.ggml.context import Context, LlamaBatch
from offload.ggml.library.callback import Pending
from offload.ggml.model import Model
from offload.times.context_memory import ContextOptions

_MTP_CONTEXT = 1  # LLAMA_CONTEXT_TYPE_MTP
# Architectures whose graph of an MTP layer drops the hidden rows of tokens without logits.
_CROPPED_ROWS = frozenset({"qwen3next", "mimo2", "step35", "deepseek4"})
# Architectures whose graph writes over the target's hidden rows in decodes with logits. Drafts get
# worse by that.
_OVERWRITTEN_ROWS = frozenset({"deepseek4"})


class RowContext(Context):
    """A context that drafts from the target's rows. Subclasses know which rows it takes."""

    n_heads = 1  # layers that draft one token each; 1: one layer drafts all tokens
    first = 0  # first token of a text that has a row, and thus the first that is computed

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        pending: Pending,
        target: Context,
        *,
        context_type: int = 0,
        layers: Sequence[int] = (),
    ) -> None:
        """`layers`: the target's layers whose inputs are taken. Without, its hidden rows are.

        Raises DoesNotFit.
        """
        super().__init__(model, options, pending, target=target, context_type=context_type)
        self._target, self._layers = target, layers
        # Values of a row that is taken from the target.
        self.taken_width = target.row_width * (len(layers) or 1)

    def follow(self) -> None:
        """Make the target's decodes keep the rows that `take` returns."""
        if self._layers:
            self._target.keep_layer_inputs(self._layers)
        else:
            self._target.keep_rows()

    def take(self, n_rows: int) -> Rows:
        """Return the rows [n_rows, taken_width] of the target's last decode."""
        if self._layers:
            return self._target.layer_inputs(self._layers, n_rows)
        return self._target.rows(n_rows)

    def use_head(self, head: int) -> None:
        """Compute with layer `head` of `n_heads` from now on."""
        raise AssertionError("there is one layer")

    def step(self, batch: Batch, rows: Rows, *, taken: bool) -> tuple[Rows, Rows]:
        """Evaluate tokens with their rows: the target's if `taken`, else rows of this context.

        Returns the logits and the hidden rows of the wanted tokens. Raises what `decode` raises.
        """
        raise NotImplementedError


class _PairContext(RowContext):
    """A context whose tokens come with a row each."""

    _asks_all = (
        False  # True: the graph computes the logits of all tokens, and must give all or none
    )

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        pending: Pending,
        target: Context,
        *,
        context_type: int = 0,
        layers: Sequence[int] = (),
        masked: bool,
    ) -> None:
        """With `masked`, only tokens with logits have rows. Raises DoesNotFit."""
        super().__init__(model, options, pending, target, context_type=context_type, layers=layers)
        self._masked = masked
        self.keep_rows(masked=masked)
        self._in = np.zeros((self.n_batch, self.row_width), np.float32)
        self._batch.take_rows(self._in)

    def step(self, batch: Batch, rows: Rows, *, taken: bool) -> tuple[Rows, Rows]:
        n_tokens, wanted = batch.n_tokens, batch.wanted
        self._in[:n_tokens] = self._fused(rows) if taken else rows
        if self._asks_all and any(wanted):
            batch = replace(batch, wanted=[True] * n_tokens)
        logits = self.decode(batch)
        if not len(logits):
            return logits, self._in[:0]
        if self._masked:
            return logits, self.rows(len(logits))
        kept = np.flatnonzero(wanted)
        return logits if len(logits) == len(kept) else logits[kept], self.rows(n_tokens)[kept]

    def _fused(self, rows: Rows) -> Rows:
        """Return rows of this context's width for rows that were taken from the target."""
        return rows


class MtpContext(_PairContext):
    """A context of the model's layers for multi-token prediction (MTP)."""

    def __init__(
        self, model: Model, options: ContextOptions, pending: Pending, target: Context, kind: str
    ) -> None:
        """`kind` is the model's architecture. Raises DoesNotFit."""
        super().__init__(
            model, options, pending, target,
            context_type=_MTP_CONTEXT, masked=kind in _CROPPED_ROWS,
        )  # fmt: skip
        self.n_heads = model.n_mtp_layers
        self._overwrites = kind in _OVERWRITTEN_ROWS

    def follow(self) -> None:
        super().follow()
        if self._overwrites:
            self._target.add_nothing()

    def use_head(self, head: int) -> None:
        self._lib.llama_set_nextn_layer_offset(self.handle, head)


class EagleContext(_PairContext):
    """A context of an EAGLE-3 file. Its encoder fuses the inputs of several layers of the target.

    The file was trained on pairs of a token and the row before it. So a text's first token is left
    out, and all others have the position of their row.
    """

    first = 1
    _asks_all = True

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        pending: Pending,
        target: Context,
        layers: Sequence[int],
    ) -> None:
        """`layers`: the target's layers whose inputs are fused. Raises DoesNotFit."""
        super().__init__(model, options, pending, target, layers=layers, masked=False)
        self._features = np.zeros((self.n_batch, self.taken_width), np.float32)
        self._encoded = LlamaBatch(self._lib.structs.llama_batch, self.n_batch, 1)
        self._encoded.take_rows(self._features, alone=True)

    def _fused(self, rows: Rows) -> Rows:
        n = len(rows)
        self._features[:n] = rows
        batch = self._encoded.fill([0] * n, range(n), [0] * n, [True] * n)
        if status := self._compute_whole(self._lib.llama_encode, batch, lambda: None):
            self._raise(status, n)
        return self.rows(n)
