"""Judges whether greedy texts differ because of near-ties or because of a mistake.

Kernels round differently by the number of rows in a batch. So either of two tokens with nearly
equal logits may be the likeliest (docs/background.md). After a mistake, such as a lost or doubled
token, some token is far below the likeliest in batches of every size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.options import engine_options
from offload.engine import open_engine

SPLITS = (1, 2, 4, 8, 16)  # batch sizes in rows
# Largest allowed gap between a token's logit and the highest, in batches of every size. With the
# embedded target, rounding explains less than 0.1, and a near-tie in a router 0.22. The token after
# a lost or doubled one is 0.67 to 15 below the highest (72 places in three texts).
MOST_GAP = 0.5


class Judge:
    """Evaluates texts with the target, opened on the CPU in this process."""

    def __init__(self, model: Path, n_threads: int, n_ctx: int) -> None:
        options = engine_options(device="cpu", n_ctx=n_ctx, n_threads=n_threads, n_outputs=64)
        self._engine = open_engine(model, options)

    def close(self) -> None:
        self._engine.close()

    def likeliest(self, prompt: str, n_tokens: int) -> list[int]:
        """The greedy answer, one token at a time."""
        *read, token = self._engine.tokenize(prompt, add_special=True, parse_special=True)
        sequences = self._engine.sequences
        sequences.rewind(0, 0)
        if read:
            sequences.extend(0, read, 0)
        found: list[int] = []
        while len(found) < n_tokens:
            token = int(sequences.extend(0, [token])[0].argmax())
            found.append(token)
        return found

    def gap(self, prompt: str, tokens: Sequence[int]) -> float:
        """The largest gap between a token of `tokens` and the likeliest at its place, in logits.

        Each token's gap is its smallest over batches of several sizes.
        """
        ids = self._engine.tokenize(prompt, add_special=True, parse_special=True)
        gaps = [_gaps(self._rows(ids, tokens, size), tokens) for size in SPLITS]
        return float(np.min(gaps, axis=0).max())

    def _rows(self, prompt: Sequence[int], tokens: Sequence[int], size: int) -> NDArray[np.float32]:
        """Logits [len(tokens), n_vocab] before each token, computed in batches of `size` rows."""
        sequences = self._engine.sequences
        sequences.rewind(0, 0)
        if len(prompt) > 1:
            sequences.extend(0, prompt[:-1], 0)
        fed = [prompt[-1], *tokens[:-1]]
        batches = [fed[i : i + size] for i in range(0, len(fed), size)]
        return np.concatenate([sequences.extend(0, batch) for batch in batches])


def _gaps(rows: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = rows.max(axis=1) - rows[np.arange(len(tokens)), list(tokens)]
    return found


def unexplained(
    judge: Judge, differing: Iterable[tuple[str, Sequence[int]]]
) -> tuple[list[str], float]:
    """Returns a sentence for each text that near-ties do not explain, and the largest gap in any
    text."""
    found, most = [], 0.0
    for prompt, tokens in differing:
        gap = judge.gap(prompt, tokens)
        most = max(most, gap)
        if gap > MOST_GAP:
            found.append(f"{prompt!r}: {list(tokens)} has a token {gap:.3f} below the likeliest")
    return found, most
