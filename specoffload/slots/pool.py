"""The slots of a target, and the prompts of reused slots in host memory and on the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Protocol

from offload.errors import DeviceFailed, DoesNotFit
from offload.plan.cell_times import CellTimes
from offload.sequences.saved_state import is_in_parts
from offload.sequences.sequences import Sequences
from specoffload.slots.choosing import (
    WORTH_TOKENS,
    PromptStore,
    SlotChoice,
    SlotState,
    Source,
    StoredPrompt,
    choose,
    common,
)
from specoffload.slots.draft_texts import DraftCells
from specoffload.slots.idle_cells import IdleCells
from specoffload.slots.moves import ComingPrompt, LeavingPrompt, advance_for
from specoffload.slots.prompt_files import PromptFolder
from specoffload.slots.slot import Slot

_MOST_READS = 3  # files that are tried for one prompt

log = logging.getLogger("specoffload.slots")


class PromptPlace(Protocol):
    """A place for prompts that outlasts the process: a folder on the disk, or a shelf in RAM."""

    n_written: int

    def keep_now(self, prompt: StoredPrompt, on_written: Callable[[float], None]) -> None: ...
    def close(self) -> None: ...


class PromptSlots:
    """Prepares slots for requests, and moves prompts between slots, host memory and the disk."""

    def __init__(
        self,
        slots: Sequence[Slot],
        sequences: Sequences,
        store_bytes: int | None,
        similar: float,
        times: CellTimes,
        keeping: Callable[[], AbstractContextManager[None]] = nullcontext,
        folder: PromptFolder | None = None,
        *,
        clears_idle: bool = True,
        draft_cells: DraftCells | None = None,
    ) -> None:
        """`store_bytes` limits the host memory for prompts of reused slots (None: no limit, 0: keep
        none). What it has no room for goes to `folder`. `similar` is passed to `choose`. A prompt
        is saved in a context of `keeping`. `times` prices idle slots' cells, and `draft_cells`
        those of a draft model.
        `clears_idle`: idle slots leave the cells for requests that run alone, and by their price.
        """
        self._keeping = keeping
        self._slots, self._sequences, self._similar = slots, sequences, similar
        self._folder = folder
        self.store = PromptStore(
            store_bytes,
            can_cut=sequences.can_cut_loaded,
            on_evicted=None if folder is None else folder.keep,
        )
        self._clears_idle = clears_idle
        self.idle = IdleCells(
            slots, sequences.cells, times, self._move_out, moves=clears_idle,
            in_parts=sequences.saves_parts,
            draft=None if sequences.has_own_cells else draft_cells,
        )  # fmt: skip
        self._leaving: dict[int, LeavingPrompt] = {}  # by slot, in the order in which they began
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
        salt: str = "",
        in_parts: bool = False,
    ) -> Slot | ComingPrompt | None:
        """Return an idle slot prepared for the prompt `tokens`, or None if all are busy.

        With `in_parts`, a kept prompt is perhaps not copied yet. The caller then copies its parts.
        A kept prompt that does not fit beside busy slots stays in the store, and is evaluated.

        The slot gets the longest beginning of the prompt that a slot, the store or the folder
        holds, if the request `reuses` prompts. `texts` has the texts of busy slots by number.
        `wanted` is the number of the only allowed slot (-1: any). `is_alone`: no other request runs
        or waits. `drafts`: the request may draft. Nothing with another `salt` is found.
        """
        states, n_stored = self._states(tokens, texts, salt), self.store.reusable(tokens, salt)
        if not reuses:
            states, n_stored = [s.without_reuse() for s in states], 0
        choice, stored = self._chosen(states, tokens, n_stored, wanted, salt, reads=reuses)
        if choice is None:
            return None
        slot = self._slots[choice.number]
        slot.n_from_disk, slot.copied_back_s = 0, 0.0
        if choice.source is Source.STORE:
            stored = self.store.take(tokens, salt)
        is_from_disk = choice.source is Source.DISK
        with self._not_lost(None if is_from_disk else stored):
            if choice.keep:
                self.keep(slot)
            if stored is not None or not reuses:
                slot.clear()
            elif choice.source is Source.SLOT:
                slot.share(self._slots[choice.other], states[choice.other].n_shareable, tokens)
            if is_alone:
                self._clear_others(slot, reuses=reuses, drafts=drafts)
            if stored is None:
                return slot
            has_room = self.make_room(slot, len(stored.tokens))
        if not has_room:
            if not is_from_disk:
                self._put_back(stored)
            return slot
        if in_parts and is_in_parts(stored.state):
            return ComingPrompt(slot, stored, is_from_disk=is_from_disk)
        self._load(slot, stored)
        slot.n_from_disk = slot.n_held if is_from_disk else 0
        return slot

    def _chosen(
        self, states: Sequence[SlotState], tokens: Sequence[int], n_stored: int, wanted: int,
        salt: str, *, reads: bool,
    ) -> tuple[SlotChoice | None, StoredPrompt | None]:  # fmt: skip
        """Return the choice, and the prompt that was read if the choice is the disk.

        If `reads` is False, or if what the folder finds cannot be used, the choice is another one.
        """
        folder = self._folder
        if folder is not None and reads and not all([s.is_busy for s in states]):
            for _ in range(_MOST_READS):
                on_disk = folder.find(tokens, salt)
                if on_disk is None:
                    break
                choice = choose(
                    states, len(tokens), n_stored, wanted, self._similar, on_disk.n_tokens
                )
                if choice is None or choice.source is not Source.DISK:
                    return choice, None
                if (stored := folder.read(on_disk.name)) is not None:
                    return choice, stored
        return choose(states, len(tokens), n_stored, wanted, self._similar), None

    def _clear_others(self, slot: Slot, *, reuses: bool, drafts: bool) -> None:
        """Move the prompts of all other slots to host memory, for a request that runs alone.

        The rounding of attention depends on the number and positions of used cells. Prompts in
        other slots would therefore change the logits of the request.

        A request that reuses prompts clears only slots whose prompts fit in host memory. It clears
        no slot if it drafts, because its logits depend on the lengths of its drafts anyway, and
        none without `clears_idle`. Sequences with cells of their own do not see each other's.
        """
        if self._sequences.has_own_cells or (reuses and (drafts or not self._clears_idle)):
            return
        for other in self._slots:
            if other is slot or not other.n_held:
                continue
            if not reuses or self.store.fits(other.saved_bytes):
                self.take_out(other, must_keep=reuses)

    def _move_out(self, slot: Slot) -> bool:
        """Move an idle slot's prompt to host memory, if no prompt is lost by that.

        Returns False if it stays for now. A long prompt is copied part by part (`go_on_moving`).
        """
        leaving = self._leaving.get(slot.number)
        if (leaving is not None and not leaving.is_void) or not self.has_room(slot):
            return False
        if slot.n_parts == 1 or self.store.covers(slot.tokens, slot.salt):
            return self.take_out(slot, must_keep=True)
        self._leaving[slot.number] = LeavingPrompt(slot)
        return False

    def go_on_moving(self, most_s: float) -> None:
        """Copy parts of the idle slots that move to host memory, for about `most_s` seconds."""
        self.drop_void_copies()
        for number, leaving in [*self._leaving.items()]:
            try:
                with self._keeping():
                    is_whole = advance_for(most_s, leaving.advance)
            except (DeviceFailed, DoesNotFit, MemoryError) as e:
                del self._leaving[number]
                self._not_kept(leaving.slot, e)
                return
            except BaseException:  # a stopped decode: what has raised cannot go on
                del self._leaving[number]
                raise
            if is_whole and self.has_room(leaving.slot):
                self.take_out(leaving.slot, must_keep=True)
            elif is_whole:
                del self._leaving[number]
            return

    def drop_void_copies(self) -> None:
        """Drop what was copied of texts that their slots hold no longer, or that are used again."""
        self._leaving = {n: leaving for n, leaving in self._leaving.items() if not leaving.is_void}

    def has_room(self, slot: Slot) -> bool:
        """True if a slot's prompt can be kept without losing another one."""
        return self.store.has_room(slot.saved_bytes)

    def take_out(self, slot: Slot, *, must_keep: bool = False) -> bool:
        """Save a slot's prompt if there is room, and empty the slot. Returns True if it is kept.

        With `must_keep`, a slot whose prompt cannot be saved is not emptied. A prompt that a stored
        one covers is not copied, so it counts as no move.
        """
        n_bytes, began_s = slot.saved_bytes, perf_counter()
        if (leaving := self._leaving.get(slot.number)) and not leaving.is_void:
            began_s -= leaving.spent_s
        is_copied = not self.store.covers(slot.tokens, slot.salt)
        is_kept = self.keep(slot)
        if must_keep and not is_kept and slot.tokens:
            return False
        slot.clear()
        if is_kept and is_copied:
            self.idle.moved_out(n_bytes, perf_counter() - began_s)
        return is_kept

    def _load(self, slot: Slot, stored: StoredPrompt) -> None:
        """Load a stored prompt into an empty slot. If that fails, the prompt is evaluated."""
        began_s = perf_counter()
        try:
            slot.load(stored)
        except (DeviceFailed, MemoryError) as e:
            _not_loaded(stored, e)
            return
        slot.copied_back_s = perf_counter() - began_s
        self.idle.moved_back(stored.size_bytes, slot.copied_back_s)

    def go_on_loading(self, coming: ComingPrompt, most_s: float) -> bool:
        """Copy parts of a kept prompt for about `most_s` seconds. Returns True when that is over.

        There must be room for all of it (`make_room`). If a part cannot be loaded, the slot is
        empty, and the prompt is evaluated.
        """
        slot, stored = coming.slot, coming.stored
        try:
            if not advance_for(most_s, coming.advance):
                return False
        except (DeviceFailed, MemoryError) as e:
            _not_loaded(stored, e)
            return True
        slot.copied_back_s = coming.spent_s
        slot.n_from_disk = slot.n_held if coming.is_from_disk else 0
        self.idle.moved_back(stored.size_bytes, coming.spent_s)
        return True

    def left_while_loading(self, coming: ComingPrompt) -> None:
        """Keep a prompt whose request has left its slot before all parts were copied."""
        stored = coming.stored
        coming.slot.keep(stored.tokens)
        if not coming.is_from_disk:
            self._put_back(stored)

    @contextmanager
    def _not_lost(self, taken: StoredPrompt | None) -> Iterator[None]:
        """Store the prompt `taken` again if the block raises, as a stopped decode does."""
        try:
            yield
        except BaseException:
            if taken is not None:
                self._put_back(taken)
            raise

    def _put_back(self, stored: StoredPrompt) -> None:
        """Store a prompt again that was taken, as the most recently used one."""
        self.store.add(stored.tokens, lambda: stored, stored.salt)

    def will_share(
        self, coming: ComingPrompt, tokens: Sequence[int], texts: Mapping[int, Sequence[int]],
        salt: str,
    ) -> bool:  # fmt: skip
        """True if the rest of `coming` spares the prompt `tokens` more than slots and store do.

        The prompt then waits for the copy. `texts` and `salt` are as in `prepared`.
        """
        stored = coming.stored
        n_common = common(stored.tokens, tokens) if stored.salt == salt else 0
        if n_common < coming.slot.n_held + WORTH_TOKENS:
            return False
        held = [max(s.n_reusable, s.n_shareable) for s in self._states(tokens, texts, salt)]
        return n_common >= max(*held, self.store.reusable(tokens, salt)) + WORTH_TOKENS

    def make_room(self, slot: Slot, n_tokens: int) -> bool:
        """Clear idle slots until `slot`, as if it were empty, has room for a text of `n_tokens`.

        The least recently used one comes first. Returns False, and clears none, if busy slots leave
        too little room. A slot with cells of its own has room for all that its context holds.
        """
        if self._sequences.has_own_cells:
            return n_tokens <= self._sequences.n_ctx
        others = [other for other in self._slots if other is not slot]
        n_busy = sum([other.n_held for other in others if other.is_busy])
        if n_tokens > self._sequences.n_ctx or n_busy + n_tokens > self._sequences.n_cells:
            return False
        idle = [other for other in others if not other.is_busy and other.n_held]
        for other in sorted(idle, key=lambda s: s.last_used):
            if sum([s.n_held for s in others]) + n_tokens <= self._sequences.n_cells:
                break
            self.take_out(other)
        return True

    def least_used(self) -> Slot | None:
        """Return the idle slot with tokens that was used longest ago, or None."""
        idle = [slot for slot in self._slots if not slot.is_busy and slot.n_held]
        return min(idle, key=lambda s: s.last_used, default=None)

    def _states(
        self, tokens: Sequence[int], texts: Mapping[int, Sequence[int]], salt: str
    ) -> list[SlotState]:
        """Return the state of every slot for the prompt `tokens`, as `choose` needs it."""
        states = []
        for slot in self._slots:
            n_held = slot.n_held
            held = texts[slot.number][:n_held] if slot.is_busy else slot.tokens
            n = common(held, tokens) if slot.salt == salt else 0
            states.append(
                SlotState(
                    number=slot.number,
                    is_busy=slot.is_busy,
                    n_held=n_held,
                    n_reusable=0 if slot.is_busy else slot.reusable(tokens, salt),
                    n_shareable=n if self._sequences.can_share(slot.number, n) else 0,
                    last_used=slot.last_used,
                )
            )
        return states

    def keep(self, slot: Slot) -> bool:
        """Save a slot's prompt to host memory if there is room. Returns True if it is kept.

        Raises DecodeStopped, since drafting layers may have to read the text's end before. The slot
        has not changed then. Only the first of several failures in a row is logged.
        """
        leaving = self._leaving.pop(slot.number, None)
        save = slot.saved if leaving is None or leaving.is_void else leaving.whole
        try:
            with self._keeping():
                is_kept = self.store.add(slot.tokens, save, slot.salt)
        except (DeviceFailed, DoesNotFit, MemoryError) as e:
            self._not_kept(slot, e)
            return False
        self._can_keep = True
        return is_kept

    def _not_kept(self, slot: Slot, error: Exception) -> None:
        if self._can_keep:
            why = str(error) or "the memory is full"
            log.warning("a prompt of %d tokens is not kept: %s", len(slot.tokens), why)
        self._can_keep = False

    def keep_all(self, place: PromptPlace, on_progress: Callable[[float], None]) -> int:
        """Move the prompts of all slots and of host memory to a place that outlasts this process.

        No request may run. `on_progress` gets the share that is written. Returns the number of
        prompts that were written. The newest come first, because whoever waits may lose patience.
        """
        for slot in sorted(self._slots, key=lambda s: s.last_used):
            if slot.tokens:
                self.keep(slot)
        n_before, prompts = place.n_written, self.store.prompts[::-1]
        whole_bytes = sum(prompt.size_bytes for prompt in prompts) or 1
        done_bytes = 0

        def written(share: float) -> None:
            on_progress((done_bytes + share * prompt.size_bytes) / whole_bytes)

        for prompt in prompts:
            place.keep_now(prompt, written)
            self.store.remove(prompt)
            done_bytes += prompt.size_bytes
        place.close()
        return place.n_written - n_before


def _not_loaded(stored: StoredPrompt, error: Exception) -> None:
    n, why = len(stored.tokens), str(error) or "the memory is full"
    log.warning("a kept prompt of %d tokens is not loaded, but evaluated again: %s", n, why)
