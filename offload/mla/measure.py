"""Chooses the MLA crossover when a model is opened, on a GPU by measuring.

The measurement uses a weight of zeros with the model's shape and type. That takes the same time as
the real weight, and needs no loaded model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph
from offload.ggml.tensor import Tensor, new_tensor
from offload.mla.decision import (
    Timing,
    choose_crossover,
    hopeless,
    measured_sizes,
    strides,
)
from offload.model import ModelFacts

_REPEATS = 4  # products per timed graph, so that launching it weighs less
_ROUNDS = 3
_FLOAT_BYTES = 4
_ALIGNMENT = 4096
_WEIGHT = "attn_v_b.weight"


@dataclass(frozen=True)
class ChosenCrossover:
    """`n_tokens`: most tokens for the broadcast form; None: the number of heads."""

    n_tokens: int | None
    table: tuple[Timing, ...] = ()
    note: str = ""  # what was not as asked for, in a sentence


def chosen_crossover(
    wanted: int | None, facts: ModelFacts, device: Device, *, token_major: bool
) -> ChosenCrossover:
    """Return `wanted`, or if it is None the crossover for this model and device.

    On a GPU the crossover is measured. If memory for that is missing, it is one token, because
    above that CUDA's kernels read the weight once per token. On the CPU it is the number of heads.
    `token_major`: attention leaves a token's heads side by side, as flash attention does.
    Raises DeviceFailed.
    """
    if wanted is not None:
        return ChosenCrossover(wanted)
    entries = (place.entry for name, place in facts.weights.items() if name.endswith(_WEIGHT))
    weight = next(entries, None)
    if weight is None:
        return ChosenCrossover(0)  # a model without MLA
    if device.kind != "gpu":
        return ChosenCrossover(None)
    kv_lora, v_dim, n_head = (*weight.shape, 1, 1, 1)[:3]
    try:
        table = measure_crossover(
            device, weight.type, (kv_lora, v_dim, n_head), token_major=token_major
        )
    except DoesNotFit as e:
        return ChosenCrossover(1, note=f"MLA crossover not measured ({e}): taking 1 token")
    return ChosenCrossover(choose_crossover(table), table)


def measure_crossover(
    device: Device, weight_type: str, shape: tuple[int, int, int], *, token_major: bool
) -> tuple[Timing, ...]:
    """Seconds of both forms for 1, 2, 4, ... 2 n_head tokens, the best of a few rounds.

    `shape` is kv_lora, v_dim, n_head of the weight. Stops where the broadcast form is hopeless or
    the device does not take it. Takes memory of the device for the weight and 2 n_head tokens, and
    gives it back. Raises DoesNotFit, DeviceFailed.
    """
    sizes = measured_sizes(shape[2])
    bench = _Bench(device, weight_type, shape, sizes[-1], token_major)
    try:
        table: list[Timing] = []
        for n in sizes:
            broadcast = bench.broadcast(n)
            if not device.supports(broadcast):
                break
            matrix_s = bench.time_s(bench.matrix(n))
            timing = Timing(n, matrix_s, bench.time_s([broadcast]))
            table.append(timing)
            if hopeless(timing):
                break
        return tuple(table)
    finally:
        bench.close()


class _Bench:
    """Device memory for both forms, and their nodes for any number of tokens."""

    def __init__(
        self, device: Device, weight_type: str, shape: tuple[int, int, int], n_max: int,
        token_major: bool,
    ) -> None:  # fmt: skip
        self._kv_lora, self._v_dim, self._n_head = shape
        self._token_major = token_major
        vectors_bytes = _aligned(_FLOAT_BYTES * self._kv_lora * self._n_head * n_max)
        product_bytes = _aligned(_FLOAT_BYTES * self._v_dim * self._n_head * n_max)
        # As f32 a weight is largest.
        weight_bytes = _aligned(_FLOAT_BYTES * self._kv_lora * self._v_dim * self._n_head)
        self._product_at = vectors_bytes
        self._output_at = vectors_bytes + product_bytes
        self._weight_at = vectors_bytes + 2 * product_bytes
        self._stream: Stream = device.open()
        try:
            size_bytes = self._weight_at + weight_bytes + _ALIGNMENT
            self._buffer = device.allocate(size_bytes, "measuring the MLA crossover")
        except DoesNotFit:
            self._stream.close()
            raise
        self._weight = new_tensor(weight_type, (*shape, 1), (self._buffer, self._weight_at))

    def close(self) -> None:
        self._stream.synchronize()
        self._buffer.close()
        self._stream.close()

    def matrix(self, n: int) -> Sequence[Tensor]:
        """The three nodes that llama.cpp builds."""
        kv_lora, v_dim, n_head = self._kv_lora, self._v_dim, self._n_head
        if self._token_major:
            attended = _permuted(self._floats((kv_lora, n_head, n, 1), 0))
        else:
            attended = self._floats((kv_lora, n, n_head, 1), 0)
        shape = v_dim, n, n_head, 1
        at = self._buffer, self._product_at
        product = new_tensor("f32", shape, at, "MUL_MAT", [self._weight, attended])
        permuted = _permuted(product)
        output = new_tensor(
            "f32", (v_dim, n_head, n, 1), (self._buffer, self._output_at), "CONT", [permuted]
        )
        return product, permuted, output

    def broadcast(self, n: int) -> Tensor:
        """The one node of the broadcast form."""
        shape = self._kv_lora, 1, self._n_head, n
        nb = strides(shape, _FLOAT_BYTES)
        if not self._token_major:
            nb = nb[0], nb[1], n * nb[1], nb[1]
        vectors = new_tensor("f32", shape, (self._buffer, 0), strides=nb)
        shape = self._v_dim, 1, self._n_head, n
        at = self._buffer, self._output_at
        return new_tensor("f32", shape, at, "MUL_MAT", [self._weight, vectors])

    def time_s(self, nodes: Sequence[Tensor]) -> float:
        """Best seconds of one pass over the nodes, launching amortised over several."""
        graph = Graph.of([*nodes] * _REPEATS)
        best_s = float("inf")
        for _ in range(1 + _ROUNDS):  # the first round compiles, allocates and fills caches
            self._stream.synchronize()
            start_s = time.perf_counter()
            status = self._stream.compute(graph)
            self._stream.synchronize()
            best_s = min(best_s, time.perf_counter() - start_s)
            if status:
                raise DeviceFailed(f"measuring the MLA crossover failed with ggml status {status}")
        return max(best_s / _REPEATS, 1e-9)

    def _floats(self, shape: tuple[int, int, int, int], offset_bytes: int) -> Tensor:
        return new_tensor("f32", shape, (self._buffer, offset_bytes))


def _permuted(of: Tensor) -> Tensor:
    """`of` with its dimensions 1 and 2 swapped, as a view."""
    (a, b, c, d), (na, nb, nc, nd) = of.shape, of.strides
    return of.viewed((a, c, b, d), (na, nc, nb, nd), op="PERMUTE", params=(0, 2, 1, 3))


def _aligned(size_bytes: int) -> int:
    return (size_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
