"""Manages a slot: one sequence of the target and of the draft, with text of past requests.

The memory of a recurrent model cannot be cut at the place where a new prompt differs. The slot
therefore keeps a checkpoint at the end of each prompt, as llama.cpp's server does
(--ctx-checkpoints). If a conversation changes, it is evaluated again from the last common
checkpoint, not from its first token.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from struct import Struct
from time import perf_counter
from zlib import crc32

from offload.errors import BadRequest, DeviceFailed, NotWritten
from offload.sequences.sequences import Checkpoint, Sequences
from specdec.types import Target
from specdec.whole_file import read_whole, whole_file
from specoffload.generation.generation import SlotAction, SlotResult
from specoffload.slots.choosing import common

# A saved sequence: magic, version, number of tokens; then the tokens, the state and a checksum.
_HEADER = Struct("<III")
_MAGIC, _VERSION = 0x67677371, 3
_TOKEN_BYTES = 4
# At the end of our files: JSON of what the state depends on, its size in bytes, magic, and the
# CRC-32 of all that precedes the CRC. llama-server skips it.
_TRAILER = Struct("<I8sI")
_TRAILER_MAGIC = b"specoff2"
_FIRST_MAGIC = b"specoff1"  # before the magic came nothing: such a file names no model
_MOST_NAMED_BYTES = 1 << 16
_CRC_BYTES = 4
_STATE_HEAD_BYTES = 8  # magic and sequence number, which only states in memory have
_SMALL_BYTES = 8 << 20  # of a checkpoint of sliding windows; gpt-oss-120b's takes 5 MiB
_MOST_NAME_BYTES = 200  # below the 255 of file systems, since a file being written has a suffix


class Slot:
    """Sequence `number` of the target, and of the draft model if there is one."""

    def __init__(
        self, number: int, target: Sequences, draft: Target | None, n_checkpoints: int
    ) -> None:
        self.number = number
        self.is_busy = False
        self.last_used = 0  # running number of the last use by a request
        self.tokens: list[int] = []  # tokens that the target holds, while no request runs
        self.n_from_disk = 0  # tokens that were read from the disk for the last request
        self._target, self._draft = target, draft
        self._most_checkpoints = n_checkpoints
        self._checkpoints: list[Checkpoint] = []  # by length, ascending
        self._asked: set[int] = set()  # lengths of those that requests asked for

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

    def reusable(self, tokens: Sequence[int]) -> int:
        """Return the number of a prompt's first tokens that need no evaluation in this slot.

        The last token never counts, since it is always evaluated.
        """
        n = common(self.tokens, tokens)
        if self._target.can_drop(self.number, self.n_held - n):
            return n
        return max((c.length for c in self._checkpoints if c.length <= n), default=0)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Cut the sequence back to the beginning that it shares with `tokens[:-1]`.

        The last token is always evaluated again. Returns the number of tokens that
        the slot then holds.
        """
        target, number = self._target, self.number
        n = common(self.tokens, tokens)
        self._drop_checkpoints(n)
        self.tokens = []  # stays empty if the calls below raise
        if target.can_drop(number, target.length(number) - n):
            target.rewind(number, target.resumable(number, n))
        elif self._checkpoints:
            target.restore(number, self._checkpoints[-1])
        else:
            target.rewind(number, 0)
        self.tokens = list(tokens[: self.n_held])
        return self.n_held

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
        if not self.goes_back_by_checkpoints or not (is_asked or self._is_cheap):
            return
        if is_asked:
            self._asked.add(self.n_held)
        if self.n_held > newest:
            self._checkpoints.append(self._target.checkpoint(self.number, lasting=True))
        if len(self._checkpoints) > self._most_checkpoints:
            old = enumerate(self._checkpoints[:-1])
            del self._checkpoints[next((i for i, c in old if c.length not in self._asked), 0)]

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
            self._draft.rewind(self.number, 0)
        self.tokens = []
        self._checkpoints.clear()
        self._asked.clear()

    def share(self, source: Slot, n_tokens: int, tokens: Sequence[int]) -> None:
        """Replace this slot's tokens with the first `n_tokens` of slot `source`.

        `tokens` must begin with them. Shares one token less if drafting needs it evaluated again.
        """
        self.clear()
        n_tokens = self._target.resumable(source.number, n_tokens)
        self._target.share(source.number, self.number, n_tokens)
        self.tokens = list(tokens[:n_tokens])

    @property
    def saved_bytes(self) -> int:
        """Bytes of host memory that the slot's state and checkpoints take when saved."""
        return self._target.saved_bytes(self.number) + sum(len(c.state) for c in self._checkpoints)

    def save(self) -> bytes:
        """Return the target's state of this sequence, in the form that `load` takes."""
        return self._target.save(self.number)

    def load(self, tokens: Sequence[int], state: bytes, checkpoints: Sequence[Checkpoint]) -> None:
        """Restore a saved sequence with its checkpoints.

        Raises DeviceFailed if there is no room for it. The slot is then empty.
        """
        self.clear()
        self._target.load(self.number, state, tokens)
        self.tokens = list(tokens)
        found = [self._target.adopted(self.number, c) for c in checkpoints]
        self._checkpoints = found[max(0, len(found) - self._most_checkpoints) :]

    def write(self, path: Path) -> int:
        """Write the slot's sequence to a file. Returns the bytes written.

        Raises OSError, and BadRequest if the slot is empty.
        """
        if not self.tokens:
            raise BadRequest(f"slot {self.number} holds nothing to save")
        return write_sequence(path, self._target, self.number, self.tokens)

    def read(self, path: Path) -> int:
        """Restore the sequence that was written to a file. Returns the bytes read.

        Raises OSError or BadRequest. The slot keeps what it holds, unless the state in the file is
        found to be damaged while it is loaded.
        """
        self.tokens, n_bytes = read_sequence(path, self._target, self.number, self.clear)
        self.mark()
        return n_bytes

    def _drop_checkpoints(self, n_tokens: int) -> None:
        """Drop the checkpoints of more than `n_tokens` tokens, and those that a failure voided."""
        self._checkpoints = [
            c for c in self._checkpoints
            if c.length <= n_tokens and self._target.can_restore(self.number, c)
        ]  # fmt: skip
        self._asked &= {c.length for c in self._checkpoints}


