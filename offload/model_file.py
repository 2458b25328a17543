"""Reads and checks the header of a model file, and of all parts of a split one."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

from offload.errors import BadModel
from offload.ggml.gguf import read_header
from offload.model import Header, ModelFacts, WeightPlace

_SPLIT = re.compile(r"^(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

_HEADER_BYTES, _N_SAMPLES, _SAMPLE_BYTES = 1 << 20, 64, 4096

_TOKENS = "tokenizer.ggml.tokens"
_PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def read_facts(path: str | Path) -> ModelFacts:
    """Read and check a model file's header, or the headers of all parts of a split model.

    Raises BadModel with one sentence for a path that is not a usable model.
    """
    path = first_part(Path(path))
    _check_path(path)
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise BadModel(f"{path}: has no general.architecture, so it is not a model")
    weights = {entry.name: WeightPlace(path, entry) for entry in header.tensors}
    for part in _other_parts(path, header):
        if not part.exists():
            raise BadModel(f"{path}: a part of this split model is missing: {part}")
        _check_path(part)
        weights |= {e.name: WeightPlace(part, e) for e in read_header(part).tensors}
    if not weights:
        raise BadModel(f"{path}: has no weights (a vocabulary-only file?)")
    _check_numbers(path, header)
    n_layers = header.metadata.get(f"{architecture}.block_count", 0)
    if isinstance(n_layers, int) and n_layers > len(weights):
        raise BadModel(
            f"{path}: {architecture}.block_count is {n_layers} for {len(weights)} weights; "
            "the file is damaged"
        )
    n_mtp = header.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if isinstance(n_mtp, int) and isinstance(n_layers, int) and n_mtp > n_layers:
        raise BadModel(
            f"{path}: {architecture}.nextn_predict_layers is {n_mtp} for {n_layers} layers; "
            "the file is damaged"
        )
    name = header.metadata.get("general.name")
    return ModelFacts(
        path, architecture, name if isinstance(name, str) else path.stem, header, weights
    )


# Architectures of encoders, whose files need not say that they read in both directions.
_ENCODERS = frozenset(
    {"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert",
     "modern-bert"}
)  # fmt: skip
_REFUSED = {
    "dflash": "is a draft that only works inside its target's context, and writes nonsense alone: "
    "open its target",
    "graniteswitch": "chooses between adapters in its file, which was not tested with experts in "
    "RAM: use llama-server for it",
}
_BY_DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})


def check_writes(facts: ModelFacts) -> None:
    """Raise BadModel for a model that cannot continue a text token by token, such as BERT."""
    if facts.architecture in _BY_DIFFUSION:
        raise BadModel(
            f"{facts.path}: {facts.architecture} writes by diffusion, many tokens at once and "
            "without a KV cache: use llama-diffusion-cli for it"
        )
    if facts.architecture in _REFUSED:
        raise BadModel(f"{facts.path}: {facts.architecture} {_REFUSED[facts.architecture]}")
    if facts.architecture in _ENCODERS or not facts.number("attention.causal", 1):
        raise BadModel(
            f"{facts.path}: {facts.architecture} here reads texts in both directions, "
            "as models for embeddings alone do, and cannot continue a text: "
            "use llama-server --embeddings for it"
        )


def model_hash(facts: ModelFacts) -> str:
    """A hash of every part's size, first bytes and samples. Files are not read whole."""
    digest = hashlib.sha256()
    for path in sorted({facts.path, *(place.file for place in facts.weights.values())}):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as f:
            digest.update(f.read(_HEADER_BYTES))
            for i in range(1, _N_SAMPLES + 1):
                f.seek(max(0, size * i // _N_SAMPLES - _SAMPLE_BYTES))
                digest.update(f.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:24]


def first_part(path: Path) -> Path:
    """Return the path of a split model's first part. `path` may be any part or an unsplit model.

    Raises BadModel if the first part is missing.
    """
    match = _SPLIT.match(path.name)
    if match is None or int(match["number"]) == 1:
        return path
    first = path.with_name(f"{match['prefix']}-00001-of-{match['count']}.gguf")
    if path.exists() and not first.exists():
        raise BadModel(f"{path}: its first part is missing: {first}")
    return first


def _check_path(path: Path) -> None:
    if not path.exists():
        raise BadModel(f"{path}: no such file")
    if path.is_dir():
        raise BadModel(f"{path}: is a directory, expected a .gguf file")
    if not path.is_file():
        raise BadModel(f"{path}: is not a regular file")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as e:
        raise BadModel(f"{path}: cannot be read ({e.strerror})") from e
    if not magic:
        raise BadModel(f"{path}: is empty")
    if magic != b"GGUF":
        raise BadModel(f"{path}: is not a GGUF file (it begins with {magic!r})")


def _check_numbers(path: Path, header: Header) -> None:
    """Raise BadModel for numbers that would make the library abort or read past an array."""
    for key, value in header.metadata.items():
        values = value if isinstance(value, tuple) else (value,)
        if any(isinstance(x, float) and not math.isfinite(x) for x in values):
            raise BadModel(f"{path}: {key} is not a finite number; the file is damaged")
        if key.endswith("_epsilon") and any(isinstance(x, float) and x < 0 for x in values):
            raise BadModel(f"{path}: {key} is {value}, below 0; the file is damaged")
    if not header.has_byte_tokens:
        raise BadModel(
            f"{path}: its vocabulary lacks tokens for single bytes (<0x00> to <0xFF>), without"
            " which the library cannot split text into tokens"
        )
    n_tokens = header.lengths.get(_TOKENS)
    for key in _PER_TOKEN if n_tokens is not None else ():
        n = header.lengths.get(key, n_tokens)
        if n != n_tokens:
            raise BadModel(
                f"{path}: {key} has {n} entries for {n_tokens} tokens; the file is damaged"
            )


def _other_parts(path: Path, header: Header) -> list[Path]:
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return []
    match = _SPLIT.match(path.name)
    if not match or int(match["number"]) != 1:
        raise BadModel(
            f"{path}: is part of a split model and has lost its name (-00001-of-{count:05d}.gguf)"
        )
    return [
        path.with_name(f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(2, count + 1)
    ]
