"""The models that lie in this machine's caches: the hub's, llama.cpp's and ollama's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specoffload.errors import UsageError
from specoffload.models import ollama
from specoffload.models.choice import is_model, parts_of, quants
from specoffload.models.folder import is_first_part


@dataclass(frozen=True)
class CachedModel:
    """`name` is what a command takes; `missing` says what an unfinished one lacks."""

    name: str
    cache: str
    path: Path
    missing: str = ""


def cached_models(hub: Path, llama: Path, ollama_folders: Sequence[Path]) -> Iterator[CachedModel]:
    """All of them, cache by cache, by name."""
    for folder in sorted(hub.glob("models--*")):
        yield from _of_repository(folder)
    for path in sorted(llama.glob("*.gguf")):
        if is_model(path.name) and is_first_part(path.name):
            yield _checked(str(path), "llama.cpp", path, [p.name for p in llama.glob("*.gguf")])
    for name, path in ollama.installed(ollama_folders):
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
