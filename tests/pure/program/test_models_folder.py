"""Finds models in a folder by llama-server's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from specoffload.errors import UsageError
from specoffload.models.folder import FolderModel, models_of

FILES = (
    "llama-1b-Q4_K_M.gguf",
    "mmproj-llama.gguf",
    "mtp-llama.gguf",
    "half-00002-of-00002.gguf",
    "notes.txt",
    "gemma/gemma-Q8_0.gguf",
    "gemma/mmproj-F16.gguf",
    "kimi/kimi-00001-of-00003.gguf",
    "kimi/kimi-00002-of-00003.gguf",
    "kimi/kimi-00003-of-00003.gguf",
    "glm/glm.gguf",
    "glm/mtp-glm.gguf",
    "empty/readme.md",
)


def test_files_and_folders_are_models(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert models_of(tmp_path) == [
        FolderModel("gemma", tmp_path / FILES[5], projector=tmp_path / FILES[6]),
        FolderModel("glm", tmp_path / FILES[10], draft=tmp_path / FILES[11]),
        FolderModel("kimi", tmp_path / FILES[7]),
        FolderModel("llama-1b-Q4_K_M", tmp_path / FILES[0]),
    ]


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--models-dir .*: no such folder"):
        models_of(tmp_path / "none")
