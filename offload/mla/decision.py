"""Decides when latent attention's (MLA's) value projection runs as matrix-vector products.

llama.cpp always computes it as one matrix product per head, over permuted views:

    attended [kv_lora, n_head, n_tokens]     what attention gave, contiguous with flash attention
      permute -> mul_mat with v_b [kv_lora, v_dim, n_head] -> [v_dim, n_tokens, n_head]
      permute -> cont -> [v_dim, n_head, n_tokens]

Matrix-vector products are faster for few tokens (docs/background.md, MLA). `attended` is read as
[kv_lora, 1, n_head, n_tokens], and `v_b` is broadcast over the tokens. The product
[v_dim, 1, n_head, n_tokens] then already has the layout that `cont` makes. This file decides from
shapes and addresses alone; offload/mla/switch.py changes the graph.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

Dims = tuple[int, int, int, int]  # ggml's order: the row length first


class Form(enum.Enum):
    """The way a replaced site computes."""

    DIRECT = "the product is written where cont would have written it"
    COPIED = "the product is written where the old product lay, then copied flat"


class LeftAlone(enum.StrEnum):
    """Why a site was left as llama.cpp built it."""

    ABOVE_CROSSOVER = "more tokens than the crossover"
    STREAMED = "the weight is streamed"
    SHARED = "an intermediate result is used elsewhere"
    UNEVEN_TOKENS = "tokens of several streams do not lie at one distance"
    OVERLAP = "no memory that the product may be written to"
    UNSUPPORTED = "the device does not take the broadcast product"


@dataclass(frozen=True, slots=True)
class Memory:
    """A tensor's shape `ne`, strides `nb` in bytes, and address `data`."""

    ne: Dims
    nb: Dims
    data: int

    @property
    def size_bytes(self) -> int:
        """Bytes from the first to the last, gaps included, for unquantised elements."""
        return self.nb[0] + sum(
            (n - 1) * stride for n, stride in zip(self.ne, self.nb, strict=True)
        )

    def overlaps(self, other: Memory) -> bool:
        return (
            self.data < other.data + other.size_bytes and other.data < self.data + self.size_bytes
        )


def strides(ne: Dims, element_bytes: int) -> Dims:
    """Strides in bytes of a contiguous tensor."""
    nb = [element_bytes]
    for n in ne[:3]:
        nb.append(nb[-1] * n)
    return nb[0], nb[1], nb[2], nb[3]


def _lies_as(ne: Dims, nb: Dims, expected: Dims) -> bool:
    """True if the strides are the expected ones; dimensions of one element do not count."""
    return all(n == 1 or a == b for n, a, b in zip(ne, nb, expected, strict=True))


@dataclass(frozen=True, slots=True)
class ValueProjection:
    """`output = cont(permute(mul_mat(weight, attended), 0, 2, 1, 3))` as found in a graph.

    attended [kv_lora, n_tokens per stream, n_head, n_streams], a view of what attention gave
    weight   [kv_lora, v_dim, n_head, 1]
    product  [v_dim, n_tokens per stream, n_head, n_streams]
    permuted [v_dim, n_head, n_tokens per stream, n_streams], a view of product
    """

    weight_ne: Dims
    attended: Memory
    product: Memory
    permuted: Memory
    output: Memory
    adjacent: bool  # nothing is computed between product and output
    shared: bool  # something else reads product or its permuted view
    streamed: bool

    @property
    def n_tokens(self) -> int:
        return self.attended.ne[1] * self.attended.ne[3]

    @property
    def n_head(self) -> int:
        return self.weight_ne[2]

    @property
    def token_major(self) -> bool:
        """True if a token's heads lie side by side, as flash attention leaves them."""
        return self.attended.nb[2] == self.attended.nb[0] * self.attended.ne[0]

    @property
    def vectors_ne(self) -> Dims:
        """The attention output as the broadcast form reads it."""
        return self.attended.ne[0], 1, self.n_head, self.n_tokens

    @property
    def vectors_nb(self) -> Dims:
        """Its strides in bytes; raises ValueError for a site that `decide` would not replace."""
        stride = token_stride(self.attended)
        if stride is None:
            raise ValueError("the tokens do not lie at one distance")
        element_bytes, _, head_stride, _ = self.attended.nb
        return element_bytes, element_bytes * self.attended.ne[0], head_stride, stride

    @property
    def product_ne(self) -> Dims:
        """The product of the broadcast form, contiguous."""
        return self.weight_ne[1], 1, self.n_head, self.n_tokens


