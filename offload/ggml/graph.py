"""Handles of ggml graphs: their nodes, their parts, and copies with some nodes replaced."""

from __future__ import annotations

import ctypes as C
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library import abi
from offload.ggml.library.lib import op_number
from offload.ggml.memory import HostRange
from offload.ggml.native import Snapshot, native
from offload.ggml.tensor import (
    Redirect,
    Tensor,
    op_at,
    source_at,
    sources_of,
    structs_at,
)
from offload.model import layer_of

GRAPH = abi.ggml_cgraph
_LOOKED_AHEAD = 32  # padding nodes after a list, because backends that fuse look past its end
# Preparing a graph reads its nodes, their sources, and chains of up to four more sources that are
# computed elsewhere (an expert's scale has that many, offload/stream/cpu_side.py).
_LEVELS = 6
# Our uids never equal ggml's, which count from 1, and none is used twice. Data cached by uid is
# therefore never applied to a later graph at the same address.
_uids = itertools.count(1 << 63)
_MOST_RANGES = 1 << 12
_first_uids = itertools.count(3 << 62, _MOST_RANGES)


@dataclass(frozen=True, slots=True)
class Product:
    """A node that multiplies with a weight in host memory. Valid as long as its graph is."""

    index: int  # in the graph's node order
    node: Tensor
    weight: Tensor
    ids: Tensor | None  # the router's choice [n_used, n_tokens]; None: not a product with experts

    @property
    def n_tokens(self) -> int:
        return self.node.shape[2 if self.ids is not None else 1]


def as_product(address: int, index: int = -1) -> Product:
    """Return the product at `address`, a MUL_MAT or MUL_MAT_ID node."""
    node = Tensor(address)
    ids = Tensor(source_at(address, 2)) if op_at(address) == op_number("MUL_MAT_ID") else None
    return Product(index, node, Tensor(source_at(address, 0)), ids)


class GraphState:
    """A snapshot of all data that preparing a graph reads, except the graph's uid.

    Graphs that match one snapshot can share the results of preparing.
    """

    __slots__ = ("_address", "_native", "size_bytes")

    def __init__(self, graph: Graph) -> None:
        """Take the snapshot. Raises MemoryError."""
        self._native = native()
        self._address: int | None = self._native.snapshot(graph.address, _LEVELS)
        if self._address is None:
            raise MemoryError("no memory for a snapshot of a graph")
        self.size_bytes = int(Snapshot.from_address(self._address).n_bytes)

    def matches(self, graph: Graph) -> bool:
        """True if a snapshot of `graph` would equal this one. Takes about 0.05 us per node.

        Stops at the first difference. Graphs of other batch sizes differ in their first nodes.
        """
        return bool(self._native.matches(graph.address, self._address))

    def __del__(self) -> None:
        address = getattr(self, "_address", None)
        if address is not None:
            self._native.forget(address)


