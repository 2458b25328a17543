"""Manages a slot: one sequence of the target and of the draft, with text of past requests.

The memory of a recurrent model cannot be cut at the place where a new prompt differs. The slot
therefore keeps a checkpoint at the end of each prompt, as llama.cpp's server does
(--ctx-checkpoints). If a conversation changes, it is evaluated again from the last common
checkpoint, not from its first token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from offload.errors import BadRequest, DeviceFailed, NotWritten
from offload.sequences.sequences import Checkpoint, Sequences
from specoffload.generation.generation import SlotAction, SlotResult
from specoffload.slots.choosing import StoredPrompt, common
from specoffload.slots.draft_texts import DraftTexts
from specoffload.slots.slot_files import read_sequence, write_sequence

log = logging.getLogger("specoffload.slots")

_SMALL_BYTES = 8 << 20  # of a checkpoint of sliding windows; gpt-oss-120b's takes 5 MiB
_MOST_ENDS = 2  # so that another last message finds the end of the prompt before
_MOST_NAME_BYTES = 200  # below the 255 of file systems, since a file being written has a suffix


class Slot:
    """Sequence `number` of the target, and of the draft model if there is one."""

    def __init__(
        self, number: int, target: Sequences, draft: DraftTexts | None, n_checkpoints: int
    ) -> None:
        self.number = number
        self.is_busy = False
        self.last_used = 0  # running number of the last use by a request
        self.tokens: list[int] = []  # tokens that the target holds, while no request runs
        self.n_from_disk = 0  # tokens that were read from the disk for the last request
        self.copied_back_s = 0.0  # seconds of copying its text from RAM for the last request
        self._target, self._draft = target, draft
        self._most_checkpoints = n_checkpoints
        self._checkpoints: list[Checkpoint] = []  # by length, ascending
        self._ends: list[int] = []  # lengths of the last prompts that have no checkpoint, ascending
        self.salt = ""  # whose text it is; a request with another salt reuses nothing

    def __repr__(self) -> str:
        state = "busy" if self.is_busy else f"{len(self.tokens)} tokens"
        return f"Slot({self.number}: {state}, {len(self._checkpoints)} checkpoints)"

    @property
    def n_held(self) -> int:
        """Number of tokens that the target holds now."""
        return self._target.length(self.number)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return tuple(self._checkpoints)

    def reusable(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the number of a prompt's first tokens that need no evaluation in this slot.

        The last token never counts, since it is always evaluated.
        """
        if salt != self.salt:
            return 0
        n = common(self.tokens, tokens)
        if self._target.can_drop(self.number, self.n_held - n):
            return n
        return max((c.length for c in self._checkpoints if c.length <= n), default=0)

    def reuse(self, tokens: Sequence[int], salt: str = "") -> int:
        """Cut the sequence back to the beginning that it shares with `tokens[:-1]`.

        The last token is always evaluated again. Returns the number of tokens that
        the slot then holds: none if its text has another salt.
        """
        target, number = self._target, self.number
        if salt != self.salt:
            self.clear()  # a draft model would go on from its beginning, too
        self.salt = salt
        n = common(self.tokens, tokens)
        self._drop_checkpoints(n)
        self.tokens = []  # stays empty if the calls below raise
        if target.can_drop(number, target.length(number) - n):
            target.rewind(number, target.resumable(number, n))
        elif self._checkpoints:
            self._restore(self._checkpoints[-1])
        else:
            target.rewind(number, 0)
        self.tokens = list(tokens[: self.n_held])
        return self.n_held

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint, or empty the slot if the library does not take it."""
        try:
            self._target.restore(self.number, checkpoint)
        except DeviceFailed as e:
            n, salt = checkpoint.length, self.salt
            log.warning("a checkpoint at %d tokens is dropped, and evaluated again: %s", n, e)
            self.clear()
            self.salt = salt

    @property
    def goes_back_by_checkpoints(self) -> bool:
        """True if checkpoints make more beginnings of the text reusable."""
        return self._target.goes_back_by_checkpoints and self._most_checkpoints > 0

    def mark(self, *, is_asked: bool = False) -> None:
        """Keep a checkpoint of the evaluated prompt if the memory cannot be cut.

        A memory with sliding windows keeps one only if it is small, or if it `is_asked` for. Asked
        checkpoints are dropped after all others when there are too many.
        """
        self._drop_checkpoints(self.n_held)
        newest = self._checkpoints[-1].length if self._checkpoints else 0
        if not self.goes_back_by_checkpoints:
            return
        if not (is_asked or self._is_cheap):
            ends = [n for n in self._ends if n < self.n_held]
            self._ends = [*ends, self.n_held][-_MOST_ENDS:]
            return
        if self.n_held > newest:
            made = self._target.checkpoint(self.number, lasting=True)
            self._checkpoints.append(replace(made, is_asked=is_asked))
        elif is_asked:
            self._checkpoints[-1] = replace(self._checkpoints[-1], is_asked=True)
        if len(self._checkpoints) > self._most_checkpoints:
            old = enumerate(self._checkpoints[:-1])
            del self._checkpoints[next((i for i, c in old if not c.is_asked), 0)]

    @property
    def _is_cheap(self) -> bool:
        """False if a checkpoint takes much memory, as that of long windows does."""
        target = self._target
        return not target.can_rewind or target.checkpoint_bytes(self.number) <= _SMALL_BYTES

    def keep(self, history: Sequence[int]) -> None:
        """Record that the sequence holds the beginning of `history`."""
        self.tokens = list(history[: self.n_held])
        self._drop_checkpoints(len(self.tokens))

    def clear(self) -> None:
        """Drop everything that the target and the draft hold, which frees their cells."""
        self._target.rewind(self.number, 0)
        if self._draft is not None:
            self._draft.clear(self.number)
        self.tokens = []
        self._checkpoints.clear()
        self._ends, self.salt = [], ""

    def share(self, source: Slot, n_tokens: int, tokens: Sequence[int]) -> None:
        """Replace this slot's tokens with the first `n_tokens` of slot `source`.

        `tokens` must begin with them. Shares one token less if drafting needs it evaluated again,
        and none if a copy fails.
        """
        self.clear()
        n_tokens = self._target.resumable(source.number, n_tokens)
        if not self._target.can_share(source.number, n_tokens):
            return
        try:
            self._target.share(source.number, self.number, n_tokens)
        except DeviceFailed as e:
            log.warning("%d tokens of another slot are evaluated again: %s", n_tokens, e)
            return
        self.tokens, self.salt = list(tokens[:n_tokens]), source.salt

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of RAM that the slot's checkpoints take now."""
        return sum([len(c.state) for c in [*self._checkpoints]])

    @property
    def saved_bytes(self) -> int:
        """Bytes of host memory that the slot's state and checkpoints take when saved."""
        n_bytes = self.checkpoint_bytes
        if ends := self._reachable_ends():
            n_bytes += len(ends) * self._target.checkpoint_bytes(self.number)
        if self._draft is not None:
            n_bytes += self._draft.saved_bytes(self.number)
        return self._target.saved_bytes(self.number) + n_bytes

    def saved(self) -> StoredPrompt:
        """Return all that `load` needs, with the draft model's state. Raises DeviceFailed."""
        return finished(self.saving())

    def saving(self) -> Generator[None, None, StoredPrompt]:
        """Do what `saved` does, and yield after each part. The slot must not change meanwhile."""
        if self._reachable_ends():
            return self.saved_whole(with_draft=True)
        tokens = tuple(self.tokens)
        state, parts = yield from self._target.saving(self.number)
        draft = None if self._draft is None else (yield from self._draft.saving(self.number))
        return StoredPrompt(tokens, state, self.checkpoints, self.salt, draft, parts)

    @property
    def n_parts(self) -> int:
        """Number of parts in which `saving` copies the target's state; 1: at once."""
        return self._target.n_parts(self.number)

    def saved_whole(self, *, with_draft: bool) -> StoredPrompt:
        """Return what `load` needs, with the state in one piece. Raises DeviceFailed.

        Long sliding windows keep no checkpoints while the slot can be cut to the ends of its
        prompts. A loaded state cannot be cut, so this one gets checkpoints there.
        """
        target, number = self._target, self.number
        state, tokens = target.save(number), tuple(self.tokens)
        draft = self._draft.saved(number) if self._draft is not None and with_draft else None
        stored = StoredPrompt(tokens, state, self.checkpoints, self.salt, draft)
        ends = self._reachable_ends()
        if not ends:
            return stored
        made = []
        for end in reversed(ends):
            target.rewind(number, end)
            made.append(target.checkpoint(number, lasting=True))
        before = [c for c in stored.checkpoints if c.length not in ends]
        together = sorted([*before, *made], key=lambda c: c.length)
        stored = replace(stored, checkpoints=tuple(together))
        self.tokens, self._checkpoints, self._ends = [], [], []  # if the call below raises
        target.load(number, state, tokens)
        self._take_over(stored)
        return stored

    def _reachable_ends(self) -> list[int]:
        """Return the lengths in `_ends` to which the sequence can be cut now."""
        n = len(self.tokens)
        return [e for e in self._ends if 0 < e < n and self._target.can_drop(self.number, n - e)]

    def load(self, stored: StoredPrompt) -> None:
        """Restore a saved sequence with its checkpoints, and what the draft model held of it.

        Raises DeviceFailed if there is no room for it. The slot is then empty.
        """
        for _ in self.loading(stored):
            pass

    def loading(self, stored: StoredPrompt) -> Iterator[None]:
        """Do what `load` does, and yield after each part."""
        self.clear()
        self.salt = stored.salt
        yield from self._target.loading(self.number, stored.state, stored.tokens, stored.parts)
        self._take_over(stored)
        if self._draft is not None and stored.draft is not None:
            yield from self._draft.loading(self.number, stored.draft)

    def _take_over(self, saved: StoredPrompt) -> None:
        """Record what is known of the sequence that was loaded."""
        self.tokens, self.salt = list(saved.tokens), saved.salt
        adopted = [self._target.adopted(self.number, c) for c in saved.checkpoints]
        self._checkpoints = adopted[max(0, len(adopted) - self._most_checkpoints) :]

    def write(self, path: Path) -> int:
        """Write the slot's sequence and its checkpoints to a file. Returns the bytes written.

        Raises OSError, DeviceFailed, and BadRequest if the slot is empty.
        """
        if not self.tokens:
            raise BadRequest(f"slot {self.number} holds nothing to save")
        return write_sequence(path, self.saved_whole(with_draft=False), self._target.made_by)

    def read(self, path: Path, make_room: MakeRoom) -> int:
        """Restore the sequence that was written to a file. Returns the bytes read.

        Raises OSError or BadRequest. The slot keeps what it holds, unless the state in the file is
        found to be damaged while it is loaded.
        """

        def clear(n_tokens: int) -> None:
            if not make_room(self, n_tokens):
                raise BadRequest(
                    f"the {n_tokens} tokens of {path.name} have no room beside the running "
                    f"requests, in a context of {self._target.n_ctx} (--ctx-size): try again when "
                    "those have ended"
                )
            self.clear()

        saved, n_bytes = read_sequence(
            path, self._target, self.number, clear, most_checkpoints=self._most_checkpoints
        )
        self._take_over(saved)
        self.mark()
        return n_bytes

    def _drop_checkpoints(self, n_tokens: int) -> None:
        """Drop the checkpoints of more than `n_tokens` tokens, and those that a failure voided."""
        self._checkpoints = [
            c for c in self._checkpoints
            if c.length <= n_tokens and self._target.can_restore(self.number, c)
        ]  # fmt: skip


