"""The batch of a decode, its ubatches, and the size of a small one. Pure.

All parts of a decode use them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# In quotes, since setup.py reads SMALL_BATCH, and an environment that builds a wheel has no numpy.
Rows: TypeAlias = "NDArray[np.float32]"

# Most tokens of a small batch: a decode of one token, or the verification of a draft. The player
# goes through its layers, its routing is recorded, and its times are learned for each size. Larger
# batches are prompts. A draft has at most 63 tokens (`MOST_DRAFTED` in specdec/options.py), because
# its verification also decodes the text's last token.
SMALL_BATCH = 64
_AFTER_ALL = 1 << 30  # a number above those of all layers


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
        if len(wanted) <= self.n_ubatch or any(sequence != sequences[0] for sequence in sequences):
            return 0
        first = next((i for i, is_wanted in enumerate(wanted) if is_wanted), len(wanted))
        return first // self.n_ubatch


class Ubatches:
    """The ubatches of one decode on one device: which have begun, and which come next."""

    def __init__(self, n_ubatch: int = 0, n_unwanted: int = 0) -> None:
        """`n_ubatch`: most tokens of an ubatch. `n_unwanted`: ubatches that come first and have no
        token whose logits are wanted."""
        self._n_ubatch, self._n_unwanted = n_ubatch, n_unwanted
        self._is_unwanted = False  # True if no logits of the ubatch that has begun are wanted
        self._sizes: deque[int] = deque()  # tokens of the ubatches that have not begun
        self._copies_wait = False  # True if the next ubatch's copies have not begun
        self._layer = _AFTER_ALL  # first streamed layer of the newest graph
        self.n_to_come = 0  # ubatches whose graphs have not come
        self.have_several_graphs = False  # because the CPU computes layers between them

    def __repr__(self) -> str:
        return f"Ubatches({self.n_to_come} to come, sizes {[*self._sizes]})"

    def announce(self, n_tokens: int) -> None:
        """Divide a decode of `n_tokens` tokens into ubatches, which all are to come."""
        n_whole, rest = divmod(n_tokens, self._n_ubatch)
        self._sizes = deque([self._n_ubatch] * n_whole + [rest] * (rest > 0))
        self.n_to_come, self._copies_wait = len(self._sizes), True

    @property
    def next_tokens(self) -> int:
        """Tokens of the ubatch whose graph comes next; 0: none was announced."""
        return self._sizes[0] if self._sizes and self.n_to_come else 0

    @property
    def is_due(self) -> bool:
        """True if copies for the next ubatch may begin."""
        return self._copies_wait and bool(self._sizes)

    def take(self) -> int:
        """Return the tokens of the next ubatch, whose copies begin now."""
        self._copies_wait = False
        return self._sizes.popleft()

    def begin(self, layer: int) -> bool:
        """Note that a graph comes whose first streamed layer is `layer`.

        Returns True if it is the first graph of an ubatch. Its graphs are in the order of layers.
        """
        is_first, self._layer = layer <= self._layer, layer
        if not is_first:
            self.have_several_graphs = True
            return False
        self.n_to_come -= 1
        self._is_unwanted = self._n_unwanted > 0
        self._n_unwanted -= 1
        if self.is_due:
            self._sizes.popleft()
        self._copies_wait = True
        return True

    @property
    def expected_tokens(self) -> int:
        """Tokens of the ubatch after the one that has begun, if its copies may begin early, or 0.

        Nothing begins early if the CPU computes between an ubatch's graphs.
        """
        return 0 if self.have_several_graphs or self.n_to_come <= 0 else self.next_tokens

    @property
    def unwanted_tokens(self) -> int:
        """Most tokens of the ubatch that has begun, if no logits of it are wanted, or 0."""
        return self._n_ubatch if self._is_unwanted else 0
