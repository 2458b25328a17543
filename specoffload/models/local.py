"""Finds the file of a model by its path or name, and lists the models in this machine's caches.

The caches are those of the hub, of llama.cpp and of ollama.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offload.errors import BadModel
from offload.model_file import is_whole
from specdec.options import ROW_FILES
from specdec.whole_file import is_folder
from specoffload import report
from specoffload.config.environment import Environment
from specoffload.config.options import Options
from specoffload.errors import UsageError
from specoffload.models.folder import projector_beside
from specoffload.models.hub import cached_model, fetch, file_beside, hub_snapshot
from specoffload.models.names import (
    HubName,
    OllamaName,
    choose_projector,
    choose_row_file,
    is_address,
    is_first_part,
    is_model,
    model_in,
    name_of,
    parts_of,
    read_hub_name,
    read_name,
    same_model,
)


def located(options: Options, environment: Environment, *, header_only: bool = False) -> Options:
    """Returns `options` with files for `model` and `draft`. Fetches missing files.

    With `header_only`, only the headers of missing files are fetched. A model that is found by a
    name gets this name as its alias. Raises UsageError or FetchFailed, and BadModel for a path that
    does not exist and for a large model that a start would refuse, which is not fetched.
    """

    def file_of(
        field: str, repo_field: str, file: str | None
    ) -> tuple[Path | None, HubName | OllamaName | None]:
        """The file of one model, and the name that it was found by."""
        path, repo = getattr(options, field), getattr(options, repo_field)
        name: HubName | OllamaName | None = None
        if repo is not None:
            said = f"{options.name(repo_field)} {repo}"
            if path is not None:
                raise UsageError(
                    f"{said} and {options.name(field)} {path} name two models: give one of them"
                )
            name = read_hub_name(repo, file or "")
            if name is None:
                raise UsageError(f"{said}: expected user/repo[:quant]")
        elif path is None:
            return None, None
        elif path.is_dir():
            return model_in(path), None
        elif not path.exists() and (len(path.parts) == 1 or not path.parent.is_dir()):
            name = read_name(str(path))
        if field == "draft" and isinstance(name, HubName) and not name.file:
            name = _row_file_of(name, options) or name
        if isinstance(name, OllamaName):
            return find_ollama(name, environment.ollama_folders), name
        if name is None:
            _check_exists(path, environment)
            return path, None
        path = fetch(
            name,
            offline=options.offline,
            token=options.hf_token,
            header_only=header_only,
            check=partial(_check_before_fetch, options.hf_token, is_draft=field == "draft"),
        )
        report.detail(f"{name}: {path}")
        return path, name

    draft, _ = file_of("draft", "hf_repo_draft", None)  # first, because it is small
    model, name = file_of("model", "hf_repo", options.hf_file)
    if draft is None and options.spec.from_file is not None and isinstance(name, HubName):
        draft = _row_file_beside(name, options, header_only=header_only)
    if options.hf_file is not None and options.hf_repo is None:
        raise UsageError(f"{options.name('hf_file')} {options.hf_file} needs -hf user/repo")
    given = dict(options.given)
    for field, repo_field in (("model", "hf_repo"), ("draft", "hf_repo_draft")):
        if repo_field in given:
            given[field] = given[repo_field]
    called = replace(name, revision="") if isinstance(name, HubName) else name
    alias = options.alias or (str(called).rpartition("/")[2] if called else None)
    options = replace(options, model=model, draft=draft, given=given, alias=alias)
    return _with_projector(options, name, header_only=header_only)


def _row_file_of(name: HubName, options: Options) -> HubName | None:
    """The file of `name` that drafts from a target's rows, if such a one is meant, or None.

    Without `--spec-type` it is meant if the repository has one, and no model of it was fetched.
    """
    named = options.spec.drafters
    kinds = [kind for kind in named if kind in ROW_FILES] if named else ROW_FILES
    if not kinds or (not named and cached_model(name) is not None):
        return None

    def choose(files: Sequence[str], model: str) -> str | None:
        return choose_row_file(files, model, name.quant, kinds)

    return file_beside(name, choose, "draft", offline=options.offline, token=options.hf_token)


def _row_file_beside(name: HubName, options: Options, *, header_only: bool) -> Path | None:
    """Fetch the file in the model's own repository that the named drafter needs, if it has one."""
    beside = _row_file_of(replace(name, file=""), options)
    if beside is None:
        return None
    path = fetch(beside, offline=options.offline, token=options.hf_token, header_only=header_only)
    report.detail(f"{beside}: {path}")
    return path