def is_value_projection(site: ValueProjection) -> bool:
    """True if the shapes are those of a value projection, so that both forms compute the same."""
    weight, product, permuted = site.weight_ne, site.product, site.permuted
    swapped = (product.ne[0], product.ne[2], product.ne[1], product.ne[3])
    swapped_nb = (product.nb[0], product.nb[2], product.nb[1], product.nb[3])
    return (
        weight[2] > 1
        and weight[3] == 1
        and site.attended.ne[0] == weight[0]
        and site.attended.ne[2] == weight[2]
        and product.ne == (weight[1], site.attended.ne[1], weight[2], site.attended.ne[3])
        and _lies_as(product.ne, product.nb, strides(product.ne, product.nb[0]))
        and permuted.ne == swapped
        and _lies_as(permuted.ne, permuted.nb, swapped_nb)
        and permuted.data == product.data
        and math.prod(site.output.ne) == math.prod(product.ne)
        and site.output.nb[0] == product.nb[0]
        and _lies_as(site.output.ne, site.output.nb, strides(site.output.ne, product.nb[0]))
    )


def token_stride(attended: Memory) -> int | None:
    """Bytes from one token of the attention output to the next; None if they differ.

    With flash attention the output is [kv_lora, n_head, n_tokens], so a token's vectors are
    contiguous. Without, it is [kv_lora, n_tokens, n_head] per stream, and vectors are read with
    strides.
    """
    _, n_tokens, n_head, n_streams = attended.ne
    if n_streams == 1:
        return attended.nb[1] if n_tokens > 1 else attended.nb[2] * n_head
    if n_tokens > 1 and attended.nb[3] != attended.nb[1] * n_tokens:
        return None
    return attended.nb[3] // n_tokens


def decide(site: ValueProjection, crossover: int) -> Form | LeftAlone:
    """Return the form of one site. `crossover`: most tokens for which the site is replaced.

    The allocator gives `output` memory that is free once `product` is computed. That is often the
    memory of the attention output, so the broadcast form would overwrite its own input. Then the
    result is written over the old product instead: that has the same size, stays allocated until
    `output` is made, and does not overlap its sources.
    """
    if site.n_tokens > crossover:
        return LeftAlone.ABOVE_CROSSOVER
    if site.streamed:
        return LeftAlone.STREAMED
    if site.shared:
        return LeftAlone.SHARED
    if token_stride(site.attended) is None:
        return LeftAlone.UNEVEN_TOKENS
    # Other nodes between the two may still use the memory that `output` will have.
    if site.adjacent and not site.output.overlaps(site.attended):
        return Form.DIRECT
    if site.product.overlaps(site.attended) or site.product.overlaps(site.output):
        return LeftAlone.OVERLAP
    return Form.COPIED


@dataclass(slots=True)
class MlaCounters:
    """Counts of what the switch did, added each time a graph is computed."""

    replaced: int = 0
    copied: int = 0  # replaced sites of Form.COPIED, whose memory overlaps
    left_alone: Counter[LeftAlone] = field(default_factory=Counter)

    @staticmethod
    def of(decisions: Sequence[Form | LeftAlone]) -> MlaCounters:
        """The counts that one computation of a graph with these decisions adds."""
        forms = [d for d in decisions if isinstance(d, Form)]
        left_alone = Counter(d for d in decisions if isinstance(d, LeftAlone))
        return MlaCounters(len(forms), forms.count(Form.COPIED), left_alone)

    def add(self, other: MlaCounters) -> None:
        self.replaced += other.replaced
        self.copied += other.copied
        if other.left_alone:
            self.left_alone.update(other.left_alone)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that each form takes for `n_tokens`, on one device, at the model's shapes."""

    n_tokens: int
    matrix_s: float
    broadcast_s: float


def measured_sizes(n_head: int) -> tuple[int, ...]:
    """Batches at which `auto` measures: 1, 2, 4, ... up to twice the number of heads."""
    return tuple(1 << i for i in range((2 * n_head).bit_length()))


def hopeless(timing: Timing) -> bool:
    """True if larger batches need not be measured: the broadcast form takes over twice as long."""
    return timing.broadcast_s > 2 * timing.matrix_s


def choose_crossover(table: Sequence[Timing]) -> int:
    """The measured batch up to which the broadcast form wins by geometric mean; 0 if it never does.

    The mean covers all smaller batches, so that one noisy measurement decides nothing.
    """
    best, best_gain, gain = 0, 0.0, 0.0
    for timing in sorted(table, key=lambda timing: timing.n_tokens):
        gain += math.log(timing.matrix_s / timing.broadcast_s)
        if gain > best_gain:
            best, best_gain = timing.n_tokens, gain
    return best
