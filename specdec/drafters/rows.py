"""Drafts from the target's hidden rows: with its own layers (MTP), an EAGLE-3 file or block draft.

`RowModel` collects the rows while the target decodes. The rows of accepted tokens are computed with
the first token of the next draft. So the time of a draft step includes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.growing import Growing
from specdec.drafters.memory import BATCHED_TAIL
from specdec.drafters.model import DraftSampling, ModelDrafter
from specdec.drafters.tree import tree_of_block
from specdec.policies.tree import TreeGrowth
from specdec.types import Decision, Draft, DraftRequest, Round, Target

_MOST_WAITING = 64  # a prompt's waiting rows above which they are computed without a draft
# Rows that wait after rounds without drafts. Above the first number, only the last rows are kept.
MOST_UNDRAFTED, KEPT_UNDRAFTED = 256, 64


class RowModel(Target, Protocol):
    """The MTP layers, and the target's rows that they have not computed yet."""

    is_paused: bool  # True: the target's rows are not taken, and later drafts lack these tokens

    @property
    def first(self) -> int:
        """The first token of a text that has a row before it, and can be computed."""
        ...

    @property
    def most_drafted(self) -> int | None:
        """Most tokens of a draft; None: no limit."""
        ...

    def tail(self, sequence: int, history: Sequence[int]) -> list[int]:
        """The last tokens of `history`, at least one, that the next draft must compute first."""
        ...

    def take_in(self, sequences: Sequence[int], *, least: int = 0) -> None:
        """Compute all waiting rows of those `sequences` that have more than `least` of them."""
        ...

    def keep_recent(self, sequence: int, most: int, kept: int) -> None:
        """If more than `most` rows wait, keep the last `kept` and forget the text before them."""
        ...

    def forget(self, sequence: int) -> None: ...


class RowMemory:
    """The memory of `RowDrafter`. The layers themselves track which tokens they hold."""

    def __init__(self, layers: RowModel) -> None:
        self._layers = layers
        self.n_rows = 0  # tokens decoded for drafts so far

    def n_unread(self, sequence: int, history: Sequence[int]) -> int:
        n = len(self._layers.tail(sequence, history))
        return n - 1 if n > BATCHED_TAIL else 0

    def tail(self, sequence: int, history: Sequence[int]) -> tuple[list[int], float]:
        """The tokens that the draft must compute first, and the seconds spent on earlier tokens."""
        tail = self._layers.tail(sequence, history)
        if len(tail) <= BATCHED_TAIL:
            return tail, 0.0
        began = perf_counter()
        self._layers.take_in([sequence])
        return tail[-1:], perf_counter() - began

    def fed(self, sequence: int, tokens: Sequence[int]) -> None:
        self.n_rows += len(tokens)

    def mark(self, sequence: int) -> None:
        """Does nothing, since the layers know which of their tokens are drafted."""

    def forget(self, sequence: int, n_same: int = 0) -> None:
        """Rely no longer on what is known of the layers' tokens, the first `n_same` included."""
        self._layers.forget(sequence)


class RowDrafter(ModelDrafter):
    """Drafts with `layers` from the target's rows. Other arguments are as in `ModelDrafter`."""

    def __init__(
        self,
        layers: RowModel,
        *,
        name: str = "mtp",
        sampling: DraftSampling | None = None,
        n_vocab: int | None = None,
    ) -> None:
        super().__init__(
            layers,
            name=name,
            sampling=sampling,
            n_vocab=n_vocab,
            memory=RowMemory(layers),
            most=layers.most_drafted,
        )
        self._layers = layers

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._layers.is_paused = not any([asked.policy.may_ask(self.name) for asked in requests])
        return super().propose(requests)

    def _begin(self, asked: DraftRequest) -> Growing | Draft:
        if len(asked.history) <= self._layers.first:
            return Draft((), (), self.name, Decision(0, "no token has a hidden row before it"))
        return super()._begin(asked)

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        self._layers.take_in([sequence], least=_MOST_WAITING)

    def learn(self, sequence: int, round_: Round) -> None:
        """Drop old rows if too many wait. Computing them would cost time while nothing drafts."""
        self._layers.keep_recent(sequence, MOST_UNDRAFTED, KEPT_UNDRAFTED)


class DraftedPlaces(Protocol):
    """The drafted places of one sequence's block."""

    def place(self, index: int, before: int | None) -> tuple[NDArray[np.float32], float | None]:
        """The logits [n_vocab] of a drafted token, and its confidence; None: none is known.

        `before` is the drafted token before it; None: it is the first.
        """
        ...

    def successors(self, index: int, before: int | None) -> list[tuple[int, float]]:
        """Return (token, p) of a place's candidates, likeliest first. Needs a lattice."""
        ...


class BlockRowModel(RowModel, Protocol):
    """A draft that computes a block of tokens in one pass."""

    @property
    def has_lattice(self) -> bool:
        """True if it scores a place's candidates after each candidate of the place before."""
        ...

    def draft_blocks(
        self, parts: Sequence[tuple[int, Sequence[int]]], n_tokens: int
    ) -> Sequence[DraftedPlaces]:
        """Draft `n_tokens` tokens for each (sequence, tokens of `tail`)."""
        ...


class BlockDrafter(RowDrafter):
    """Drafts whole blocks with `layers`, each in one pass that counts as one step.

    A pass has always the same number of tokens, because each token of a block sees all others. The
    policy is fed their probabilities one by one, and cuts the block. A lattice may give a tree.
    """

    def __init__(
        self,
        layers: BlockRowModel,
        *,
        name: str,
        sampling: DraftSampling | None = None,
        n_vocab: int | None = None,
        n_max: int | None = None,
    ) -> None:
        """`n_max`: most tokens of a draft, as the user chose it; None: those of a trained block."""
        super().__init__(layers, name=name, sampling=sampling, n_vocab=n_vocab)
        self._by_block = layers
        self._may_branch = layers.has_lattice and sampling is None
        most = layers.most_drafted or 0
        self._n_tokens = self._most = most if n_max is None else min(most, n_max)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        return [replace(draft, n_steps=1) if draft.n_steps else draft for draft in drafts]

    def _draft_tree(self, growing: Growing, growth: TreeGrowth) -> Draft:
        part = growing.sequence, growing.feed
        (block,) = self._by_block.draft_blocks([part], self._n_tokens)
        self._memory.fed(*part)
        return tree_of_block(block.successors, self.name, growing, growth)

    def _draft_by_token(self, drafting: list[Growing]) -> None:
        parts = [(growing.sequence, growing.feed) for growing in drafting]
        blocks = self._by_block.draft_blocks(parts, self._n_tokens)
        for growing, block in zip(drafting, blocks, strict=True):
            self._memory.fed(growing.sequence, growing.feed)
            before, goes_on, index = None, True, 0
            while goes_on and index < growing.limit:
                logits, confidence = block.place(index, before)
                goes_on = growing.choose(logits[: self._n_vocab], confidence)
                before, index = growing.feed[-1], index + 1
