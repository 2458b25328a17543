"""Computes latent attention's (MLA's) value projection as matrix-vector products for few tokens.

llama.cpp always computes the projection as one matrix product per head, over permuted views:

    attended [kv_lora, n_tokens, n_head]     the result of attention, as a view
    product  [v_dim, n_tokens, n_head]       mul_mat with v_b [kv_lora, v_dim, n_head]
    output   [v_dim, n_head, n_tokens]       permute, then cont

Matrix-vector products are faster for few tokens (docs/background.md, MLA). `attended` is read as
[kv_lora, 1, n_head, n_tokens], and `v_b` is broadcast over the tokens. The product
[v_dim, 1, n_head, n_tokens] then already has the layout that `cont` makes.

ggml's own graph is not changed. In a copy of its list of nodes, our nodes replace the old ones, and
write to the addresses of the old results. So the graph is still submitted as one computation.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.backend import Device
from offload.ggml.graph import Graph
from offload.ggml.tensor import Dims, Tensor, new_tensor
from offload.model import ModelFacts


class Outcome(enum.StrEnum):
    """The way a value projection is computed."""

    DIRECT = "broadcast, written where cont would have written it"
    COPIED = "broadcast, written where the old product lay, then copied flat"
    ABOVE_CROSSOVER = "as llama.cpp: more tokens than the crossover"
    STREAMED = "as llama.cpp: the weight is streamed"
    SHARED = "as llama.cpp: an intermediate result is used elsewhere"
    UNSUPPORTED = "as llama.cpp: the device does not take the broadcast product"


REPLACED = Outcome.DIRECT, Outcome.COPIED


@dataclass(frozen=True, slots=True)
class Site:
    """A value projection as found in a graph, valid as long as the graph."""

    weight: Tensor
    attended: Tensor
    product: Tensor
    permuted: Tensor
    output: Tensor
    at: tuple[int, int, int] = (0, 1, 2)  # positions of product, permuted and output in the graph
    is_shared: bool = False  # something else reads product or permuted

    @property
    def n_tokens(self) -> int:
        return self.attended.shape[1]

    @property
    def n_head(self) -> int:
        return self.weight.shape[2]

    def is_value_projection(self) -> bool:
        """True if the shapes are those of a value projection, so that both forms compute the same.

        Sequences with a KV cache of their own each are the fourth dimension of a batch. Such a
        batch of several sequences is no site, because tokens then have two strides.
        """
        product, permuted, output = self.product, self.permuted, self.output
        kv_lora, v_dim, n_head, _ = self.weight.shape
        n_tokens, element_bytes = self.n_tokens, product.strides[0]
        _, row, matrix, whole = product.strides
        return (
            n_head > 1
            and self.weight.shape[3] == 1
            and self.attended.shape == (kv_lora, n_tokens, n_head, 1)
            and product.shape == (v_dim, n_tokens, n_head, 1)
            and _lies_as(product, contiguous(product.shape, element_bytes))
            and permuted.shape == (v_dim, n_head, n_tokens, 1)
            and _lies_as(permuted, (element_bytes, matrix, row, whole))
            and permuted.position == product.position
            and math.prod(output.shape) == math.prod(product.shape)
            and output.strides[0] == element_bytes
            and _lies_as(output, contiguous(output.shape, element_bytes))
        )

    def decide(self, crossover: int) -> Outcome:
        """Return the way to compute. `crossover`: most tokens for the broadcast form.

        The allocator gives `output` memory that is free once `product` is computed. That is often
        the memory of the attention output, so the broadcast form would overwrite its own input.
        Then the result is written over the old product instead. That has the same size and stays
        allocated until `output` is computed. The same is done if there are other nodes between
        `product` and `output`, because they may use the memory of `output`.
        """
        if self.n_tokens > crossover:
            return Outcome.ABOVE_CROSSOVER
        if self.is_shared:
            return Outcome.SHARED
        is_free = self.at[2] == self.at[0] + 2 and not self.output.overlaps(self.attended)
        return Outcome.DIRECT if is_free else Outcome.COPIED

    def broadcast(self, outcome: Outcome) -> tuple[Tensor, ...]:
        """Return the one or two nodes that replace the site's three."""
        kv_lora, v_dim, n_head, _ = self.weight.shape
        element_bytes, token_bytes, head_bytes, _ = self.attended.strides
        if self.n_tokens == 1:
            token_bytes = head_bytes * n_head
        vectors = self.attended.viewed(
            (kv_lora, 1, n_head, self.n_tokens),
            (element_bytes, element_bytes * kv_lora, head_bytes, token_bytes),
        )
        shape = v_dim, 1, n_head, self.n_tokens
        product = (self.output if outcome is Outcome.DIRECT else self.product).computing(
            "MUL_MAT",
            [self.weight, vectors],
            shape=shape,
            strides=contiguous(shape, self.product.strides[0]),
            like=self.product,
        )
        if outcome is Outcome.DIRECT:
            return (product,)
        return product, self.output.computing("CONT", [product])


