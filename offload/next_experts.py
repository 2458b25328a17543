"""Guesses the experts of the next layers by applying their routers to the rows of this layer.

A layer changes the rows of the residual stream only a little. So the next layer's router, applied
to the rows that this layer's router has just read, mostly chooses the experts that it will choose
later (arXiv 2312.17238). The disk can then read them while this layer is computed.

The nearest layer is guessed best. But often several layers in turn miss no expert, and the next one
misses two. So a layer farther ahead is guessed too, which keeps the disk busy meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from offload.model import ModelFacts
from offload.routing import RoutingGuess

Rows = NDArray[np.float32]
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
    found = {}
    is_sigmoid = facts.number("expert_gating_func") == _SIGMOID
    for layer in facts.layers:
        weights = _read(facts, f"blk.{layer}.ffn_gate_inp.weight")
        norms = (_read(facts, f"blk.{layer}.{name}") for name in _NORMS)
        norm = next((values for values in norms if values is not None), None)
        if weights is None or norm is None or weights.shape[1:] != norm.shape:
            continue
        bias = _read(facts, f"blk.{layer}.ffn_gate_inp.bias")
        late = _read(facts, f"blk.{layer}.exp_probs_b.bias") if is_sigmoid else None
        found[layer] = Router(weights, norm, bias, late)
    return found


def _read(facts: ModelFacts, name: str) -> Rows | None:
    place = facts.weights.get(name)
    if place is None or place.entry.type != "f32":
        return None
    entry = place.entry
    n = entry.size_bytes // 4
    values = np.fromfile(place.file, np.float32, n, offset=entry.offset_bytes)
    return values.reshape(entry.shape[::-1]) if len(values) == n else None


class Memory(Protocol):
    """Memory for some of the experts."""

    def is_there(self, layer: int, expert: int) -> bool: ...
    def read_ahead(self, layer: int, experts: Iterable[int]) -> None: ...


@dataclass
class _Share:
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


class NextExperts:
    """Reads experts from the disk before a router chooses them.

    If all tokens of a batch were decoded before, reads the experts that they chose then. Otherwise
    the routers guess. If fewer than half of the guesses for the farthest layer were right, a nearer
    one is guessed from then on. Guesses for the next layer are not read while fewer than half are
    right.
    """

    def __init__(self, memory: Memory, routers: Mapping[int, Router]) -> None:
        self._memory, self._routers = memory, routers
        self._far = _FARTHEST
        self._shares = [_Share() for _ in range(_FARTHEST + 1)]  # by distance in layers
        # Missing experts that were guessed, and the distance from which they were, by layer.
        self._guessed: dict[int, dict[int, frozenset[int]]] = {}

    def read_ahead(
        self, layers: Sequence[int], at: int, guess: RoutingGuess, n_tokens: int, n_used: int,
        rows: Callable[[], Rows | None], has_slot: HasSlot = lambda layer, expert: False,
    ) -> None:  # fmt: skip
        """Begin to read experts of the layers after `layers[at]`. `at` is -1 before the first one.

        `rows` returns the rows [n_tokens, n_embd] that the layer's router has read. `n_used`:
        experts that a token uses.
        """
        # Without a bound on scores, experts of unseen tokens would be guessed by the last tokens.
        # Fewer than half of these guesses are right, and each costs the disk time.
        by_token = partial(guess.predict, n_tokens=n_tokens, least=math.inf)
        if at + 1 == len(layers):
            return
        if by_token(layers[at + 1]):
            for layer in layers[:_KNOWN_AHEAD] if at < 0 else layers[at + _KNOWN_AHEAD :][:1]:
                self._read(layer, by_token(layer), has_slot)
            return
        if at < 0 or not self._routers or (values := rows()) is None:
            return
        for distance in range(1, self._far + 1) if not at else dict.fromkeys((1, self._far)):
            if at + distance < len(layers):
                layer = layers[at + distance]
                likely = self._choose(layers[at], layer, distance, values, n_used, has_slot)
                self._read(layer, likely, has_slot)

    def _read(self, layer: int, experts: Iterable[int], has_slot: HasSlot) -> None:
        self._memory.read_ahead(layer, [e for e in experts if not has_slot(layer, e)])

    def _choose(
        self, layer: int, following: int, distance: int, rows: Rows, n_used: int, has_slot: HasSlot
    ) -> list[int]:
        """Return the experts of `following` that its router chooses, the best first.

        Returns none while too few such guesses are right.
        """
        router, after = self._routers.get(layer), self._routers.get(following)
        if router is None or after is None or rows.shape[1:] != router.norm.shape:
            return []
        with np.errstate(all="ignore"):
            rows_there = np.nan_to_num(rows * (after.norm / router.norm))
        ranked: list[int] = after.choose(rows_there, n_used).ravel("F").tolist()
        chosen = list(dict.fromkeys(ranked))
        there = self._memory.is_there
        missing = [e for e in chosen if not (has_slot(following, e) or there(following, e))]
        self._guessed.setdefault(following, {})[distance] = frozenset(missing)
        return chosen if self._shares[distance].pays else []

    def judge(self, layer: int, used: Collection[int]) -> None:
        """Count how many of the experts that were guessed for a layer it uses."""
        for distance, guessed in self._guessed.pop(layer, {}).items():
            share = self._shares[distance]
            share.add(len(guessed.intersection(used)), len(guessed))
            if 1 < distance == self._far and not share.pays:
                self._far -= 1
