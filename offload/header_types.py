"""Checks the types of a model's tensors. Pure.

The library checks a weight's shape when it opens a file, and no more of its type than that rows are
whole blocks. A kernel that meets a type without a product reads through a null pointer, and ends
the process by SIGSEGV. One that meets a type that it was not written for ends it by an assertion.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from offload.model import TensorEntry

# Types that are no weights, by ggml's names: integers, doubles, and what kernels make of the other
# factor of a product. They have no product of their own (`vec_dot` in ggml-cpu.c).
_NO_WEIGHTS = frozenset({"i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K"})
_NUMBERS = ("i32", "i64")
# Tables of whole numbers: experts by token (DeepSeek-V4), and the tokens that an EAGLE-3 file
# drafts.
_TABLES = re.compile(r"(^|\.)(ffn_gate_tid2eid|d2t)(\.weight)?$")
# Tensors of more than one dimension that are added, multiplied element by element or convolved. The
# kernels for these operations read 32-bit floats next to activations.
_ELEMENTWISE = re.compile(
    r"\.bias$|norm|scale(\.weight)?$|^rope_f|sinks|\.ssm_(a|d)\b|\.ssm_dt$|conv1d|shortconv\.conv\."
)  # not ssm_dt.weight, which is a matrix (Mamba, Jamba), and may have any type

_VECTOR_FACTORS = re.compile(r"ffn_gate_inp_shexp")  # vectors that are multiplied as matrices are


def type_complaints(entries: Iterable[TensorEntry]) -> Iterator[str]:
    """Yield a sentence for each tensor whose type no kernel reads where the tensor is used."""
    for entry in entries:
        allowed = _allowed(entry)
        if allowed is None:
            if entry.type in _NO_WEIGHTS:
                yield (
                    f"{entry.name} has the type {entry.type}, in which no weights are multiplied; "
                    "the file is damaged"
                )
        elif entry.type not in allowed:
            yield (
                f"{entry.name} has the type {entry.type}, and must have {' or '.join(allowed)}; "
                "the file is damaged"
            )


def _allowed(entry: TensorEntry) -> tuple[str, ...] | None:
    """Return the types that a tensor may have, or None if it may have any type of weights."""
    if _TABLES.search(entry.name):
        return _NUMBERS
    is_vector = len(entry.shape) < 2 and not _VECTOR_FACTORS.search(entry.name)
    return ("f32",) if is_vector or _ELEMENTWISE.search(entry.name) else None