def contiguous(shape: Dims, element_bytes: int) -> Dims:
    """Return the strides in bytes of a contiguous tensor of this shape."""
    a, b, c, _ = shape
    return element_bytes, element_bytes * a, element_bytes * a * b, element_bytes * a * b * c


def _lies_as(tensor: Tensor, strides: Dims) -> bool:
    """True if the tensor has these strides. Dimensions of one element are not compared."""
    return all(
        n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.strides, strides, strict=True)
    )


class MlaSwitch:
    """Replaces the value projections of one device's graphs (docs/mla.md)."""

    def __init__(
        self,
        crossover: int | None,
        supports: Callable[[Tensor], bool],
        is_streamed: Callable[[Tensor], bool],
    ) -> None:
        """`crossover`: most tokens of a batch that is replaced; None: the model's number of heads.

        `supports(node)` returns True if the device computes a node. `is_streamed(weight)` returns
        True if a weight has no fixed place on the device.
        """
        self.crossover = crossover
        self._supports, self._is_streamed = supports, is_streamed
        self.outcomes: Counter[Outcome] = Counter()  # added each time a graph is computed

    @property
    def n_replaced(self) -> int:
        """Number of computed projections that were replaced."""
        return sum(self.outcomes[outcome] for outcome in REPLACED)

    def rewrite(self, graph: Graph) -> tuple[Graph, Counter[Outcome]]:
        """Return the graph to compute instead of `graph`, and the outcomes to count each time."""
        outcomes: Counter[Outcome] = Counter()
        placed: dict[int, Tensor] = {}
        without: set[int] = set()
        for site in self.sites(graph) if self.crossover != 0 else ():
            crossover = site.n_head if self.crossover is None else self.crossover
            outcome = site.decide(crossover)
            if outcome in REPLACED and self._is_streamed(site.weight):
                outcome = Outcome.STREAMED
            if outcome in REPLACED:
                nodes = site.broadcast(outcome)
                if all(self._supports(node) for node in nodes):
                    placed |= dict(zip((site.at[0], site.at[2]), nodes, strict=False))
                    without |= {*site.at}
                else:
                    outcome = Outcome.UNSUPPORTED
            outcomes[outcome] += 1
        return (graph.replacing(placed, without) if placed else graph), outcomes

    def sites(self, graph: Graph) -> list[Site]:
        """Return the value projections of a graph, in order."""
        # Searching for the last node is fast, because few nodes are conts and hundreds products.
        outputs, index_of = graph.find("CONT"), graph.positions()
        sites = (_site(graph, output, index, index_of) for index, output in outputs)
        return [site for site in sites if site is not None]


