"""Counts KV cells that rejected tokens have left behind."""

from __future__ import annotations

from offload.sequences.sequences import Sequences


class SurplusCells:
    """A count of KV cells beyond one for each token that a sequence holds.

    A rewind that does not remove rejected tokens leaves such cells (llama.cpp #19493). They are
    counted by the size of a sequence's state, so nothing is copied.
    """

    def __init__(self, sequences: Sequences, n_sequences: int) -> None:
        """Decodes two tokens in sequence 0, which must be empty, and removes them."""
        self._sequences, self._n_sequences = sequences, n_sequences
        sizes = []
        for _ in range(2):
            sequences.extend(0, [0], 0)
            sizes.append(sequences.state_bytes(0))
        sequences.rewind(0, 0)
        self._cell_bytes = sizes[1] - sizes[0]
        self._other_bytes = sizes[0] - self._cell_bytes

    def count(self) -> int | None:
        """The surplus cells now; None if the memory has no cells, or drops those of old tokens."""
        if self._cell_bytes <= 0 or not self._sequences.saves_all:
            return None
        total = 0
        for sequence in range(self._n_sequences):
            if length := self._sequences.length(sequence):
                size = self._sequences.state_bytes(sequence) - self._other_bytes
                total += round(size / self._cell_bytes) - length
        return total
