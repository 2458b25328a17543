"""The log of single rounds that -vv shows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from offload.sequences import Sequences
from specdec.types import Round

N_CANDIDATES = 3  # shown at each position of a draft

log = logging.getLogger("specoffload.speculation")


class DuplicateCells:
    """Counts attention cells beyond one for each token that a sequence holds.

    They exist if a rollback leaves cells of rejected tokens (llama.cpp #19493). The number of cells
    follows from the size of a sequence's state, so nothing has to be copied.
    """

    def __init__(self, sequences: Sequences, n_sequences: int) -> None:
        """Decodes two tokens in sequence 0, which must be empty, and forgets them."""
        self._sequences, self._n_sequences = sequences, n_sequences
        sizes = []
        for _ in range(2):
            sequences.extend(0, [0], 0)
            sizes.append(sequences.saved_bytes(0))
        sequences.rewind(0, 0)
        self._cell_bytes = sizes[1] - sizes[0]
        self._other_bytes = sizes[0] - self._cell_bytes

    def count(self) -> int | None:
        """The present number of duplicates; None if cells cannot be counted.

        That is so for a memory without cells, or one that drops tokens outside sliding windows.
        """
        if self._cell_bytes <= 0 or not self._sequences.saves_all:
            return None
        total = 0
        for sequence in range(self._n_sequences):
            if length := self._sequences.length(sequence):
                size = self._sequences.saved_bytes(sequence) - self._other_bytes
                total += round(size / self._cell_bytes) - length
        return total


class RoundLog:
    """Writes a line for each round, and one for each drafted position."""

    def __init__(self, sequences: Sequences, n_sequences: int, piece: Callable[[int], str]) -> None:
        self._cells = DuplicateCells(sequences, n_sequences)
        self._piece = piece
        self._n_rounds = 0

    def add(self, round_: Round) -> None:
        draft = round_.draft
        self._n_rounds += 1
        probs = (*draft.probs, *(p for _, p in draft.dropped))
        size, best = len(probs), len(draft.tokens)
        n_twice = self._cells.count()
        log.debug(
            "round %d: %d drafted by %s, best %d, gap %d, P %.3f, %d accepted, draft %.2f ms, "
            "verify %.2f ms, duplicate KV cells %s: %s",
            self._n_rounds,
            size,
            draft.source,
            best,
            size - best if best else 0,
            math.prod(probs),
            round_.n_accepted,
            1e3 * round_.draft_s,
            1e3 * round_.verify_s,
            "not counted" if n_twice is None else n_twice,
            draft.decision.reason,
        )
        for position, candidates in enumerate(draft.candidates):
            words = ", ".join(f"{token} {self._piece(token)!r} {p:.3f}" for token, p in candidates)
            log.debug("  position %d: %s", position, words)
