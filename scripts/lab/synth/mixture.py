"""The mixtures of types that published quantisations have: what each layer's tensors get.

`Q4_K_M` follows llama.cpp's `llama_tensor_get_type`; the two `UD-` mixtures follow the tensor types
that the loader lists for files of Unsloth's dynamic quantisation (ik_llama.cpp #259 shows one).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from lab.synth.tensortype import ALWAYS_F32, TypePolicy
from offload.ggml.wanted_tensors import WantedTensor

_LAYER = re.compile(r"^blk\.(\d+)\.")
# Small or delicate: llama.cpp quantises none of them.
_NEVER_QUANTISED = re.compile(r"altup|laurel|per_layer_model_proj")
# What a row gets that does not fill blocks of 256: llama.cpp's tensor_type_fallback.
_FALLBACK = {
    Type.Q2_K: Type.Q4_0,
    Type.Q3_K: Type.Q4_0,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}


@dataclass(frozen=True)
class _Place:
    """A tensor, the layer it is in, and what it is within that layer."""

    kind: str  # the name without the layer
    layer: int  # -1 outside the layers
    n_layers: int
    n_dense: int  # layers before the first with experts
    is_output: bool  # also the embedding where it is the output matrix too


Rule = Callable[[_Place], Type]


def _more_bits(place: _Place) -> bool:
    """llama.cpp's use_more_bits: the first and last eighth of the layers, and every third."""
    i, n = place.layer, place.n_layers
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _q4_k_m(place: _Place) -> Type:
    if place.is_output:
        return Type.Q6_K
    if place.kind.startswith(("ffn_down", "attn_v.")) and _more_bits(place):
        return Type.Q6_K
    if place.kind.startswith("attn_qkv"):
        return Type.Q5_K
    return Type.Q4_K


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
        return Type.Q6_K if _more_bits(place) else Type.Q5_K
    return Type.Q5_K if place.layer < place.n_dense + 2 else Type.Q4_K


RULES: Mapping[str, Rule] = {
    "Q4_K_M": _q4_k_m,
    "UD-Q2_K_XL": _ud_q2_k_xl,
    "UD-Q4_K_XL": _ud_q4_k_xl,
}


def types_of(
    quant: str, tensors: Iterable[WantedTensor], n_layers: int, n_dense: int, *, tied: bool
) -> list[Type]:
    """The type of each tensor under `quant`: a mixture of RULES, or as TypePolicy.parse reads it.

    `n_dense` layers come before the first with experts; `tied` says that the embedding is the
    output matrix too. Raises BadRequest for an unknown name.
    """
    rule = next((rule for name, rule in RULES.items() if name.lower() == quant.lower()), None)
    if rule is None:
        policy = TypePolicy.parse(quant)
        return [policy.type_of(tensor) for tensor in tensors]
    return [_mixed(rule, tensor, n_layers, n_dense, tied) for tensor in tensors]


def _mixed(rule: Rule, tensor: WantedTensor, n_layers: int, n_dense: int, tied: bool) -> Type:
    if len(tensor.shape) == 1 or ALWAYS_F32.search(tensor.name):
        return Type.F32
    if _NEVER_QUANTISED.search(tensor.name):
        return Type.F16
    match = _LAYER.match(tensor.name)
    is_output = tensor.name == ("token_embd.weight" if tied else "output.weight")
    kind, layer = tensor.name, -1
    if match:
        kind, layer = tensor.name[match.end() :], int(match[1])
    wanted = rule(_Place(kind, layer, n_layers, n_dense, is_output))
    for candidate in (wanted, _FALLBACK[wanted]):
        if tensor.shape[0] % GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return Type.F16