def _with_projector(
    options: Options, name: HubName | OllamaName | None, *, header_only: bool
) -> Options:
    """Return `options` with the file of the projector, if one is asked for. Fetches it.

    `name`: the model's, None for a file.
    """
    if options.mmproj is not None:
        return options
    projector: HubName | OllamaName | None = None
    reason = "only models in files and repositories have one beside them"
    if options.mmproj_url is not None:
        projector = read_name(options.mmproj_url)
        if not isinstance(projector, HubName) or not projector.file:
            raise UsageError(
                f"{options.name('mmproj_url')} {options.mmproj_url}: only files of the hub are "
                "fetched (https://huggingface.co/USER/REPO/resolve/main/FILE.gguf); fetch others "
                "yourself, and name them with --mmproj"
            )
    elif options.mmproj_auto and isinstance(name, HubName):
        projector = file_beside(
            name,
            lambda files, model: choose_projector(files, model) if model else None,
            "projector",
            offline=options.offline,
            token=options.hf_token,
        )
        reason = f"no file with mmproj in its name was found in {name.repo}"
    elif options.mmproj_auto and options.model is not None and name is None:
        beside = projector_beside(options.model)
        if beside.projector is not None:
            return replace(options, mmproj=beside.projector)
        reason = beside.reason
    if isinstance(projector, HubName):
        path = fetch(
            projector, offline=options.offline, token=options.hf_token, header_only=header_only
        )
        report.detail(f"{projector}: {path}")
        return replace(options, mmproj=path)
    if options.mmproj_auto:
        flag = options.name("mmproj_auto")
        words = f"{flag} has no effect: {reason}"
        return replace(options, notes=(*options.notes, words))
    return options


def _check_exists(path: Path, environment: Environment) -> None:
    """Raise BadModel for a path of no file, with the name that was probably meant."""
    if not path.exists():
        if is_address(str(path)):
            raise UsageError(
                f"{str(path).replace(':/', '://', 1)}: only models of the Hugging Face hub are "
                "fetched: fetch the file yourself, and name it"
            )
        known = dict(installed_ollama(environment.ollama_folders))
        raise BadModel(f"{path}: no such file{name_hint(str(path), list(known))}")


def _check_before_fetch(token: str | None, name: HubName, *, is_draft: bool) -> None:
    # Imported here, because only large downloads need what it imports.
    from specoffload.models.fetch_check import check_before_fetch

    check_before_fetch(name, token, is_draft=is_draft)


# -- the caches


@dataclass(frozen=True)
class CachedModel:
    """A model in a cache. Commands take its `name`. `missing` says which parts it lacks, or ""."""

    name: str
    cache: str
    path: Path
    missing: str = ""


def cached_models(hub: Path, llama: Path, ollama_folders: Sequence[Path]) -> Iterator[CachedModel]:
    """All cached models, cache by cache, sorted within each."""
    for folder in _glob(hub, "models--*"):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot, files = hub_snapshot(folder)
        for file in files:
            if is_model(file) and is_first_part(file):
                path = snapshot / file
                name = name_of(repo, file, files) or str(path)
                yield CachedModel(name, "hub", path, _missing(path, file, files))
    there = [path.name for path in _glob(llama, "*.gguf")]
    for file in there:
        if is_model(file) and is_first_part(file):
            path = llama / file
            yield CachedModel(str(path), "llama.cpp", path, _missing(path, file, there))
    installed = list(installed_ollama(ollama_folders))
    chosen = dict(installed)  # two folders may have a model of one name
    for name, path in installed:
        is_found = chosen[name] == path and isinstance(read_name(name), OllamaName)
        yield CachedModel(name if is_found else str(path), "ollama", path)


