"""The shapes and types with which each operation writes only into its own result.

ggml's functions that build a graph check this (ggml_mul_mat and others in ggml.c). Its kernels
check only some of it again, and a graph from a network was not built here. So each rule repeats
what the building function asserts. op_bounds.py bounds parameters, integers and gaps. An operation
without both is refused, as ggml's operations of the kind MAP_CUSTOM call a function at an address
that the graph contains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.ggml.node_table import Ints
from offload.worker.op_bounds import BOUNDS, RESULT

Bools = NDArray[np.bool_]

VIEWS = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")  # these compute nothing


@dataclass(frozen=True)
class Types:
    """Numbers of ggml's types and operations that rules name."""

    f32: int
    f16: int
    i32: int
    i64: int
    integers: tuple[int, ...]
    n_unary: int
    n_glu: int


@dataclass(frozen=True)
class OperationNodes:
    """Nodes of one operation: arrays with a row for each node."""

    shape: Ints  # [n, 4]
    type: NDArray[np.int32]
    params: NDArray[np.int32]  # [n, 16]
    source_shapes: Ints  # [n, 10, 4], 0 where there is no source
    source_types: NDArray[np.int32]  # [n, 10], -1 where there is no source
    type_bytes: Ints  # [n] bytes of an element of the result
    packed: Bools  # [n, 11] whether the sources, and last the result, have no gaps
    types: Types

    def source(self, index: int) -> Ints:
        return self.source_shapes[:, index]

    def has(self, *indices: int) -> Bools:
        return in_all(self.source_types[:, indices] >= 0)

    def is_f32(self, *indices: int) -> Bools:
        """True where the result and these sources are in f32."""
        sources_are: Bools = in_all(self.source_types[:, indices] == self.types.f32)
        return every(sources_are, self.type == self.types.f32)

    def source_is(self, index: int, *types: int) -> Bools:
        return np.isin(self.source_types[:, index], types)

    @property
    def keeps_type(self) -> Bools:
        return np.equal(self.type, self.source_types[:, 0])


def every(first: Bools, *conditions: Bools) -> Bools:
    """Return for each row whether all conditions are true."""
    is_kept = first
    for condition in conditions:
        is_kept = np.logical_and(is_kept, condition)
    return is_kept


def in_all(are_true: Bools) -> Bools:
    """Return for each row whether all its values are true."""
    rows: Bools = np.asarray(are_true.reshape(len(are_true), -1).all(axis=1))
    return rows


def _equal(a: Ints, b: Ints) -> Bools:
    return in_all(a == b)


def _divides(some: Ints, whole: Ints) -> Bools:
    """True where `some` is positive and `whole` is a multiple of it, in all dimensions."""
    return in_all((some > 0) & (whole % np.maximum(some, 1) == 0))


def _shape(*dims: Ints | int) -> Ints:
    """Return shapes [n, 4] with these dimensions; missing ones are 1."""
    n = max(len(d) for d in dims if not isinstance(d, int))
    columns = [np.broadcast_to(np.asarray(d, np.int64), n) for d in (*dims, 1, 1, 1, 1)[:4]]
    return np.stack(columns, axis=1)


def _elements(shape: Ints) -> Ints:
    n_elements: Ints = shape.prod(axis=-1)
    return n_elements


def _pointwise(n: OperationNodes) -> Bools:
    return every(n.has(0), _equal(n.shape, n.source(0)), n.keeps_type)


def _pointwise_f32(n: OperationNodes) -> Bools:
    return every(_pointwise(n), n.is_f32(0))


def _unary(n: OperationNodes) -> Bools:
    return every(_pointwise(n), n.params[:, 0] >= 0, n.params[:, 0] < n.types.n_unary)


def _copy(n: OperationNodes) -> Bools:
    return every(n.has(0), _elements(n.shape) == _elements(n.source(0)))


def _binary(n: OperationNodes) -> Bools:
    same = every(_equal(n.shape, n.source(0)), n.keeps_type | n.is_f32(1))
    return every(n.has(0, 1), same, _divides(n.source(1), n.shape))


def _add_id(n: OperationNodes) -> Bools:
    bias, ids = n.source(1), n.source(2)
    return every(
        _pointwise(n),
        n.has(1, 2),
        n.is_f32(0, 1),
        n.source_is(2, n.types.i32),
        bias[:, 0] == n.shape[:, 0],
        bias[:, 1] > 0,
        _equal(ids, _shape(n.shape[:, 1], n.shape[:, 2])),
    )


