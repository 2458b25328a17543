"""The facts of a model file's header: paths, parts, layers, experts and sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

from offload.kv_overrides import KvOverride

_LAYER = re.compile(r"^blk\.(\d+)\.")
_STATE = re.compile(r"^cache_(?:r|s|ple_r)_l(\d+)$")
_CACHE = re.compile(r"cache_[a-z_]+_l(\d+)")
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_exps\.weight$")
_RECURRENT = re.compile(r"^blk\.\d+\.(ssm_(conv1d|a|in)|shortconv|time_mix)")
_ATTENTION = re.compile(r"^blk\.\d+\.attn_(k|kv_a_mqa|qkv)\.weight$")
_ATTENTION_KEYS = re.compile(r"^blk\.\d+\.attn_k\.weight$")
_EXPERT_BIASES = re.compile(r"_exps\.bias$")

# Weights of which the CPU looks up rows, in host memory. The first may be the output matrix too.
LOOKED_UP = frozenset(
    {
        *("token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight"),
        *("token_types.weight", "token_embd_norm.weight", "token_embd_norm.bias"),
    }
)

HeaderValue = str | int | float | bool


@dataclass(frozen=True)
class TensorEntry:
    """One row of a file's tensor table. `offset_bytes` counts from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]  # ggml order: the row length first
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """A GGUF file's contents before its weights begin."""

    metadata: dict[str, HeaderValue | tuple[HeaderValue, ...]]
    tensors: tuple[TensorEntry, ...]
    lengths: dict[str, int] = field(default_factory=dict)  # lengths of all arrays in the metadata
    has_byte_tokens: bool = True  # False: the library cannot split text with this vocabulary


@dataclass(frozen=True)
class WeightPlace:
    file: Path
    entry: TensorEntry


