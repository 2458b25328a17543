"""Models on this machine: in the caches of the hub, of llama.cpp and of ollama."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specoffload.errors import UsageError
from specoffload.models.names import OllamaName, is_first_part, is_model, parts_of, quants


@dataclass(frozen=True)
class CachedModel:
    """A model in a cache. Commands take its `name`. `missing` says which parts it lacks, or ""."""

    name: str
    cache: str
    path: Path
    missing: str = ""


def cached_models(hub: Path, llama: Path, ollama_folders: Sequence[Path]) -> Iterator[CachedModel]:
    """All cached models, cache by cache, sorted within each."""
    for folder in sorted(hub.glob("models--*")):
        yield from _of_repository(folder)
    for path in sorted(llama.glob("*.gguf")):
        if is_model(path.name) and is_first_part(path.name):
            yield _checked(str(path), "llama.cpp", path, [p.name for p in llama.glob("*.gguf")])
    for name, path in installed_ollama(ollama_folders):
        yield CachedModel(name, "ollama", path)


def _of_repository(folder: Path) -> Iterator[CachedModel]:
    repo = folder.name.removeprefix("models--").replace("--", "/", 1)
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return
    snapshot = folder / "snapshots" / commit
    files = [str(path.relative_to(snapshot)) for path in sorted(snapshot.rglob("*.gguf"))]
    for file in files:
        if is_model(file) and is_first_part(file):
            yield _checked(f"{repo}:{quants([file])[0]}", "hub", snapshot / file, files)


def _checked(name: str, cache: str, path: Path, files: Sequence[str]) -> CachedModel:
    inside = next(file for file in files if str(path).endswith(file))
    try:
        parts_of(inside, files, "it")
    except UsageError as e:
        return CachedModel(name, cache, path, str(e))
    return CachedModel(name, cache, path)


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


def installed_ollama(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(name, GGUF file) of every model whose file is there."""
    for folder in folders:
        for manifest in sorted((folder / "manifests").glob("*/**/*")):
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
        return None  # something else lies there, or an adapter without a model
    blob = folder / "blobs" / str(digest).replace(":", "-")
    return blob if blob.is_file() else None