# -- files (llama.cpp's POST /slots/ID?action=...) -------------------------------------------------


def change_slot(
    slots: Sequence[Slot], folder: Path | None, number: int, action: SlotAction, filename: str
) -> SlotResult:
    """Save an idle slot to a file in `folder`, restore it from there, or erase it.

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
        n_bytes = slot.write(path) if action == "save" else slot.read(path)
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
    try:
        n_bytes = len(filename.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"filename {filename!r} has half a surrogate pair") from None
    if n_bytes > _MOST_NAME_BYTES:
        raise BadRequest(f"filename has {len(filename)} letters: at most {_MOST_NAME_BYTES} bytes")
    if Path(filename).name != filename:
        raise BadRequest(f"filename {filename!r} must be a name, not a path")
    return folder / filename


def write_sequence(path: Path, sequences: Sequences, sequence: int, tokens: Sequence[int]) -> int:
    """Write a sequence and its `tokens`, completely or not at all. Returns the bytes written.

    The format is that of llama.cpp's server, which ignores what a drafter's own data and the
    trailer add at the end. The trailer names what the state depends on (`Sequences.made_by`).
    libllama's own functions are not used, since they end the process on a truncated file.

    Raises OSError. Raises BadRequest if the sequence holds another number of tokens.
    """
    if len(tokens) != sequences.length(sequence):
        raise BadRequest(f"sequence {sequence} holds {sequences.length(sequence)} tokens")
    state = sequences.save(sequence)
    named = json.dumps(dict(sequences.made_by)).encode()
    with whole_file(path) as file:
        found = 0
        for part in (
            _HEADER.pack(_MAGIC, _VERSION, len(tokens)),
            array("i", tokens).tobytes(),
            memoryview(state)[_STATE_HEAD_BYTES:],
            named,
            _TRAILER.pack(len(named), _TRAILER_MAGIC, 0)[:-_CRC_BYTES],
        ):
            found = crc32(part, found)
            file.write(part)
        file.write(found.to_bytes(_CRC_BYTES, "little"))
        return file.tell()


def read_sequence(
    path: Path, sequences: Sequences, sequence: int, clear: Callable[[], None] | None = None
) -> tuple[list[int], int]:
    """Load the sequence from the file `path`. Returns its tokens and the bytes read.

    The sequence is emptied after the file was read and found to be whole, with `clear` if given.

    Raises OSError if the file is not regular or is larger than any sequence of this context. Raises
    BadRequest if the file is damaged, or was written with another model or other settings. Files of
    llama.cpp's server have no trailer, so damage to them, and another model of the same shape, may
    be noticed late or never.
    """
    most_tokens_bytes = _HEADER.size + _TOKEN_BYTES * sequences.n_ctx
    most_bytes = most_tokens_bytes + sequences.most_state_bytes + _TRAILER.size + _MOST_NAMED_BYTES
    raw = read_whole(path, most_bytes)
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
    end = _end_of_state(path, raw, sequences.made_by)
    if clear is None:
        sequences.rewind(sequence, 0)
    else:
        clear()
    state = sequences.save(sequence)[:_STATE_HEAD_BYTES] + raw[start:end]
    try:
        sequences.load(sequence, state, tokens)
    except DeviceFailed as e:
        raise BadRequest(f"{path.name} is damaged, or of another model: {e}") from e
    return list(tokens), len(raw)


def _end_of_state(path: Path, raw: bytes, made_by: Mapping[str, str]) -> int:
    """Return where the state in the bytes of a file ends.

    Raises BadRequest if the file is damaged, or if its trailer names other values than `made_by`.
    """
    end = len(raw) - _TRAILER.size
    if end < _HEADER.size:
        return len(raw)
    n_named, magic, expected = _TRAILER.unpack_from(raw, end)
    if magic == _FIRST_MAGIC:
        raise BadRequest(
            f"{path.name} was saved by an earlier version, which did not note the model: delete "
            "it, the prompt is then evaluated again"
        )
    if magic != _TRAILER_MAGIC:
        return len(raw)
    if crc32(memoryview(raw)[:-_CRC_BYTES]) != expected or end - n_named < _HEADER.size:
        raise BadRequest(
            f"{path.name} is damaged: its checksum does not match; delete it, the prompt is then "
            "evaluated again"
        )
    named: dict[str, str] = json.loads(raw[end - n_named : end])
    for what in sorted(named.keys() | made_by.keys()):
        if (theirs := named.get(what)) != (ours := made_by.get(what)):
            raise BadRequest(
                f"{path.name} was saved with another {what} ({theirs}) than this one ({ours}): "
                "start with the same model and flags, or evaluate the prompt again"
            )
    return end - int(n_named)
