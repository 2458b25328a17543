"""Sequences that are shared, saved, loaded into others and written to files.

The models have attention, MLA, sliding windows, recurrent and hybrid memory.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np
import pytest
from numpy.typing import NDArray
from test_lossless_recurrent import write_model

from lab.options import engine_options
from lab.synth import write_preset
from offload.engine import open_engine
from offload.errors import BadRequest, DeviceFailed
from offload.sequences.sequences import Sequences
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.slot_files import read_sequence, write_sequence

KINDS = ("mistral-large", "deepseek-v3", "gpt-oss", "mamba2", "qwen3next")
RECURRENT = ("mamba2", "qwen3next")
TEXT = [(29 * i + 5) % 60 for i in range(40)]
MORE = [7, 3, 50]


def model(kind: str, models: Path) -> Path:
    if kind in RECURRENT:
        return write_model(models, kind)
    return write_preset(kind, models / f"elsewhere-{kind}.gguf", size="tiny", seed=4)


@pytest.fixture(scope="module", params=KINDS)
def sequences(request: pytest.FixtureRequest, models: Path) -> Iterator[Sequences]:
    options = engine_options(device="cpu", n_ctx=512, n_sequences=4, n_rs_seq=3)
    with open_engine(model(request.param, models), options) as engine:
        yield engine.sequences


@pytest.fixture(autouse=True)
def empty(sequences: Sequences) -> None:
    for sequence in range(4):
        sequences.rewind(sequence, 0)


def in_file(path: Path, sequences: Sequences, tokens: Sequence[int]) -> int:
    """Write sequence 0, which holds `tokens`. Returns the bytes written."""
    return write_sequence(path, StoredPrompt(tuple(tokens), sequences.save(0)), sequences.made_by)


def continued(sequences: Sequences, sequence: int) -> NDArray[np.float32]:
    return sequences.extend(sequence, MORE)


def test_a_saved_sequence_goes_on_in_another_as_it_would_have(sequences: Sequences) -> None:
    sequences.extend(0, TEXT, 0)
    state = sequences.save(0)
    wanted = continued(sequences, 0)
    sequences.extend(1, [1, 2, 3], 0)
    sequences.extend(3, [4, 4], 0)
    sequences.load(3, state, TEXT)
    assert sequences.length(3) == len(TEXT)
    np.testing.assert_array_equal(continued(sequences, 3), wanted)
    assert sequences.length(1) == 3


def test_a_saved_sequence_goes_on_alike_behind_the_cells_of_others(sequences: Sequences) -> None:
    """Attention sums over groups of cells, counted from the first one."""
    sequences.extend(0, TEXT, 0)
    state = sequences.save(0)
    wanted = continued(sequences, 0)
    sequences.rewind(0, 0)
    sequences.extend(1, (TEXT * 7)[:256], 0)
    sequences.load(2, state, TEXT)
    np.testing.assert_array_equal(continued(sequences, 2), wanted)


def test_a_whole_sequence_is_shared_and_both_go_on_by_themselves(sequences: Sequences) -> None:
    sequences.extend(0, TEXT, 0)
    sequences.share(0, 2, len(TEXT))
    wanted = continued(sequences, 0)
    sequences.extend(0, [9] * 5, 0)
    np.testing.assert_array_equal(continued(sequences, 2), wanted)


def test_a_prefix_is_shared_where_memory_can_be_cut(sequences: Sequences) -> None:
    n = len(TEXT) - 4
    sequences.extend(1, TEXT[:n], 0)
    wanted = continued(sequences, 1)
    sequences.extend(0, TEXT, 0)
    if not sequences.can_share(0, n):
        assert not sequences.can_rewind
        with pytest.raises(BadRequest, match="cannot begin with"):
            sequences.share(0, 2, n)
        return
    sequences.share(0, 2, n)
    np.testing.assert_array_equal(continued(sequences, 2), wanted)
    sequences.rewind(2, 0)
    assert sequences.length(0) == len(TEXT)
    with pytest.raises(BadRequest, match="cannot begin with"):
        sequences.share(0, 1, n)


def test_a_sequence_comes_back_from_a_file_that_the_library_would_write(
    sequences: Sequences, tmp_path: Path
) -> None:
    sequences.extend(0, TEXT, 0)
    path, theirs = tmp_path / "conversation", tmp_path / "theirs"
    n_bytes = in_file(path, sequences, TEXT)
    assert n_bytes == path.stat().st_size
    tokens = (ctypes.c_int32 * len(TEXT))(*TEXT)
    native.llama_state_seq_save_file(
        sequences._context.handle, str(theirs).encode(), 0, tokens, len(TEXT)
    )
    # After the library's bytes comes our trailer, which the library does not read.
    trailer = path.read_bytes().removeprefix(theirs.read_bytes())
    assert len(trailer) < n_bytes
    named = json.loads(trailer[:-16])
    assert named == {"made_by": dict(sequences.made_by), "checkpoints": [], "salt": ""}
    wanted = continued(sequences, 0)
    found, n_read = read_sequence(path, sequences, 2)
    assert (list(found.tokens), n_read) == (TEXT, n_bytes)
    np.testing.assert_array_equal(continued(sequences, 2), wanted)


def test_a_file_cut_anywhere_leaves_the_sequence_empty(
    sequences: Sequences, tmp_path: Path
) -> None:
    path = tmp_path / "conversation"
    sequences.extend(0, TEXT, 0)
    n_bytes = in_file(path, sequences, TEXT)
    raw = path.read_bytes()
    for n in sorted({*range(0, 300, 7), *range(300, n_bytes, n_bytes // 40), n_bytes - 1}):
        path.write_bytes(raw[:n])
        with pytest.raises(BadRequest, match="conversation is (no saved sequence|damaged)"):
            read_sequence(path, sequences, 1)
        assert sequences.length(1) == 0
    path.write_bytes(raw + b"more")
    with pytest.raises(BadRequest, match="conversation is damaged"):
        read_sequence(path, sequences, 1)
    assert continued(sequences, 1).shape[0] == len(MORE)


def test_what_is_no_saved_sequence_is_refused(sequences: Sequences, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("once upon a time" * 9)
    with pytest.raises(BadRequest, match="text is no saved sequence"):
        read_sequence(tmp_path / "text", sequences, 1)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("missing", "pipe", "link", "folder"):
        with pytest.raises(OSError, match="not a regular file|Is a directory|No such file"):
            read_sequence(tmp_path / name, sequences, 1)


def test_a_file_larger_than_any_sequence_is_not_read(sequences: Sequences, tmp_path: Path) -> None:
    sequences.extend(0, [3] * sequences.n_ctx, 0)
    whole = tmp_path / "whole"
    n_bytes = in_file(whole, sequences, [3] * sequences.n_ctx)
    sequences.rewind(0, 0)
    assert read_sequence(whole, sequences, 1)[1] == n_bytes, "a full context comes back"
    sequences.rewind(1, 0)
    os.truncate(whole, 1 << 40)  # one terabyte: a valid header, then a hole
    with pytest.raises(OSError, match="it has 1099511627776 bytes, and [0-9]+ are read at most"):
        read_sequence(whole, sequences, 1)
    assert sequences.length(1) == 0


def test_a_lasting_checkpoint_moves_with_its_sequence(sequences: Sequences) -> None:
    sequences.extend(0, TEXT[:20], 0)
    checkpoint = sequences.checkpoint(0, lasting=True)
    sequences.extend(0, TEXT[20:], 0)
    state = sequences.save(0)
    sequences.restore(0, checkpoint)
    wanted = continued(sequences, 0)
    sequences.load(3, state, TEXT)
    moved = sequences.adopted(3, checkpoint)
    sequences.restore(3, moved)
    assert sequences.length(3) == 20
    np.testing.assert_array_equal(continued(sequences, 3), wanted)


def test_a_state_that_finds_no_room_leaves_the_sequence_empty(sequences: Sequences) -> None:
    sequences.extend(0, TEXT, 0)
    state = sequences.save(0)
    with pytest.raises(DeviceFailed, match="could not be restored"):
        sequences.load(1, state[: len(state) // 2], TEXT)
    assert sequences.length(1) == 0
    assert continued(sequences, 1).shape[0] == len(MORE)
