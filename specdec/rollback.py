"""Taking back what verification appended and acceptance refused.

Where the memory can be cut, that is one rewind. Recurrent and hybrid memory cannot: a checkpoint
is taken before verification, restored on partial acceptance, and the accepted prefix replayed
without asking for logits, so that it is never verified twice (E01, E05; MECHANISMS 8.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.types import Target


class Rollback:
    """One verification of `sequence`. Create it before extending; call `keep` afterwards."""

    __slots__ = ("_checkpoint", "_length", "_sequence", "_target")

    def __init__(self, target: Target, sequence: int, n_drafted: int) -> None:
        self._target = target
        self._sequence = sequence
        self._length = target.length(sequence)
        needs_checkpoint = n_drafted > 0 and not target.can_rewind
        self._checkpoint = target.checkpoint(sequence) if needs_checkpoint else None

    def keep(self, fed: Sequence[int], n: int) -> None:
        """Keep the first `n` of the tokens fed since."""
        if n == len(fed):
            return
        target, sequence = self._target, self._sequence
        if self._checkpoint is None:
            target.rewind(sequence, self._length + n)
            return
        target.restore(sequence, self._checkpoint)
        if n:
            target.extend(sequence, fed[:n], 0)

    def undo(self) -> None:
        """Back to where it began, as far as the memory allows; used when a round fails."""
        if self._target.length(self._sequence) <= self._length:
            return
        if self._checkpoint is not None:
            self._target.restore(self._sequence, self._checkpoint)
        elif self._target.can_rewind:
            self._target.rewind(self._sequence, self._length)