def _rows_to_one(n: OperationNodes) -> Bools:
    a = n.source(0)
    return every(n.has(0), n.is_f32(0), _equal(n.shape, _shape(1, a[:, 1], a[:, 2], a[:, 3])))


def _repeat(n: OperationNodes) -> Bools:
    return every(n.has(0), n.keeps_type, _divides(n.source(0), n.shape))


def _concat(n: OperationNodes) -> Bools:
    a, b, dim = n.source(0), n.source(1), n.params[:, 0]
    along = np.arange(4) == dim[:, None]
    same = every(n.keeps_type, n.type == n.source_types[:, 1])
    return every(
        n.has(0, 1),
        same,
        dim >= 0,
        dim < 4,
        _equal(n.shape, np.where(along, a + b, a)),
        in_all(along | (a == b)),
    )


def _product(n: OperationNodes) -> Bools:
    """ggml-cpu transforms rows of the second source in place of a product with a Hadamard matrix.

    It then writes rows as long as that source's, without a look at the matrix.
    """
    a, b, hint = n.source(0), n.source(1), n.params[:, 1]
    power_of_2 = (a[:, 0] & (a[:, 0] - 1)) == 0
    return every(
        n.has(0, 1),
        (hint == 0) | ((hint == 1) & (a[:, 0] == a[:, 1]) & power_of_2),
        n.type == n.types.f32,
        a[:, 0] == b[:, 0],
        _equal(n.shape, _shape(a[:, 1], b[:, 1], b[:, 2], b[:, 3])),
        _divides(a[:, 2:], b[:, 2:]),
    )


def _product_with_experts(n: OperationNodes) -> Bools:
    a, b, ids = n.source(0), n.source(1), n.source(2)
    return every(
        n.has(0, 1, 2),
        n.is_f32(1),
        n.source_is(2, n.types.i32),
        a[:, 3] == 1,
        b[:, 3] == 1,
        a[:, 0] == b[:, 0],
        _equal(ids, _shape(ids[:, 0], b[:, 2])),
        _divides(b[:, 1:2], ids[:, 0:1]),
        _equal(n.shape, _shape(a[:, 1], ids[:, 0], b[:, 2])),
    )


def _get_rows(n: OperationNodes) -> Bools:
    a, rows = n.source(0), n.source(1)
    kind = np.where(n.source_is(0, n.types.i32), n.types.i32, n.types.f32)
    return every(
        n.has(0, 1),
        n.source_is(1, n.types.i32),
        n.type == kind,
        a[:, 2] == rows[:, 1],
        a[:, 3] == rows[:, 2],
        rows[:, 3] == 1,
        _equal(n.shape, _shape(a[:, 0], rows[:, 0], rows[:, 1], rows[:, 2])),
    )


def _set_rows(n: OperationNodes) -> Bools:
    b, rows = n.source(0), n.source(1)
    return every(
        n.has(0, 1),
        n.source_is(0, n.types.f32, n.types.f16),
        n.source_is(1, n.types.i64, n.types.i32),
        in_all(n.shape[:, [0, 2, 3]] == b[:, [0, 2, 3]]),
        n.shape[:, 1] > 0,
        b[:, 1] == rows[:, 0],
        _divides(rows[:, 1:3], b[:, 2:]),
        rows[:, 3] == 1,
    )


def _soft_max(n: OperationNodes) -> Bools:
    mask, sinks = n.source(1), n.source(2)
    masked = every(
        n.source_is(1, n.types.f16, n.types.f32),
        mask[:, 0] == n.shape[:, 0],
        mask[:, 1] >= n.shape[:, 1],
        _divides(mask[:, 2:], n.shape[:, 2:]),
    )
    sunk = every(n.source_is(2, n.types.f32), sinks[:, 0] == n.shape[:, 2])
    return every(_pointwise_f32(n), masked | ~n.has(1), sunk | ~n.has(2))


_MROPE, _VISION = 8, 24
_ROPES = (0, 2, _MROPE, _VISION, 40)


