"""Saves a draft model's states of slots' texts beside the target's, and prices the draft's cells.

Without its state, the draft model would read a whole conversation again that comes back from RAM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Protocol, runtime_checkable

from offload.decode import SMALL_BATCH
from offload.engine import Engine
from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.cells import Cells
from offload.plan.cell_times import CellTimes
from specdec.drafters.memory import DraftMemory
from specoffload.opening.draft_model import DraftModel
from specoffload.slots.choosing import SavedDraft

log = logging.getLogger("specoffload.slots")


class SavableDraft(Protocol):
    """A draft model whose sequences can be saved: libllama's or torch's."""

    def length(self, sequence: int) -> int: ...
    def rewind(self, sequence: int, length: int) -> None: ...
    def save(self, sequence: int) -> bytes: ...
    def load(self, sequence: int, state: bytes, tokens: Sequence[int]) -> None: ...
    def saved_bytes(self, sequence: int) -> int: ...


@runtime_checkable
class SavedInParts(Protocol):
    """A draft model whose sequences are saved and loaded in parts: libllama's."""

    def saving(self, sequence: int) -> Generator[None, None, tuple[bytes, tuple[bytes, ...]]]: ...
    def loading(
        self, sequence: int, state: bytes, tokens: Sequence[int], parts: Sequence[bytes] = ()
    ) -> Iterator[None]: ...


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
        saving = self.saving(sequence)
        while True:
            try:
                next(saving)
            except StopIteration as e:
                saved: SavedDraft | None = e.value
                return saved

    def saving(self, sequence: int) -> Generator[None, None, SavedDraft | None]:
        """Do what `saved` does, and yield after each part if the model is saved in parts."""
        try:
            tokens = () if self._memory is None else self._memory.settled(sequence)
            if not tokens:
                return None
            if not isinstance(self._model, SavedInParts):
                return SavedDraft(tokens, self._model.save(sequence))
            state, parts = yield from self._model.saving(sequence)
            return SavedDraft(tokens, state, parts)
        except (DeviceFailed, DoesNotFit) as e:
            log.warning("what the draft model holds is not kept with a prompt: %s", e)
            return None

    def load(self, sequence: int, saved: SavedDraft) -> None:
        """Restore what the model held. If that fails, the model reads the text again."""
        for _ in self.loading(sequence, saved):
            pass

    def loading(self, sequence: int, saved: SavedDraft) -> Iterator[None]:
        """Do what `load` does, and yield after each part if the model is loaded in parts."""
        if self._memory is None:
            return
        self._memory.loaded(sequence, ())  # true of no part, if the rest is never loaded
        try:
            if isinstance(self._model, SavedInParts):
                yield from self._model.loading(sequence, saved.state, saved.tokens, saved.parts)
            else:
                self._model.load(sequence, saved.state, saved.tokens)
        except (DeviceFailed, DoesNotFit) as e:
            n = len(saved.tokens)
            log.warning("the draft model reads %d tokens again that were kept: %s", n, e)
            return
        self._memory.loaded(sequence, saved.tokens)


class DraftCells:
    """Prices the cells that idle slots hold in a draft model's cache.

    Each of the model's decodes passes over them. How many it makes in the next step is not known,
    so a step is priced as if it drafted as many tokens as the one before.
    """

    def __init__(self, cells: Cells, times: CellTimes, n_decoded: Callable[[], int]) -> None:
        """`n_decoded` returns how many tokens the model has decoded so far."""
        self._cells, self._times, self._n_decoded = cells, times, n_decoded
        self._n_before = n_decoded()
        self._freed: dict[int, float] = {}  # by idle slot: cells that would leave with it

    def look(self, idle: Collection[int], busy: Collection[int]) -> None:
        """Count the cells of `idle` slots that `busy` ones do not hold."""
        self._freed = {slot: self._cells.freed_by(slot, busy) for slot in idle}

    def rents_s(self) -> dict[int, float]:
        """Return by idle slot the seconds that it adds to the drafts of a step."""
        n_before, self._n_before = self._n_before, self._n_decoded()
        n_tokens = self._n_before - n_before
        if n_tokens <= 0:
            return {}
        # Drafted tokens are decoded one by one, and those of a prompt in one batch.
        n_decodes, n_each = (n_tokens, 1) if n_tokens <= SMALL_BATCH else (1, n_tokens)
        end = self._cells.end
        return {
            slot: n_decodes * self._times.rent_s(end, n, n_each)
            for slot, n in self._freed.items()
            if n >= 1.0
        }


def draft_cells(draft: DraftModel | None, memory: DraftMemory | None) -> DraftCells | None:
    """Return what prices the cells of a draft model, None if its sequences share none.

    In torch, each sequence has cells of its own.
    """
    if memory is None or not isinstance(draft, Engine):
        return None
    times = CellTimes(draft.layout, draft.opened.threads.n_threads)
    return DraftCells(draft.sequences.cells, times, lambda: memory.n_rows)
