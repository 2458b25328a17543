"""Reads rows of tables on the disk into the page cache before a decode looks them up.

libllama maps such a table from the file, and the kernel is told that it is read at random. So a row
that is not in the page cache costs a page fault, in which the computing thread waits for the disk.
Rows are known as soon as their tokens are: those of the whole batch, drafts included, and those of
the next part of a prompt while this part is computed. The kernel reads them all at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.plan.store_layout import PAGE_BYTES
from offload.plan.tables import UNKNOWN, LookupTable, TokenIds
from offload.store.reading import OpenFile

_MOST_AT_ONCE = 64  # reads that are begun on the calling thread; each takes a few microseconds


@dataclass
class TableCounters:
    """Counts of what was read ahead."""

    table_rows_ahead: int = 0
    table_bytes_ahead: int = 0  # bytes in their pages; some may have been in memory


@dataclass
class _Foreseen:
    """A text that a sequence will hold. Rows of its first `n_asked` tokens were asked for."""

    text: Sequence[int]
    n_asked: int = 0


class TableRows:
    """The tables of a model that stay on the disk. `close` it."""

    def __init__(self, tables: Iterable[LookupTable], n_ahead: int) -> None:
        """`n_ahead`: most tokens of a prompt whose rows are read before their decode begins.

        Raises BadModel if a file cannot be read.
        """
        self.counters = TableCounters()
        self._tables = tuple(tables)
        self._n_ahead = n_ahead
        self._n_before = max((table.n_before for table in self._tables), default=0)
        paths = dict.fromkeys(table.place.file for table in self._tables)
        self._files = {path: OpenFile(path) for path in paths}
        self._foreseen: dict[int, _Foreseen] = {}
        self._held: dict[int, list[int]] = {}  # by sequence, its tokens; only if rows need them
        self._thread = ThreadPoolExecutor(1, "table-rows")
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def foresee(self, sequence: int, text: Sequence[int]) -> None:
        """Take the text that the sequence will hold. Nothing is read before its next decode."""
        self._foreseen[sequence] = _Foreseen(tuple(text))
        if self._n_before:
            self._held[sequence] = list(text)

    def expect(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | Sequence[Sequence[int]],
    ) -> None:
        """Read ahead for the next decode, and for the decode after it if its tokens are known.

        The arguments are those of the decode. Raises ModelChanged if a file was written to.
        """
        for file in self._files.values():
            file.check_unchanged()
        wanted: list[TokenIds] = []
        for sequence, start, part in _parts(tokens, positions, sequences):
            wanted += self._of_part(sequence, start, part)
        pages = [page for run in wanted for page in self._pages(run)]
        self.counters.table_bytes_ahead += sum(n_bytes for _, _, n_bytes in pages)
        if len(pages) > _MOST_AT_ONCE:
            self._thread.submit(self._ask, pages)
        else:
            self._ask(pages)

    def _of_part(self, sequence: int, start: int, part: Sequence[int]) -> list[TokenIds]:
        """Return runs of tokens to ask for, each with the `n_before` tokens before it."""
        end, foreseen = start + len(part), self._foreseen.get(sequence)
        first = start
        if foreseen is not None:
            if tuple(part) != foreseen.text[start:end]:  # the prompt has been read
                del self._foreseen[sequence]
                foreseen = None
            else:
                first = min(max(start, foreseen.n_asked), end)
                foreseen.n_asked = max(end, foreseen.n_asked)
        runs = [self._with_context(sequence, first, part[first - start :])]
        if foreseen is not None:
            n_asked = foreseen.n_asked
            later = foreseen.text[n_asked : end + self._n_ahead]
            foreseen.n_asked += len(later)
            runs.append(self._with_context(sequence, n_asked, later))
        return [run for run in runs if len(run) > self._n_before]

    def _with_context(self, sequence: int, start: int, part: Sequence[int]) -> TokenIds:
        n = self._n_before
        if not n:
            return np.array(part, np.int64)
        held = self._held.setdefault(sequence, [])
        held += [UNKNOWN] * (start - len(held))
        held[start : start + len(part)] = part
        context = [UNKNOWN] * (n - start) + held[max(0, start - n) : start]
        return np.array([*context, *part], np.int64)

    def _pages(self, tokens: TokenIds) -> Iterator[tuple[OpenFile, int, int]]:
        """Return (file, first byte, number of bytes) of the pages of a run's rows."""
        for table in self._tables:
            file, entry = self._files[table.place.file], table.place.entry
            rows = table.rows(tokens[self._n_before - table.n_before :])
            self.counters.table_rows_ahead += rows.size
            for at, n_bytes in pages_of(rows, entry.offset_bytes, table.row_bytes):
                yield file, at, n_bytes

    def _ask(self, pages: Iterable[tuple[OpenFile, int, int]]) -> None:
        for file, at, n_bytes in pages:
            if self._is_closed:
                return
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.buffered, at, n_bytes, os.POSIX_FADV_WILLNEED)


def pages_of(
    rows: NDArray[np.int64], offset_bytes: int, row_bytes: int
) -> Iterator[tuple[int, int]]:
    """Return (first byte, number of bytes) of the runs of pages in which the rows lie.

    `offset_bytes` is the table's place in the file.
    """
    starts = offset_bytes + np.unique(rows) * row_bytes
    first, last = starts // PAGE_BYTES, (starts + row_bytes - 1) // PAGE_BYTES
    is_new = np.ones(len(first), bool)
    is_new[1:] = first[1:] > last[:-1] + 1
    at = np.flatnonzero(is_new)
    ends = last[np.append(at[1:] - 1, len(last) - 1)]
    for page, end in zip(first[at].tolist(), ends.tolist(), strict=True):
        yield page * PAGE_BYTES, (end + 1 - page) * PAGE_BYTES


def _parts(
    tokens: Sequence[int],
    positions: Sequence[int],
    sequences: Sequence[int] | Sequence[Sequence[int]],
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Return (sequence, first position, tokens) of the runs of a batch.

    A row of several sequences counts as one of the first.
    """
    begin = 0
    owners = [sequence if isinstance(sequence, int) else sequence[0] for sequence in sequences]
    for i in range(1, len(tokens) + 1):
        if (
            i == len(tokens)
            or owners[i] != owners[begin]
            or positions[i] != positions[begin] + i - begin
        ):
            yield owners[begin], positions[begin], tokens[begin:i]
            begin = i
