"""Decides whether a client's graph may be computed beside this worker's weights.

ggml's server checks that a tensor lies inside a buffer of the client, by the tensor's own strides.
It checks neither how operations fit their tensors, nor tensors without a buffer, and those become
our weights. A graph that passes here writes only into the client's buffers, and reads only these
and the weights, if the numbers of `IdRange` are in range at each computation. Two cases are left to
the kernel. Row numbers that a graph computes as floats (MiniMax-M3) are checked by ggml's CPU
backend, which then ends the process, and not by GPU backends. The place of the largest value
(ARGMAX) is -1 on CUDA if all are NaNs or minus infinity: then floats before a table are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from offload.errors import GraphRefused
from offload.ggml.node_table import (
    Ints,
    NodeTable,
    TensorForm,
    constants,
    is_packed,
    operations,
    type_sizes,
)
from offload.ggml.tensor import Tensor
from offload.worker.op_bounds import BOUNDS, RESULT, Integers
from offload.worker.op_rules import (
    LEAST_SOURCES,
    VIEWS,
    Bools,
    OperationNodes,
    Types,
    in_all,
    keeps_rule,
)

_MOST_BYTES = 1 << 46  # larger products than this are refused, so that 64 bits hold every sum
_FLOAT_BYTES = 4
_MOST_COPIES = 4  # copies of numbers, one after another, that are followed to their origin
WeightForms = Mapping[str, TensorForm]


def named_rows(table: NodeTable, weights: WeightForms) -> dict[int, str]:
    """Return the rows of tensors that name one of `weights`: they have neither data nor sources.

    Raises GraphRefused if such a tensor has another type or shape than the weight.
    """
    empty = (table.data == 0) & (table.end == 0) & ~table.is_view & ~table.has_sources
    names = {}
    for row in np.flatnonzero(empty & table.rows("NONE")).tolist():
        weight = weights.get(name := table.name(row))
        if weight is None:
            continue
        # Clients send sizes and strides in 32 bits.
        strides = [stride % 2**32 for stride in weight.strides]
        is_alike = (
            table.type[row] == weight.type
            and table.shape[row].tolist() == list(weight.shape)
            and table.strides[row].tolist() == strides
        )
        if not is_alike:
            raise GraphRefused(f"{name} has another type or shape than this worker's weight")
        names[row] = name
    return names


@dataclass(frozen=True)
class IdRange:
    """Numbers in a client's data that have to be from 0 to `limit` - 1 at each computation."""

    tensor: Tensor
    limit: int


def check_graph(
    table: NodeTable, weights: WeightForms, streamed: Collection[str] = ()
) -> tuple[dict[int, str], tuple[IdRange, ...]]:
    """Return the rows that stand for weights with the weights' names, and the numbers to check.

    Raises GraphRefused, with the node's name, if the graph could write or read elsewhere than in
    the client's buffers, or could write to a weight. `streamed` names the weights that stream.
    """
    named = named_rows(table, weights)
    known_type = (table.type >= 0) & (table.type < len(type_sizes()[0]))
    _refuse(table, ~known_type, "has an unknown type")
    block_bytes, block = (sizes[table.type] for sizes in type_sizes())
    _refuse(table, block == 0, "has a type without a size")
    strides = table.strides.copy()
    for row, name in named.items():
        strides[row] = weights[name].strides
    span = _spans(table, strides, block_bytes, block)
    has_memory = _check_places(table, span, named)
    _check_memory(table, span, has_memory)
    packed = is_packed(table, strides)
    _check_operations(table, block_bytes, packed)
    _check_order(table)
    _check_copies(table, span, packed)
    ids = _check_integers(table, span, named)
    _check_streamed(table, named, streamed)
    return named, ids


