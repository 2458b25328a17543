"""Decides which slots in a compute buffer may hold experts. Pure.

A scheduler's compute buffer lies behind a pool's own slots, and the pool's slots are continued in
it. A graph takes the buffer's first bytes, and the more bytes the more tokens it has. So the first
lent slots are closed and the others are open:

    own slots 0 .. n_own - 1 | closed: bytes of graphs | open: hold experts

Slots are closed as soon as a graph reaches them. They are opened only after the scheduler has
planned a graph of the largest verification batch, because graphs of small batches differ in size.
Otherwise the slots at the border would be opened and closed again and again, and lose their experts
each time.
"""

from __future__ import annotations


class LentSlots:
    """The border between a pool's closed and open lent slots."""

    def __init__(self, n_lent: int) -> None:
        self.n_lent = n_lent
        self.n_closed = n_lent  # the first lent slots
        self._may_open = False

    @property
    def n_open(self) -> int:
        return self.n_lent - self.n_closed

    def planned_small(self) -> None:
        """Let the next graph open the slots that it does not reach."""
        self._may_open = True

    def reached(self, n: int) -> bool:
        """Note that graphs reached the first `n` lent slots. Returns whether the border moves."""
        before = self.n_closed
        if self._may_open or n > before:
            self.n_closed, self._may_open = n, False
        return self.n_closed != before
