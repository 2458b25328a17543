"""Makes shapes of models from presets or from descriptions in files, and checks that they are
possible.

`presets.json` holds the metadata of published models from their configurations, and the values that
change in the tiny model of each. Layers for multi-token prediction count as layers if llama.cpp's
conversion writes them. A description is a file with one entry of the same form.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from lab.synth.routing import ROUTINGS, Routing
from offload.errors import BadRequest

Value = int | float | bool | str | tuple[int, ...]
SIGMOID = 2  # a value of expert_gating_func

TINY_VOCAB = 512
SIZES = ("tiny", "tiny-vulkan", "full")
_ROW_MULTIPLE = 32  # block size of most quantised types; narrower rows would all be f16
# Head and row sizes that a software Vulkan driver computes in seconds, for deepseek2.
_TINY_VULKAN: Mapping[str, Value] = {
    "block_count": 3,
    "embedding_length": 256,
    "feed_forward_length": 256,
    "attention.head_count": 2,
    "attention.q_lora_rank": 256,
    "attention.kv_lora_rank": 256,
    "attention.key_length": 288,
    "attention.value_length": 256,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 128,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 256,
    "leading_dense_block_count": 1,
    "rope.freq_base": 10000.0,
}


class UnknownPreset(BadRequest):
    """No preset of that name."""


class ImpossibleShape(BadRequest):
    """Sizes that no model of the architecture can have."""


# Metadata keys by the short names of overrides.
OVERRIDES: Mapping[str, str] = {
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_ff": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "n_expert": "expert_count",
    "n_expert_used": "expert_used_count",
    "n_ff_exp": "expert_feed_forward_length",
    "n_ctx": "context_length",
}


@dataclass(frozen=True)
class Shape:
    """Everything about a model except its weights, which is written into the file's header.

    `metadata` keys have no architecture prefix. `without` are patterns of optional tensors to leave
    out; `quant` is as TypePolicy.parse takes it.
    """

    name: str
    architecture: str
    metadata: dict[str, Value]
    n_vocab: int
    without: tuple[str, ...] = ()
    quant: str = "q8_0"
    fused_experts: bool = False  # gate and up of each expert in one tensor, if the library can
    expert_scales: bool = False  # a factor for each expert's products, if the library supports it
    routing: Routing | None = None  # None: routers choose evenly
    unchecked: bool = False  # True: has metadata of the caller, on which the library may abort

    def number(self, key: str, default: int = 0) -> int:
        """The value of a key, or the largest one of a list that has a value for each layer."""
        value = self.metadata.get(key, default)
        return max(value) if isinstance(value, tuple) else int(value)


@dataclass(frozen=True)
class Preset:
    """One published model. `metadata` keys have no architecture prefix."""

    name: str
    architecture: str
    about: str
    metadata: dict[str, Value]
    tiny: dict[str, Value]  # the values that differ in its tiny model
    n_vocab: int
    aliases: tuple[str, ...] = ()  # names that people use, and architectures
    without: tuple[str, ...] = ()  # patterns of optional tensors that its files do not have
    quant: str = "Q4_K_M"
    tiny_quant: str = "q8_0"
    square_attention: bool = False  # True: the graph requires a head size of n_embd / n_head


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_presets() -> dict[str, Preset]:
    rows = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    for row in rows.values():
        for key in ("metadata", "tiny"):
            row[key] = {name: _frozen(value) for name, value in row[key].items()}
    return {
        name: Preset(name, **{key: _frozen(value) for key, value in row.items()})
        for name, row in rows.items()
    }


PRESETS = _read_presets()
_ALIASES = {alias: preset.name for preset in PRESETS.values() for alias in preset.aliases}


def find_preset(name: str) -> Preset:
    """The preset of that name or alias. Raises UnknownPreset with the nearest names."""
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key in PRESETS:
        return PRESETS[key]
    near = difflib.get_close_matches(key, [*PRESETS, *_ALIASES], n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "--list shows all"
    raise UnknownPreset(f"there is no preset {name!r}; {hint}")


def resolve(preset: str, size: str, **overrides: Any) -> Shape:
    """The shape of `preset` at `size` with overrides applied, checked.

    Overrides are the keys of OVERRIDES, `n_vocab`, `scale` (multiplies the widths, keeps head
    sizes, depth and expert count), `quant`, `fused_experts`, `expert_scales`, `routing` (a
    name of ROUTINGS, or "even"), and `metadata` (raw keys -> values).
    Raises UnknownPreset, ImpossibleShape, or BadRequest for an unknown size or override.
    """
    chosen = find_preset(preset)
    shape = _at_size(chosen, size)
    scale = overrides.pop("scale", None)
    if scale is not None:
        shape = _scaled(shape, float(scale), chosen.square_attention)
    raw = overrides.pop("metadata", None) or {}
    n_vocab, quant = overrides.pop("n_vocab", None), overrides.pop("quant", None)
    fused = bool(overrides.pop("fused_experts", False))
    scales = bool(overrides.pop("expert_scales", False))
    routing = _routing(chosen.name, shape, overrides.pop("routing", None))
    values = {k: v for k, v in overrides.items() if v is not None}
    if unknown := sorted(values.keys() - OVERRIDES.keys()):
        others = ("n_vocab", "scale", "quant", "fused_experts", "expert_scales", "routing",
                  "metadata")  # fmt: skip
        known = ", ".join([*OVERRIDES, *others])
        raise BadRequest(f"unknown override {unknown[0]!r}; known are {known}")
    metadata = dict(shape.metadata)
    for short, value in values.items():
        if short.startswith("n_expert") and "expert_count" not in metadata:
            raise ImpossibleShape(f"{chosen.name} is a dense model, it has no {short} to set")
        metadata[OVERRIDES[short]] = int(value)
    if chosen.square_attention and "n_embd" in values and "n_head" not in values:
        size_of_head = shape.number("attention.key_length")
        metadata["attention.head_count"] = metadata["embedding_length"] // size_of_head  # type: ignore[operator]
    prefix = f"{chosen.architecture}."
    metadata.update({str(k).removeprefix(prefix): v for k, v in raw.items()})
    shape = replace(
        shape,
        metadata=metadata,
        n_vocab=shape.n_vocab if n_vocab is None else int(n_vocab),
        quant=quant or shape.quant,
        fused_experts=fused,
        expert_scales=scales,
        routing=routing,
        unchecked=bool(raw),
    )
    check(shape, chosen.square_attention)
    return shape


def _routing(name: str, shape: Shape, wanted: str | None) -> Routing | None:
    if wanted is None or wanted == "even":
        return None
    if wanted not in ROUTINGS:
        raise BadRequest(f"unknown routing {wanted!r}; one of even, {', '.join(ROUTINGS)}")
    if not shape.number("expert_count"):
        raise ImpossibleShape(f"{name} is a dense model, it has no routers to shape")
    return ROUTINGS[wanted]


def _at_size(preset: Preset, size: str) -> Shape:
    if size not in SIZES:
        raise BadRequest(f"unknown size {size!r}; one of {', '.join(SIZES)}")
    metadata, n_vocab, quant = dict(preset.metadata), preset.n_vocab, preset.quant
    if size != "full":
        metadata.update(preset.tiny)
        n_vocab, quant = TINY_VOCAB, preset.tiny_quant
    if size == "tiny-vulkan":
        if preset.architecture != "deepseek2":
            raise BadRequest(f"size tiny-vulkan exists for deepseek2 presets, not {preset.name}")
        metadata.update(_TINY_VULKAN)
        quant = "q4_K"
    name = preset.name if size == "full" else f"{preset.name}-{size}"
    return Shape(name, preset.architecture, metadata, n_vocab, preset.without, quant)


def _scaled(shape: Shape, scale: float, square_attention: bool) -> Shape:
    if not 0 < scale <= 64:
        raise ImpossibleShape(f"a scale of {scale:g} is not between 0 and 64")
    metadata = dict(shape.metadata)
    step = 256 if shape.number("embedding_length") >= 2048 else _ROW_MULTIPLE

    def times(key: str, multiple: int) -> None:
        if metadata.get(key):
            units = round(shape.number(key) * scale / multiple)
            metadata[key] = max(1, units) * multiple

    n_kv = shape.number("attention.head_count_kv", 1)
    times("attention.head_count", n_kv)
    for key in ("embedding_length", "feed_forward_length", "expert_feed_forward_length"):
        times(key, step)
    times("expert_shared_feed_forward_length", step)
    times("attention.q_lora_rank", step)
    if square_attention:
        n_head, head = metadata["attention.head_count"], shape.number("attention.key_length")
        metadata["embedding_length"] = n_head * head
    return replace(shape, metadata=metadata)


def check(shape: Shape, square_attention: bool = False) -> None:
    """Raises ImpossibleShape for sizes that the library loads but cannot compute with.

    On other impossible sizes the library itself aborts (`plan_shape`).
    """
    # A low rank of 0 means that the projection is not factored. A group count of 0 means no groups.
    # Pooling 0 is none.
    may_be_zero = ("attention.q_lora_rank", "expert_group_count", "expert_group_used_count",
                   "hash_layer_count", "pooling_type")  # fmt: skip
    for key, value in shape.metadata.items():
        if isinstance(value, int) and not isinstance(value, bool):
            least = 0 if key in may_be_zero or key.startswith("rope.dim") else 1
            if not least <= value < 2**31:
                raise ImpossibleShape(
                    f"{shape.architecture}.{key} is {value}, it must be {least} or more"
                )
    if not 1 <= shape.n_vocab < 2**31:
        raise ImpossibleShape(f"a vocabulary of {shape.n_vocab} tokens is not possible (--n-vocab)")
    for key in ("embedding_length", "feed_forward_length", "expert_feed_forward_length"):
        if (n := shape.number(key)) % _ROW_MULTIPLE:
            raise ImpossibleShape(f"{key} is {n}, it must be a multiple of {_ROW_MULTIPLE}")
    n_head, n_kv = shape.number("attention.head_count"), shape.number("attention.head_count_kv", 1)
    head, n_embd = shape.number("attention.key_length"), shape.number("embedding_length")
    n_layer, n_dense = shape.number("block_count"), shape.number("leading_dense_block_count")
    interval = shape.number("full_attention_interval")
    rules = (
        (n_head % n_kv, f"{n_head} heads cannot share {n_kv} key-value heads evenly (--heads)"),
        (
            square_attention and n_embd != n_head * head,
            f"embedding_length {n_embd} must be {n_head} heads x head size {head} (--heads)",
        ),
        (
            shape.number("expert_count") and n_layer <= n_dense,
            f"{n_layer} layers have no expert layer, as {n_dense} are dense (--layers)",
        ),
        (
            n_layer < interval,
            f"{n_layer} layers have no attention layer: every {interval}th is one (--layers)",
        ),
    )
    for is_broken, sentence in rules:
        if is_broken:
            raise ImpossibleShape(sentence)
    for pattern in shape.without:
        try:
            re.compile(pattern)
        except re.error as e:
            raise BadRequest(f"{pattern!r} is no regular expression: {e}") from e


# -- descriptions of models without a preset ------------------------------------------------------

_VALUE: TypeAdapter[Value] = TypeAdapter(Value)


class _Description(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    architecture: str
    metadata: dict[str, Value]
    n_vocab: int = TINY_VOCAB
    without: list[str] = []
    quant: str = "q8_0"


def read_description(path: Path) -> Shape:
    """The shape that a JSON file describes by "architecture", "metadata" (GGUF's keys, with or
    without the architecture before them), "n_vocab", "without" and "quant".

    Raises BadRequest for anything else, and ImpossibleShape for impossible sizes.
    """
    try:
        read = _Description.model_validate_json(path.read_bytes())
    except OSError as e:
        raise BadRequest(f"{path}: cannot be read ({e.strerror})") from e
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRequest(f"{path}: is no description of a model: {where} {first['msg']}") from e
    prefix = f"{read.architecture}."
    metadata = {key.removeprefix(prefix): value for key, value in read.metadata.items()}
    shape = Shape(
        path.stem,
        read.architecture,
        metadata,
        read.n_vocab,
        tuple(read.without),
        read.quant,
        unchecked=True,
    )
    check(shape)
    return shape


def parse_setting(text: str) -> tuple[str, Value]:
    """Reads KEY=VALUE, the value as JSON if it is JSON, else as a string. Raises BadRequest."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadRequest(f"--set {text}: must be KEY=VALUE")
    try:
        return key, _VALUE.validate_json(value)
    except ValidationError:
        return key, value
