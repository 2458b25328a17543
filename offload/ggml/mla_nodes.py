"""Nodes and graphs of our own, made after ggml's."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Any

from offload.ggml import tensor
from offload.mla.decision import Shape


def node_like(address: int, ne: Shape, nb: Shape) -> Any:
    """A copy of the tensor at `address`, of another shape in the same memory."""
    made = tensor.copy_of(address)
    for i in range(4):
        made.ne[i], made.nb[i] = ne[i], nb[i]
    return made


def graph_of(template: int, nodes: Sequence[int]) -> tuple[Any, Any]:
    """A graph of these nodes and its array of them, both kept by the caller.

    It has the tables of the graph `template`, which backends look nodes up in before they fuse
    some; our own nodes are not in them, and so are not fused.
    """
    array = (C.c_void_p * len(nodes))(*nodes)
    made = tensor.view(template, 0, len(nodes))
    made.nodes = C.addressof(array)
    return made, array
