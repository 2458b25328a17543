"""A model file before anything is loaded: paths, splits, layers, experts, sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from offload.errors import BadModel
from offload.ggml.gguf import Header, TensorEntry, read_header

_LAYER = re.compile(r"^blk\.(\d+)\.")
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_exps\.weight$")
_SPLIT = re.compile(r"^(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class WeightPlace:
    """Where one weight lies on disk."""

    file: Path
    entry: TensorEntry


@dataclass(frozen=True)
class ModelFacts:
    """The header of a model, all its parts together."""

    path: Path
    architecture: str
    name: str
    header: Header
    weights: dict[str, WeightPlace]

    def number(self, key: str, default: int = 0) -> int:
        """An integer of the architecture's metadata, e.g. `block_count`; first of an array."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            value = value[0] if value else default
        return int(value) if isinstance(value, int | float) else default

    @property
    def n_layers(self) -> int:
        return self.number("block_count")

    @property
    def n_experts(self) -> int:
        return self.number("expert_count")

    @property
    def n_experts_used(self) -> int:
        return self.number("expert_used_count")

    @property
    def size_bytes(self) -> int:
        return sum(place.entry.size_bytes for place in self.weights.values())

    @cached_property
    def expert_weights(self) -> tuple[TensorEntry, ...]:
        """The routed experts' matrices [n_in, n_out, n_experts], in layer order."""
        found = [p.entry for p in self.weights.values() if is_experts(p.entry)]
        return tuple(sorted(found, key=lambda entry: (layer_of(entry.name), entry.name)))

    @property
    def expert_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.expert_weights)


def is_experts(entry: TensorEntry) -> bool:
    """True if it holds a layer's routed experts, [n_in, n_out, n_experts]."""
    return bool(_EXPERTS.search(entry.name))


def layer_of(tensor_name: str) -> int:
    """The layer a weight belongs to, -1 for those outside the layers."""
    match = _LAYER.match(tensor_name)
    return int(match.group(1)) if match else -1


def read_facts(path: str | Path) -> ModelFacts:
    """Read and check a model file's header; of a split model, those of all parts.

    Raises BadModel with one sentence for a path that is not a usable model.
    """
    path = Path(path)
    _check_path(path)
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise BadModel(f"{path}: has no general.architecture, so it is not a model")
    weights = {entry.name: WeightPlace(path, entry) for entry in header.tensors}
    for part in _other_parts(path, header):
        _check_path(part)
        weights |= {e.name: WeightPlace(part, e) for e in read_header(part).tensors}
    if not weights:
        raise BadModel(f"{path}: has no weights (a vocabulary-only file?)")
    name = header.metadata.get("general.name")
    return ModelFacts(
        path, architecture, name if isinstance(name, str) else path.stem, header, weights
    )


def _check_path(path: Path) -> None:
    if not path.exists():
        raise BadModel(f"{path}: no such file")
    if path.is_dir():
        raise BadModel(f"{path}: is a directory, expected a .gguf file")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as e:
        raise BadModel(f"{path}: cannot be read ({e.strerror})") from e
    if not magic:
        raise BadModel(f"{path}: is empty")
    if magic != b"GGUF":
        raise BadModel(f"{path}: is not a GGUF file (it begins with {magic!r})")


def _other_parts(path: Path, header: Header) -> list[Path]:
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return []
    match = _SPLIT.match(path.name)
    if not match or int(match["number"]) != 1:
        raise BadModel(f"{path}: is part of a split model; give the first part (-00001-of-...)")
    return [
        path.with_name(f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(2, count + 1)
    ]
