"""Models that ollama has fetched: a manifest names the blob that is the GGUF file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from specoffload.errors import UsageError
from specoffload.models.name import OllamaName

_REGISTRY = "registry.ollama.ai"
_MODEL = "application/vnd.ollama.image.model"


def find(name: OllamaName, folders: Sequence[Path]) -> Path:
    """The blob of `name`. Raises UsageError naming the nearest model that is there."""
    known = dict(installed(folders))
    if path := known.get(str(name)):
        return path
    if not known:
        where = " or ".join(map(str, folders))
        raise UsageError(f"{name}: ollama has no models in {where} (OLLAMA_MODELS)")
    near = difflib.get_close_matches(str(name), list(known), 1, cutoff=0.0)[0]
    raise UsageError(f"ollama has not fetched {name}; the nearest that it has is {near}")


def installed(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
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
