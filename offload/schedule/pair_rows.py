"""Computes the memory for the rows of pairs, on the device and in host memory. Pure.

A pair is a token with one of its experts (offload/schedule/passes.py). Plans count this memory from
a model's header (offload/plan/working.py), and runs allocate it by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.alignment import aligned, power_of_two
from offload.decode import SMALL_BATCH
from offload.schedule.passes import MOST_HOST_PAIRS, MOST_PAIRS

_NUMBER_BYTES = 4  # of an f32 of a row, and of an i32 of a table
_LEAST_HOST_PAIRS = 256  # pairs of a prompt that the CPU has memory for, at least
_N_TABLES = 4  # tables of a launch: each pair's token, place, expert and slot


@dataclass(frozen=True)
class PairShape:
    """The rows of one pair, in numbers, and a token's pairs."""

    n_used: int  # pairs of a token
    n_in: int  # numbers of the row that gate and up read
    widths: tuple[int, ...]  # numbers of each node's result, of the last product last
    rows_per_token: int = 1  # rows that the products read of each token
    n_scales: int = 0  # factors of each pair

    @property
    def n_out(self) -> int:
        return self.widths[-1]

    @property
    def may_copy(self) -> bool:
        """True if later nodes may overwrite the tokens' rows, and no node has room for a copy.

        Each pair has a row of its own then. Whether a graph overwrites them depends on how ggml
        places its nodes, so memory for the copy is taken for all graphs.
        """
        return self.rows_per_token > 1 and max(self.widths[:-1], default=0) < self.n_in

    def nodes_bytes(self, most: int) -> int:
        """Return the bytes for the results of all nodes, for `most` pairs."""
        return sum(aligned(_NUMBER_BYTES * width * most) for width in self.widths)

    def most_pairs(self, n_tokens: int) -> int:
        """Return the most pairs of a launch in batches of `n_tokens`."""
        return min(MOST_PAIRS, max(1, n_tokens * self.n_used))

    def launch_bytes(self, n_tokens: int, *, copied: bool) -> int:
        """Return the bytes of device memory for the rows of a launch.

        `copied`: there is also a copy of all tokens' rows.
        """
        most = self.most_pairs(n_tokens)
        rows_bytes = _NUMBER_BYTES * self.n_in * self.rows_per_token * n_tokens
        gathered_bytes = aligned(_NUMBER_BYTES * self.n_in * most)
        return aligned(rows_bytes) * copied + gathered_bytes + self.nodes_bytes(most)

    def table_bytes(self, n_pairs: int) -> int:
        """Return the bytes of the tables of one launch. Each table is aligned."""
        return (_N_TABLES + self.n_scales) * aligned(_NUMBER_BYTES * n_pairs)

    def tables_bytes(self, n_tokens: int, n_passes: int) -> int:
        """Return the bytes of device memory for the tables of all launches of one layer."""
        n_pairs = n_tokens * self.n_used
        n_launches = n_passes + n_pairs // self.most_pairs(n_tokens) + 1
        # The CPU's pairs have tables too, to place their results.
        each_bytes = 2 * _NUMBER_BYTES * n_pairs + 2 * n_launches * aligned(1)
        return (_N_TABLES + self.n_scales) * each_bytes

    def placed_bytes(self, most: int) -> int:
        """Return the bytes for the results of `most` pairs and their places in the batch."""
        return aligned(_NUMBER_BYTES * most) + aligned(_NUMBER_BYTES * self.n_out * most)

    def host_bytes(self, most: int, n_rows: int | None = None) -> tuple[int, int]:
        """Return the bytes of pinned and of other host memory for `most` pairs of the CPU.

        The tokens' rows are pinned, and the pairs' rows are gathered from them. `n_rows`: those of
        a prompt's tokens, with a number for each; None: a small batch's, which has no more of them
        than pairs.
        """
        row_bytes = _NUMBER_BYTES * self.n_in
        between = sum(aligned(_NUMBER_BYTES * width * most) for width in self.widths[:-1])
        n_numbers = 1 + self.n_scales + (n_rows is not None)  # that a pair has beside its rows
        others = aligned(row_bytes * most) + between + n_numbers * aligned(_NUMBER_BYTES * most)
        if n_rows is None:
            return self.placed_bytes(most) + row_bytes * most, others
        return self.placed_bytes(most) + (row_bytes + _NUMBER_BYTES) * n_rows, others


def small_batch_pairs(n_used: int) -> int:
    """Return the pairs that memory is taken for in batches whose layers are split by the player."""
    return power_of_two(SMALL_BATCH * n_used)


def prompt_host_pairs(n_pairs: int) -> int:
    """Return the pairs that memory is taken for, if the CPU computes up to `n_pairs` of a layer."""
    return power_of_two(max(_LEAST_HOST_PAIRS, min(n_pairs, MOST_HOST_PAIRS)))
