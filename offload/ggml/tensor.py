"""Views of ggml tensors and graphs at an address: fields by name, nothing copied, nothing owned."""

from __future__ import annotations

import ctypes as C
from typing import Any

from offload.ggml.library import abi

TENSOR = abi.ggml_tensor
GRAPH = abi.ggml_cgraph

_OP = TENSOR.op.offset
_SRC = TENSOR.src.offset
_POINTER = C.sizeof(C.c_void_p)
_int_at = C.c_int.from_address
_pointer_at = C.c_void_p.from_address


def op_of(address: int) -> int:
    """The operation number of the node at `address`; the cheapest question there is (0.2 us)."""
    return _int_at(address + _OP).value


def source(address: int, index: int) -> int:
    """Address of the node's source tensor `index`, 0 when it has none."""
    return _pointer_at(address + _SRC + index * _POINTER).value or 0


def set_source(address: int, index: int, value: int) -> None:
    """Point the node at another source; the caller restores it after the node was submitted."""
    _pointer_at(address + _SRC + index * _POINTER).value = value


def at(address: int) -> Any:
    """The tensor at `address` as a structure of offload/ggml/library/abi.py."""
    return TENSOR.from_address(address)


def copy_of(address: int) -> Any:
    """A tensor of our own that begins as a copy of the one at `address`."""
    return TENSOR.from_buffer_copy(TENSOR.from_address(address))


def address_of(structure: Any) -> int:
    return C.addressof(structure)


def name_of(address: int) -> str:
    return bytes(at(address).name).split(b"\0", 1)[0].decode("utf-8", "replace")


def node_addresses(graph: int) -> list[int]:
    """Addresses of the graph's nodes in compute order."""
    g = GRAPH.from_address(graph)
    if not g.nodes or not g.n_nodes:
        return []
    return list((C.c_size_t * g.n_nodes).from_address(g.nodes))


def uid_of(graph: int) -> int:
    """Identity of a graph: 0 in views, new whenever ggml splits a graph anew."""
    return int(GRAPH.from_address(graph).uid)


def view(graph: int, first: int, end: int) -> Any:
    """Nodes [first, end) of a graph as a graph of its own, which must not outlive it."""
    part = GRAPH.from_buffer_copy(GRAPH.from_address(graph))
    part.nodes = part.nodes + first * _POINTER
    part.n_nodes, part.size, part.n_leafs, part.uid = end - first, 0, 0, 0
    part.grads = part.grad_accs = part.leafs = None
    return part
