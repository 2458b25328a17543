"""Guesses the experts of the next layers by applying their routers to the rows of this layer.

A layer changes the rows of the residual stream only a little. So the next layer's router, applied
to the rows that this layer's router has just read, mostly chooses the experts that it will choose
later (arXiv 2312.17238). The disk can then read them while this layer is computed.

The nearest layer is guessed best. But often several layers in turn miss no expert, and the next one
misses two. So a layer farther ahead is guessed too, which keeps the disk busy meanwhile.

No router has read rows before the first layer, so its experts are guessed from the embeddings of
the tokens. Otherwise the disk would be idle until the first router has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from offload.decode import Rows
from offload.model import ModelFacts, WeightPlace
from offload.routing.routing import RoutingGuess

HasSlot = Callable[[int, int], bool]  # (layer, expert): True if the expert need not be in memory
_NORMS = "ffn_norm.weight", "post_attention_norm.weight"  # the first that a layer has is its own
_SIGMOID = 2  # a value of expert_gating_func
_KNOWN_AHEAD = 16  # layers that are read ahead if all tokens were decoded before
_FARTHEST = 4  # most layers from a layer to one that is guessed from its rows
_LEAST_RIGHT = 0.5  # share of right guesses below which guessed experts are not read
_MEMORY = 256  # guessed experts after which earlier ones weigh half


@dataclass(frozen=True)
class Router:
    """A layer's router, as far as its choice depends on it."""

    weights: Rows  # [n_experts, n_embd]
    norm: Rows  # weights [n_embd] of the norm before the router
    bias: Rows | None = None  # [n_experts], added to the scores
    late_bias: Rows | None = None  # [n_experts], added behind the sigmoid

    def choose(self, rows: Rows, n_used: int) -> NDArray[np.intp]:
        """Return the experts of normed rows [n_tokens, n_embd], the best first.

        The result is [n_tokens, n_used]. Groups of experts are not considered.
        """
        with np.errstate(all="ignore"):
            # No BLAS: its threads would spin beside those that compute the layer.
            scores = np.einsum("ij,kj->ik", rows, self.weights)
            if self.bias is not None:
                scores += self.bias
            if self.late_bias is not None:
                scores = 1.0 / (1.0 + np.exp(-scores)) + self.late_bias
        return np.argsort(-scores, axis=1, kind="stable")[:, :n_used]


def read_routers(facts: ModelFacts) -> dict[int, Router]:
    """Read the routers of all layers whose weights are f32. Raises OSError."""
    routers = {}
    is_sigmoid = facts.number("expert_gating_func") == _SIGMOID
    for layer in facts.layers:
        weights = _read(facts, f"blk.{layer}.ffn_gate_inp.weight")
        norms = (_read(facts, f"blk.{layer}.{name}") for name in _NORMS)
        norm = next((values for values in norms if values is not None), None)
        if weights is None or norm is None or weights.shape[1:] != norm.shape:
            continue
        bias = _read(facts, f"blk.{layer}.ffn_gate_inp.bias")
        late = _read(facts, f"blk.{layer}.exp_probs_b.bias") if is_sigmoid else None
        routers[layer] = Router(weights, norm, bias, late)
    return routers


def _read(facts: ModelFacts, name: str) -> Rows | None:
    place = facts.weights.get(name)
    if place is None or place.entry.type != "f32":
        return None
    entry = place.entry
    n = entry.size_bytes // 4
    values = np.fromfile(place.file, np.float32, n, offset=entry.offset_bytes)
    return values.reshape(entry.shape[::-1]) if len(values) == n else None


class Embeddings:
    """Reads the embeddings of tokens from the model file."""

    def __init__(self, place: WeightPlace) -> None:
        self._place = place
        self._kind = GGMLQuantizationType[place.entry.type.upper()]
        self._n_rows = place.entry.shape[1]
        self._row_bytes = place.entry.size_bytes // self._n_rows

    @classmethod
    def of(cls, facts: ModelFacts) -> Embeddings | None:
        """Return the embeddings, or None if numpy cannot compute with their type."""
        place = facts.weights.get("token_embd.weight")
        if place is None or place.entry.type.upper() not in GGMLQuantizationType.__members__:
            return None
        made = cls(place)
        return made if made.rows([0]) is not None else None

    def rows(self, tokens: Sequence[int]) -> Rows | None:
        """Return the tokens' rows [n_tokens, n_embd], each with a root mean square of 1.

        Returns None if they cannot be read.
        """
        start, n = self._place.entry.offset_bytes, self._row_bytes
        at = [start + n * (token % self._n_rows) for token in tokens]
        try:
            read = [np.fromfile(self._place.file, np.uint8, n, offset=one) for one in at]
            rows = dequantize(np.stack(read), self._kind).astype(np.float32, copy=False)
        except (OSError, ValueError, NotImplementedError):  # ValueError: the file is shorter now
            return None
        with np.errstate(all="ignore"):
            normed: Rows = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True))
            return normed


class PartialMemory(Protocol):
    """Memory for some of the experts."""

    def is_there(self, layer: int, expert: int) -> bool: ...
    def read_ahead(self, layer: int, experts: Iterable[int]) -> None: ...