def models_below(folder: Path) -> Iterator[CachedModel]:
    """All models in `folder` and its subfolders. Raises UsageError if it is no folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: specoffload models lists the caches or a FOLDER")
    for path in sorted(folder.rglob("*.gguf")):
        if not is_model(str(path.relative_to(folder))) or not path.is_file():
            continue
        there = sorted(other.name for other in path.parent.glob("*.gguf"))
        if is_first_part(path.name) or _stands_alone(path, there):
            yield CachedModel(str(path), "folder", path, _missing(path, path.name, there))


def _stands_alone(path: Path, files: Sequence[str]) -> bool:
    """True for a whole model that has kept the name of a later part."""
    return not any(is_first_part(other) and same_model(other, path.name) for other in files) and (
        is_whole(path)
    )


def _missing(path: Path, file: str, files: Sequence[str]) -> str:
    """A sentence on the parts of a split model that are missing, or "".

    A merged model may have kept the name of its first part, and lacks none.
    """
    try:
        parts_of(file, files, "it")
    except UsageError as e:
        return "" if is_whole(path) else str(e)
    return ""


def _glob(folder: Path, pattern: str) -> list[Path]:
    """The sorted paths in a folder that need not exist. None if it may not be entered."""
    return sorted(folder.glob(pattern)) if is_folder(folder) else []


def unreadable(folder: Path) -> bool:
    """True if this user may not see whether a folder exists, or may not list it."""
    try:
        return folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)
    except PermissionError:
        return True


_REGISTRY = "registry.ollama.ai"
_MODEL = "application/vnd.ollama.image.model"


def find_ollama(name: OllamaName, folders: Sequence[Path]) -> Path:
    """The GGUF file of `name`. Raises UsageError, which names the nearest installed model."""
    known = dict(installed_ollama(folders))
    if path := known.get(str(name)):
        return path
    if not known:
        where = " or ".join(map(str, folders))
        raise UsageError(f"{name}: ollama has no models in {where} (OLLAMA_MODELS)")
    near = difflib.get_close_matches(str(name), list(known), 1, cutoff=0.0)[0]
    raise UsageError(f"ollama has not fetched {name}; the nearest that it has is {near}")


def name_hint(text: str, installed: Sequence[str]) -> str:
    """Return a clause on the name that `text`, which is no file, was probably meant to be, or "".

    `installed` has the names of ollama's models. ollama itself takes names without `ollama:`.
    """
    name = None if text.endswith(".gguf") else read_name(f"ollama:{text}")
    if not isinstance(name, OllamaName):
        return ""
    if str(name) in installed:
        return f"; ollama has a model of this name: {name}"
    near = difflib.get_close_matches(str(name), installed, 1, cutoff=0.8)
    if near:
        return f"; ollama has {near[0]}"
    if ":" not in text:
        return ""
    return f"; {name} is a model of ollama, which has to fetch it first: ollama pull {text}"


def installed_ollama(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(name, GGUF file) of every model whose file is there."""
    for folder in folders:
        for manifest in _glob(folder / "manifests", "*/**/*"):
            blob = _blob(folder, manifest)
            if blob is not None:
                yield _name_of(manifest.relative_to(folder / "manifests")), blob


def _name_of(manifest: Path) -> str:
    host, *namespace, name, tag = manifest.parts
    if host == _REGISTRY:
        words = [*(namespace if namespace != ["library"] else ()), name]
    else:
        words = [host, *namespace, name]
    return str(OllamaName("/".join(words), tag))


def _blob(folder: Path, manifest: Path) -> Path | None:
    if not manifest.is_file():
        return None
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _MODEL)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None  # another kind of file, or an adapter without a model
    blob = folder / "blobs" / str(digest).replace(":", "-")
    return blob if blob.is_file() else None
