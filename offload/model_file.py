"""Reads and checks the header of a model file, and of all parts of a split one."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path

from offload.errors import BadModel
from offload.ggml.gguf import read_header
from offload.header_check import check_header, value_reasons
from offload.header_overrides import overriding
from offload.kv_overrides import KvOverride
from offload.model import Header, ModelFacts, WeightPlace
from offload.regular_file import open_regular

_SPLIT = re.compile(r"^(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

FileStamps = tuple[tuple[int, int, int] | None, ...]  # one of each part of a model

_HEADER_BYTES, _N_SAMPLES, _SAMPLE_BYTES = 1 << 20, 64, 4096

_TOKENS = "tokenizer.ggml.tokens"
_PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def read_facts(path: str | Path, overrides: tuple[KvOverride, ...] = ()) -> ModelFacts:
    """Read and check a model file's header, or the headers of all parts of a split model.

    `overrides` take the place of the file's values. Headers are kept as long as no part of the
    model changes, because a start needs them several times and a vocabulary takes long to read.
    Raises BadModel with one sentence for a path that is not a usable model, or a wrong override.
    """
    path = first_part(Path(path))
    _check_path(path)
    stamps = stamps_of(path)
    return _overridden_facts(path, stamps, overrides) if overrides else _facts(path, stamps)


def stamps_of(path: Path) -> FileStamps:
    """Return (size in bytes, time of change in ns, inode) of each part, None if it is missing."""
    match = _SPLIT.match(path.name)
    stamps: list[tuple[int, int, int] | None] = []
    for part in _parts(path, int(match["count"]) if match else 1):
        try:
            about = part.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((about.st_size, about.st_mtime_ns, about.st_ino))
    return tuple(stamps)


@lru_cache(8)
def _facts(path: Path, stamps: FileStamps) -> ModelFacts:
    """Read the headers of the model's parts. `stamps` are part of the cache's key."""
    del stamps
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise BadModel(f"{path}: has no general.architecture, so it is not a model")
    weights = {entry.name: WeightPlace(path, entry) for entry in header.tensors}
    for number, part in enumerate(_other_parts(path, header), 1):
        if not part.exists():
            raise BadModel(f"{path}: a part of this split model is missing: {part}")
        _check_path(part)
        part_header = read_header(part)
        _check_part(part, part_header, number, header)
        for entry in part_header.tensors:
            if entry.name in weights:
                raise BadModel(
                    f"{part}: has {entry.name}, and so has {weights[entry.name].file.name}: they "
                    "are no parts of one model"
                )
            weights[entry.name] = WeightPlace(part, entry)
    n_wanted = header.metadata.get("split.tensors.count")
    if _n_parts(header) > 1 and isinstance(n_wanted, int) and n_wanted != len(weights):
        raise BadModel(
            f"{path}: its parts hold {len(weights)} weights, and split.tensors.count is {n_wanted}:"
            " a part is of another model, or damaged"
        )
    if not weights:
        raise BadModel(f"{path}: has no weights (a vocabulary-only file?)")
    _check_values(path, header)
    name = header.metadata.get("general.name")
    facts = ModelFacts(
        path, architecture, name if isinstance(name, str) else path.stem, header, weights
    )
    check_header(facts)
    return facts


@lru_cache(8)
def _overridden_facts(
    path: Path, stamps: FileStamps, overrides: tuple[KvOverride, ...]
) -> ModelFacts:
    return overriding(_facts(path, stamps), overrides)


# Architectures of encoders, whose files need not say that they read in both directions.
_ENCODERS = frozenset(
    {"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert",
     "modern-bert", "eurobert", "gemma-embedding", "llama-embed", "t5encoder"}
)  # fmt: skip
_REFUSED = {
    **dict.fromkeys(
        ("dflash", "eagle3"),
        "is a draft head for another model, and writes nothing alone: open its target, and name "
        "this file with --draft",
    ),
    "gemma4-assistant": "is a draft head that reads the hidden rows of a Gemma 4, which is not "
    "supported: open the Gemma 4 without it",
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
        with open_regular(path) as f:
            digest.update(f.read(_HEADER_BYTES))
            for i in range(1, _N_SAMPLES + 1):
                f.seek(max(0, size * i // _N_SAMPLES - _SAMPLE_BYTES))
                digest.update(f.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:24]


def behaviour_hash(facts: ModelFacts) -> str:
    """A hash of the file and of the values that replace its own (`--override-kv`).

    Measurements and texts of a model belong to both. Without such values it is the file's hash.
    """
    of_file = model_hash(facts)
    if not facts.overrides:
        return of_file
    words = ",".join(sorted(map(str, facts.overrides)))
    return hashlib.sha256(f"{of_file}\0{words}".encode()).hexdigest()[: len(of_file)]


def first_part(path: Path) -> Path:
    """Return the path of a split model's first part. `path` may be any part or an unsplit model.

    A whole model may have kept a part's name. Raises BadModel if the first part is missing.
    """
    match = _SPLIT.match(path.name)
    if match is None or int(match["number"]) == 1 or is_whole(path):
        return path
    first = path.with_name(f"{match['prefix']}-00001-of-{match['count']}.gguf")
    if path.exists() and not first.exists():
        raise BadModel(f"{path}: its first part is missing: {first}")
    return first


def is_whole(path: Path) -> bool:
    """True if the file's header is readable, and counts no parts."""
    try:
        return path.is_file() and _n_parts(read_header(path)) < 2
    except (BadModel, OSError):
        return False


