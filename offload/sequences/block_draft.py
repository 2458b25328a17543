"""Drafts a block of tokens in one pass, by a block draft beside its target.

`BlockDraft` follows the target as `RowDraft` does, but needs the row of each token itself, and not
of the token before it. It holds the rows of the target's tokens as keys and values. A block sees
them, and leaves nothing in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.decode import Batch, Rows
from offload.ggml.block_context import BlockContext
from offload.plan.block_draft import BlockShape
from offload.sequences.row_draft import UNKNOWN, RowDraft, RowStep


@dataclass(frozen=True)
class DraftedBlock:
    """The result of one pass for one sequence, from which tokens are read place by place.

    `logits` [n_tokens, n_vocab]: those of DFlash and DSpark, by drafted token. `scores` [n_tokens,
    width]: the rows of DFlash2's lattice, or of DSpark's confidence. Empty arrays are not used.
    """

    shape: BlockShape
    n_tokens: int
    n_vocab: int
    logits: Rows
    scores: Rows

    def place(self, index: int, before: int | None) -> tuple[Rows, float | None]:
        """Return the logits [n_vocab] of a drafted token, and its confidence; None: none is known.

        `before` is the drafted token before it, None for the first. Only DFlash2 depends on it.
        """
        if self.shape.n_candidates:
            return self._of_lattice(index, before), None
        has_confidence = self.shape.has_confidence
        confidence = float(self.scores[index, 0]) if has_confidence else None
        return self.logits[index], confidence

    def successors(self, index: int, before: int | None) -> list[tuple[int, float]]:
        """Return (token, p) of a place's candidates, likeliest first. Needs a lattice.

        `before` is the token before them, None for the first place. `p` is the softmax of their
        scores.
        """
        tokens, scores = self._candidates(index, before)
        order = np.argsort(-scores, kind="stable")
        e = np.exp(scores[order] - scores[order[0]], dtype=np.float64)
        return list(zip(tokens[order].tolist(), (e / e.sum()).tolist(), strict=True))

    def _of_lattice(self, index: int, before: int | None) -> Rows:
        """The scores of a place's candidates, as logits of the whole vocabulary."""
        tokens, scores = self._candidates(index, before)
        logits = np.full(self.n_vocab, -np.inf, np.float32)
        logits[tokens] = scores
        return logits

    def _candidates(self, index: int, before: int | None) -> tuple[NDArray[np.int64], Rows]:
        """The candidates of a place, and their scores after the token `before`.

        A row of the lattice has the candidates, and then their scores after each candidate of the
        place before. Those of the first place are the same after all of them. If `before` is no
        candidate, the scores after the first one are taken.
        """
        k, row = self.shape.n_candidates, self.scores[index]
        at = 0
        if before is not None:
            places = np.flatnonzero(self.scores[index - 1, :k] == before)
            at = int(places[0]) if len(places) else 0
        return row[:k].astype(np.int64), row[k * (1 + at) : k * (2 + at)]


