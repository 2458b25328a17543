"""The batch of a decode, and the size of a small one. All parts of a decode use them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Most tokens of a small batch: a decode of one token, or the verification of a draft. The player
# goes through its layers, its routing is recorded, and its times are learned for each size. Larger
# batches are prompts. A draft has at most 63 tokens (`MOST_DRAFTED` in specdec/options.py), because
# its verification also decodes the text's last token.
SMALL_BATCH = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one decode.

    `sequences` has one sequence for each token. For a tree it has several sequences for each token.
    libllama computes ubatches of at most `n_ubatch` tokens.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[int] | Sequence[Sequence[int]]
    wanted: Sequence[bool]  # True for a token whose logits are wanted
    n_ubatch: int
    is_draft: bool = False  # True for a model's own layers that draft

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_at_once(self) -> int:
        """Tokens of the largest ubatch."""
        return min(len(self.tokens), self.n_ubatch)

    @property
    def small_tokens(self) -> Sequence[int]:
        """The tokens of a small batch that is one ubatch. Otherwise there are none."""
        return self.tokens if len(self.tokens) <= min(self.n_ubatch, SMALL_BATCH) else ()

    @property
    def n_unwanted_ubatches(self) -> int:
        """Number of ubatches before the first one with a token whose logits are wanted.

        It is 0 for a batch of several sequences, whose tokens libllama may compute in another
        order.
        """
        wanted, sequences = self.wanted, self.sequences
        if len(wanted) <= self.n_ubatch or any(its != sequences[0] for its in sequences):
            return 0
        first = next((i for i, is_wanted in enumerate(wanted) if is_wanted), len(wanted))
        return first // self.n_ubatch