def _site(
    graph: Graph, output: Tensor, index: int, index_of: Callable[[Tensor], int | None]
) -> Site | None:
    """Return the value projection that ends at node `output`, or None."""
    permuted = _source(output, "PERMUTE")
    product = permuted and _source(permuted, "MUL_MAT")
    weight = product and _source(product, "NONE")
    attended = product and product.source(1)
    if not (permuted and product and weight and attended):
        return None
    first, middle = index_of(product), index_of(permuted)
    if first is None or middle is None:
        return None  # computed in another part of the graph
    is_shared = any(node.is_output or graph.use_count(node) != 1 for node in (product, permuted))
    at = first, middle, index
    site = Site(weight, attended, product, permuted, output, at, is_shared)
    return site if site.is_value_projection() else None


def _source(node: Tensor, op: str) -> Tensor | None:
    """Return the node's first source if it computes that operation."""
    source = node.source(0)
    return source if source is not None and source.is_op(op) else None


# -- choosing the crossover ------------------------------------------------------------------------

_REPEATS = 4  # products per timed graph, to reduce the share of the launch in the time
_ROUNDS = 3
_FLOAT_BYTES = 4
_ALIGNMENT = 4096
_WEIGHT = "attn_v_b.weight"
_FLOATS = ("f32", "f16", "bf16")
_CPU_FLOATS, _CPU_QUANTISED = 8, 1  # crossovers of ggml's CPU kernels, measured (docs/mla.md)


@dataclass(frozen=True, slots=True)
class MlaTiming:
    """Seconds that each form takes for `n_tokens`, on one device, at the model's shapes."""

    n_tokens: int
    matrix_s: float
    broadcast_s: float


@dataclass(frozen=True)
class ChosenCrossover:
    """The most tokens for the broadcast form, and the measurements that led to it."""

    n_tokens: int
    table: tuple[MlaTiming, ...] = ()
    note: str = ""  # a sentence for the user if the crossover could not be measured


def chosen_crossover(
    facts: ModelFacts, device: Device, *, token_major: bool, is_on: bool = True
) -> ChosenCrossover:
    """Return the crossover for this model and device. It is 0 if the switch is not `is_on`.

    On a GPU it is measured. If there is not enough memory to measure, it is one token,
    because for more tokens CUDA's kernels read the weight once per token. On the CPU and on `sim`
    it is taken from measurements of ggml's CPU kernels (docs/mla.md): starts are fast, and two
    starts on one machine compute the same bits.
    `token_major`: True if attention stores all heads of a token side by side, as flash attention
    does. Raises DeviceFailed.
    """
    entries = (place.entry for name, place in facts.weights.items() if name.endswith(_WEIGHT))
    weight = next(entries, None)
    if weight is None or not is_on:
        return ChosenCrossover(0)  # also of a model without MLA
    if device.kind != "gpu":
        return ChosenCrossover(_CPU_FLOATS if weight.type in _FLOATS else _CPU_QUANTISED)
    kv_lora, v_dim, n_head = (*weight.shape, 1, 1, 1)[:3]
    try:
        table = measure_crossover(
            device, weight.type, (kv_lora, v_dim, n_head), token_major=token_major
        )
    except DoesNotFit as e:
        return ChosenCrossover(1, note=f"MLA crossover not measured ({e}): taking 1 token")
    return ChosenCrossover(choose_crossover(table), table)


def measured_sizes(n_head: int) -> tuple[int, ...]:
    """Return the batch sizes to measure: 1, 2, 4, ... up to twice the number of heads."""
    return tuple(1 << i for i in range((2 * n_head).bit_length()))


def choose_crossover(table: Sequence[MlaTiming]) -> int:
    """Return the measured batch size up to which the broadcast form gains most, or 0 if none.

    The gain is the product of the ratios of times at all measured sizes up to that one, so that one
    noisy measurement decides nothing.
    """
    best, best_gain, gain = 0, 0.0, 0.0
    for timing in sorted(table, key=lambda timing: timing.n_tokens):
        gain += math.log(timing.matrix_s / timing.broadcast_s)
        if gain > best_gain:
            best, best_gain = timing.n_tokens, gain
    return best


