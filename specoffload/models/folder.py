"""Finds the models in a folder for `--models-dir`.

A .gguf file is a model, and so is each one in a folder of the folder. Files that are no models of
their own are left out: by their names, as for repositories (`names.py`), and by their headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from specoffload.errors import UsageError
from specoffload.models.file_kind import no_model_reason
from specoffload.models.names import (
    are_one_model,
    choose_projector,
    is_first_part,
    is_model,
    quants,
    same_model,
    stem_of,
    usual_of,
)

_DRAFT_STARTS = ("mtp-", "dspark-", "dflash-")  # draft_prefixes in common/preset.cpp of llama.cpp


class FolderModel(NamedTuple):
    """A model's name and file, and the files of its draft model and projector, if it has any.

    `aliases` are more names of it.
    """

    name: str
    model: Path
    draft: Path | None = None
    projector: Path | None = None
    aliases: tuple[str, ...] = ()


class FolderModels(NamedTuple):
    """The models of a folder, and why other .gguf files are none, by their paths in the folder."""

    models: list[FolderModel]
    left_out: dict[str, str]


def models_of(folder: Path) -> FolderModels:
    """Return the models of a folder and of the folders in it, by name.

    A folder with one model gives it its name. With several, each is named FOLDER:QUANTISATION, or
    FOLDER/FILE if their quantisations are equal or not named, and FOLDER is an alias of the one
    that the name of a repository would mean. Raises UsageError if `folder` is no folder, or cannot
    be read.
    """
    if not folder.is_dir():
        raise UsageError(f"--models-dir {folder}: no such folder")
    left_out: dict[str, str] = {}
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
        models = _in_folder(folder, "", left_out)
        for path in inner:
            models += _in_folder(path, path.name, left_out)
    except OSError as e:
        raise UsageError(f"--models-dir {e.filename or folder}: {e.strerror}") from e
    return FolderModels(sorted(_with_own_names(models, folder)), left_out)


class FolderProjector(NamedTuple):
    """The projector in a model's folder, or None and why none is used."""

    projector: Path | None
    reason: str = ""


def projector_beside(model: Path) -> FolderProjector:
    """Return the projector that lies beside the file of a model.

    Quantisations of one model share it. With several models it may belong to another one.
    """
    return _projector_of(model, _kinds(model.parent))


def _projector_of(model: Path, kinds: Mapping[Path, str]) -> FolderProjector:
    """As `projector_beside`, for a folder with these `.gguf` files."""
    others = [path.name for path, reason in kinds.items() if reason and path.is_file()]
    chosen = choose_projector(others, model.name)
    if chosen is None:
        return FolderProjector(None, f"no file with mmproj in its name lies beside {model.name}")
    models = [path.name for path, reason in kinds.items() if not reason]
    if not are_one_model([name for name in models if is_first_part(name)]):
        words = f"{chosen} may belong to another model of its folder; name it with --mmproj"
        return FolderProjector(None, words)
    return FolderProjector(model.parent / chosen)


def _kinds(folder: Path) -> dict[Path, str]:
    """Return why each `.gguf` file of a folder is no model, "" for a model, by its path."""
    files = sorted(folder.glob("*.gguf"))
    return {path: no_model_reason(path) or _reason_by_name(path) for path in files}


def _in_folder(folder: Path, within: str, left_out: dict[str, str]) -> list[FolderModel]:
    """Return the models of one folder. `within` is its name, "" for the folder of --models-dir."""
    reasons = _kinds(folder)
    files = [*reasons]
    models = [path.name for path in files if not reasons[path]]
    firsts = [name for name in models if is_first_part(name)]
    companions = [path for path in files if reasons[path] and path.is_file()]
    drafts = [path for path in companions if path.name.startswith(_DRAFT_STARTS)] if within else []
    entries = []
    for name, own in zip(firsts, _names(firsts, within), strict=True):
        projector = _projector_of(folder / name, reasons).projector if within else None
        entries.append(FolderModel(own, folder / name, next(iter(drafts), None), projector))
    used = {*drafts, *(entry.projector for entry in entries)}
    for path in files:
        is_rest = any(same_model(first, path.name) for first in firsts)
        if reasons[path] and path not in used and not is_rest:
            left_out[f"{within}/{path.name}".removeprefix("/")] = reasons[path]
    if within and len(entries) > 1:
        usual = usual_of(firsts)
        entries = [m._replace(aliases=(within,)) if m.model.name == usual else m for m in entries]
    return entries


def _reason_by_name(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    if not is_model(path.name):
        return "a draft model, a projector or the like by its name"
    return "" if is_first_part(path.name) else "a part whose first one is missing"


def _names(files: Sequence[str], within: str) -> list[str]:
    """Return the names of the models of one folder, by their files."""
    if not within:
        return [stem_of(file) for file in files]
    if len(files) == 1:
        return [within]
    tags = [quants([file])[0] for file in files]
    is_told = len(set(tags)) == len(tags) and all(
        tag != stem_of(file) for tag, file in zip(tags, files, strict=True)
    )
    if is_told:
        return [f"{within}:{tag.upper()}" for tag in tags]
    return [f"{within}/{stem_of(file)}" for file in files]


def _with_own_names(models: Sequence[FolderModel], folder: Path) -> list[FolderModel]:
    """Give models whose names are equal the paths of their files as names."""
    taken = Counter(name for model in models for name in (model.name, *model.aliases))
    return [
        model._replace(
            name=model.name
            if taken[model.name] == 1
            else str(model.model.relative_to(folder)).removesuffix(".gguf"),
            aliases=tuple(alias for alias in model.aliases if taken[alias] == 1),
        )
        for model in models
    ]