@dataclass(frozen=True)
class ModelFacts:
    """The header of a model. For a split model, the headers of all parts together."""

    path: Path
    architecture: str
    name: str
    header: Header
    weights: dict[str, WeightPlace]
    part_layers: range | None = None  # the layers that `weights` has; None: all
    overrides: tuple[KvOverride, ...] = ()  # by which `header` differs from the file's

    def part(self, first: int, end: int) -> ModelFacts:
        """Return the facts of a device that computes the layers `first` to `end - 1`.

        The output counts as one more layer after the last one. Its device has all weights outside
        the layers, and the layers for multi-token prediction. Layers keep their numbers.
        """
        n = self.n_layers
        if (first, end) == (0, n + 1):
            return self
        has_output = end > n
        layers = range(first, min(end, n))
        chosen = {
            name: place
            for name, place in self.weights.items()
            if (i := layer_of(name)) in layers or (has_output and not 0 <= i < n)
        }
        return replace(self, weights=chosen, part_layers=layers)

    def number(self, key: str, default: int = 0) -> int:
        """Return an integer of the metadata, such as `block_count`, or an array's first one."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            value = value[0] if value else default
        return int(value) if isinstance(value, int | float) else default

    def per_layer(self, key: str, default: int = 0) -> tuple[int, ...]:
        """Return an integer of the metadata for each layer. A single number is repeated."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, tuple):
            return (self.number(key, default),) * self.n_layers
        numbers = [int(v) if isinstance(v, int | float) else default for v in value]
        return tuple((*numbers, *[default] * self.n_layers)[: self.n_layers])

    @property
    def n_layers(self) -> int:
        """Layers that compute a token. Layers for multi-token prediction come after them."""
        return self.number("block_count") - self.n_mtp_layers

    @property
    def layers(self) -> range:
        """The layers that compute a token: all of them, or those of a part."""
        return range(self.n_layers) if self.part_layers is None else self.part_layers

    @property
    def n_mtp_layers(self) -> int:
        """Layers for multi-token prediction that the header counts."""
        return self.number("nextn_predict_layers")

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context that the model was trained for."""
        return self.number("context_length", 4096)

    @cached_property
    def loaded(self) -> tuple[TensorEntry, ...]:
        """The weights that libllama loads: all but those of layers for multi-token prediction."""
        n_layers, entries = self.n_layers, [place.entry for place in self.weights.values()]
        return tuple(e for e in entries if layer_of(e.name) < n_layers)

    @property
    def is_tied(self) -> bool:
        """True if the token embeddings are the output matrix, too."""
        return not any(entry.name == "output.weight" for entry in self.loaded)

    @cached_property
    def recurrent_layers(self) -> frozenset[int]:
        if self.architecture == "minimax-01":  # whose two kinds of layers have equal names
            interval = self.number("full_attention_interval", 8)
            listed = self.per_layer("attention.recurrent_layers", -1)
            return frozenset(
                i for i in self.layers if listed[i] > 0 or (listed[i] < 0 and (i + 1) % interval)
            )
        return self._layers_with(_RECURRENT)

    @cached_property
    def attending_layers(self) -> frozenset[int]:
        """Layers that have keys and values."""
        with_keys = (
            frozenset() if self.architecture == "minimax-01" else self._layers_with(_ATTENTION_KEYS)
        )
        return self._layers_with(_ATTENTION) - (self.recurrent_layers - with_keys)

    @property
    def keeps_compressed(self) -> bool:
        """True if the context keeps compressed keys, which can only be cut by its snapshots."""
        return self.architecture == "deepseek4"

    def _layers_with(self, pattern: re.Pattern[str]) -> frozenset[int]:
        return frozenset(layer_of(e.name) for e in self.loaded if pattern.match(e.name))

    @property
    def n_experts(self) -> int:
        return self.number("expert_count")

    @cached_property
    def n_experts_used(self) -> int:
        """Experts that a token uses in a layer, or the most of any layer if they differ."""
        return max(self.per_layer("expert_used_count"), default=0)

    @property
    def size_bytes(self) -> int:
        return sum(place.entry.size_bytes for place in self.weights.values())

    @cached_property
    def expert_weights(self) -> tuple[TensorEntry, ...]:
        """The routed experts' matrices [n_in, n_out, n_experts], in layer order."""
        entries = [entry for entry in self.loaded if is_experts(entry)]
        return tuple(sorted(entries, key=lambda entry: (layer_of(entry.name), entry.name)))

    @cached_property
    def expert_biases(self) -> tuple[TensorEntry, ...]:
        """The biases of the routed experts' matrices [n_out, n_experts]."""
        return tuple(entry for entry in self.loaded if _EXPERT_BIASES.search(entry.name))

    @property
    def expert_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.expert_weights)

    @property
    def one_expert_bytes(self) -> int:
        """Size of the largest layer's expert, or 0 without experts."""
        return max(self.layer_expert_bytes.values(), default=0)

    @property
    def layer_expert_bytes(self) -> dict[int, int]:
        """Size of one expert by layer. Layers without experts are left out."""
        of_layer: dict[int, int] = {}
        for entry in self.expert_weights:
            layer = layer_of(entry.name)
            of_layer[layer] = of_layer.get(layer, 0) + entry.size_bytes
        return {layer: size // max(1, self.n_experts) for layer, size in of_layer.items()}


def is_experts(entry: TensorEntry) -> bool:
    """True if the tensor holds a layer's routed experts, [n_in, n_out, n_experts]."""
    return bool(_EXPERTS.search(entry.name))


@lru_cache(1 << 14)
def layer_of(tensor_name: str) -> int:
    """Return the layer that a weight belongs to, or -1 for a weight outside the layers."""
    match = _LAYER.match(tensor_name)
    return int(match.group(1)) if match else -1


def layer_of_cache(tensor_name: str) -> int:
    """Return the layer of a cache by the name that `llama_kv_cache` gives it, such as cache_k_l0.

    Returns -1 for another tensor.
    """
    match = _CACHE.match(tensor_name)
    return int(match.group(1)) if match else -1


def layer_of_state(tensor_name: str) -> int | None:
    """Return the layer of a recurrent state by libllama's name, None for a cache of keys or values.

    `llama_memory_recurrent` names the tensors of a layer's state.
    """
    match = _STATE.match(tensor_name)
    return int(match.group(1)) if match else None
