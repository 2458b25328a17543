"""A graph's tensors as arrays, so that thousands of nodes can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.errors import GraphRefused
from offload.ggml.graph import Graph
from offload.ggml.library import abi
from offload.ggml.library.lib import library, op_number
from offload.ggml.tensor import Tensor, read_by, structs_at, type_number

_FIELDS = np.dtype(abi.ggml_tensor)
_LEVELS = 6  # as many as preparing a graph reads (offload/ggml/graph.py)
Ints = NDArray[np.int64]
Addresses = NDArray[np.uint64]


@dataclass(frozen=True)
class TensorForm:
    """The type, shape and strides of a tensor."""

    type: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        struct = abi.ggml_tensor.from_address(tensor.address)
        return cls(struct.type, tuple(struct.ne), tuple(struct.nb))


@cache
def type_sizes() -> tuple[Ints, Ints]:
    """Return each type's bytes of a block and elements of a block, by the type's number."""
    lib, numbers = library(), range(abi.GGML_TYPE_COUNT)
    sizes = np.array([lib.ggml_type_size(n) for n in numbers], np.int64)
    return sizes, np.array([lib.ggml_blck_size(n) for n in numbers], np.int64)


@cache
def type_name(number: int) -> str:
    """Return ggml's name of a type."""
    return str(library().ggml_type_name(number).decode())


def is_packed(table: NodeTable, strides: Addresses | None = None) -> NDArray[np.bool_]:
    """Return for each tensor whether its elements follow each other without gaps, in order.

    `strides` replace those of the table.
    """
    strides = table.strides if strides is None else strides
    block_bytes, block = (sizes[np.clip(table.type, 0, None)] for sizes in type_sizes())
    counts = table.shape.copy()
    counts[:, 0] //= np.maximum(block, 1)
    expected = block_bytes * np.ones(len(table), np.int64)
    packed = np.ones(len(table), np.bool_)
    for dim in range(counts.shape[1]):
        packed &= (counts[:, dim] <= 1) | (strides[:, dim] == expected.astype(np.uint64))
        expected = expected * np.maximum(counts[:, dim], 1)
    return packed


class NodeTable:
    """The nodes of a graph and the tensors that they read, directly or through others.

    Rows are in the order of addresses. A column of indices has the row of another tensor, -1 for
    none. `is_inner` is False at the last level, whose sources are missing. The table is a snapshot.
    """

    def __init__(self, graph: Graph) -> None:
        """Raises GraphRefused if a place in the list of nodes is empty."""
        nodes = np.array(graph.addresses(), np.uint64)
        if not nodes.all():
            raise GraphRefused("its list of nodes has an empty place")
        known = new = np.unique(nodes)
        inner = known
        for _ in range(_LEVELS):
            inner = known
            new = np.setdiff1d(read_by(structs_at(new)), known, assume_unique=True)
            known = np.union1d(known, new)
            if not len(new):
                break
        self.addresses: Addresses = known
        structs = structs_at(known).view(_FIELDS).reshape(len(known))
        self.is_node: NDArray[np.bool_] = np.isin(known, nodes)
        self.is_inner: NDArray[np.bool_] = np.isin(known, inner)
        self.order: Ints = np.searchsorted(known, nodes)  # the nodes' rows, in compute order
        self.op: NDArray[np.int32] = structs["op"]
        self.type: NDArray[np.int32] = structs["type"]
        self.shape: Ints = structs["ne"]
        self.strides: NDArray[np.uint64] = structs["nb"]
        self.params: NDArray[np.int32] = structs["op_params"]
        self.data: Addresses = structs["data"]
        self.buffer: Addresses = structs["buffer"]
        self.view_offset: Addresses = structs["view_offs"]
        self.has_sources: NDArray[np.bool_] = np.asarray(structs["src"].any(axis=1))
        self.is_view: NDArray[np.bool_] = structs["view_src"] != 0
        self._names = structs["name"]
        self.sources: Ints = self._rows_of(structs["src"])
        self.root: Ints = self._rows_of(structs["view_src"])
        self.first, self.end = _ranges(self.buffer)

    def __len__(self) -> int:
        return len(self.addresses)

    def _rows_of(self, addresses: Addresses) -> Ints:
        rows = np.searchsorted(self.addresses, addresses)
        inside = np.minimum(rows, max(0, len(self) - 1))
        is_there = self.addresses[inside] == addresses if len(self) else np.zeros(rows.shape, bool)
        return np.where(is_there, inside, -1)

    def name(self, row: int) -> str:
        text: bytes = self._names[row].tobytes().split(b"\0", 1)[0]
        return text.decode("utf-8", "replace")

    def rows(self, *ops: str) -> NDArray[np.bool_]:
        """Return for each row whether it computes one of these operations."""
        is_op: NDArray[np.bool_] = np.isin(self.op, [op_number(op) for op in ops])
        return is_op


def _ranges(buffers: Addresses) -> tuple[Addresses, Addresses]:
    """Return the first address of each buffer and the one after its last; 0 for no buffer."""
    first, end = np.zeros_like(buffers), np.zeros_like(buffers)
    lib = library()
    for buffer in np.unique(buffers[buffers != 0]).tolist():
        here = buffers == buffer
        first[here] = lib.ggml_backend_buffer_get_base(buffer)
        end[here] = lib.ggml_backend_buffer_get_base(buffer) + lib.ggml_backend_buffer_get_size(
            buffer
        )
    return first, end


@cache
def operations() -> tuple[str, ...]:
    """Return the names of ggml's operations, by their numbers."""
    lib = library()
    return tuple(lib.ggml_op_name(n).decode() for n in range(abi.GGML_OP_COUNT))


@cache
def constants() -> dict[str, Any]:
    """Return numbers of ggml's types, and how many unary and gated operations it has."""
    numbers = {name: type_number(name) for name in ("f32", "f16", "i32", "i64")}
    integers = tuple(type_number(name) for name in ("i8", "i16", "i32", "i64"))
    return numbers | {
        "integers": integers,
        "n_unary": abi.GGML_UNARY_OP_COUNT,
        "n_glu": abi.GGML_GLU_OP_COUNT,
    }
