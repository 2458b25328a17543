"""Copies a graph into memory of our own, so that it stays valid while ggml builds the next one."""

from __future__ import annotations

import ctypes as C

import numpy as np
from numpy.typing import NDArray

from offload.ggml.graph import GRAPH, Graph, node_array
from offload.ggml.library.lib import library
from offload.ggml.tensor import (
    TENSOR,
    buffer_at,
    op_at,
    pointers_of,
    read_by,
    root_at,
    structs_at,
)

_SIZE_BYTES = C.sizeof(TENSOR)
_IGNORED_BITS = 4  # lowest bits of an address that ggml's hash function ignores
_COMPUTE = 2  # enum ggml_backend_buffer_usage: memory for the results of graphs


def detached(graph: Graph) -> Graph:
    """Return a copy of the graph and of all its tensors that ggml overwrites for the next graph.

    The tensors' data stay where they are. The copy has the graph's use counts, so that backends
    fuse the same nodes. It is valid as long as the buffers of its tensors are.
    """
    nodes = np.array(graph.addresses(), np.uint64)
    known = _overwritten(nodes)
    n = len(known)
    copies = structs_at(known)
    first = copies.ctypes.data
    assert first % (1 << _IGNORED_BITS) == 0, "malloc aligns to 16 bytes"
    addresses = np.uint64(first) + np.arange(n, dtype=np.uint64) * np.uint64(_SIZE_BYTES)

    def moved(pointers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        at = np.minimum(np.searchsorted(known, pointers), n - 1)
        return np.where(known[at] == pointers, addresses[at], pointers)

    pointers = pointers_of(copies)
    pointers[:] = moved(pointers)
    array = node_array(moved(nodes).tolist())
    # In a hash table of this size, each tensor has a place of its own.
    n_places = n * (_SIZE_BYTES >> _IGNORED_BITS)
    at = (addresses >> np.uint64(_IGNORED_BITS)) % np.uint64(n_places)
    found = graph.use_counts(known)
    is_counted = found >= 0
    at = at[is_counted]
    keys, counts = np.zeros(n_places, np.uint64), np.zeros(n_places, np.int32)
    keys[at], counts[at] = addresses[is_counted], found[is_counted]
    used = np.packbits(keys != 0, bitorder="little")
    used = np.pad(used, (0, -len(used) % 4))

    struct = GRAPH.from_buffer_copy(GRAPH.from_address(graph.address))
    struct.size = struct.n_leafs = 0
    struct.grads = struct.grad_accs = struct.leafs = None
    struct.nodes, struct.use_counts = C.addressof(array), counts.ctypes.data
    table = struct.visited_hash_set
    table.size, table.used, table.keys = n_places, used.ctypes.data, keys.ctypes.data
    return Graph.own(struct, (copies, array, keys, counts, used))


def _overwritten(nodes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the sorted addresses of all tensors that `nodes` reach, except the model's own.

    Weights and the KV cache are the model's own tensors. They have no operation, are no views, and
    lie in buffers that are not for computing.
    """
    usage = library().ggml_backend_buffer_get_usage

    def is_own(address: int) -> bool:
        if op_at(address) or root_at(address) != address:
            return False
        buffer = buffer_at(address)
        return bool(buffer) and usage(buffer) != _COMPUTE

    known = new = np.unique(nodes)
    while len(new):
        found = np.setdiff1d(read_by(structs_at(new)), known, assume_unique=True)
        new = np.array([at for at in found.tolist() if not is_own(at)], np.uint64)
        known = np.union1d(known, new)
    return known
