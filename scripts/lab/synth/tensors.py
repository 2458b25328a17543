"""Lists the tensors of a shape, with their types and random values.

No list of tensors is kept here: names and shapes come from the library that will load the file.
The mixtures of types are those of published quantisations: `Q4_K_M` follows llama.cpp's
`llama_tensor_get_type`, the two `UD-` mixtures Unsloth's dynamic quantisation (ik_llama.cpp #259
lists the types of one).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from lab.synth.routing import Part
from lab.synth.shape import SIGMOID, Shape
from offload.errors import BadRequest
from offload.ggml.wanted import WantedTensor, wanted_tensors


@dataclass(frozen=True)
class Fill:
    """Values of one tensor. `kind` is constant (all `scale`), normal (deviation `scale`), decay or
    steps.

    A decay is -scale * uniform(0.5, 4). Steps are 0, scale, 2 * scale ... `first` describes the
    first values of each row, if they are drawn separately.
    """

    kind: Literal["constant", "normal", "decay", "steps"]
    scale: float = 1.0
    first: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file to write. `shape` is in ggml's order: the row length first."""

    name: str
    shape: tuple[int, ...]
    type: Type
    fill: Fill

    @property
    def n_values(self) -> int:
        n = 1
        for dimension in self.shape:
            n *= dimension
        return n

    @property
    def n_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return int(self.n_values // block * size)


# Scales of a quantisation that is not written here. The library offers them for every matrix.
_NEVER = (r"(?<!ffn_gate_inp)\.scale$", r"\.input_scale$", r"\.lora_[ab]$")
_EXPERT_SCALE = re.compile(r"\.ffn_(gate|up|down)_exps\.scale$")


def tensors_of(shape: Shape, header: Path) -> tuple[Tensor, ...]:
    """The tensors of the model whose metadata `header` holds.

    Raises BadModel when the library refuses the metadata, BadRequest for unknown types.
    """
    wanted = [tensor for tensor in _all_tensors(header, shape) if not _left_out(tensor, shape)]
    names = {tensor.name for tensor in wanted}
    tied = "output.weight" not in names
    n_layers, n_dense = shape.number("block_count"), shape.number("leading_dense_block_count")
    types = types_of(shape.quant, wanted, n_layers, n_dense, tied=tied)
    return tuple(
        Tensor(t.name, t.shape, type_, _routed(fill_of(t, shape, tied), t, shape, names))
        for t, type_ in zip(wanted, types, strict=True)
    )


def _all_tensors(header: Path, shape: Shape) -> Iterator[WantedTensor]:
    """The library's tensors. It reports gate and up fused; they are split here, as in published
    files."""
    for tensor in wanted_tensors(header):
        if "ffn_gate_up_exps" not in tensor.name or shape.fused_experts:
            yield tensor
            continue
        n_embd, n_ff_twice, *n_expert = tensor.shape
        for half in ("ffn_gate_exps", "ffn_up_exps"):
            name = tensor.name.replace("ffn_gate_up_exps", half)
            yield WantedTensor(name, (n_embd, n_ff_twice // 2, *n_expert))
            if name.endswith(".weight"):  # the scales that the library has for separate gate and up
                yield WantedTensor(f"{name.removesuffix('weight')}scale", tuple(n_expert))


def _left_out(tensor: WantedTensor, shape: Shape) -> bool:
    if shape.expert_scales and _EXPERT_SCALE.search(tensor.name):
        return False
    return any(re.search(pattern, tensor.name) for pattern in (*_NEVER, *shape.without))


# -- types -----------------------------------------------------------------------------------------

# The types that ggml_quantize_chunk makes without an importance matrix.
NAMES: Mapping[str, Type] = {
    name.lower(): Type[name]
    for name in (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_M", "IQ4_NL", "IQ4_XS", "MXFP4"),
    )
}
_CLASSES = (
    ("experts", r"_exps\.weight$"),
    ("output", r"^output\.weight$"),
    ("embedding", r"^token_embd\.weight$"),
    ("attention", r"\.(attn|ssm)_"),
)
CLASSES = (*(name for name, _ in _CLASSES), "other")
# Routers, convolutions and decays stay f32, as in published files: kernels expect them so.
_ALWAYS_F32 = re.compile(
    r"\.bias$|\.ffn_gate_inp\.|conv1d|shortconv\.conv|ssm_[ad]\b|ssm_a_|_norm\b|rope_f|position_embd"
    r"|hc_|ple_norm_|compressor_ape"
)
_NEVER_QUANTISED = re.compile(r"altup|laurel|per_layer_model_proj")  # llama.cpp keeps these in f16
_LAYER = re.compile(r"^blk\.(\d+)\.")
# Types of rows that do not fill blocks of 256, as in llama.cpp's tensor_type_fallback.
_FALLBACK = {
    Type.IQ1_M: Type.IQ4_NL,
    Type.Q2_K: Type.Q4_0,
    Type.Q3_K: Type.Q4_0,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}


@dataclass(frozen=True)
class _Place:
    """A tensor's name without the layer's number, and the layer's place in the model."""

    kind: str
    layer: int  # -1 outside the layers
    n_layers: int
    n_dense: int  # layers before the first with experts
    is_output: bool  # True also for the embedding, if it is the output matrix too

    @property
    def more_bits(self) -> bool:
        """llama.cpp's use_more_bits: the first and last eighth of the layers, and every third."""
        i, n = self.layer, self.n_layers
        return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _q4_k_m(place: _Place) -> Type:
    if place.is_output:
        return Type.Q6_K
    if place.kind.startswith(("ffn_down", "attn_v.")) and place.more_bits:
        return Type.Q6_K
    return Type.Q5_K if place.kind.startswith("attn_qkv") else Type.Q4_K


def _ud_q2_k_xl(place: _Place) -> Type:
    if place.is_output or place.kind.startswith(("attn_kv_a", "attn_k_b", "attn_v_b", "attn_v.")):
        return Type.Q6_K
    if "_exps" in place.kind:
        early = place.layer < place.n_dense + 3
        return Type.Q3_K if early and "ffn_down" in place.kind else Type.Q2_K
    return Type.Q4_K


def _ud_q4_k_xl(place: _Place) -> Type:
    if place.is_output or "_exps" not in place.kind:
        is_large = place.kind.startswith(("attn_q", "attn_output", "token_embd"))
        return Type.Q5_K if is_large and not place.is_output else Type.Q6_K
    if "ffn_down" in place.kind:
        return Type.Q6_K if place.more_bits else Type.Q5_K
    return Type.Q5_K if place.layer < place.n_dense + 2 else Type.Q4_K


MIXTURES: Mapping[str, Callable[[_Place], Type]] = {
    "Q4_K_M": _q4_k_m,
    "UD-Q2_K_XL": _ud_q2_k_xl,
    "UD-Q4_K_XL": _ud_q4_k_xl,
}


def types_of(
    quant: str, tensors: Iterable[WantedTensor], n_layers: int, n_dense: int, *, tied: bool
) -> list[Type]:
    """The type of each tensor under `quant`: a name of MIXTURES, or types by class such as
    "q4_K,experts=mxfp4,output=q6_K".

    Rows that do not fill a type's blocks get llama.cpp's fallback in a mixture, else q8_0; f16 if
    that does not fit either. `n_dense` layers come before the first with experts; `tied` says that
    the embedding is the output matrix too. Raises BadRequest for unknown names.
    """
    mixture = next((rule for name, rule in MIXTURES.items() if name.lower() == quant.lower()), None)
    by_class = {} if mixture else _by_class(quant)
    output = "token_embd.weight" if tied else "output.weight"

    def type_of(tensor: WantedTensor) -> Type:
        name = tensor.name
        if len(tensor.shape) == 1 or _ALWAYS_F32.search(name):
            return Type.F32
        if mixture is None:
            candidates = (by_class[class_of(name)], Type.Q8_0)
        elif _NEVER_QUANTISED.search(name):
            return Type.F16
        else:
            layer = _LAYER.match(name)
            kind, at = (name[layer.end() :], int(layer[1])) if layer else (name, -1)
            wanted = mixture(_Place(kind, at, n_layers, n_dense, name == output))
            candidates = wanted, _FALLBACK[wanted]
        fits = (t for t in candidates if tensor.shape[0] % GGML_QUANT_SIZES[t][0] == 0)
        return next(fits, Type.F16)

    return [type_of(tensor) for tensor in tensors]


def _by_class(text: str) -> dict[str, Type]:
    """The type of each of CLASSES."""
    default, found = Type.Q8_0, {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, type_name = part.rpartition("=")
        if equals and name not in CLASSES:
            raise BadRequest(f"no tensor class {name!r}; the classes are {', '.join(CLASSES)}")
        if type_name.lower() not in NAMES:
            known = ", ".join(NAMES)
            raise BadRequest(f"no tensor type {type_name!r} can be written; known are {known}")
        if equals:
            found[name] = NAMES[type_name.lower()]
        else:
            default = NAMES[type_name.lower()]
    return {name: found.get(name, default) for name in CLASSES}


def class_of(name: str) -> str:
    return next((c for c, pattern in _CLASSES if re.search(pattern, name)), "other")


# -- values, which make logits finite and different for each token ---------------------------------

_LOGIT_STD = 3.0  # wide enough that the best token leads the next by more than rounding
_BY_NAME = (
    (r"norm\.weight$", Fill("constant")),
    (r"^rope_f|\.rope_f", Fill("constant")),  # frequency factors are divisors and must be positive
    (r"\.ssm_a$", Fill("decay")),  # decays must be negative, or the state grows without bound
    (r"\.exp_probs_b\.bias$", Fill("normal", 0.1)),
    (r"\.ssm_dt\.bias$", Fill("normal", 0.5)),
    (r"\.bias$", Fill("normal", 0.02)),
    (r"_exps\.scale$", Fill("normal")),
    (r"\.attn_sinks\.weight$", Fill("normal")),
)
# If embedding and output are one matrix, the residual stream's own embedding would dominate, and
# every token would predict itself. So the layers' additions to the stream are larger there.
_TIED_GAIN = 8.0
_INTO_STREAM = re.compile(r"\.(attn_output|ffn_down(_exps)?)\.weight$")
_STREAM_NORM = re.compile(r"\.post_(attention|ffw)_norm\.weight$")
# Layers add less to the stream if routers have to read the tokens' embeddings.
_ADDED = re.compile(r"\.(attn_output|ssm_out|ffn_down(_exps|_shexp)?)\.weight$")
_ROUTED_GAIN = 0.25
_SIGMOID_SLOPE = 0.25  # slope of the sigmoid at 0; some biases are added after it


def fill_of(tensor: WantedTensor, shape: Shape, tied: bool) -> Fill:
    """How to fill a tensor. With `tied`, the embedding is also the output matrix and scales the
    logits."""
    if tied and _STREAM_NORM.search(tensor.name):
        return Fill("constant", _TIED_GAIN)
    for pattern, fill in _BY_NAME:
        if re.search(pattern, tensor.name):
            return fill
    n_in = tensor.shape[0]
    if tensor.name == "output.weight" or (tied and tensor.name == "token_embd.weight"):
        logit_scale = float(shape.metadata.get("logit_scale", 1.0))  # type: ignore[arg-type]
        return Fill("normal", _LOGIT_STD * n_in**-0.5 / logit_scale)
    if tensor.name == "token_embd.weight":
        return Fill("normal")
    gain = _TIED_GAIN if tied and _INTO_STREAM.search(tensor.name) else 1.0
    return Fill("normal", gain * n_in**-0.5)


def _routed(fill: Fill, tensor: WantedTensor, shape: Shape, names: Collection[str]) -> Fill:
    """`fill`, changed if routers follow `shape.routing`. `names` are the names of all tensors."""
    routing = shape.routing
    if routing is None:
        return fill
    if tensor.name == "token_embd.weight":
        return replace(fill, first=routing.embedding(fill.scale))
    if _ADDED.search(tensor.name):
        return replace(fill, scale=_ROUTED_GAIN * fill.scale)
    layer, _, last = tensor.name.rpartition(".ffn_gate_inp.")
    behind = shape.number("expert_gating_func") == SIGMOID
    if last == "weight":
        has_bias = f"{layer}.ffn_gate_inp.bias" in names
        has_bias |= behind and f"{layer}.exp_probs_b.bias" in names
        return replace(fill, first=routing.router(has_bias=has_bias))
    bias = routing.bias(shape.number("embedding_length"))
    if last == "bias":
        return Fill("normal", bias)
    if tensor.name.endswith(".exp_probs_b.bias"):
        # After a softmax all scores are small, so any bias would decide alone.
        return Fill("normal", _SIGMOID_SLOPE * bias) if behind else Fill("constant", 0.0)
    return fill
