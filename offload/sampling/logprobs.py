"""Log probabilities of an answer's tokens, before and after samplers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from offload.sampling.answers import ChosenLogprob, TokenLogprob


def raw_logprobs(
    logits: NDArray[np.float32], token: int, n: int, piece: Callable[[int], bytes]
) -> ChosenLogprob:
    """Return logprobs of `token` and the `n` likeliest before samplers.

    They are the logarithms of softmax(`logits` [n_vocab]).
    """
    highest = float(logits.max())
    rest = float(np.log(np.exp(logits - highest, dtype=np.float64).sum()))
    n = min(n, len(logits))
    top = np.argpartition(logits, len(logits) - n)[len(logits) - n :]
    top = top[np.argsort(-logits[top], kind="stable")]

    def told(i: int) -> TokenLogprob:
        return TokenLogprob(i, piece(i), float(logits[i]) - highest - rest)

    return ChosenLogprob(told(token), tuple(told(int(i)) for i in top))


def left_logprobs(
    ids: NDArray[np.int32],
    p: NDArray[np.float64],
    token: int,
    n: int,
    piece: Callable[[int], bytes],
) -> ChosenLogprob:
    """Return logprobs of `token` and the `n` likeliest of the tokens `ids` that samplers left.

    `p` are the probabilities of `ids`.
    """
    order = np.argsort(-p, kind="stable")[:n]

    def told(i: int, probability: float) -> TokenLogprob:
        return TokenLogprob(i, piece(i), math.log(probability) if probability > 0 else -math.inf)

    top = tuple(told(int(ids[i]), float(p[i])) for i in order if p[i] > 0)
    at = np.flatnonzero(ids == token)  # empty if a limit of reasoning chose the token
    return ChosenLogprob(told(token, float(p[at[0]]) if len(at) else 0.0), top)
