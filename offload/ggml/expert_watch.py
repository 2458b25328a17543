"""Tells which experts a graph is about to read, if libllama's own CPU backend computes it.

libllama can ask before each node whether the caller wants to see its result (cb_eval). The watch
asks to see the router's choice. libllama then computes up to that node and calls back. Next, it
asks about the products, and computes them when these calls have returned.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from offload.errors import NotSupported
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library, op_number
from offload.ggml.rewriting import read_rows
from offload.ggml.tensor import Tensor, name_is_at, op_at, source_at
from offload.model import layer_of

# (layer, ids [n_tokens, n_used], a function that returns the rows [n_tokens, n_embd] that these
# experts multiply): returns when the experts may be read
AwaitExperts = Callable[[int, NDArray[np.int32], Callable[[], NDArray[np.float32] | None]], None]
_CHOICE = b"ffn_moe_topk-"  # libllama's name of a router's choice, before the layer's number


class ExpertWatch:
    """A callback for contexts. Must outlive them, because C keeps its address."""

    def __init__(self, host: HostBufferType, pending: Pending, need: AwaitExperts) -> None:
        """`need` is called before products with weights in `host` are computed."""
        self._host, self._pending, self._need = host, pending, need
        self._product = op_number("MUL_MAT_ID")
        self._ids, self._layer = 0, -1  # the choice that was computed last
        self._is_due = False  # True until the first product with that choice
        prototype = library().structs.ggml_backend_sched_eval_callback
        self.callback, _ = guard(prototype, pending, False, self._on_node)

    def _on_node(self, address: int, ask: bool, _: object) -> bool:
        """Return True to see a node's result (`ask`), or to let the graph go on."""
        if self._pending.first is not None:
            return ask  # stops the graph as soon as possible
        if ask:
            if op_at(address) == self._product:
                self._check(address)
            return name_is_at(address, _CHOICE)
        self._read(Tensor(address))
        return True

    def _read(self, ids: Tensor) -> None:
        self._layer = int(ids.name.rpartition("-")[2])
        self._ids, self._is_due = ids.address, True

    def _check(self, address: int) -> None:
        """Wait until the experts that a product is about to read are in memory.

        Raises NotSupported if the graph does not name the choice of these experts.
        """
        weight = source_at(address, 0)
        if not self._host.holds_at(weight):
            return
        name = Tensor(weight).name
        if source_at(address, 2) != self._ids or layer_of(name) != self._layer:
            raise NotSupported(
                f"{name} is read by a choice of experts that the graph does not name, so this "
                "model has to fit memory; use --mmap to keep its weights in the page cache"
            )
        if self._is_due:
            self._is_due = False
            rows = partial(read_rows, Tensor(source_at(address, 1)))
            self._need(self._layer, _values(Tensor(self._ids)), rows)


def _values(ids: Tensor) -> NDArray[np.int32]:
    """Return the numbers of a tensor [n_used, n_tokens] in host memory, as [n_tokens, n_used]."""
    (n_used, n_tokens, _, _), (value_bytes, row_bytes, _, _) = ids.shape, ids.strides
    if not n_tokens:  # the last layer of a batch without logits
        return np.empty((0, n_used), np.int32)
    n_values = ((n_tokens - 1) * row_bytes + (n_used - 1) * value_bytes) // value_bytes + 1
    flat = np.ctypeslib.as_array((C.c_int32 * n_values).from_address(ids.position))
    shape = n_tokens, n_used
    return np.lib.stride_tricks.as_strided(flat, shape, (row_bytes, value_bytes), writeable=False)
