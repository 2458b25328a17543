"""Writes a sequence to a file and reads it (llama.cpp's POST /slots/ID?action=save and restore).

    header, tokens, state, checkpoints | JSON, trailer

Up to the state this is the form of llama.cpp's server, which ignores what follows. The JSON says
what the state depends on, how long each checkpoint is, and whose text it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from struct import Struct
from zlib import crc32

from pydantic import TypeAdapter, ValidationError

from offload.errors import BadRequest, DeviceFailed
from offload.sequences.sequences import Checkpoint, Sequences
from specdec.whole_file import read_whole, whole_file
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.prompt_format import SavedCheckpoint

_HEADER = Struct("<III")  # magic, version, number of tokens
_MAGIC, _VERSION = 0x67677371, 3
_TOKEN_BYTES = 4
# At the end of our files: the size of the JSON in bytes, magic, and the CRC-32 of all that precedes
# the CRC.
_TRAILER = Struct("<I8sI")
_TRAILER_MAGIC = b"specoff3"
_SECOND_MAGIC = b"specoff2"  # its JSON is the object "made_by" alone, without checkpoints
_FIRST_MAGIC = b"specoff1"  # before the magic came nothing: such a file names no model
_MOST_NAMED_BYTES = 1 << 16
_CRC_BYTES = 4
_STATE_HEAD_BYTES = 8  # magic and sequence number, which only states in memory have
_LEAST_READ = 32  # checkpoints for which a file always has room, the default of --ctx-checkpoints


@dataclass(frozen=True)
class _SlotHeader:
    """The JSON before the trailer."""

    made_by: dict[str, str]
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    salt: str = ""


_NAMED: TypeAdapter[_SlotHeader] = TypeAdapter(_SlotHeader)
_MADE_BY: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


def write_sequence(path: Path, saved: StoredPrompt, made_by: Mapping[str, str]) -> int:
    """Write a saved sequence, whole or not at all. Returns the bytes written.

    What a drafter holds of the text is part of the state. `made_by` is what the state depends on.
    libllama's own functions are not used, since they end the process on a truncated file.

    Raises OSError. Raises BadRequest for more checkpoints than a file can have.
    """
    kept = tuple(map(SavedCheckpoint.of, saved.checkpoints))
    named = _NAMED.dump_json(_SlotHeader(dict(made_by), kept, saved.salt))
    if len(named) > _MOST_NAMED_BYTES:
        raise BadRequest(
            f"{len(kept)} checkpoints are more than a file names: start with fewer "
            "(--ctx-checkpoints)"
        )
    with whole_file(path) as file:
        checksum = 0
        parts: tuple[bytes | memoryview, ...] = (
            _HEADER.pack(_MAGIC, _VERSION, len(saved.tokens)),
            array("i", saved.tokens).tobytes(),
            memoryview(saved.state)[_STATE_HEAD_BYTES:],
            *chain.from_iterable(map(SavedCheckpoint.parts, saved.checkpoints)),
            named,
            _TRAILER.pack(len(named), _TRAILER_MAGIC, 0)[:-_CRC_BYTES],
        )
        for part in parts:
            checksum = crc32(part, checksum)
            file.write(part)
        file.write(checksum.to_bytes(_CRC_BYTES, "little"))
        return file.tell()


def read_sequence(
    path: Path,
    sequences: Sequences,
    sequence: int,
    clear: Callable[[int], None] | None = None,
    *,
    most_checkpoints: int = 0,
) -> tuple[StoredPrompt, int]:
    """Load the sequence from the file `path`. Returns what the file holds, and the bytes read.

    The sequence is emptied after the file was read and found to be whole, with `clear` if given,
    which gets the number of tokens that need room. What it raises is raised.
    Of the checkpoints, the last `most_checkpoints` are returned.

    Raises OSError if the file is not regular or is larger than any sequence of this context. Raises
    BadRequest if the file is damaged, or was written with another model or other settings. Files of
    llama.cpp's server have no trailer, so damage to them, and another model of the same shape, may
    be noticed late or never.
    """
    raw = read_whole(path, _most_bytes(sequences, most_checkpoints))
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
    named, end = _named(path, raw, start)
    if named is not None:
        _check_made_by(path, named.made_by, sequences.made_by)
    checkpoints = () if named is None else _checkpoints(path, raw, named, start, end, n_tokens)
    end -= 0 if named is None else sum(one.n_bytes for one in named.checkpoints)
    if clear is None:
        sequences.rewind(sequence, 0)
    else:
        clear(n_tokens)
    state = sequences.save(sequence)[:_STATE_HEAD_BYTES] + raw[start:end]
    try:
        sequences.load(sequence, state, tokens)
    except DeviceFailed as e:
        raise BadRequest(f"{path.name} is damaged, or of another model: {e}") from e
    newest = checkpoints[max(0, len(checkpoints) - most_checkpoints) :]
    salt = "" if named is None else named.salt
    return StoredPrompt(tuple(tokens), state, newest, salt), len(raw)


def _most_bytes(sequences: Sequences, most_checkpoints: int) -> int:
    """Return an upper bound of a file's size. A checkpoint is at most as large as a whole state."""
    tokens_bytes = _HEADER.size + _TOKEN_BYTES * sequences.n_ctx
    states_bytes = (1 + max(most_checkpoints, _LEAST_READ)) * sequences.most_state_bytes
    return tokens_bytes + states_bytes + _TRAILER.size + _MOST_NAMED_BYTES


