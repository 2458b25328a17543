"""A slot: one sequence of the target and of the draft, and what they hold of past requests.

A recurrent memory cannot be cut where a new prompt differs. So a checkpoint is kept of the end of
each prompt, as llama.cpp's server does (--ctx-checkpoints): a conversation that goes on differently
is evaluated again from the last prompt that both have in common, not from its first token.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from time import perf_counter

from offload.errors import BadRequest, DeviceFailed, NotWritten
from offload.sequences import Checkpoint, Sequences
from specdec.types import Target
from specdec.whole_file import read_whole, whole_file
from specoffload.session.generation import SlotAction, SlotResult
from specoffload.slots.choosing import common

# A saved sequence: magic, version, number of tokens; then the tokens and the state.
_HEADER = Struct("<III")
_MAGIC, _VERSION = 0x67677371, 3
_TOKEN_BYTES = 4
_STATE_HEAD_BYTES = 8  # a magic and the sequence, which a state in memory has and a file has not
_MOST_NAME_BYTES = 200  # file systems take 255, and a file being written has a longer name


class Slot:
    """Sequence `number` of the target, and of the draft model if there is one."""

    def __init__(
        self, number: int, target: Sequences, draft: Target | None, n_checkpoints: int
    ) -> None:
        self.number = number
        self.is_busy = False
        self.last_used = 0  # a running number, greater for later
        self.tokens: list[int] = []  # those that the target holds, while no request runs
        self._target, self._draft = target, draft
        self._checkpoints: deque[Checkpoint] = deque(maxlen=n_checkpoints)

    @property
    def n_held(self) -> int:
        """Tokens that the target holds now."""
        return self._target.length(self.number)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return tuple(self._checkpoints)

    def reusable(self, tokens: Sequence[int]) -> int:
        """The number of tokens of a prompt that need not be evaluated here. Its last always is."""
        n = common(self.tokens, tokens)
        if self._target.can_drop(self.number, self.n_held - n):
            return n
        return max((c.length for c in self._checkpoints if c.length <= n), default=0)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Cut the sequence back to what it shares with `tokens`, without the last of them, which
        is evaluated anew; how many tokens it holds then."""
        target, number = self._target, self.number
        n = common(self.tokens, tokens)
        self._drop_checkpoints(n)
        self.tokens = []  # until it is known what is left
        if target.can_drop(number, target.length(number) - n):
            target.rewind(number, n)
        elif self._checkpoints:
            target.restore(number, self._checkpoints[-1])
        else:
            target.rewind(number, 0)
        self.tokens = list(tokens[: self.n_held])
        return self.n_held

    def mark(self) -> None:
        """The prompt has been evaluated: keep a checkpoint of it where cutting is impossible."""
        newest = self._checkpoints[-1].length if self._checkpoints else 0
        if not self._target.can_rewind and self._checkpoints.maxlen and self.n_held > newest:
            self._checkpoints.append(self._target.checkpoint(self.number, lasting=True))

    def keep(self, history: Sequence[int]) -> None:
        """The sequence holds the beginning of `history`."""
        self.tokens = list(history[: self.n_held])
        self._drop_checkpoints(len(self.tokens))

    def clear(self) -> None:
        """Drop everything, the draft's too: its cells are for others."""
        self._target.rewind(self.number, 0)
        if self._draft is not None:
            self._draft.rewind(self.number, 0)
        self.tokens = []
        self._checkpoints.clear()

    def share(self, source: Slot, n_tokens: int, tokens: Sequence[int]) -> None:
        """Begin with the first `n_tokens` of another slot, which are those of `tokens`."""
        self.clear()
        self._target.share(source.number, self.number, n_tokens)
        self.tokens = list(tokens[:n_tokens])

    @property
    def saved_bytes(self) -> int:
        """The size of what is held, and of its checkpoints, in host memory."""
        return self._target.saved_bytes(self.number) + sum(len(c.state) for c in self._checkpoints)

    def save(self) -> bytes:
        """All that the target holds, for `load`."""
        return self._target.save(self.number)

    def load(self, tokens: Sequence[int], state: bytes, checkpoints: Sequence[Checkpoint]) -> None:
        """Hold what a slot held when it was saved, with its checkpoints. Raises DeviceFailed when
        there is no room for it: the slot is empty then."""
        self.clear()
        self._target.load(self.number, state, len(tokens))
        self.tokens = list(tokens)
        self._checkpoints.extend(self._target.adopted(self.number, c) for c in checkpoints)

    def write(self, path: Path) -> int:
        """Write what the slot holds to a file; its bytes. Raises OSError, BadRequest."""
        if not self.tokens:
            raise BadRequest(f"slot {self.number} holds nothing to save")
        return write_sequence(path, self._target, self.number, self.tokens)

    def read(self, path: Path) -> int:
        """Hold what was written to a file; its bytes. Raises OSError, BadRequest: then the slot
        is empty."""
        self.clear()
        self.tokens, n_bytes = read_sequence(path, self._target, self.number)
        self.mark()
        return n_bytes

    def _drop_checkpoints(self, n_tokens: int) -> None:
        """Those of more than `n_tokens`."""
        while self._checkpoints and self._checkpoints[-1].length > n_tokens:
            self._checkpoints.pop()


