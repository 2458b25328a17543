"""Routers whose choices follow the text, in random models: what an expert cache lives on.

A router of independent random weights spreads its choices nearly evenly, and no text leaves traces
in it. Here a token's score for an expert has three parts: noise (the token's own random values),
*drift* (its topic: tokens of one topic share some values of their embedding, which all routers
read) and *lasting* popularity (the same for all tokens: the router's bias where an architecture has
one, else a value that all embeddings share). A text that stays with a topic for some time uses some
experts again and again, and others later. Published: of 512 experts, 10 of which are used, those
used last in 64 slots hit 67 %, in 128 slots 81 %, the 32 most popular of one half of a text 10 % in
the other (llama.cpp #27861); elsewhere a tenth of the experts takes 80 % (llama.cpp #24524).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

N_TOPICS = 64
TOPIC_TOKENS = 60.0  # mean number of tokens before a drawn text changes its topic
_DIRECTIONS = 16  # values of an embedding that its topic decides
_SIZE = 4.0  # size of those values in deviations of the others; layers add little to them


@dataclass(frozen=True)
class Part:
    """Neighbouring values of every row of a matrix: `normal` of deviation scale, or `constant`.

    A period of n has every n-th row alike.
    """

    n_columns: int
    scale: float
    kind: Literal["normal", "constant"] = "normal"
    period: int = 0


@dataclass(frozen=True)
class Routing:
    """Deviations of drift and of lasting popularity in a router's scores, over noise of 1."""

    drift: float
    lasting: float

    def embedding(self, scale: float) -> tuple[Part, ...]:
        """The first values of a token's embedding, whose others have a deviation of `scale`."""
        size = _SIZE * scale
        return Part(_DIRECTIONS, size, period=N_TOPICS), Part(1, size, "constant")

    def router(self, *, has_bias: bool) -> tuple[Part, ...]:
        """The weights of a router that read them. With a bias, that has what lasts."""
        drift = Part(_DIRECTIONS, self.drift / _SIZE / math.sqrt(_DIRECTIONS))
        return drift, Part(1, 0.0 if has_bias else self.lasting / _SIZE)

    def bias(self, n_embd: int) -> float:
        """The deviation of a router's bias."""
        n_shared = _DIRECTIONS + 1
        # A norm before the router divides by this, and a bias is added behind it.
        return self.lasting / math.sqrt((n_shared * _SIZE**2 + n_embd - n_shared) / n_embd)


ROUTINGS: Mapping[str, Routing] = MappingProxyType(
    {"drifting": Routing(1.1, 0.2), "skewed": Routing(1.0, 2.0)}
)


def drawn_text(n_vocab: int, n_tokens: int, seed: int = 0) -> list[int]:
    """Random tokens, of one topic for `TOPIC_TOKENS` on average, then of another."""
    rng = np.random.default_rng([seed, n_vocab])
    n_topics = min(N_TOPICS, n_vocab)
    changes = np.cumsum(rng.random(n_tokens) < 1.0 / TOPIC_TOKENS)
    topics = rng.integers(n_topics, size=int(changes[-1]) + 1 if n_tokens else 0)[changes]
    tokens = topics + n_topics * rng.integers(n_vocab // n_topics, size=n_tokens)
    return [int(token) for token in tokens]
