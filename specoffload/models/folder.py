"""Finds the models in a folder as llama-server's `--models-dir` does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from specoffload.errors import UsageError
from specoffload.models.names import is_first_part

_DRAFT_STARTS = ("mtp-", "dspark-", "dflash-")  # draft_prefixes in common/preset.cpp of llama.cpp
_FIRST_PART = "-00001-of-"
_PROJECTOR = "mmproj"


class FolderModel(NamedTuple):
    """A model's name and file, and the files of its draft model and projector, if it has any."""

    name: str
    model: Path
    draft: Path | None = None
    projector: Path | None = None


def models_of(folder: Path) -> list[FolderModel]:
    """Return the models of a folder, by name.

    A .gguf file is a model, and so is a folder with one, or with the parts of one. Files of
    projectors and of draft models are none, and belong to the model of their folder. Raises
    UsageError if `folder` is no folder.
    """
    if not folder.is_dir():
        raise UsageError(f"--models-dir {folder}: no such folder")
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found += _in_folder(path)
        elif path.suffix == ".gguf" and not _is_companion(path) and is_first_part(path.name):
            found.append(FolderModel(path.name.removesuffix(".gguf"), path))
    return found


def _in_folder(folder: Path) -> list[FolderModel]:
    files = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    models = [path for path in files if not _is_companion(path)]
    firsts = [path for path in models if _FIRST_PART in path.name] or models[-1:]
    drafts = [path for path in files if path.name.startswith(_DRAFT_STARTS)]
    projectors = [path for path in files if _PROJECTOR in path.name]
    draft, projector = (next(iter(found), None) for found in (drafts, projectors[-1:]))
    return [FolderModel(folder.name, path, draft, projector) for path in firsts[-1:]]


def _is_companion(path: Path) -> bool:
    return _PROJECTOR in path.name or path.name.startswith(_DRAFT_STARTS)