def _check_path(path: Path) -> None:
    if not path.exists():
        raise BadModel(f"{path}: no such file")
    if path.is_dir():
        raise BadModel(f"{path}: is a directory, expected a .gguf file")
    try:
        with open_regular(path) as file:
            magic = file.read(4)
    except OSError as e:
        raise BadModel(f"{path}: cannot be read ({e.strerror})") from e
    if not magic:
        raise BadModel(f"{path}: is empty")
    if magic != b"GGUF":
        begin = ascii(magic.decode("latin-1"))
        raise BadModel(f"{path}: is not a GGUF file, because it begins with {begin}")


def _check_values(path: Path, header: Header) -> None:
    """Raise BadModel for numbers that would make the library abort or read past an array."""
    for what in value_reasons(header):
        raise BadModel(f"{path}: {what}")
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


def _n_parts(header: Header) -> int:
    count = header.metadata.get("split.count", 0)
    return count if isinstance(count, int) else 0


def _check_part(part: Path, header: Header, number: int, first: Header) -> None:
    """Raise BadModel unless the header is that of part `number` of this model, counted from 0."""
    part_number, count = header.metadata.get("split.no"), _n_parts(first)
    if part_number != number or _n_parts(header) != count:
        raise BadModel(
            f"{part}: says that it is {_part_words(header)}, and its name that it is part "
            f"{number + 1} of {count}: parts were exchanged, or belong to another model"
        )


def _part_words(header: Header) -> str:
    number = header.metadata.get("split.no")
    if not isinstance(number, int) or _n_parts(header) < 2:
        return "no part of a split model"
    return f"part {number + 1} of {_n_parts(header)}"


def _parts(path: Path, n_parts: int) -> list[Path]:
    """Return the paths of all parts of the model whose first one this is."""
    match = _SPLIT.match(path.name)
    if match is None or n_parts < 2:
        return [path]
    of = f"of-{match['count']}.gguf"
    rest = range(2, n_parts + 1)
    return [path, *(path.with_name(f"{match['prefix']}-{number:05d}-{of}") for number in rest)]


def _other_parts(path: Path, header: Header) -> list[Path]:
    """Return the paths of a split model's parts after the first one, whose header this is.

    Raises BadModel if the file is not the first part, or has lost its name.
    """
    count = _n_parts(header)
    if count < 2:
        return []
    if _is_joined(path, header):
        raise BadModel(
            f"{path}: its {count} parts were joined as bytes (cat), which makes no model of them: "
            "give the first part as it was fetched, or merge the parts with llama-gguf-split"
        )
    match = _SPLIT.match(path.name)
    if not match or int(match["number"]) != 1 or int(match["count"]) != count:
        raise BadModel(
            f"{path}: is {_part_words(header)} and has lost its name: call it "
            f"NAME-{_number(header):05d}-of-{count:05d}.gguf, as all parts, and give the first one"
        )
    if header.metadata.get("split.no", 0) != 0:
        _check_part(path, header, 0, header)
    return _parts(path, count)[1:]


def _number(header: Header) -> int:
    number = header.metadata.get("split.no", 0)
    return number + 1 if isinstance(number, int) else 1


_ALIGNMENT = 32  # bytes to which a part's last weight is padded, unless general.alignment differs


def _is_joined(path: Path, header: Header) -> bool:
    """True if another GGUF file begins behind the last weight."""
    end = max((t.offset_bytes + t.size_bytes for t in header.tensors), default=0)
    named = header.metadata.get("general.alignment", _ALIGNMENT)
    step = named if isinstance(named, int) and named > 0 else _ALIGNMENT
    with open_regular(path) as file:
        for at in {end, -(-end // step) * step}:
            file.seek(at)
            if end and file.read(4) == b"GGUF":
                return True
    return False
