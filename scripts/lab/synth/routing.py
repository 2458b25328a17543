"""Routers of random models whose choices follow the text, so that an expert cache gets hits.

A router of independent random weights spreads its choices nearly evenly, whatever the text. Here a
token's score for an expert has three parts:

- noise, from the token's own random values;
- *drift*, from its topic: tokens of one topic share some values of their embedding;
- *lasting* popularity, the same for all tokens: the router's bias if the architecture has one, else
  a value that all embeddings share.

So a text that keeps its topic for some time uses the same experts again and again.

Published figures, for 10 of 512 experts: an LRU cache hits 67 % with 64 slots and 81 % with 128.
The 32 most popular experts of one half of a text hit 10 % in the other half (llama.cpp #27861).
Elsewhere, a tenth of the experts has 80 % of the uses (llama.cpp #24524).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

N_TOPICS = 64
TOPIC_TOKENS = 60.0  # mean number of tokens from one change of topic to the next
_DIRECTIONS = 16  # values of an embedding that its topic decides
_SIZE = 4.0  # size of those values in deviations of the others; layers change them little


@dataclass(frozen=True)
class Part:
    """Neighbouring values of every row of a matrix: `constant`, or `normal` with deviation `scale`.

    With a period of n, every n-th row has the same values.
    """

    n_columns: int
    scale: float
    kind: Literal["normal", "constant"] = "normal"
    period: int = 0


@dataclass(frozen=True)
class Routing:
    """Deviations of drift and of lasting popularity in a router's scores, relative to the noise."""

    drift: float
    lasting: float

    def embedding(self, scale: float) -> tuple[Part, ...]:
        """The first values of a token's embedding, whose others have a deviation of `scale`."""
        size = _SIZE * scale
        return Part(_DIRECTIONS, size, period=N_TOPICS), Part(1, size, "constant")

    def router(self, *, has_bias: bool) -> tuple[Part, ...]:
        """The router's weights for the values of `embedding`. A bias, if there is one, has the
        lasting popularity."""
        drift = Part(_DIRECTIONS, self.drift / _SIZE / math.sqrt(_DIRECTIONS))
        return drift, Part(1, 0.0 if has_bias else self.lasting / _SIZE)

    def bias(self, n_embd: int) -> float:
        """The deviation of a router's bias."""
        n_shared = _DIRECTIONS + 1
        # The norm before the router divides by this root, and the bias is added after the norm.
        return self.lasting / math.sqrt((n_shared * _SIZE**2 + n_embd - n_shared) / n_embd)


ROUTINGS: Mapping[str, Routing] = MappingProxyType(
    {"drifting": Routing(1.1, 0.2), "skewed": Routing(1.0, 2.0)}
)


def drawn_text(n_vocab: int, n_tokens: int, seed: int = 0) -> list[int]:
    """Random tokens. The topic changes after `TOPIC_TOKENS` tokens on average."""
    rng = np.random.default_rng([seed, n_vocab])
    n_topics = min(N_TOPICS, n_vocab)
    changes = np.cumsum(rng.random(n_tokens) < 1.0 / TOPIC_TOKENS)
    topics = rng.integers(n_topics, size=int(changes[-1]) + 1 if n_tokens else 0)[changes]
    tokens = topics + n_topics * rng.integers(n_vocab // n_topics, size=n_tokens)
    return [int(token) for token in tokens]
