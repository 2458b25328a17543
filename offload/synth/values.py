"""Values of random tensors, by name: logits are to be finite and to tell tokens apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from offload.ggml.wanted_tensors import WantedTensor
from offload.synth.shape import Shape

_LOGIT_STD = 3.0  # wide enough that the best token leads the next by more than rounding


@dataclass(frozen=True)
class Fill:
    """Values of one tensor: `constant` scale, `normal` of deviation scale, or `decay`.

    A decay is -scale * uniform(0.5, 4).
    """

    kind: Literal["constant", "normal", "decay"]
    scale: float = 1.0


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
