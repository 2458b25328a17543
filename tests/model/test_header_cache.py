"""A header is read once for a start, and again after its file has changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from offload import model_file
from offload.errors import BadModel
from offload.model_file import read_facts


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose headers are read during the test."""
    read, seen = model_file.read_header, list[Path]()

    def seeing(path: Path) -> object:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(model_file, "read_header", seeing)
    return seen


def test_an_unchanged_file_is_read_once(
    tiny_dense: Path, tmp_path: Path, reads: list[Path]
) -> None:
    path = Path(shutil.copy(tiny_dense, tmp_path / "model.gguf"))
    first = read_facts(path)
    assert read_facts(str(path)) is first
    assert reads == [path]


def test_a_changed_file_is_read_again(
    tiny_dense: Path, tiny_moe: Path, tmp_path: Path, reads: list[Path]
) -> None:
    path = Path(shutil.copy(tiny_dense, tmp_path / "model.gguf"))
    assert read_facts(path).architecture == "llama"
    os.utime(path, ns=(1, 1))
    read_facts(path)
    assert reads == [path, path]
    shutil.copy(tiny_moe, path)
    assert read_facts(path).architecture == "deepseek2"
    path.unlink()
    with pytest.raises(BadModel, match="no such file"):
        read_facts(path)


def test_a_part_that_goes_missing_is_noticed(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(1)
    for name in ("token_embd.weight", "blk.0.attn_norm.weight"):
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = sorted(tmp_path.glob("model-*-of-00002.gguf"))
    assert {place.file for place in read_facts(first).weights.values()} == {first, second}
    second.unlink()
    with pytest.raises(BadModel, match="a part of this split model is missing"):
        read_facts(first)
