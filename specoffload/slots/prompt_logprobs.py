"""The probabilities of a prompt's own tokens, as OpenAI's `echo` with `logprobs` asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from offload.sampling.probabilities import ChosenLogprob, TokenLogprob, raw_logprobs


class PromptLogprobs:
    """Made of the logits as they come, of which nothing else is kept: for each token its own
    logarithm and the `n_top` likeliest."""

    def __init__(self, tokens: Sequence[int], n_top: int, piece: Callable[[int], bytes]) -> None:
        self._tokens, self._n_top, self._piece = tuple(tokens), n_top, piece
        self._n_known = 1  # nothing comes before the first token
        first = TokenLogprob(tokens[0], piece(tokens[0]), math.nan)
        self._untold = [ChosenLogprob(first, ())]

    @property
    def is_complete(self) -> bool:
        """True when the logits are no longer needed."""
        return self._n_known == len(self._tokens)

    def hear(self, start: int, rows: NDArray[np.float32]) -> None:
        """`rows` are the logits after token number `start` and those behind it. A part that is
        evaluated again, after a failure or for want of room, counts once."""
        for at, row in enumerate(rows, start + 1):
            if at == self._n_known and not self.is_complete:
                found = raw_logprobs(row, self._tokens[at], self._n_top, self._piece)
                self._untold.append(found)
                self._n_known += 1

    def take(self) -> tuple[ChosenLogprob, ...]:
        """Those that are new, in the prompt's order."""
        found, self._untold = tuple(self._untold), []
        return found
