"""Taking back what verification appended and acceptance refused.

Where the memory can be cut, that is one rewind; so it is for a recurrent one with snapshots of the
last tokens. Other recurrent and hybrid memory cannot: a checkpoint is taken before verification,
restored on partial acceptance, and the accepted prefix replayed without asking for logits, so that
it is never verified twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.types import Target


class Rollback:
    """One verification of `sequence`. Create it before extending; call `keep` afterwards."""

    __slots__ = ("_checkpoint", "_length", "_sequence", "_target")

    def __init__(self, target: Target, sequence: int, n_drafted: int, n_droppable: int) -> None:
        """`n_droppable` as Target's, for the decode that verifies."""
        self._target = target
        self._sequence = sequence
        self._length = target.length(sequence)
        needs_checkpoint = not target.can_rewind and n_drafted > n_droppable
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
        """Back to where it began; used when a round fails."""
        target, sequence = self._target, self._sequence
        if self._checkpoint is None:
            take_back(target, sequence, self._length)
        elif target.length(sequence) > self._length:
            target.restore(sequence, self._checkpoint)


def take_back(target: Target, sequence: int, length: int) -> None:
    """Back to `length` after a decode that may have failed, without a checkpoint.

    A recurrent memory keeps the first token fed, which was the last of the history: what it holds
    is history all the same.
    """
    if target.length(sequence) > length:
        target.rewind(sequence, length + (0 if target.can_rewind else 1))