def _rope(n: OperationNodes) -> Bools:
    positions, factors = n.source(1), n.source(2)
    n_dims, mode, offset = n.params[:, 1], n.params[:, 2], n.params[:, 15]
    several = (mode & _MROPE) != 0
    sections = n.params[:, 11:15]
    halves = np.where(mode == _VISION, 2, 1)
    return every(
        _pointwise(n),
        n.has(1),
        np.isin(n.type, (n.types.f32, n.types.f16)),
        n.source_is(1, n.types.i32),
        np.isin(mode, _ROPES),
        _equal(positions, _shape(n.shape[:, 2] * np.where(several, 4, 1))),
        n_dims > 0,
        n_dims % 2 == 0,
        offset >= 0,
        n_dims.astype(np.int64) * halves + offset <= n.shape[:, 0],
        in_all((sections >= 0) & (sections <= n_dims[:, None])),
        ~several | (sections.sum(axis=1) > 0),
        ~n.has(2) | (n.source_is(2, n.types.f32) & (factors[:, 0] >= n_dims // 2)),
    )


def _argsort(n: OperationNodes) -> Bools:
    return every(
        n.has(0), n.type == n.types.i32, n.source_is(0, n.types.f32), _equal(n.shape, n.source(0))
    )


def _top_k(n: OperationNodes) -> Bools:
    a = n.source(0)
    return every(
        n.has(0),
        n.type == n.types.i32,
        n.source_is(0, n.types.f32),
        _equal(n.shape[:, 1:], a[:, 1:]),
        n.shape[:, 0] <= a[:, 0],
    )


def _argmax(n: OperationNodes) -> Bools:
    a = n.source(0)
    return every(
        n.has(0),
        n.type == n.types.i32,
        n.source_is(0, n.types.f32),
        a[:, 0] > 0,
        _equal(a[:, 2:], np.ones_like(a[:, 2:])),
        _equal(n.shape, _shape(a[:, 1])),
    )


_MOST_PADDED = 1 << 31  # CUDA's kernel counts the result's elements in 32 bits


def _pad(n: OperationNodes) -> Bools:
    """Zeros around the source. A ninth parameter, which must be 0, would repeat the source."""
    zeros = n.params[:, :8].astype(np.int64).reshape(-1, 4, 2)  # before and after each dimension
    return every(
        n.has(0),
        n.is_f32(0),
        in_all(zeros >= 0),
        _equal(n.shape, n.source(0) + zeros.sum(axis=2)),
        _elements(n.shape) < _MOST_PADDED,
    )


def _glu(n: OperationNodes) -> Bools:
    a = n.source(0)
    alone = ~n.has(1)
    half = _shape(a[:, 0] // 2, a[:, 1], a[:, 2], a[:, 3])
    beside = _equal(n.shape, a) & _equal(n.source(1), a) & (n.source_types[:, 1] == n.type)
    kind = every(n.params[:, 0] >= 0, n.params[:, 0] < n.types.n_glu)
    alike = np.where(alone, _equal(n.shape, half) & (a[:, 0] % 2 == 0), beside)
    return every(n.has(0), n.keeps_type, kind, alike)


def _attention(n: OperationNodes) -> Bools:
    q, k, v, mask, sinks = (n.source(i) for i in range(5))
    masked = every(
        n.source_is(3, n.types.f16),
        mask[:, 0] >= k[:, 1],
        mask[:, 1] >= q[:, 1],
        _divides(mask[:, 2:], q[:, 2:]),
    )
    sunk = every(n.source_is(4, n.types.f32), sinks[:, 0] == q[:, 2])
    return every(
        n.has(0, 1, 2),
        n.is_f32(0),
        q[:, 0] == k[:, 0],
        k[:, 1] == v[:, 1],
        _divides(k[:, 2:], q[:, 2:]),
        _divides(v[:, 2:], q[:, 2:]),
        _equal(n.shape, _shape(v[:, 0], q[:, 2], q[:, 1], q[:, 3])),
        masked | ~n.has(3),
        sunk | ~n.has(4),
        n.params[:, 4] >= 0,
        n.params[:, 4] <= k[:, 1],
    )


def _ssm_conv(n: OperationNodes) -> Bools:
    x, c = n.source(0), n.source(1)
    return every(
        n.has(0, 1),
        n.is_f32(0, 1),
        _equal(c, _shape(c[:, 0], c[:, 1])),
        c[:, 1] == x[:, 1],
        x[:, 3] == 1,
        x[:, 0] >= c[:, 0] - 1,
        _equal(n.shape, _shape(x[:, 1], x[:, 0] - c[:, 0] + 1, x[:, 2])),
    )


def _ssm_scan(n: OperationNodes) -> Bools:
    s, x, dt, a, b, c, ids = (n.source(i) for i in range(7))
    copies = n.params[:, 0].astype(np.int64)
    end = _elements(x) + copies * _elements(s[:, :3]) * ids[:, 0]
    groups = every(b[:, 1] > 0, x[:, 1] % np.maximum(b[:, 1], 1) == 0)
    return every(
        n.has(*range(7)),
        n.is_f32(*range(6)),
        n.source_is(6, n.types.i32),
        copies >= 1,
        _equal(dt, _shape(x[:, 1], x[:, 2], x[:, 3])),
        _equal(b, c),
        groups,
        _equal(s[:, 1:3], x[:, :2]),
        _equal(ids, _shape(x[:, 3])),
        _equal(b[:, [0, 2, 3]], np.stack([s[:, 0], x[:, 2], x[:, 3]], axis=1)),
        _equal(a, _shape(a[:, 0], x[:, 1])),
        (a[:, 0] == 1) | (a[:, 0] == s[:, 0]),
        _equal(n.shape, _shape(end)),
    )


def _delta_net(n: OperationNodes) -> Bools:
    q, k, v, g, beta, state = (n.source(i) for i in range(6))
    copies, (size, heads, tokens, seqs) = n.params[:, 0].astype(np.int64), v.T
    ones = np.ones_like(heads)
    return every(
        n.has(*range(6)),
        n.is_f32(*range(6)),
        copies >= 1,
        _equal(q, k),
        q[:, 0] == size,
        q[:, 2] == tokens,
        _divides(q[:, [1, 3]], v[:, [1, 3]]),
        _equal(g, _shape(ones, heads, tokens, seqs)) | _equal(g, v),
        _equal(beta, _shape(ones, heads, tokens, seqs)),
        _equal(state, _shape(size, size, heads, seqs)),
        _equal(n.shape, _shape(size * heads, tokens * seqs + copies * size * seqs)),
    )


def _indexer(n: OperationNodes) -> Bools:
    q, k, weights, mask = (n.source(i) for i in range(4))
    return every(
        n.has(0, 1, 2, 3),
        n.is_f32(0, 2),
        n.source_is(3, n.types.f16),
        q[:, 0] == k[:, 0],
        k[:, 1] == 1,
        q[:, 3] == k[:, 3],
        _equal(weights, _shape(q[:, 1], q[:, 2], 1, q[:, 3])),
        _equal(mask[:, :3], _shape(k[:, 2], q[:, 2])[:, :3]),
        _divides(mask[:, 3:], weights[:, 3:]),
        _equal(n.shape, _shape(k[:, 2], q[:, 2], 1, q[:, 3])),
    )


def _arange(n: OperationNodes) -> Bools:
    return every(n.type == n.types.f32, _equal(n.shape, _shape(n.shape[:, 0])))


def _pool(n: OperationNodes) -> Bools:
    """Windows without padding, one in each step of the plane."""
    a, window, step = n.source(0), n.params[:, 1:3].astype(np.int64), n.params[:, 3:5]
    planes = (a[:, :2] - window) // np.maximum(step, 1) + 1
    return every(
        n.has(0),
        n.is_f32(0),
        in_all(window > 0),
        in_all(step > 0),
        in_all(window <= a[:, :2]),
        _equal(n.shape, np.column_stack([planes, a[:, 2:]])),
    )


def _streams(n: OperationNodes) -> Bools:
    """DeepSeek-V4 mixes four residual streams; ggml-cpu has room for these alone."""
    mixes, scale, base = (n.source(i) for i in range(3))
    return every(
        n.has(0, 1, 2),
        n.is_f32(0, 1, 2),
        _equal(mixes, _shape(24, mixes[:, 1])),
        _equal(scale, _shape(scale[:, 0])),
        scale[:, 0] >= 3,
        _equal(base, _shape(24 * np.ones_like(scale[:, 0]))),
        _equal(n.shape, _shape(4, 4, mixes[:, 1])),
    )


def _streams_to_one(n: OperationNodes) -> Bools:
    x, weights, gated = n.source(0), n.source(1), n.params[:, 1] != 0
    each = _shape(x[:, 1], x[:, 2])
    return every(
        n.has(0, 1),
        n.is_f32(0, 1),
        x[:, 3] == 1,
        (n.params[:, 1] == 0) | (n.params[:, 1] == 1),
        _equal(weights, np.where(gated[:, None], x, each)),
        _equal(n.shape, _shape(x[:, 0], x[:, 2])),
    )


def _one_to_streams(n: OperationNodes) -> Bools:
    x, residual, post, comb = (n.source(i) for i in range(4))
    streams, tokens = residual[:, 1], x[:, 1]
    mixed = n.source_is(3, n.types.f32) & _equal(comb, _shape(streams, streams, tokens))
    return every(
        n.has(0, 1, 2),
        n.is_f32(0, 1, 2),
        _equal(x, _shape(x[:, 0], tokens)),
        _equal(residual, _shape(x[:, 0], streams, tokens)),
        _equal(post, _shape(streams, tokens)),
        mixed | ~n.has(3),
        _equal(n.shape, residual),
    )


_BY_OP: Mapping[str, Callable[[OperationNodes], Bools]] = {
    "CONT": _copy, "CPY": _copy,
    "ADD": _binary, "SUB": _binary, "MUL": _binary, "DIV": _binary, "ADD_ID": _add_id,
    "SQR": _pointwise, "SQRT": _pointwise,
    "CLAMP": _pointwise, "SCALE": _pointwise, "FILL": _pointwise,
    "UNARY": _unary, "GLU": _glu,
    "NORM": _pointwise_f32, "RMS_NORM": _pointwise_f32,
    "SUM_ROWS": _rows_to_one, "MEAN": _rows_to_one,
    "ARANGE": _arange, "POOL_2D": _pool, "REPEAT": _repeat, "CONCAT": _concat,
    "MUL_MAT": _product, "MUL_MAT_ID": _product_with_experts,
    "GET_ROWS": _get_rows, "SET_ROWS": _set_rows, "SOFT_MAX": _soft_max,
    "ROPE": _rope, "ROPE_BACK": _rope, "ARGSORT": _argsort, "TOP_K": _top_k,
    "ARGMAX": _argmax, "PAD": _pad,
    "FLASH_ATTN_EXT": _attention, "LIGHTNING_INDEXER": _indexer,
    "SSM_CONV": _ssm_conv, "SSM_SCAN": _ssm_scan, "GATED_DELTA_NET": _delta_net,
    "DSV4_HC_COMB": _streams, "DSV4_HC_PRE": _streams_to_one, "DSV4_HC_POST": _one_to_streams,
}  # fmt: skip


# Sources that every node of an operation has, even if its result is empty; 1 for the others
LEAST_SOURCES: Mapping[str, int] = {
    "ARANGE": 0, "ADD": 2, "SUB": 2, "MUL": 2, "DIV": 2, "ADD_ID": 3, "CONCAT": 2, "MUL_MAT": 2,
    "MUL_MAT_ID": 3, "GET_ROWS": 2, "SET_ROWS": 2, "ROPE": 2, "ROPE_BACK": 2,
    "FLASH_ATTN_EXT": 3, "LIGHTNING_INDEXER": 4, "SSM_CONV": 2, "SSM_SCAN": 7,
    "GATED_DELTA_NET": 6, "DSV4_HC_COMB": 3, "DSV4_HC_PRE": 2, "DSV4_HC_POST": 3,
}  # fmt: skip


def keeps_rule(op: str, nodes: OperationNodes) -> Bools:
    """Return for each node whether it writes only into its result. False: no rule for `op`."""
    rule, bounds = _BY_OP.get(op), BOUNDS.get(op)
    if rule is None or bounds is None:
        return np.zeros(len(nodes.shape), np.bool_)
    is_kept = every(rule(nodes), bounds.keeps_params(nodes.params))
    integers = np.isin(nodes.source_types, nodes.types.integers)
    for index in range(nodes.source_types.shape[1]):
        if index not in bounds.integers:
            is_kept &= ~integers[:, index]
        if index not in bounds.strided:
            is_kept &= nodes.packed[:, index]
    if RESULT not in bounds.strided:
        is_kept &= nodes.packed[:, RESULT]
    return is_kept
