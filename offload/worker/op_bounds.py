"""The bounds of each number of an operation that a kernel may turn into an address.

The operations are those that our own clients' graphs contain: `scripts/lab/run worker-operations`
records them, with their parameters, integer sources and the tensors that have gaps. Everything
else is refused: other operations, other parameters than 0, other integer sources, other gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Params = NDArray[np.int32]


class Integers(Enum):
    """The bounds of the values of an integer source."""

    COPIED = "values are copied, and no kernel uses them as an index here"
    ANGLES = "positions are multiplied with frequencies, in floating point"
    ROWS_OF_FIRST = "below the rows of source 0, in data or by how the graph computes them"
    ROWS_OF_RESULT = "below the rows of the result, in data or by how the graph computes them"
    EXPERTS = "below the experts of source 0, in data or by how the graph computes them"
    BIASES = "below the rows of source 1, in data or by how the graph computes them"
    STATES = "below the states in source 0, in data"


@dataclass(frozen=True)
class Within:
    """A parameter from `least` to `most`. `reason` says why no value of it is an address."""

    least: int
    most: int
    reason: str = ""


@dataclass(frozen=True)
class Value:
    """A parameter that kernels only compute with: any float, or an int turned into one."""

    reason: str = "a factor, a limit or an addend"


@dataclass(frozen=True)
class ByRule:
    """A parameter that the operation's rule in op_rules.py compares with the shapes."""

    reason: str


Bound = Within | Value | ByRule


@dataclass(frozen=True)
class OpBounds:
    """The bounds of one operation. What is missing here must be 0, absent or without gaps."""

    params: Mapping[int, Bound] = field(default_factory=dict)
    integers: Mapping[int, Integers] = field(default_factory=dict)
    strided: frozenset[int] = frozenset()  # sources that may have gaps; RESULT: the result

    def keeps_params(self, params: Params) -> NDArray[np.bool_]:
        """Return for each node [n, 16] whether its parameters are within bounds."""
        is_kept = np.ones(len(params), np.bool_)
        for index, column in enumerate(params.T):
            bound = self.params.get(index)
            if bound is None:
                is_kept &= column == 0
            elif isinstance(bound, Within):
                is_kept &= (column >= bound.least) & (column <= bound.most)
        return is_kept


RESULT = -1
_PRECISION = Within(0, 10, "a precision: GGML_PREC_DEFAULT or GGML_PREC_F32")
_ROPE = OpBounds(
    {
        1: ByRule("turned values, with the offset and halves at most a row"),
        2: ByRule("one of the known modes"),
        4: Value("the context that the model was trained for, which YaRN computes with"),
        **{i: Value() for i in range(5, 11)},
        **{i: ByRule("sections from 0 to the turned values, not all 0") for i in range(11, 15)},
        15: ByRule("offset of the turned values in a row"),
    },
    {1: Integers.ANGLES},
    frozenset({0}),
)
_ANY = frozenset({0, 1})
_COPY = OpBounds({}, {0: Integers.COPIED, 1: Integers.COPIED}, frozenset({RESULT, 0, 1}))

BOUNDS: Mapping[str, OpBounds] = {
    "CONT": _COPY,
    "CPY": _COPY,
    "ADD": OpBounds(strided=_ANY),
    "SUB": OpBounds(strided=_ANY),
    "MUL": OpBounds(strided=_ANY),
    "DIV": OpBounds(strided=_ANY),
    "ADD_ID": OpBounds({}, {2: Integers.BIASES}, frozenset({2})),
    "SQR": OpBounds(),
    "SQRT": OpBounds(),
    "CLAMP": OpBounds({0: Value(), 1: Value()}),
    "SCALE": OpBounds({0: Value(), 1: Value()}, {}, frozenset({0})),
    "FILL": OpBounds({0: Value()}),
    "UNARY": OpBounds({0: ByRule("one of ggml's unary functions")}, {}, frozenset({0})),
    "GLU": OpBounds(
        {
            0: ByRule("one of ggml's gated functions"),
            1: Within(0, 1, "which half is the gate"),
            2: Value(),
            3: Value(),
        },
        {},
        _ANY,
    ),
    "NORM": OpBounds({0: Value("epsilon")}, {}, frozenset({0})),
    "RMS_NORM": OpBounds({0: Value("epsilon")}, {}, frozenset({0})),
    "SUM_ROWS": OpBounds(strided=frozenset({0})),
    "MEAN": OpBounds(),
    "REPEAT": OpBounds(strided=frozenset({0})),
    "CONCAT": OpBounds(
        {0: ByRule("a dimension from 0 to 3")}, {0: Integers.COPIED, 1: Integers.COPIED}, _ANY
    ),
    "ARANGE": OpBounds({0: Value(), 1: Value(), 2: Value("a step; ggml counts them again")}),
    "POOL_2D": OpBounds(
        {
            0: Within(0, 1, "largest or mean"),
            **{
                i: ByRule("windows and steps in the plane, with the result's size")
                for i in range(1, 5)
            },
        }
    ),
    "MUL_MAT": OpBounds(
        {0: _PRECISION, 1: ByRule("0, or 1 for a square Hadamard matrix of a power of 2")},
        {},
        _ANY,
    ),
    "MUL_MAT_ID": OpBounds({3: _PRECISION}, {2: Integers.EXPERTS}, frozenset({1, 2})),
    "GET_ROWS": OpBounds({}, {0: Integers.COPIED, 1: Integers.ROWS_OF_FIRST}, frozenset({0, 1})),
    "SET_ROWS": OpBounds({}, {1: Integers.ROWS_OF_RESULT}, frozenset({RESULT, 0, 1, 2})),
    "SOFT_MAX": OpBounds({0: Value(), 1: Value("slopes of ALiBi")}, {}, frozenset({0})),
    "ROPE": _ROPE,
    "ROPE_BACK": _ROPE,
    "ARGSORT": OpBounds({0: Within(0, 1, "ascending or descending")}),
    "TOP_K": OpBounds(),
    "ARGMAX": OpBounds(),
    "PAD": OpBounds(
        {i: ByRule("zeros before or after a dimension, in the result's size") for i in range(8)},
        {},
        frozenset({0}),
    ),
    "FLASH_ATTN_EXT": OpBounds(
        {
            0: Value(),
            1: Value("slopes of ALiBi"),
            2: Value("soft cap"),
            3: _PRECISION,
            4: ByRule("0, or at most the cells; the worker drops this hint before it computes"),
        },
        {},
        frozenset({0, 1, 2}),
    ),  # fmt: skip
    "LIGHTNING_INDEXER": OpBounds({0: Value(), 1: Value()}, {}, frozenset({1})),
    "SSM_CONV": OpBounds(),
    "SSM_SCAN": OpBounds(
        {0: ByRule("copies of the state, counted in the result's size")},
        {6: Integers.STATES},
        frozenset({1, 2, 4, 5}),
    ),
    "GATED_DELTA_NET": OpBounds(
        {0: ByRule("copies of the state, counted in the result's size")}, {}, frozenset({0, 1, 2})
    ),
    "DSV4_HC_COMB": OpBounds({0: Value("epsilon"), 1: Within(1, 1 << 10, "iterations")}),
    "DSV4_HC_PRE": OpBounds({0: Value(), 1: ByRule("a switch that the weights' shape follows")}),
    "DSV4_HC_POST": OpBounds(),
}
