"""A fake model that drafts by itself, as one on a GPU does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lab.simulation.fake import FakeTarget
from specdec.types import Drawing


@dataclass
class FakeBlock:
    tokens: NDArray[np.int64]
    p: NDArray[np.float32]
    rows: list[list[NDArray[np.float64]]] = field(default_factory=list)

    def row(self, step: int, part: int) -> NDArray[np.float64]:
        return self.rows[step][part]


class FakeBlockModel(FakeTarget):
    """Implements `BlockModel`. `blocks` are the lengths that were asked for."""

    def __init__(self, n_steps_max: int = 16, **parameters: object) -> None:
        super().__init__(**parameters)  # type: ignore[arg-type]
        self.n_steps_max = n_steps_max
        self.blocks: list[int] = []
        self._ends: dict[int, int] = {}  # sequence -> last drafted token, not held yet

    def draft(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> FakeBlock:
        return self._block(dict(parts), n_steps, drawing, top_k)

    def draft_more(
        self,
        sequences: Sequence[int],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> FakeBlock:
        return self._block({s: [self._ends[s]] for s in sequences}, n_steps, drawing, top_k)

    def _block(
        self, feed: dict[int, Sequence[int]], n_steps: int, drawing: Drawing | None, top_k: int
    ) -> FakeBlock:
        assert 1 <= n_steps <= self.n_steps_max
        self.blocks.append(n_steps)
        shape = (n_steps, len(feed))
        out = FakeBlock(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
        for step in range(n_steps):
            out.rows.append([])
            for part, (sequence, tokens) in enumerate(feed.items()):
                logits = self._append(sequence, tokens)[-1].astype(np.float64)
                given = 1.0 if drawing is None else drawing.temperature
                q = np.exp((logits - logits.max()) / np.broadcast_to(given, len(feed))[part])
                q /= q.sum()
                token = int(q.argmax())
                if drawing is not None:
                    token = int(np.searchsorted(q.cumsum(), drawing.uniforms[step, part], "right"))
                    token = min(token, self.n_vocab - 1)
                if drawing is None and top_k:
                    q[np.argsort(-q, kind="stable")[top_k:]] = 0.0
                    q /= q.sum()
                out.tokens[step, part], out.p[step, part] = token, q.max()
                out.rows[step].append(q)
                feed[sequence] = [token]
        self._ends = {sequence: tokens[-1] for sequence, tokens in feed.items()}
        return out