# -- files (llama.cpp's POST /slots/ID?action=...) -------------------------------------------------


def change_slot(
    slots: Sequence[Slot], folder: Path | None, number: int, action: SlotAction, filename: str
) -> SlotResult:
    """Save an idle slot to a file in `folder`, restore it from there, or erase it.

    Raises BadRequest for a slot that does not exist or is busy, a name that leads out of `folder`,
    and a file that cannot be read; NotWritten for a file that cannot be written.
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
        n_bytes = slot.write(path) if action == "save" else slot.read(path)
    except OSError as e:
        if action == "save":
            raise NotWritten(
                f"slot {number} is not saved to {filename} in --slot-save-path: {e.strerror or e}"
            ) from e
        raise BadRequest(f"{filename}: {e.strerror or e}") from e
    return SlotResult(len(slot.tokens), n_bytes, perf_counter() - began)


def file_of(folder: Path | None, filename: str) -> Path:
    """The file of that name in the folder. Raises BadRequest for a name that is a path."""
    if folder is None:
        raise BadRequest("no folder for saved slots: start the server with --slot-save-path")
    if not filename or filename in (".", "..") or "\0" in filename or "\\" in filename:
        raise BadRequest(f"filename {filename!r} is no name of a file")
    if len(os.fsencode(filename)) > _MOST_NAME_BYTES:
        raise BadRequest(f"filename has {len(filename)} letters: at most {_MOST_NAME_BYTES} bytes")
    if Path(filename).name != filename:
        raise BadRequest(f"filename {filename!r} must be a name, not a path")
    return folder / filename


def write_sequence(path: Path, sequences: Sequences, sequence: int, tokens: Sequence[int]) -> int:
    """Write the sequence, which holds `tokens`, in the format of llama.cpp's server, whole or not
    at all; the bytes written. libllama's own functions end the process on a file that was cut
    short. Raises OSError, BadRequest."""
    if len(tokens) != sequences.length(sequence):
        raise BadRequest(f"sequence {sequence} holds {sequences.length(sequence)} tokens")
    state = sequences.save(sequence)
    with whole_file(path) as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, len(tokens)))
        file.write(array("i", tokens).tobytes())
        file.write(memoryview(state)[_STATE_HEAD_BYTES:])
        return file.tell()


def read_sequence(path: Path, sequences: Sequences, sequence: int) -> tuple[list[int], int]:
    """Make the sequence what `path` holds; its tokens, and the bytes read.

    Raises OSError for a file that is not regular or is larger than any sequence of this context,
    and BadRequest for a file that is not of this model; the sequence is empty then.
    """
    sequences.rewind(sequence, 0)
    most_tokens_bytes = _HEADER.size + _TOKEN_BYTES * sequences.n_ctx
    raw = read_whole(path, most_tokens_bytes + sequences.most_state_bytes)
    if len(raw) < _HEADER.size:
        raise BadRequest(f"{path.name} is no saved sequence: it has {len(raw)} bytes")
    magic, version, n_tokens = _HEADER.unpack_from(raw)
    if (magic, version) != (_MAGIC, _VERSION):
        raise BadRequest(f"{path.name} is no saved sequence of version {_VERSION}")
    start = _HEADER.size + _TOKEN_BYTES * n_tokens
    if n_tokens > sequences.n_ctx or start > len(raw):
        raise BadRequest(
            f"{path.name} is damaged, or its {n_tokens} tokens exceed the context of "
            f"{sequences.n_ctx} (--ctx-size)"
        )
    tokens = array("i")
    tokens.frombytes(raw[_HEADER.size : start])
    state = sequences.save(sequence)[:_STATE_HEAD_BYTES] + raw[start:]
    try:
        sequences.load(sequence, state, n_tokens)
    except DeviceFailed as e:
        raise BadRequest(f"{path.name} is damaged, or of another model: {e}") from e
    return list(tokens), len(raw)