def finished(saving: Generator[None, None, StoredPrompt]) -> StoredPrompt:
    """Let `saving` copy all parts that are left, and return its result."""
    while True:
        try:
            next(saving)
        except StopIteration as e:
            result: StoredPrompt = e.value
            return result


# -- files (llama.cpp's POST /slots/ID?action=...) -------------------------------------------------


# Clears other slots until this one has room for that many tokens. Returns False if it cannot.
MakeRoom = Callable[["Slot", int], bool]


def change_slot(
    slots: Sequence[Slot],
    folder: Path | None,
    number: int,
    action: SlotAction,
    filename: str,
    make_room: MakeRoom,
) -> SlotResult:
    """Save an idle slot to a file in `folder`, restore it from there, or erase it.

    The texts of idle slots make room for what is restored, as they do for a request.

    Raises BadRequest if the slot does not exist or is busy, the name leads out of `folder`, or the
    file cannot be read. Raises NotWritten if the file cannot be written.
    """
    if not 0 <= number < len(slots):
        raise BadRequest(f"slot {number} does not exist: there are slots 0 to {len(slots) - 1}")
    slot = slots[number]
    if slot.is_busy:
        raise BadRequest(f"slot {number} is at work on a request: try again when it is idle")
    began = perf_counter()
    n_tokens = len(slot.tokens)
    if action == "erase":
        slot.clear()
        return SlotResult(n_tokens, 0, perf_counter() - began)
    path = file_of(folder, filename)
    try:
        n_bytes = slot.write(path) if action == "save" else slot.read(path, make_room)
    except OSError as e:
        if action == "save":
            raise NotWritten(
                f"slot {number} is not saved to {filename} in --slot-save-path: {e.strerror or e}"
            ) from e
        raise BadRequest(f"{filename}: {e.strerror or e}") from e
    return SlotResult(len(slot.tokens), n_bytes, perf_counter() - began)


def file_of(folder: Path | None, filename: str) -> Path:
    """Return the path of a file in the folder. Raises BadRequest for a name that is a path."""
    if folder is None:
        raise BadRequest("no folder for saved slots: start the server with --slot-save-path")
    if not filename or filename in (".", "..") or "\0" in filename or "\\" in filename:
        raise BadRequest(f"filename {filename!r} is not a file name")
    if "\ufffd" in filename:  # what is no character was replaced when the request was read
        raise BadRequest(f"filename {filename!r} has something that is no character")
    try:
        n_bytes = len(filename.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"filename {filename!r} has half a surrogate pair") from None
    if n_bytes > _MOST_NAME_BYTES:
        raise BadRequest(f"filename has {len(filename)} letters: at most {_MOST_NAME_BYTES} bytes")
    if Path(filename).name != filename:
        raise BadRequest(f"filename {filename!r} must be a name, not a path")
    return folder / filename
