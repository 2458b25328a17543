"""A target model in pure Python, for tests and as an example of a `Target`.

The next token is a hash of the last `order` tokens in memory, so a wrong rewind changes the text.
Two fakes with the same seed agree on the share `agreement` of contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def _hash(seed: int, tokens: Sequence[int]) -> int:
    """A 64-bit hash of the tokens (splitmix64)."""
    h = seed & _MASK
    for token in tokens:
        h = (h + 0x9E3779B97F4A7C15 + token) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h


@dataclass(frozen=True)
class FakeCheckpoint:
    """A copy of one sequence's cells (position, token)."""

    cells: tuple[tuple[int, int], ...]


class FakeTarget:
    """Implements `specdec.types.TreeTarget`; without `n_tree_leaves` it holds no trees.

    With `agreement` below 1 it is like a draft model: it chooses the same next token as a fake with
    agreement 1 in only that share of contexts. `peak` is the probability of the chosen token. With
    `recurrent` it refuses partial rewinds, except for `n_rs_seq` tokens of the last decode. Raises
    AssertionError if a sequence holds a position twice or lacks one.
    """

    def __init__(
        self,
        *,
        n_vocab: int = 64,
        n_ctx: int = 4096,
        seed: int = 1,
        agreement: float = 1.0,
        order: int = 3,
        peak: float = 0.7,
        recurrent: bool = False,
        n_rs_seq: int = 0,
        logits_seed: int | None = None,
        n_batch: int | None = None,
        n_outputs: int = 1 << 30,
        n_tree_leaves: int = 0,
    ) -> None:
        self.n_vocab = n_vocab
        self.n_batch = n_batch or 1 << 30
        self.n_outputs = n_outputs
        self.n_ctx = n_ctx
        self.can_rewind = not recurrent
        self.needs_equal_lengths = recurrent
        self.n_rs_seq = n_rs_seq
        self._snapshots: dict[int, int] = {}
        self.calls: list[int] = []  # rows of each decode
        self._seed, self._order, self._peak = seed, order, peak
        self._agreement = agreement
        self._logits_seed = logits_seed
        self._rows: dict[tuple[int, ...], NDArray[np.float32]] = {}  # random rows, made once
        self._cells: dict[int, list[tuple[int, int]]] = {}
        self.n_tree_leaves = n_tree_leaves
        self._tree: dict[int, list[tuple[int, list[int]]]] = {}  # nodes: (parent, text)

    # -- the text ---------------------------------------------------------------------------

    def next_token(self, tokens: Sequence[int]) -> int:
        """The most likely token after `tokens`."""
        context = tokens[-self._order :]
        h = _hash(self._seed, context)
        token = h % self.n_vocab
        if self._agreement < 1.0 and (h >> 32) / 2**32 >= self._agreement:
            return (token + 1) % self.n_vocab
        return token

    def logits_after(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits [n_vocab] after `tokens`: `peak` on the next token, the rest flat or, with
        `logits_seed`, random."""
        if self._logits_seed is not None:
            return self._random_logits(self._logits_seed, tuple(tokens[-self._order :])).copy()
        rest = (1 - self._peak) / max(1, self.n_vocab - 1)
        row = np.full(self.n_vocab, np.log(rest), np.float32)
        row[self.next_token(tokens)] = np.log(self._peak)
        return row

    def _random_logits(self, seed: int, context: tuple[int, ...]) -> NDArray[np.float32]:
        row = self._rows.get(context)
        if row is None:
            rng = np.random.default_rng(_hash(seed, context))
            row = rng.normal(0, 1.5, self.n_vocab).astype(np.float32)
            self._rows[context] = row
        return row

    # -- Target ----------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        return len(self._cells.get(sequence, ()))

    def tokens(self, sequence: int) -> list[int]:
        """The tokens that the sequence holds. Raises if its positions are not 0, 1, 2, ..."""
        cells = self._cells.get(sequence, [])
        positions = [position for position, _ in cells]
        if positions != list(range(len(cells))):
            raise AssertionError(f"sequence {sequence} holds positions {positions}")
        return [token for _, token in cells]

    def extend(
        self, sequence: int, tokens: Sequence[int], n_logits: int | None = None
    ) -> NDArray[np.float32]:
        n = len(tokens) if n_logits is None else n_logits
        if not tokens or not 0 <= n <= len(tokens):
            raise ValueError(f"{n} rows of {len(tokens)} tokens")
        if len(tokens) > self.n_batch:
            # Like the engine, divide a long prompt into chunks. Only its end may have rows.
            if n > self.n_batch:
                raise ValueError(f"{n} rows exceed a batch of {self.n_batch}")
            for at in range(0, len(tokens) - n, self.n_batch):
                self._append(sequence, tokens[at : min(at + self.n_batch, len(tokens) - n)])
            if not n:
                return np.empty((0, self.n_vocab), np.float32)
            return self._append(sequence, tokens[len(tokens) - n :])
        return self._append(sequence, tokens)[len(tokens) - n :]

    def _append(self, sequence: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        held = self.tokens(sequence)
        if len(held) + len(tokens) > self.n_ctx:
            raise ValueError(f"{len(held) + len(tokens)} tokens exceed the context {self.n_ctx}")
        if not all(0 <= t < self.n_vocab for t in tokens):
            raise ValueError(f"a token of {list(tokens)} is outside {self.n_vocab}")
        if sequence in self._tree:
            raise AssertionError("a tree was evaluated and no path kept")
        self.calls.append(len(tokens))
        rows = np.empty((len(tokens), self.n_vocab), np.float32)
        cells = self._cells.setdefault(sequence, [])
        for i, token in enumerate(tokens):
            cells.append((len(held), token))
            held.append(token)
            rows[i] = self.logits_after(held)
        self._snapshots = {sequence: min(len(tokens) - 1, self.n_rs_seq)}
        return rows

    def extend_batch(
        self, parts: Sequence[tuple[int, Sequence[int], int]]
    ) -> list[NDArray[np.float32]]:
        n_rows, n_wanted = sum(len(t) for _, t, _ in parts), sum(n for _, _, n in parts)
        if n_rows > self.n_batch or n_wanted > self.n_outputs:
            raise ValueError(f"a batch of {n_rows} tokens with {n_wanted} rows is too large")
        before = len(self.calls)
        rows = [self._append(sequence, tokens)[len(tokens) - n :] for sequence, tokens, n in parts]
        self.calls[before:] = [sum(self.calls[before:])]
        n = self.n_droppable([(sequence, len(tokens)) for sequence, tokens, _ in parts])
        self._snapshots = {sequence: min(len(tokens) - 1, n) for sequence, tokens, _ in parts}
        return rows

    def n_droppable(self, parts: Sequence[tuple[int, int]]) -> int:
        """Number of tokens that snapshots can take back: none if the parts differ in length."""
        return self.n_rs_seq if len({n for _, n in parts}) == 1 else 0

    def rewind(self, sequence: int, length: int) -> None:
        held = self.length(sequence)
        if not 0 <= length <= held:
            raise ValueError(f"cannot rewind {held} tokens to {length}")
        snapshots = self._snapshots.pop(sequence, 0)
        if not self.can_rewind and length not in (0, held) and held - length > snapshots:
            raise ValueError("a recurrent memory cannot be cut; use a checkpoint")
        del self._cells.setdefault(sequence, [])[length:]

    def checkpoint(self, sequence: int) -> FakeCheckpoint:
        return FakeCheckpoint(tuple(self._cells.get(sequence, ())))

    def restore(self, sequence: int, checkpoint: object) -> None:
        assert isinstance(checkpoint, FakeCheckpoint)
        self._cells[sequence] = list(checkpoint.cells)

    # -- TreeTarget ------------------------------------------------------------------------

    def extend_tree(
        self, sequence: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> NDArray[np.float32]:
        held, nodes = self.tokens(sequence), self._tree.setdefault(sequence, [])
        self.calls.append(len(tokens))
        if len(tokens) > self.n_outputs:
            raise ValueError(f"{len(tokens)} nodes exceed {self.n_outputs} rows")
        for token, parent in zip(tokens, parents, strict=True):
            if not -1 <= parent < len(nodes):
                raise ValueError(f"a node has parent {parent}, which does not come before it")
            nodes.append((parent, [*(nodes[parent][1] if parent >= 0 else held), token]))
        n_leaves = len(nodes) - len({parent for parent, _ in nodes} - {-1})
        if n_leaves > self.n_tree_leaves or len(held) + len(nodes) > self.n_ctx:
            raise ValueError(f"{n_leaves} leaves or {len(held) + len(nodes)} cells are too many")
        return np.stack([self.logits_after(text) for _, text in nodes[-len(tokens) :]])

    def keep_path(self, sequence: int, path: Sequence[int]) -> None:
        nodes, last = self._tree.pop(sequence, []), -1
        cells = self._cells.setdefault(sequence, [])
        for node in path:
            if nodes[node][0] != last:
                raise ValueError(f"node {node} does not follow node {last}")
            cells.append((len(cells), nodes[node][1][-1]))
            last = node
