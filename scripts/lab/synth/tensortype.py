"""Which ggml type each tensor gets, and how many bytes that takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from offload.errors import BadRequest
from offload.ggml.wanted_tensors import WantedTensor

# What ggml_quantize_chunk makes without an importance matrix.
NAMES: Mapping[str, Type] = {
    name.lower(): Type[name]
    for name in (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
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
ALWAYS_F32 = re.compile(r"\.bias$|\.ffn_gate_inp\.|ssm_conv1d|ssm_a|_norm\b|rope_f|position_embd")


@dataclass(frozen=True)
class TypePolicy:
    """A type per tensor class. Rows that do not fill a type's blocks get q8_0, else f16."""

    default: Type
    by_class: tuple[tuple[str, Type], ...] = ()

    @classmethod
    def parse(cls, text: str) -> TypePolicy:
        """Reads e.g. "q4_K,experts=mxfp4,output=q6_K". Raises BadRequest for unknown names."""
        default, by_class = Type.Q8_0, []
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, type_name = part.rpartition("=")
            if equals and name not in CLASSES:
                raise BadRequest(f"no tensor class {name!r}; the classes are {', '.join(CLASSES)}")
            if type_name.lower() not in NAMES:
                known = ", ".join(NAMES)
                raise BadRequest(f"no tensor type {type_name!r} can be written; known are {known}")
            if equals:
                by_class.append((name, NAMES[type_name.lower()]))
            else:
                default = NAMES[type_name.lower()]
        return cls(default, tuple(by_class))

    def type_of(self, tensor: WantedTensor) -> Type:
        if len(tensor.shape) == 1 or ALWAYS_F32.search(tensor.name):
            return Type.F32
        wanted = dict(self.by_class).get(class_of(tensor.name), self.default)
        for candidate in (wanted, Type.Q8_0):
            if tensor.shape[0] % GGML_QUANT_SIZES[candidate][0] == 0:
                return candidate
        return Type.F16


def class_of(name: str) -> str:
    return next((c for c, pattern in _CLASSES if re.search(pattern, name)), "other")


def row_bytes(type_: Type, n_per_row: int) -> int:
    block, size = GGML_QUANT_SIZES[type_]
    return int(n_per_row // block * size)