def _named(path: Path, raw: bytes, start: int) -> tuple[_SlotHeader | None, int]:
    """Return the JSON of a file and where it begins; None and the file's end if it has none.

    Raises BadRequest if the file is damaged.
    """
    end = len(raw) - _TRAILER.size
    if end < _HEADER.size:
        return None, len(raw)
    n_named, magic, expected = _TRAILER.unpack_from(raw, end)
    if magic == _FIRST_MAGIC:
        raise BadRequest(
            f"{path.name} was saved by an earlier version, which did not note the model: delete "
            "it, the prompt is then evaluated again"
        )
    if magic not in (_TRAILER_MAGIC, _SECOND_MAGIC):
        return None, len(raw)
    if crc32(memoryview(raw)[:-_CRC_BYTES]) != expected or end - n_named < start:
        raise _damaged(path, "its checksum does not match")
    text = raw[end - n_named : end]
    try:
        if magic == _SECOND_MAGIC:
            return _SlotHeader(_MADE_BY.validate_json(text)), end - int(n_named)
        return _NAMED.validate_json(text), end - int(n_named)
    except ValidationError:
        raise _damaged(path, "its end is no description of a sequence") from None


def _check_made_by(path: Path, named: Mapping[str, str], made_by: Mapping[str, str]) -> None:
    """Raise BadRequest if a file names other values than `made_by`."""
    for what in sorted(named.keys() | made_by.keys()):
        if (theirs := named.get(what)) != (ours := made_by.get(what)):
            raise BadRequest(
                f"{path.name} was saved with another {what} ({theirs or 'none'}) than this one "
                f"({ours or 'none'}): "
                "start with the same model and flags, or evaluate the prompt again"
            )


def _checkpoints(
    path: Path, raw: bytes, named: _SlotHeader, start: int, end: int, n_tokens: int
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints, which end at `end`. Raises BadRequest if the file is damaged."""
    at = end - sum(one.n_bytes for one in named.checkpoints)
    lengths = [one.length for one in named.checkpoints]
    if at < start or lengths != sorted(set(lengths)) or not all(0 < n <= n_tokens for n in lengths):
        raise _damaged(path, "its checkpoints do not fit its tokens")
    checkpoints = []
    for one in named.checkpoints:
        checkpoints.append(one.checkpoint(raw[at : at + one.n_bytes]))
        at += one.n_bytes
    return tuple(checkpoints)


def _damaged(path: Path, why: str) -> BadRequest:
    return BadRequest(
        f"{path.name} is damaged: {why}; delete it, the prompt is then evaluated again"
    )