def _refuse(table: NodeTable, bad: Bools, reason: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        number = int(table.op[row])
        op = operations()[number] if 0 <= number < len(operations()) else f"operation {number}"
        raise GraphRefused(f"{_shown(table, row) or 'a tensor'} ({op}) {reason}")


def _shown(table: NodeTable, row: int) -> str:
    """Return a tensor's name without blanks at its ends, and nothing that changes a terminal."""
    name = table.name(row).strip()
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _spans(table: NodeTable, strides: NDArray[np.uint64], block_bytes: Ints, block: Ints) -> Ints:
    """Return the bytes from each tensor's first element to its last, 0 for an empty one.

    Refuses tensors whose elements overlap. So no order in which a kernel walks over the elements
    leads out of the span.
    """
    shape = table.shape
    _refuse(table, ~in_all(shape >= 0), "has a negative size")
    _refuse(table, shape[:, 0] % block != 0, "has part of a block of its type")
    counts = shape.copy()
    counts[:, 0] //= block
    is_empty = (counts == 0).any(axis=1)
    counts[is_empty] = 0
    steps = np.where(counts > 1, strides, 0)
    is_large = counts.astype(float) * steps > _MOST_BYTES
    _refuse(table, ~in_all(~is_large), "is larger than any memory")
    steps = steps.astype(np.int64)
    order = np.argsort(steps, axis=1)
    steps, counts = (np.take_along_axis(a, order, axis=1) for a in (steps, counts))
    span = block_bytes.copy()
    overlaps = np.zeros(len(table), np.bool_)
    for step, count in zip(steps.T, counts.T, strict=True):
        overlaps |= (count > 1) & (step < span)
        span = np.where(count > 1, (count - 1) * step + span, span)
    _refuse(table, overlaps, "has strides with which its elements overlap")
    return np.where(is_empty, 0, span)


def _check_places(table: NodeTable, span: Ints, named: Mapping[int, str]) -> Bools:
    """Check that tensors lie in their buffers and views in what they view.

    Returns which tensors have memory: in a buffer of the client, or as a weight or a part of one.
    """
    is_weight = np.zeros(len(table), np.bool_)
    is_weight[list(named)] = True
    has_data = (table.data != 0) & (table.end != 0)
    inside = (table.data >= table.first) & (table.data <= table.end)
    inside &= span <= (table.end - table.data).astype(np.int64)
    _refuse(table, (table.data != 0) & ~(has_data & inside), "lies outside its buffer")
    views = table.root >= 0
    root = np.where(views, table.root, 0)
    _refuse(table, views & table.is_view[root], "is a view of a view")
    offset = table.view_offset
    whole = span[root]
    fits = (offset <= whole.astype(np.uint64)) & (span <= whole - offset.astype(np.int64))
    _refuse(table, views & ~fits & (span > 0), "is a view that reaches beyond what it views")
    elsewhere = has_data & (table.data != table.data[root] + offset)
    _refuse(table, views & has_data[root] & elsewhere, "does not lie in what it views")
    of_weight = views & is_weight[root]
    _refuse(table, of_weight & has_data, "does not lie in the weight that it views")
    writes = of_weight & ~table.rows(*VIEWS)
    if writes.any():
        row = int(np.flatnonzero(writes)[0])
        _refuse(table, writes, f"would write to the weight {table.name(int(root[row]))}")
    has_place: Bools = has_data | is_weight | of_weight
    return has_place


def _check_memory(table: NodeTable, span: Ints, has_memory: Bools) -> None:
    """Check that nodes have memory for their results, and that what they read has some."""
    computes = table.is_node & ~table.rows(*VIEWS) & (span > 0)
    _refuse(table, computes & (table.data == 0), "has no memory for its result")
    sources = table.sources[computes]
    read = np.unique(sources[sources >= 0])
    missing = read[(span[read] > 0) & ~has_memory[read]]
    if len(missing):
        name = _shown(table, int(missing[0]))
        raise GraphRefused(
            f"it reads {name}, which is not among this worker's layers; start both again"
        )


def _check_operations(table: NodeTable, block_bytes: Ints, packed: Bools) -> None:
    """Check that clients' graphs contain all operations, and check results by their rules.

    Operations with an empty result need no rule, but have their sources, because ggml reads the
    sources' types.
    """
    names, types = operations(), _types()
    _refuse(table, (table.op < 0) | (table.op >= len(names)), "is no operation of ggml")
    computes = table.is_inner & ~table.rows(*VIEWS)
    _refuse(table, computes & ~table.rows(*BOUNDS), "is no operation of clients' graphs")
    for number in np.unique(table.op[computes]).tolist():
        least = LEAST_SOURCES.get(names[number], 1)
        lacks = computes & (table.op == number) & (table.sources[:, :least] < 0).any(axis=1)
        _refuse(table, lacks, "lacks a source")
    computes &= (table.shape > 0).all(axis=1)
    for number in np.unique(table.op[computes]).tolist():
        here = computes & (table.op == number)
        sources = table.sources[here]
        there = sources >= 0
        nodes = OperationNodes(
            table.shape[here],
            table.type[here],
            table.params[here],
            np.where(there[:, :, None], table.shape[sources], 0),
            np.where(there, table.type[sources], -1),
            block_bytes[here],
            np.column_stack([np.where(there, packed[sources], True), packed[here]]),  # noqa: FBT003
            types,
        )
        bad = np.zeros(len(table), np.bool_)
        bad[here] = ~keeps_rule(names[number], nodes)
        _refuse(table, bad, "does not fit the types, shapes and parameters of clients' graphs")


def _check_order(table: NodeTable) -> None:
    """Check that each node is computed once, and after its sources, as in all graphs of ggml.

    The engine moves nodes and changes their sources, which it does by their places in the graph.
    """
    n_nodes = len(table.order)
    place = np.full(len(table) + 1, -1, np.int64)  # the last one is that of missing sources
    place[table.order] = np.arange(n_nodes)
    again = place[table.order] != np.arange(n_nodes)
    own = np.arange(n_nodes)[:, None]
    are_late = place[table.sources[table.order]] >= own
    # ggml_cast makes a copy whose destination, its second source, is the copy itself.
    is_cast = table.rows("CPY")[table.order]
    are_late[:, 1] &= ~(is_cast & (table.sources[table.order, 1] == table.order))
    late: Bools = np.asarray(are_late.any(axis=1))
    for are_bad, reason in ((again, "is computed twice"), (late, "is computed before its source")):
        bad = np.zeros(len(table), np.bool_)
        bad[table.order[are_bad]] = True
        _refuse(table, bad, reason)


def _check_copies(table: NodeTable, span: Ints, packed: Bools) -> None:
    """Check that copies do not overlap what they copy, because ggml copies by memcpy."""
    source = table.sources[:, 0]
    copies = table.rows("CONT", "CPY") & (source >= 0) & packed & packed[source] & (span > 0)
    end, its_end = (table.data[at] + span[at].astype(np.uint64) for at in (slice(None), source))
    same = (table.buffer == table.buffer[source]) & (table.data != table.data[source])
    overlaps = same & (table.data < its_end) & (table.data[source] < end)
    _refuse(table, copies & overlaps, "overlaps what it copies")


def _check_integers(table: NodeTable, span: Ints, named: Mapping[int, str]) -> tuple[IdRange, ...]:
    """Check the numbers by which kernels find rows, experts, biases and states.

    A graph computes such numbers by sorting, which gives numbers below those sorted, as the place
    of a row's largest value, or looks them up in a weight; copies of these are as good. All others
    are the client's data: they are returned, and `check_ids` checks them before each computation.
    Nothing in the graph may overwrite numbers between their check and their last reader, or in that
    reader.
    """
    origins, names = _Origins(table, span, named), operations()
    bad = np.zeros(len(table), np.bool_)
    for place, row in enumerate(table.order.tolist()):
        op = names[int(table.op[row])]
        if op in VIEWS or not span[row]:
            continue
        for index, kind in BOUNDS[op].integers.items():
            limited, dim = _LIMITS.get(kind, (None, 0))
            read = int(table.sources[row, index])
            if limited is None or read < 0:
                continue
            counted = row if limited == RESULT else int(table.sources[row, limited])
            limit = int(table.shape[counted, dim])
            takes_data = kind not in (Integers.EXPERTS, Integers.BIASES)
            # CUDA's kernel gives -1 for a row of NaNs or -inf. So floats may be read by it, but
            # it is no place to write to, and what it reads is never a number of a row itself.
            takes_argmax = kind is Integers.ROWS_OF_FIRST and table.type[row] == _types().f32
            bad[row] |= not origins.are_below(
                read, limit, place, takes_data=takes_data, takes_argmax=takes_argmax
            )
    _refuse(table, bad, "reads numbers of experts or rows that may be out of range")
    return tuple(origins.data)


_LIMITS: Mapping[Integers, tuple[int, int]] = {  # whose size in which dimension is the limit
    Integers.ROWS_OF_FIRST: (0, 1),
    Integers.ROWS_OF_RESULT: (RESULT, 1),
    Integers.EXPERTS: (0, 2),
    Integers.BIASES: (1, 1),
    Integers.STATES: (0, 3),
}


class _Origins:
    """Finds where numbers come from, through copies, and collects those that are data."""

    def __init__(self, table: NodeTable, span: Ints, named: Mapping[int, str]) -> None:
        self.data: dict[IdRange, None] = {}
        self._table, self._named = table, named
        self._place = {row: place for place, row in enumerate(table.order.tolist())}
        self._memory = _Memory(table, span)

    def are_below(
        self,
        read: int,
        limit: int,
        place: int,
        depth: int = 0,
        *,
        takes_data: bool,
        takes_argmax: bool,
    ) -> bool:
        """Return whether the numbers that the node at `place` reads are from 0 to `limit` - 1.

        Data of the client counts as below, and is added to `data`.
        """
        table = self._table
        made = int(table.root[read]) if table.is_view[read] else read
        op = operations()[int(table.op[made])]
        if op == "NONE":
            if not takes_data or made in self._named:
                return False
            self.data[IdRange(Tensor(int(table.addresses[read])), limit)] = None
            return not self._memory.is_written(read, -1, place)
        first = self._place.get(made)
        if first is None or first >= place or self._memory.is_written(made, first, place):
            return False
        sources = table.sources[made]
        if op in ("ARGSORT", "TOP_K"):
            return int(table.shape[sources[0], 0]) <= limit
        if op == "ARGMAX":
            return takes_argmax and int(table.shape[sources[0], 0]) <= limit
        if op == "GET_ROWS" and int(sources[0]) in self._named:
            return True
        n_copied = {"CONT": 1, "DUP": 1, "CPY": 1, "GET_ROWS": 1, "CONCAT": 2}.get(op, 0)
        copied = sources[:n_copied].tolist()
        if op == "CPY" and takes_data and table.type[copied[0]] == _types().f32:
            return True  # computed in floating point: only ggml's CPU backend checks the rows
        if not copied or depth == _MOST_COPIES or (table.type[copied] != table.type[made]).any():
            return False
        return all(
            self.are_below(
                source, limit, first, depth + 1, takes_data=takes_data, takes_argmax=takes_argmax
            )
            for source in copied
        )


class _Memory:
    """Which nodes write where, in compute order.

    Addresses tell only places in one buffer: Vulkan's buffers all begin at the same one.
    """

    def __init__(self, table: NodeTable, span: Ints) -> None:
        self._buffer = table.buffer
        self._first = table.data
        self._end = table.data + span.astype(np.uint64)
        computes = (~table.rows(*VIEWS) & (span > 0))[table.order]
        self._places = np.flatnonzero(computes)
        rows = table.order[self._places]
        self._node_first, self._node_end = self._first[rows], self._end[rows]
        self._node_buffer = self._buffer[rows]

    def is_written(self, row: int, after: int, until: int) -> bool:
        """True if a node after place `after`, up to and with place `until`, writes to `row`."""
        here = (self._places > after) & (self._places <= until)
        touches = (self._node_first < self._end[row]) & (self._node_end > self._first[row])
        touches &= self._node_buffer == self._buffer[row]
        return bool((here & touches).any())


def _check_streamed(table: NodeTable, named: Mapping[int, str], streamed: Collection[str]) -> None:
    """Check that products read streamed weights whole, and that their biases are the weights' own.

    The device finds a product's weight by the name of the tensor that it reads. A view has a name
    of its own, which the client chose. Slots keep the biases that the first graph adds to a
    weight's products, for all later clients. They have room for one row of floats for each expert.
    """
    whole = {row: name for row, name in named.items() if name in streamed}
    views = np.flatnonzero(np.isin(table.root, list(whole)))
    products = table.rows("MUL_MAT", "MUL_MAT_ID")
    bad = products & np.isin(table.sources[:, 0], views)
    _refuse(table, bad, "multiplies with a part of a weight that streams")
    others = np.zeros(len(table), np.bool_)
    misfits = np.zeros(len(table), np.bool_)
    for row in np.flatnonzero(table.rows("ADD_ID")).tolist():
        product, bias = table.sources[row, :2].tolist()
        weight = int(table.sources[product, 0]) if products[product] else -1
        if weight not in whole:
            continue
        others[row] = named.get(bias) != whole[weight].removesuffix("weight") + "bias"
        shape = [*table.shape[weight, 1:3].tolist(), 1, 1]  # a row for each expert
        misfits[row] = (
            table.shape[bias].tolist() != shape
            or table.type[bias] != _types().f32
            or table.strides[bias, :2].tolist() != [_FLOAT_BYTES, _FLOAT_BYTES * shape[0]]
        )
    _refuse(table, others, "adds other biases than those of the weight, which streams")
    _refuse(table, misfits, "adds biases that are not one row of floats for each expert")


@cache
def _types() -> Types:
    return Types(**constants())
