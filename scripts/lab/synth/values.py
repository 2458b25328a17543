"""Values of random tensors, by name: logits are to be finite and to tell tokens apart."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from lab.synth.parts import SIGMOID
from lab.synth.routing import Part
from lab.synth.shape import Shape
from offload.ggml.wanted_tensors import WantedTensor

_LOGIT_STD = 3.0  # wide enough that the best token leads the next by more than rounding


@dataclass(frozen=True)
class Fill:
    """Values of one tensor: `constant` scale, `normal` of deviation scale, or `decay`.

    A decay is -scale * uniform(0.5, 4). `first` are the first values of each row of a matrix, where
    they are drawn apart.
    """

    kind: Literal["constant", "normal", "decay"]
    scale: float = 1.0
    first: tuple[Part, ...] = ()


_BY_NAME = (
    (r"norm\.weight$", Fill("constant")),
    (r"^rope_f|\.rope_f", Fill("constant")),  # frequency factors divide: they must be positive
    (r"\.ssm_a$", Fill("decay")),  # must be negative, the state would grow without bound
    (r"\.exp_probs_b\.bias$", Fill("normal", 0.1)),
    (r"\.ssm_dt\.bias$", Fill("normal", 0.5)),
    (r"\.bias$", Fill("normal", 0.02)),
    (r"_exps\.scale$", Fill("normal")),
    (r"\.attn_sinks\.weight$", Fill("normal")),
)
# With one matrix for embedding and output, the residual stream's own embedding would always win,
# and every token predict itself. So what the layers add to the stream is made larger there.
_TIED_GAIN = 8.0
_INTO_STREAM = re.compile(r"\.(attn_output|ffn_down(_exps)?)\.weight$")
_STREAM_NORM = re.compile(r"\.post_(attention|ffw)_norm\.weight$")
# All that layers add is made smaller where routers are to read what tokens bring.
_ADDED = re.compile(r"\.(attn_output|ssm_out|ffn_down(_exps|_shexp)?)\.weight$")
_ROUTED_GAIN = 0.25
_SIGMOID_SLOPE = 0.25  # of scores near zero: some biases are added behind the sigmoid


def fill_of(tensor: WantedTensor, shape: Shape, tied: bool) -> Fill:
    """`tied`: the embedding is the output matrix too, so it sets the scale of the logits."""
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


def routed(fill: Fill, tensor: WantedTensor, shape: Shape, names: Collection[str]) -> Fill:
    """`fill` in a model whose routers follow `shape.routing`; `names` are those of all tensors."""
    routing = shape.routing
    if routing is None:
        return fill
    if tensor.name == "token_embd.weight":
        return replace(fill, first=routing.embedding(fill.scale))
    if _ADDED.search(tensor.name):
        return replace(fill, scale=_ROUTED_GAIN * fill.scale)
    layer, _, last = tensor.name.rpartition(".ffn_gate_inp.")
    behind = shape.number("expert_gating_func") == SIGMOID
    has_bias = f"{layer}.ffn_gate_inp.bias" in names
    if last == "weight":
        has_bias |= behind and f"{layer}.exp_probs_b.bias" in names
        return replace(fill, first=routing.router(has_bias=has_bias))
    bias = routing.bias(shape.number("embedding_length"))
    if last == "bias":
        return Fill("normal", bias)
    if tensor.name.endswith(".exp_probs_b.bias"):
        # Behind a softmax all scores are small, and any bias would choose alone.
        return Fill("normal", _SIGMOID_SLOPE * bias) if behind else Fill("constant", 0.0)
    return fill
