"""Chooses what a worker's CPU computes: by kept costs of split layers, or by measuring them.

A worker gets its graphs from clients, so it cannot decode a text to measure. It builds the products
of one layer's experts itself, and computes them as if a client had asked for them, before the first
client's graph. Biases and scales of experts are left out, because they take little time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from offload.ggml.backend import Device, copy_now
from offload.ggml.graph import Graph
from offload.ggml.memory import AnonymousMemory
from offload.ggml.tensor import Buffer, Tensor, host_bytes, new_tensor
from offload.model import layer_of
from offload.schedule.division import HOST, DeviceCosts, MeasuredCosts
from offload.schedule.splitter import ByCosts, all_on_device
from offload.stream.split_measuring import (
    LinkTimes,
    SecondsByRows,
    SplitSides,
    costs_of,
    on_device,
    on_host,
    on_link,
)
from offload.stream.ways_in_use import WaysInUse

_N_TOKENS = (1, 8)
_ROUNDS = 3  # graphs of each size, which fill the slots
_SWIGLU = 2  # GGML_GLU_OP_SWIGLU
_ALIGNMENT = 4096


def words_of(known: DeviceCosts, n_used: int) -> str:
    """Return a sentence for the user: the costs, and how they divide a token's missing experts."""
    ids = np.arange(n_used, dtype=np.int32)[None]
    kinds = ByCosts(known.costs.costs())(ids, np.zeros(n_used, np.bool_))
    n_host = int(np.count_nonzero(kinds == HOST))
    how = f"measured on {known.date}" if known.date else "measured now"
    return (
        f"split layers: {known.costs.words} ({how}); if a token's {n_used} experts are all missing "
        f"in slots, the CPU computes {n_host} of them and {n_used - n_host} are copied"
    )


class ExpertLayer:
    """The products of one layer's experts for `n_tokens` tokens, in device memory of their own."""

    def __init__(
        self, weights: Mapping[str, Tensor], layer: int, n_used: int, n_tokens: int, device: Device
    ) -> None:
        """`weights` by their names in the file. Raises KeyError if the layer has other products."""
        start, end = f"blk.{layer}.ffn_", "_exps.weight"
        down = weights[f"{start}down{end}"]
        joined = weights.get(f"{start}gate_up{end}")
        first = (
            [joined] if joined is not None
            else [weights[f"{start}{kind}{end}"] for kind in ("gate", "up")]
        )  # fmt: skip
        n_in, n_ff, n_out = first[0].shape[0], down.shape[0], down.shape[1]
        self._n_experts, self._n_ids = down.shape[2], n_used * n_tokens
        widths = [weight.shape[1] for weight in first]
        floats = [n_in * n_tokens, *(w * self._n_ids for w in widths), n_ff * self._n_ids,
                  n_out * self._n_ids, self._n_ids]  # fmt: skip
        at = [0]
        for n in floats:
            at.append(-(-(at[-1] + 4 * n) // _ALIGNMENT) * _ALIGNMENT)
        self.buffer: Buffer = device.allocate(at[-1] + _ALIGNMENT, "measuring split layers")
        places = [(self.buffer, offset) for offset in at]
        rows = new_tensor("f32", (n_in, 1, n_tokens, 1), places[0])
        self.ids = new_tensor("i32", (n_used, n_tokens, 1, 1), places[-2])
        products = [
            new_tensor("f32", (width, n_used, n_tokens, 1), place, "MUL_MAT_ID",
                       [weight, rows, self.ids])
            for width, place, weight in zip(widths, places[1:], first, strict=False)
        ]  # fmt: skip
        acted = new_tensor("f32", (n_ff, n_used, n_tokens, 1), places[-4], "GLU", products)
        acted = acted.with_parameters([_SWIGLU])
        result = new_tensor("f32", (n_out, n_used, n_tokens, 1), places[-3], "MUL_MAT_ID",
                            [down, acted, self.ids])  # fmt: skip
        self.graph = Graph.of([*products, acted, result])

    def choose(self, random: np.random.Generator) -> None:
        """Let each token use random experts, none twice."""
        memory = AnonymousMemory()
        ids = memory.allocate(4 * self._n_ids)
        n_used = self.ids.shape[0]
        drawn = [random.permutation(self._n_experts)[:n_used] for _ in range(self.ids.shape[1])]
        ids.array()[: 4 * self._n_ids] = np.concatenate(drawn).astype(np.int32).view(np.uint8)
        copy_now(self.ids, 0, host_bytes(ids), 0, 4 * self._n_ids)
        memory.free(ids)


def measure_split_layer(
    weights: Mapping[str, Tensor],
    streamed: Sequence[str],
    n_used: int,
    device: Device,
    ways: WaysInUse,
    compute: Callable[[Graph], SplitSides | None],
    made: list[ExpertLayer],
) -> MeasuredCosts | None:
    """Return the costs of splitting a layer of `streamed` weights, or None if it cannot be split.

    `compute` computes a graph and returns the sides of its split layer. `made` gets the layers with
    their device memory, which the caller frees. Raises DoesNotFit, DeviceFailed, NotSupported.
    """
    layers = sorted({layer_of(name) for name in streamed if name.endswith("down_exps.weight")})
    if not layers:
        return None
    random = np.random.default_rng(0)
    measured: SecondsByRows = {}
    host: SecondsByRows = {}
    link: LinkTimes | None = None
    kinds: Sequence[float] = ()
    with ways.trying(ways.now.splitting_by(all_on_device)):
        for n_tokens in _N_TOKENS:
            try:
                layer = ExpertLayer(weights, layers[0], n_used, n_tokens, device)
            except KeyError:
                return None
            made.append(layer)
            sides = None
            for _ in range(_ROUNDS):
                layer.choose(random)
                sides = compute(layer.graph)
            if sides is not None:
                on_device(sides, measured)
                host = host or on_host(sides)
                link, kinds = link or on_link(sides), sides.kinds
    if not (measured and host and link):
        return None
    return costs_of(measured, host, link, kinds)
