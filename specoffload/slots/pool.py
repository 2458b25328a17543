"""The slots of a target, and the prompts of reused slots in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from offload.errors import DeviceFailed, DoesNotFit
from offload.sequences.sequences import Sequences
from specoffload.slots.choosing import (
    PromptStore,
    SlotState,
    Source,
    StoredPrompt,
    choose,
    common,
)
from specoffload.slots.slot import Slot

log = logging.getLogger("specoffload.slots")


class SlotPool:
    """Prepares slots for requests, and moves prompts between slots and host memory."""

    def __init__(
        self,
        slots: Sequence[Slot],
        sequences: Sequences,
        store_bytes: int | None,
        similar: float,
        keeping: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`store_bytes` limits the host memory for prompts of reused slots (None: no limit, 0: keep
        none). `similar` is passed to `choose`. A prompt is saved in a context of `keeping`."""
        self._keeping = keeping
        self._slots, self._sequences, self._similar = slots, sequences, similar
        self.store = PromptStore(store_bytes, can_cut=sequences.can_rewind)
        self._can_keep = True  # False after a prompt could not be kept in host memory

    def prepared(
        self,
        tokens: Sequence[int],
        texts: Mapping[int, Sequence[int]],
        wanted: int,
        *,
        reuses: bool,
        is_alone: bool,
        drafts: bool,
    ) -> Slot | None:
        """Return an idle slot prepared for the prompt `tokens`, or None if all are busy.

        The slot gets the longest beginning of the prompt that a slot or the store holds, if the
        request `reuses` prompts. `texts` has the texts of busy slots by number. `wanted` is the
        number of the only allowed slot (-1: any). `is_alone`: no other request runs or waits.
        `drafts`: the request may draft.
        """
        states, n_stored = self._states(tokens, texts), self.store.reusable(tokens)
        if not reuses:
            states, n_stored = [s.without_reuse() for s in states], 0
        choice = choose(states, len(tokens), n_stored, wanted, self._similar)
        if choice is None:
            return None
        slot = self._slots[choice.number]
        stored = self.store.take(tokens) if choice.source is Source.STORE else None
        if choice.keep:
            self.keep(slot)
        if stored is not None or not reuses:
            slot.clear()
        elif choice.source is Source.SLOT:
            slot.share(self._slots[choice.other], states[choice.other].n_shareable, tokens)
        if is_alone:
            self._clear_others(slot, reuses=reuses, drafts=drafts)
        if stored is not None:
            self._load(slot, stored)
        return slot

    def _clear_others(self, slot: Slot, *, reuses: bool, drafts: bool) -> None:
        """Move the prompts of all other slots to host memory, for a request that runs alone.

        The rounding of attention depends on the number and positions of used cells. Prompts in
        other slots would therefore change the logits of the request.

        A request that reuses prompts clears only slots whose prompts fit in host memory. It clears
        no slot if sliding windows cannot be saved whole, or if it drafts: its logits depend on the
        lengths of its drafts anyway, and a draft model would have to read the prompts again.
        """
        if reuses and (drafts or not self._sequences.saves_all):
            return
        for other in self._slots:
            if other is slot or not other.n_held:
                continue
            if not reuses or self.store.fits(other.saved_bytes):
                self.keep(other)
                other.clear()

    def _load(self, slot: Slot, stored: StoredPrompt) -> None:
        """Load a stored prompt into an empty slot, and clear idle slots until it fits.

        Loads nothing if it still does not fit. The prompt is then evaluated once there is room.
        """
        while sum([s.n_held for s in self._slots]) + len(stored.tokens) > self._sequences.n_ctx:
            idle = self.least_used()
            if idle is None:
                return
            self.keep(idle)
            idle.clear()
        with suppress(DeviceFailed):
            slot.load(stored.tokens, stored.state, stored.checkpoints)

    def least_used(self) -> Slot | None:
        """Return the idle slot with tokens that was used longest ago, or None."""
        idle = [slot for slot in self._slots if not slot.is_busy and slot.n_held]
        return min(idle, key=lambda s: s.last_used, default=None)

    def _states(self, tokens: Sequence[int], texts: Mapping[int, Sequence[int]]) -> list[SlotState]:
        """Return the state of every slot for the prompt `tokens`, as `choose` needs it."""
        states = []
        for slot in self._slots:
            n_held = slot.n_held
            held = texts[slot.number][:n_held] if slot.is_busy else slot.tokens
            n = common(held, tokens)
            states.append(
                SlotState(
                    number=slot.number,
                    is_busy=slot.is_busy,
                    n_held=n_held,
                    n_reusable=0 if slot.is_busy else slot.reusable(tokens),
                    n_shareable=n if self._sequences.can_share(slot.number, n) else 0,
                    last_used=slot.last_used,
                )
            )
        return states

    def keep(self, slot: Slot) -> None:
        """Save a slot's prompt to host memory if there is room.

        Only the first of several failures in a row is logged.
        """
        try:
            with self._keeping():
                self.store.add(slot.tokens, slot.checkpoints, slot.save)
        except (DeviceFailed, DoesNotFit, MemoryError) as e:
            if self._can_keep:
                why = str(e) or "the memory is full"
                log.warning("a prompt of %d tokens is not kept: %s", len(slot.tokens), why)
            self._can_keep = False
        else:
            self._can_keep = True