class BlockDraft(RowDraft):
    """A drafter that computes whole blocks, with the interface of specdec's `BlockRowModel`."""

    def __init__(self, context: BlockContext, step: RowStep, n_ctx: int, n_sequences: int) -> None:
        super().__init__(context, step, n_ctx, n_sequences)
        self.shape = context.shape
        n_block = self.shape.first_place + self.shape.n_most
        self.n_outputs = min(n_sequences, self.n_batch // n_block)  # sequences of a pass

    @property
    def most_drafted(self) -> int | None:
        return self.shape.n_most

    @property
    def has_lattice(self) -> bool:
        """True if a place's candidates are scored after each candidate of the place before."""
        return self.shape.n_candidates > 0

    def draft_blocks(
        self, parts: Sequence[tuple[int, Sequence[int]]], n_tokens: int
    ) -> list[DraftedBlock]:
        """Draft `n_tokens` tokens for each sequence, all in one pass if there is room.

        A part is (sequence, tokens of `tail`). Raises the errors of a decode.
        """
        self._take_in_together([sequence for sequence, _ in parts])
        blocks: list[DraftedBlock] = []
        for start in range(0, len(parts), self.n_outputs):
            blocks += self._pass(parts[start : start + self.n_outputs], n_tokens)
        return blocks

    def _pass(
        self, parts: Sequence[tuple[int, Sequence[int]]], n_tokens: int
    ) -> list[DraftedBlock]:
        shape = self.shape
        n_block, tokens = shape.first_place + n_tokens, list[int]()
        positions, sequences = list[int](), list[int]()
        for sequence, tail in parts:
            length = len(self._texts[sequence].held)
            tokens += [tail[-1], *[shape.mask_token] * (n_block - 1)]
            positions += range(length, length + n_block)
            sequences += [sequence] * n_block
        n = len(tokens)
        wanted = [not shape.n_candidates] * n
        batch = Batch(tokens, positions, sequences, wanted, n, is_draft=True)
        try:
            logits, scores = self._step(batch, self._no_rows(0), taken=False)
        finally:
            for sequence, _ in parts:
                self._remove(sequence, len(self._texts[sequence].held))
        ends = range(n_block, n + 1, n_block)
        return [
            DraftedBlock(
                shape,
                n_tokens,
                self.n_vocab,
                logits[end - n_tokens : end],
                scores[end - n_tokens : end],
            )
            for end in ends
        ]

    def extend_batch(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> list[Rows]:
        """Draft a block for each sequence. Returns the logits [1, n_vocab] of its first token.

        A part is (sequence, tokens of `tail`, 1). Raises the errors of a decode.
        """
        blocks = self.draft_blocks([(s, tail) for s, tail, _ in parts], self.shape.n_most)
        return [block.place(0, None)[0][None] for block in blocks]

    # -- following the target ----------------------------------------------------------------------

    def _take_in_together(self, sequences: Sequence[int]) -> None:
        """Take the waiting rows of several sequences in one decode, if they fit."""
        texts = [(s, self._texts[s]) for s in sequences if self._texts[s].waiting]
        if len(texts) < 2 or sum([len(text.waiting) for _, text in texts]) > self.n_batch:
            self.take_in(sequences)
            return
        tokens, positions, of = list[int](), list[int](), list[int]()
        for sequence, text in texts:
            start, n = len(text.held), len(text.waiting)
            self._remove(sequence, start)  # a stopped decode may have left cells there
            tokens += text.waiting
            positions += range(start, start + n)
            of += [sequence] * n
        rows = np.concatenate([text.rows[1:] for _, text in texts])
        self._inject(tokens, positions, of, rows)
        for _, text in texts:
            self._settle(text, len(text.waiting))

    def _compute(
        self, sequence: int, tokens: Sequence[int], start: int, rows: Rows, head: int
    ) -> None:
        n = len(tokens)
        self._inject(tokens, range(start, start + n), [sequence] * n, rows[1:])

    def _inject(
        self, tokens: Sequence[int], positions: Sequence[int], of: Sequence[int], rows: Rows
    ) -> None:
        n = len(tokens)
        batch = Batch(tokens, positions, of, [False] * n, n, is_draft=True)
        self._step(batch, rows, taken=True)

    def row(self, sequence: int, length: int) -> Rows | None:
        """Return the target's row of the last of the first `length` tokens, or zeros if unknown.

        The rows of tokens that are held are never needed again. None if fewer tokens are known.
        """
        text = self._texts[sequence]
        if length > len(text.held) + len(text.waiting):
            return None
        found = super().row(sequence, length)
        return self._no_row() if found is None else found

    def _begin(self, sequence: int, held: list[int], row: Rows | None = None) -> None:
        super()._begin(sequence, held, row)
        self.n_unknown_rows += held.count(UNKNOWN)

    def _count_unknown(self, text: object) -> None:
        """Do nothing, since `_begin` counts the tokens whose rows are not known."""