def measure_crossover(
    device: Device, weight_type: str, shape: tuple[int, int, int], *, token_major: bool
) -> tuple[MlaTiming, ...]:
    """Return the times of both forms for 1, 2, 4, ... 2 n_head tokens, the best of a few rounds.

    `shape` is (kv_lora, v_dim, n_head) of the weight. Measuring stops at a size at which the
    broadcast form takes over twice as long, or that the device does not support. Allocates device
    memory for a weight and 2 n_head tokens, and frees it. The values of the weight do not matter.
    Raises DoesNotFit, DeviceFailed.
    """
    sizes = measured_sizes(shape[2])
    bench = MlaBench(device, weight_type, shape, sizes[-1], token_major)
    try:
        table: list[MlaTiming] = []
        for n in sizes:
            site = bench.site(n)
            broadcast = site.broadcast(Outcome.DIRECT)
            if not device.supports(broadcast[0]):
                break
            matrix_s = bench.time_s((site.product, site.permuted, site.output))
            table.append(MlaTiming(n, matrix_s, bench.time_s(broadcast)))
            if table[-1].broadcast_s > 2 * matrix_s:
                break
        return tuple(table)
    finally:
        bench.close()


class MlaBench:
    """Device memory for a value projection of up to `n_max` tokens, and its nodes."""

    def __init__(
        self, device: Device, weight_type: str, shape: tuple[int, int, int], n_max: int,
        token_major: bool,
    ) -> None:  # fmt: skip
        self._shape, self._token_major = shape, token_major
        kv_lora, v_dim, n_head = shape
        product_floats = v_dim * n_head * n_max
        # The weight's size is an upper bound, because no type takes more memory than f32.
        sizes = kv_lora * n_head * n_max, product_floats, product_floats, kv_lora * v_dim * n_head
        self._at = [0]  # offsets in bytes of attended, product, output and weight, and the end
        for n in sizes:
            self._at.append(-(-(self._at[-1] + _FLOAT_BYTES * n) // _ALIGNMENT) * _ALIGNMENT)
        self._buffer = device.allocate(self._at[-1] + _ALIGNMENT, "measuring the MLA crossover")
        self._stream = device.open()
        self.weight = new_tensor(weight_type, (*shape, 1), (self._buffer, self._at[3]))

    def close(self) -> None:
        self._stream.synchronize()
        self._buffer.close()
        self._stream.close()

    def site(self, n: int) -> Site:
        """Return the nodes that llama.cpp builds for `n` tokens."""
        kv_lora, v_dim, n_head = self._shape
        at = [(self._buffer, offset_bytes) for offset_bytes in self._at]
        if self._token_major:
            attended = _permuted(new_tensor("f32", (kv_lora, n_head, n, 1), at[0]))
        else:
            attended = new_tensor("f32", (kv_lora, n, n_head, 1), at[0])
        sources = self.weight, attended
        product = new_tensor("f32", (v_dim, n, n_head, 1), at[1], "MUL_MAT", sources)
        permuted = _permuted(product)
        output = new_tensor("f32", (v_dim, n_head, n, 1), at[2], "CONT", [permuted])
        return Site(self.weight, attended, product, permuted, output)

    def time_s(self, nodes: Sequence[Tensor]) -> float:
        """Return the best seconds of one pass over the nodes. Raises DeviceFailed.

        Each launch computes several passes, to reduce the launch's share in the time.
        """
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


def _permuted(of: Tensor) -> Tensor:
    """Return a view of `of` with dimensions 1 and 2 swapped."""
    (a, b, c, d), (na, nb, nc, nd) = of.shape, of.strides
    return of.viewed((a, c, b, d), (na, nc, nb, nd), op="PERMUTE", params=(0, 2, 1, 3))
