"""Measures both forms of the value projection on a device, at a model's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from offload.errors import DeviceFailed
from offload.ggml import tensor
from offload.ggml.arena import DeviceMemory
from offload.ggml.library.lib import library, op_number
from offload.ggml.mla_nodes import graph_of, node_like
from offload.mla.decision import Shape, Timing, hopeless, measured_sizes, strides

_REPEATS = 4  # products per timed graph, so that launching it weighs less
_ROUNDS = 3
_FLOAT_BYTES = 4
_ALIGNMENT = 4096


def measure_crossover(
    backend: int,
    buft: int,
    graph: int,
    product: int,
    supports: Callable[[int], bool],
    *,
    token_major: bool,
) -> tuple[Timing, ...]:
    """Seconds of both forms for 1, 2, 4, ... 2 n_head tokens, the best of a few rounds.

    `product` is a node of `graph` that multiplies with the weight in question, which must lie in
    the device's memory; `token_major` says how the attention output lies (ValueProjection). Stops
    where the broadcast form is hopeless or the device does not take it (`supports` a node). Takes
    memory of the device for 2 n_head tokens, and gives it back. Raises DoesNotFit, DeviceFailed.
    """
    n_head = int(tensor.at(tensor.source(product, 0)).ne[2])
    sizes = measured_sizes(n_head)
    bench = _Bench(backend, buft, graph, product, sizes[-1], token_major)
    try:
        table: list[Timing] = []
        for n in sizes:
            vectors, broadcast = bench.broadcast(n)
            if not supports(tensor.address_of(broadcast)):
                break
            matrix_s = bench.time_s(bench.matrix(n))
            timing = Timing(n, matrix_s, bench.time_s([vectors, broadcast]))
            table.append(timing)
            if hopeless(timing):
                break
        return tuple(table)
    finally:
        bench.close()


class _Bench:
    """Room for both forms, and their nodes for any number of tokens."""

    def __init__(
        self, backend: int, buft: int, graph: int, product: int, n_max: int, token_major: bool
    ) -> None:
        self._lib, self._token_major = library(), token_major
        self._backend, self._graph, self._product = backend, graph, product
        self._weight = tensor.source(product, 0)
        ne = tensor.at(self._weight).ne
        self._kv_lora, self._v_dim, self._n_head = int(ne[0]), int(ne[1]), int(ne[2])
        self._vectors_bytes = _aligned(_FLOAT_BYTES * self._kv_lora * self._n_head * n_max)
        product_bytes = _aligned(_FLOAT_BYTES * self._v_dim * self._n_head * n_max)
        size_bytes = self._vectors_bytes + 2 * product_bytes + _ALIGNMENT
        self._memory = DeviceMemory(buft, size_bytes, "measuring the MLA crossover")
        self._product_offset = self._vectors_bytes
        self._output_offset = self._vectors_bytes + product_bytes

    def close(self) -> None:
        self._lib.ggml_backend_synchronize(self._backend)
        self._memory.close()

    def matrix(self, n: int) -> list[Any]:
        """The three nodes that llama.cpp builds, and what they read."""
        kv_lora, v_dim, n_head = self._kv_lora, self._v_dim, self._n_head
        if self._token_major:
            whole = self._tensor((kv_lora, n_head, n, 1), "NONE", 0)
            attended = self._permuted(whole)
        else:
            whole = attended = self._tensor((kv_lora, n, n_head, 1), "NONE", 0)
        product = self._tensor((v_dim, n, n_head, 1), "MUL_MAT", self._product_offset,
                               self._weight, tensor.address_of(attended))  # fmt: skip
        permuted = self._permuted(product)
        output = self._tensor((v_dim, n_head, n, 1), "CONT", self._output_offset,
                              tensor.address_of(permuted))  # fmt: skip
        return [whole, attended, product, permuted, output]

    def broadcast(self, n: int) -> tuple[Any, Any]:
        """The tensors that the one node of the broadcast form reads, and that node."""
        vectors = self._tensor((self._kv_lora, 1, self._n_head, n), "NONE", 0)
        if not self._token_major:
            row = int(vectors.nb[1])
            vectors.nb[2], vectors.nb[3] = n * row, row
        product = self._tensor((self._v_dim, 1, self._n_head, n), "MUL_MAT", self._output_offset,
                               self._weight, tensor.address_of(vectors))  # fmt: skip
        return vectors, product

    def time_s(self, nodes: list[Any]) -> float:
        """Best seconds of one pass over the nodes, launching amortised over several."""
        addresses = [tensor.address_of(node) for node in nodes if node.op != op_number("NONE")]
        graph, array = graph_of(self._graph, addresses * _REPEATS)
        best_s = float("inf")
        for _ in range(1 + _ROUNDS):  # the first round compiles, allocates and fills caches
            self._lib.ggml_backend_synchronize(self._backend)
            start_s = time.perf_counter()
            status = self._lib.ggml_backend_graph_compute_async(
                self._backend, tensor.address_of(graph)
            )
            self._lib.ggml_backend_synchronize(self._backend)
            best_s = min(best_s, time.perf_counter() - start_s)
            if status:
                raise DeviceFailed(f"measuring the MLA crossover failed with ggml status {status}")
        del array  # alive until here: the graph points at it
        return max(best_s / _REPEATS, 1e-9)

    def _tensor(self, ne: Shape, op: str, offset: int, *sources: int) -> Any:
        """A float tensor in our memory, with the precision that the model's product asks for."""
        made = node_like(self._product, ne, strides(ne, _FLOAT_BYTES))
        made.op = op_number(op)
        made.buffer, made.data = self._memory.buffer, self._memory.base + offset
        made.view_src, made.view_offs, made.extra = None, 0, None
        for i in range(len(made.src)):
            made.src[i] = sources[i] if i < len(sources) else None
        return made

    def _permuted(self, of: Any) -> Any:
        """`of` with its dimensions 1 and 2 swapped, as a view."""
        ne = int(of.ne[0]), int(of.ne[2]), int(of.ne[1]), int(of.ne[3])
        nb = int(of.nb[0]), int(of.nb[2]), int(of.nb[1]), int(of.nb[3])
        made = node_like(tensor.address_of(of), ne, nb)
        made.op, made.view_src = op_number("PERMUTE"), tensor.address_of(of)
        for i, axis in enumerate((0, 2, 1, 3)):
            made.op_params[i] = axis
        for i in range(len(made.src)):
            made.src[i] = tensor.address_of(of) if i == 0 else None
        return made


def _aligned(size_bytes: int) -> int:
    return (size_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
