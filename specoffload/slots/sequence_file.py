"""Sequences in files, in the format of llama.cpp's server (--slot-save-path).

Written and read here and not by the library's own functions, which end the process on a file that
was cut short.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

from offload.errors import BadRequest, DeviceFailed
from offload.sequences import Sequences
from specdec.whole_file import read_whole, whole_file

_HEADER = Struct("<III")  # magic, version, number of tokens; the tokens and the state follow
_MAGIC, _VERSION = 0x67677371, 3
_TOKEN_BYTES = 4
_OF_STATE = 8  # bytes before a state in memory that a file does not have: a magic and the sequence


def write_sequence(path: Path, sequences: Sequences, sequence: int, tokens: Sequence[int]) -> int:
    """Write the sequence, which holds `tokens`, whole or not at all; the bytes written.

    Raises OSError, BadRequest."""
    if len(tokens) != sequences.length(sequence):
        raise BadRequest(f"sequence {sequence} holds {sequences.length(sequence)} tokens")
    state = sequences.save(sequence)
    with whole_file(path) as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, len(tokens)))
        file.write(array("i", tokens).tobytes())
        file.write(memoryview(state)[_OF_STATE:])
        return file.tell()


def read_sequence(path: Path, sequences: Sequences, sequence: int) -> tuple[list[int], int]:
    """Make the sequence what `path` holds; its tokens, and the bytes read.

    Raises OSError for what is no regular file or larger than any sequence of this context, and
    BadRequest for a file that is none of this model: the sequence is empty then.
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
    state = sequences.save(sequence)[:_OF_STATE] + raw[start:]
    try:
        sequences.load(sequence, state, n_tokens)
    except DeviceFailed as e:
        raise BadRequest(f"{path.name} is damaged, or of another model: {e}") from e
    return list(tokens), len(raw)
