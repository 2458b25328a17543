"""Batches from one token stream, every token once per epoch whatever the sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lab.train.shapes import SEED

BLOCK = 2048
POOL_BLOCKS = 64
# (from this share of the run on, tokens per sequence): short first because it is faster, long at
# the end so that positions up to the declared context have been trained.
LENGTHS = ((0.0, 256), (0.35, 512), (0.70, 1024), (0.90, 2048))
LONG_FROM = 0.6  # where a run that goes on with trained weights begins in that list


def sequence_length(share: float) -> int:
    return [length for start, length in LENGTHS if share >= start][-1]


@dataclass
class Cursor:
    """Which pool of which epoch comes next; a resumed run starts at a pool boundary."""

    epoch: int = 0
    pool: int = 0


class Stream:
    """Pools of `POOL_BLOCKS` random blocks, cut into sequences, shuffled within the pool."""

    def __init__(self, tokens: np.ndarray, cursor: Cursor) -> None:
        if len(tokens) < 2 * BLOCK:
            raise ValueError(f"{len(tokens)} tokens are fewer than two blocks of {BLOCK}")
        self.tokens, self.cursor = tokens, cursor
        self.rows: list[tuple[int, int]] = []

    def batch(self, n_tokens: int, length: int) -> np.ndarray:
        """int64 [n_tokens / length, length + 1]: inputs and, shifted by one, labels."""
        windows: list[np.ndarray] = []
        while len(windows) < n_tokens // length:
            if not self.rows or self.rows[-1][1] != length:
                self.rows = self._next_pool(length)
            start, size = self.rows.pop()
            windows.append(self.tokens[start : start + size + 1])
        return np.stack(windows).astype(np.int64)

    def _next_pool(self, length: int) -> list[tuple[int, int]]:
        rng = np.random.default_rng((SEED, self.cursor.epoch))
        offset = int(rng.integers(BLOCK))
        n_blocks = (len(self.tokens) - 1 - offset) // BLOCK
        order = rng.permutation(n_blocks)
        first = self.cursor.pool * POOL_BLOCKS
        chosen = order[first : first + POOL_BLOCKS]
        rows = [(offset + int(b) * BLOCK + s, length) for b in chosen for s in _cuts(length)]
        np.random.default_rng((SEED, self.cursor.epoch, self.cursor.pool)).shuffle(rows)
        self.cursor.pool += 1
        if first + POOL_BLOCKS >= n_blocks:
            self.cursor = Cursor(self.cursor.epoch + 1, 0)
        return [(int(start), int(size)) for start, size in rows]


class Replay:
    """The target's continuations [n, length], in a new random order each time round."""

    def __init__(self, rows: np.ndarray, seed: int) -> None:
        self.rows, self.rng = rows, np.random.default_rng((SEED, seed))
        self.order: list[int] = []

    def batch(self, n_tokens: int) -> np.ndarray:
        """int64 [n_tokens / length, length]: inputs and, shifted by one, labels."""
        n_rows = n_tokens // self.rows.shape[1]
        while len(self.order) < n_rows:
            self.order.extend(self.rng.permutation(len(self.rows)).tolist())
        chosen, self.order = self.order[:n_rows], self.order[n_rows:]
        return self.rows[chosen].astype(np.int64)


def _cuts(length: int) -> Iterator[int]:
    return iter(range(0, BLOCK, length))
