"""Saves and restores what a draft model holds of a slot's text, beside the target's state.

Without that, the draft model would read a whole conversation again that comes back from RAM.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from offload.errors import DeviceFailed, DoesNotFit
from specdec.drafters.memory import DraftMemory
from specoffload.slots.choosing import SavedDraft

log = logging.getLogger("specoffload.slots")


class SavableDraft(Protocol):
    """A draft model whose sequences can be saved: libllama's or torch's."""

    def length(self, sequence: int) -> int: ...
    def rewind(self, sequence: int, length: int) -> None: ...
    def save(self, sequence: int) -> bytes: ...
    def load(self, sequence: int, state: bytes, tokens: Sequence[int]) -> None: ...
    def saved_bytes(self, sequence: int) -> int: ...


class DraftTexts:
    """The sequences of a draft model, one for each slot."""

    def __init__(self, model: SavableDraft, memory: DraftMemory | None) -> None:
        """`memory` knows the model's tokens. None: nothing drafts, so nothing is saved."""
        self._model, self._memory = model, memory

    def clear(self, sequence: int) -> None:
        """Drop what the model holds, which frees its cells."""
        self._model.rewind(sequence, 0)

    def saved_bytes(self, sequence: int) -> int:
        """Return an upper bound of the bytes of the state that `saved` returns."""
        is_saved = self._memory is not None and self._model.length(sequence)
        return self._model.saved_bytes(sequence) if is_saved else 0

    def saved(self, sequence: int) -> SavedDraft | None:
        """Return what the model holds, without drafted tokens.

        None: that is not known, or cannot be saved. Then the model reads the text again.
        """
        try:
            tokens = () if self._memory is None else self._memory.settled(sequence)
            return SavedDraft(tokens, self._model.save(sequence)) if tokens else None
        except (DeviceFailed, DoesNotFit) as e:
            log.warning("what the draft model holds is not kept with a prompt: %s", e)
            return None

    def load(self, sequence: int, saved: SavedDraft) -> None:
        """Restore what the model held. If that fails, the model reads the text again."""
        if self._memory is None:
            return
        try:
            self._model.load(sequence, saved.state, saved.tokens)
        except (DeviceFailed, DoesNotFit) as e:
            n = len(saved.tokens)
            log.warning("the draft model reads %d tokens again that were kept: %s", n, e)
            return
        self._memory.loaded(sequence, saved.tokens)