@dataclass
class _RightShare:
    """The share of right guesses. Earlier ones weigh less."""

    n_right: float = 16.0
    n_all: float = 16.0

    def add(self, n_right: int, n_all: int) -> None:
        weight = 0.5 ** (n_all / _MEMORY)
        self.n_right = weight * self.n_right + n_right
        self.n_all = weight * self.n_all + n_all

    @property
    def pays(self) -> bool:
        return self.n_right >= _LEAST_RIGHT * self.n_all


class _GuessSource:
    """Rows that layers are guessed from, and how good these guesses are."""

    def __init__(self) -> None:
        self.farthest = _FARTHEST  # layers from the rows to the last layer that is guessed
        self._shares = [_RightShare() for _ in range(_FARTHEST + 1)]  # by distance in layers

    def pays(self, distance: int) -> bool:
        return self._shares[distance].pays

    def judge(self, distance: int, n_right: int, n_all: int) -> None:
        """Count guesses. Guesses a nearer layer from now on if the farthest ones are bad."""
        self._shares[distance].add(n_right, n_all)
        if 1 < distance == self.farthest and not self.pays(distance):
            self.farthest -= 1


class NextExperts:
    """Reads experts from the disk before a router chooses them.

    If all tokens of a batch were decoded before, reads the experts that they chose then. Otherwise
    the routers guess. If fewer than half of the guesses for the farthest layer were right, a nearer
    one is guessed from then on. Guesses for the next layer are not read while fewer than half are
    right. Guesses from embeddings and from the rows of layers are judged apart.
    """

    def __init__(
        self, memory: PartialMemory, routers: Mapping[int, Router], n_used: int,
        embeddings: Embeddings | None = None,
    ) -> None:  # fmt: skip
        """`n_used`: experts that a token uses."""
        self._memory, self._routers, self._n_used = memory, routers, n_used
        self._embeddings = embeddings
        self._from_tokens, self._from_rows = _GuessSource(), _GuessSource()
        # What to multiply rows with that one router has read, before another one reads them.
        self._norms: dict[tuple[int | None, int], Rows | None] = {}
        # Missing experts that were guessed, by layer, and then by source and distance.
        self._guessed: dict[int, dict[tuple[_GuessSource, int], frozenset[int]]] = {}

    def read_ahead(
        self, layers: Sequence[int], at: int, guess: RoutingGuess, n_tokens: int,
        rows: Callable[[], Rows | None], has_slot: HasSlot = lambda layer, expert: False,
    ) -> None:  # fmt: skip
        """Begin to read experts of the layers after `layers[at]`. `at` is -1 before the first one.

        `rows` returns the rows [n_tokens, n_embd] that the layer's router has read. It is not
        called before the first layer.
        """
        if at + 1 == len(layers):
            return
        if guess.chosen_before(layers[at + 1], n_tokens):
            for layer in layers[:_KNOWN_AHEAD] if at < 0 else layers[at + _KNOWN_AHEAD :][:1]:
                self._read(layer, guess.chosen_before(layer, n_tokens), has_slot)
            return
        if not self._routers:
            return
        source, before, values = self._from_rows, None, None
        if at >= 0:
            before, values = layers[at], rows()
        elif self._embeddings and layers[0] == min(self._routers) and len(guess.tokens) == n_tokens:
            source, values = self._from_tokens, self._embeddings.rows(guess.tokens)
        if values is None:
            return
        far = source.farthest
        for distance in range(1, far + 1) if at <= 0 else dict.fromkeys((1, far)):
            if at + distance < len(layers):
                layer = layers[at + distance]
                likely = self._choose(before, layer, values)
                there = self._memory.is_there
                missing = [e for e in likely if not (has_slot(layer, e) or there(layer, e))]
                self._guessed.setdefault(layer, {})[source, distance] = frozenset(missing)
                if source.pays(distance):
                    self._read(layer, likely, has_slot)

    def _read(self, layer: int, experts: Iterable[int], has_slot: HasSlot) -> None:
        self._memory.read_ahead(layer, [e for e in experts if not has_slot(layer, e)])

    def _choose(self, before: int | None, layer: int, rows: Rows) -> list[int]:
        """Return the experts of `layer` that its router chooses, the best first.

        `rows`: those that the router of the layer `before` has read, or embeddings if it is None.
        """
        key = before, layer
        if key not in self._norms:
            self._norms[key] = self._norm_between(before, layer)
        norm = self._norms[key]
        if norm is None or rows.shape[1:] != norm.shape:
            return []
        with np.errstate(all="ignore"):
            rows_there = rows * norm
        ranked = self._routers[layer].choose(rows_there, self._n_used)
        return list(dict.fromkeys(ranked.ravel("F").tolist()))

    def _norm_between(self, before: int | None, layer: int) -> Rows | None:
        """Return what to multiply rows of `_choose` with, or None if a router is not known."""
        if layer not in self._routers:
            return None
        norm = self._routers[layer].norm
        if before is None:
            return norm
        if before not in self._routers or (first := self._routers[before].norm).shape != norm.shape:
            return None
        with np.errstate(all="ignore"):
            # The values of rows that were multiplied with 0 are not known.
            return np.where(first == 0, np.float32(0), norm / first)

    def judge(self, layer: int, used: Collection[int]) -> None:
        """Count how many of the experts that were guessed for a layer it uses."""
        for (source, distance), guessed in self._guessed.pop(layer, {}).items():
            source.judge(distance, len(guessed.intersection(used)), len(guessed))