class Graph:
    """A handle of the graph at an address. Handles with the same address are equal.

    A handle owns its graph only if we made the graph.
    """

    __slots__ = ("_kept", "_struct", "_uids", "address", "parts")

    def __init__(self, address: int) -> None:
        self.address = address
        self._struct: Any = GRAPH.from_address(address)
        self._kept: tuple[Any, ...] = ()
        self._uids: dict[tuple[int, ...], int] = {}
        self.parts: dict[tuple[int, int], Graph] = {}

    @classmethod
    def own(cls, struct: Any, kept: tuple[Any, ...]) -> Graph:
        """Return a handle of a graph that we made. `kept`: the memory that it refers to."""
        made = cls.__new__(cls)
        made._struct, made.address, made._kept, made.parts = struct, C.addressof(struct), kept, {}
        made._uids = {}
        return made

    @classmethod
    def of(cls, nodes: Sequence[Tensor]) -> Graph:
        """Make a graph of our own nodes. They have no use counts, so backends do not fuse them."""
        array = node_array([node.address for node in nodes])
        # Backends look each node up in the table, so even an empty table needs one free place.
        used, keys, counts = C.c_uint32(0), C.c_size_t(0), C.c_int32(0)
        struct = GRAPH()
        struct.n_nodes, struct.nodes = len(nodes), C.addressof(array)
        struct.use_counts = C.addressof(counts)
        table = struct.visited_hash_set
        table.size, table.used, table.keys = 1, C.addressof(used), C.addressof(keys)
        return cls.own(struct, (array, used, keys, counts, tuple(nodes)))

    def __repr__(self) -> str:
        return f"Graph({self.n_nodes} nodes, uid {self.uid})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and other.address == self.address

    def __hash__(self) -> int:
        return hash(self.address)

    @property
    def uid(self) -> int:
        """The number that identifies the graph: 0 in views, new each time ggml splits a graph."""
        return int(self._struct.uid)

    @property
    def n_nodes(self) -> int:
        return int(self._struct.n_nodes)

    def addresses(self) -> list[int]:
        """Return the addresses of the nodes, in compute order."""
        return self._addresses(0, self._struct.n_nodes)

    def _addresses(self, first: int, end: int) -> list[int]:
        nodes = self._struct.nodes
        if end <= first or not nodes:
            return []
        return list((C.c_size_t * (end - first)).from_address(nodes + 8 * first))

    def operations(self) -> list[int]:
        """Return the operation number of each node, in compute order."""
        return [op_at(address) for address in self.addresses()]

    def nodes(self) -> list[Tensor]:
        return [Tensor(address) for address in self.addresses()]

    def products(self, host: HostBufferType) -> Iterator[Product]:
        """Yield the products with weights in the memory of `host`, in compute order.

        Skips products of no tokens, as backends do. The last layer has them if no logits are
        wanted.
        """
        indices = (C.c_int64 * max(1, self.n_nodes))()
        types, nodes = C.addressof(host.types), self._struct.nodes
        for index in indices[: native().products(self.address, types, indices, len(indices))]:
            yield as_product(C.c_size_t.from_address(nodes + 8 * index).value, index)

    def has_products(self, host: HostBufferType) -> bool:
        """True if `products` yields any. Takes some nanoseconds per node."""
        return bool(native().products(self.address, C.addressof(host.types), _one, 1))

    def last_layer(self) -> int:
        """Return the number of the highest layer whose weights a node reads, or -1."""
        sources = (source_at(node, i) for node in self.addresses() for i in (0, 1))
        return max((layer_of(Tensor(at).name) for at in sources if at), default=-1)

    def find(self, op: str) -> list[tuple[int, Tensor]]:
        """Return the nodes of the operation `op`, each as (position, node)."""
        number = op_number(op)
        addresses = enumerate(self.addresses())
        return [(i, Tensor(address)) for i, address in addresses if op_at(address) == number]

    def positions(self) -> Callable[[Tensor], int | None]:
        index = {address: i for i, address in enumerate(self.addresses())}
        return lambda node: index.get(node.address)

    def use_count(self, node: Tensor) -> int:
        """Return the number of nodes that read `node`, or -1 if the graph does not know `node`.

        Nodes in other devices' parts of the graph count too, because all parts share one table
        (ggml_node_get_use_count).
        """
        table = self._struct.visited_hash_set
        if not table.size or not self._struct.use_counts:
            return -1
        at = (node.address >> 4) % table.size
        for _ in range(table.size):
            word = C.c_uint32.from_address(table.used + 4 * (at >> 5)).value
            if not word >> (at & 31) & 1:
                return -1
            if C.c_size_t.from_address(table.keys + 8 * at).value == node.address:
                return C.c_int32.from_address(self._struct.use_counts + 4 * at).value
            at = (at + 1) % table.size
        return -1

    def use_counts(self, addresses: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the use counts of the nodes at these addresses, vectorised."""
        use_counts = np.full(len(addresses), -1, np.int32)
        table, size = self._struct.visited_hash_set, int(self._struct.visited_hash_set.size)
        if not size or not self._struct.use_counts:
            return use_counts
        used = HostRange(table.used, -(-size // 32) * 4).array().view(np.uint32)
        keys = HostRange(table.keys, size * 8).array().view(np.uint64)
        counts = HostRange(self._struct.use_counts, size * 4).array().view(np.int32)
        left = np.arange(len(addresses))
        at = ((addresses >> np.uint64(4)) % np.uint64(size)).astype(np.intp)
        for _ in range(size):
            is_used = (used[at >> 5] >> (at & 31).astype(np.uint32) & 1).astype(bool)
            is_found = is_used & (keys[at] == addresses[left])
            use_counts[left[is_found]] = counts[at[is_found]]
            is_beside = is_used & ~is_found
            if not is_beside.any():
                break
            left, at = left[is_beside], (at[is_beside] + 1) % size
        return use_counts

    def state(self) -> GraphState:
        """Return a snapshot of the graph and its nodes' sources."""
        return GraphState(self)

    def name_weights(self, weights: Mapping[int, Tensor], views: Mapping[int, Tensor]) -> None:
        """Make nodes read `weights` instead of the tensors at these addresses.

        `views`: the weights of the views at these addresses, which become views of them. The caller
        has checked that types, shapes and offsets fit (offload/worker/graph_check.py). Gives the
        graph a uid, which a graph from a network lacks.
        """
        for address, weight in views.items():
            Tensor(address).show(weight)
        nodes = np.array(self.addresses(), np.uint64)
        if len(nodes):
            sources = sources_of(structs_at(nodes))
            reads = np.isin(sources, np.array(list(weights), np.uint64))
            for row, index in np.argwhere(reads).tolist():
                target = weights[int(sources[row, index])]
                Redirect(Tensor(int(nodes[row])), index).to(target)
        self._struct.uid = next(_uids)

    def forget_uid(self) -> None:
        """Take the graph's uid away, so that it is treated as a new one."""
        self._struct.uid = 0

    def part(self, first: int, end: int, redirected: Sequence[Redirect] | None = None) -> Graph:
        """Return nodes [first, end) as a graph, kept as long as this one.

        `redirected` are the sources that currently point elsewhere. While they point to the same
        targets, the part has the same uid. It has none if `redirected` is None or the graph has
        none.

        CUDA's backend looks up captured graphs by their first node. Each part therefore begins with
        a node of its own that computes nothing, so that parts with the same beginning differ.
        """
        part = self.parts.get((first, end))
        if part is None:
            own = abi.ggml_tensor()
            array = node_array([C.addressof(own), *self._addresses(first, end)])
            struct = self._view(end - first + 1)
            struct.nodes = C.addressof(array)
            part = self.parts[first, end] = Graph.own(struct, (array, own))
        uid = 0
        if redirected is not None and self.uid:
            reads = tuple([redirect.address for redirect in redirected])
            uid = part._uids.get(reads, 0) or part._uids.setdefault(reads, next(_uids))
        part._struct.uid = uid
        return part

    def entry(self, first: int, end: int) -> tuple[int, int, int]:
        """Return the addresses of a part and of its uid, and its first uid, for the player.

        The player gives the part a uid for each range of slots that its nodes see.
        """
        return self.entry_of(self.part(first, end))

    def entry_of(self, part: Graph) -> tuple[int, int, int]:
        """Return the values of `entry` for an existing part."""
        uid = next(_first_uids) if self.uid else 0
        return part.address, part.address + GRAPH.uid.offset, uid

    def forget_uids(self) -> None:
        """Give parts new uids from now on. Call it when results have moved to other memory."""
        for part in self.parts.values():
            part._uids.clear()

    def with_nodes(self, first: int, end: int, before: Mapping[int, Sequence[Tensor]]) -> Graph:
        """Return nodes [first, end) as a graph, with other nodes inserted.

        `before`: the nodes to insert before each position, `end` included. The graph's uid is
        unique, and is valid as long as its nodes read and write the same memory.
        """
        own = abi.ggml_tensor()
        nodes = [C.addressof(own)]
        for position, address in enumerate(self._addresses(first, end), first):
            nodes += [node.address for node in before.get(position, ())]
            nodes.append(address)
        nodes += [node.address for node in before.get(end, ())]
        array, struct = node_array(nodes), self._view(len(nodes))
        struct.nodes = C.addressof(array)
        return Graph.own(struct, (array, own, tuple(before.values())))

    def replacing(self, nodes: Mapping[int, Tensor], without: Collection[int] = ()) -> Graph:
        """Return a copy with the nodes at some positions replaced or removed.

        The copy has this graph's use counts, which lack our nodes, so backends do not fuse those.
        """
        addresses = self.addresses()
        without = set(without) - nodes.keys()
        for index, node in nodes.items():
            addresses[index] = node.address
        kept = [address for i, address in enumerate(addresses) if i not in without]
        return self._copy(kept, tuple(nodes.values()))

    def inserting(
        self, before: Mapping[int, Sequence[Tensor]], nodes: Mapping[int, Tensor]
    ) -> Graph:
        """Return a copy with the nodes at some positions replaced, and others before them.

        The copy has this graph's use counts, as that of `replacing`.
        """
        addresses: list[int] = []
        for position, address in enumerate(self.addresses()):
            addresses += [node.address for node in before.get(position, ())]
            addresses.append(nodes[position].address if position in nodes else address)
        own = [node for inserted in before.values() for node in inserted]
        return self._copy(addresses, (*own, *nodes.values()))

    def reordered(self, addresses: Sequence[int]) -> Graph:
        """Return a copy with nodes in the order of `addresses`. Backends still fuse neighbours."""
        return self._copy(addresses, ())

    def _copy(self, addresses: Sequence[int], own: tuple[Tensor, ...]) -> Graph:
        array = node_array(addresses)
        struct = self._view(len(addresses))
        struct.nodes = C.addressof(array)
        struct.uid = next(_uids) if self.uid else 0
        return Graph.own(struct, (array, own, self._kept))

    def _view(self, n_nodes: int) -> Any:
        struct = GRAPH.from_buffer_copy(self._struct)
        struct.n_nodes, struct.size, struct.n_leafs, struct.uid = n_nodes, 0, 0, 0
        struct.grads = struct.grad_accs = struct.leafs = None
        return struct


def node_array(addresses: Sequence[int]) -> Any:
    """Return a C array of these nodes, padded with nodes that compute nothing."""
    behind = [C.addressof(_nothing)] * _LOOKED_AHEAD
    return (C.c_void_p * (len(addresses) + _LOOKED_AHEAD))(*addresses, *behind)


_nothing = abi.ggml_tensor()  # its operation is 0, NONE
_one = (C.c_int64 * 1)()
