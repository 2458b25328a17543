"""Tables of embeddings that are looked up and not multiplied: their rows, and where they are kept.

Gemma-3n and Gemma 4 look up one row for each token, with a part for each layer. Qwen3.8-Flash-Next
looks up rows by hashes of the last tokens. Such a table has gigabytes, of which a token reads
kilobytes. So it need not be in memory, and a GPU gains nothing by it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from mmap import PAGESIZE

import numpy as np
from numpy.typing import NDArray

from offload.model import ModelFacts, WeightPlace
from offload.plan.found import Found, Kind
from offload.plan.host import LaterBytes, mapped_bytes, with_slots
from offload.plan.placement import Plan
from offload.plan.wanted import Wanted
from offload.times.context_memory import DEFAULT_UBATCH
from offload.units import size_words

TABLES = ("per_layer_token_embd.weight",)
_PAGE_BYTES = PAGESIZE  # the kernel reads whole pages
UNKNOWN = -1  # a token before the beginning of a text

TokenIds = NDArray[np.int64]


@dataclass(frozen=True)
class LookupTable:
    """A table in the file, and the rows that tokens look up in it."""

    place: WeightPlace
    hashes: NgramHashes | None = None  # None: a token's row has its number

    @property
    def size_bytes(self) -> int:
        return self.place.entry.size_bytes

    @property
    def row_bytes(self) -> int:
        return self.size_bytes // self.place.entry.shape[1]

    @property
    def n_before(self) -> int:
        """Number of tokens before a token on which its rows depend."""
        return 0 if self.hashes is None else self.hashes.n_before

    @property
    def rows_per_token(self) -> int:
        return 1 if self.hashes is None else len(self.hashes.offsets)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes in the pages that hold a token's rows, which begin anywhere in a page."""
        return self.rows_per_token * (self.row_bytes - 1 + _PAGE_BYTES)

    def rows(self, tokens: TokenIds) -> TokenIds:
        """Return the rows [n_tokens - n_before, rows_per_token] of all but the first tokens.

        The first `n_before` of `tokens` only give context; they may be `UNKNOWN`.
        """
        if self.hashes is not None:
            return self.hashes.rows(tokens)
        return tokens[:, None]


@dataclass(frozen=True)
class NgramHashes:
    """The rule by which llama.cpp's `qwen4exp` chooses rows (src/models/qwen4exp.cpp).

    The last n tokens, for n from 2 to `1 + n_before`, are mixed into a number. Several heads for
    each n take it modulo their own size. An end of text hides all tokens before it.
    """

    n_before: int
    per_gram: int  # heads for each n
    end_of_text: int
    multipliers: tuple[int, ...]  # [1 + n_before], by distance from the token
    sizes: tuple[int, ...]  # [n_before * per_gram], rows of each head
    offsets: tuple[int, ...]  # the first row of each head

    def rows(self, tokens: TokenIds) -> TokenIds:
        n = len(tokens) - self.n_before
        is_hidden = np.zeros(n, bool)
        mixed = self._part(tokens[self.n_before :], 0)
        rows_of_head = []
        for distance in range(1, self.n_before + 1):
            before = tokens[self.n_before - distance :][:n]
            is_hidden = is_hidden | (before < 0) | (before == self.end_of_text)
            mixed = mixed ^ self._part(np.where(is_hidden, self.end_of_text, before), distance)
            first = (distance - 1) * self.per_gram
            for head in range(first, first + self.per_gram):
                rows_of_head.append(
                    mixed % np.uint64(self.sizes[head]) + np.uint64(self.offsets[head])
                )
        return np.stack(rows_of_head, axis=1).astype(np.int64)

    def _part(self, tokens: TokenIds, distance: int) -> NDArray[np.uint64]:
        return tokens.astype(np.uint64) * np.uint64(self.multipliers[distance])


def lookup_tables(facts: ModelFacts) -> tuple[LookupTable, ...]:
    """Return the model's tables that are looked up by row, the token embeddings left out.

    Token embeddings are small beside these, and often are the output matrix, too.
    """
    places = [facts.weights[name] for name in TABLES if name in facts.weights]
    return tuple(LookupTable(place, ngram_hashes(facts)) for place in places)


def ngram_hashes(facts: ModelFacts) -> NgramHashes | None:
    """Return the rule for rows by n-grams, or None if rows have the tokens' numbers."""
    per_gram = facts.number("ple.heads_per_ngram")
    if not per_gram:
        return None
    n_before = facts.number("ple.ngram_size") - 1
    return NgramHashes(
        n_before, per_gram, facts.number("ple.eos_token_id"),
        _listed(facts, "layer_multipliers", n_before + 1),
        _listed(facts, "head_vocab_sizes", n_before * per_gram),
        _listed(facts, "head_offsets", n_before * per_gram),
    )  # fmt: skip


def _listed(facts: ModelFacts, key: str, n: int) -> tuple[int, ...]:
    """Return the first `n` integers of an array, which the library requires to be there."""
    values = facts.header.metadata.get(f"{facts.architecture}.ple.{key}", ())
    listed = values if isinstance(values, tuple) else (values,)
    return tuple(int(v) for v in listed[:n])


@dataclass(frozen=True)
class HostTables:
    """The tables that are looked up, all in memory or all on the disk. Never on a device."""

    names: tuple[str, ...]
    size_bytes: int
    bytes_per_token: float  # bytes of the pages that hold one token's rows
    on_disk: bool
    reason: str = field(default="", compare=False)  # why they stay on the disk

    @property
    def words(self) -> str:
        """One sentence for the plan and for start-up messages."""
        what = f"{size_words(self.size_bytes)} of embeddings that are looked up"
        if not self.on_disk:
            return f"{what} stay in RAM, and never on the GPU"
        return (
            f"{what} stay on the disk ({self.reason}); each token reads "
            f"{size_words(self.bytes_per_token)} of them, in advance if the token is known"
        )


def host_tables(
    facts: ModelFacts, plan: Plan, found: Found, wanted: Wanted, later: LaterBytes
) -> HostTables | None:
    """Return where the model's tables are kept, None if it has none.

    They leave memory before any expert does, because a token reads so little of them.
    """
    tables = lookup_tables(facts)
    if not tables:
        return None
    reason = _on_disk_reason(tables, plan, found, wanted, later)
    return HostTables(
        tuple(table.place.entry.name for table in tables),
        sum(table.size_bytes for table in tables),
        sum(table.bytes_per_token for table in tables),
        on_disk=bool(reason),
        reason=reason,
    )


def _on_disk_reason(
    tables: tuple[LookupTable, ...], plan: Plan, found: Found, wanted: Wanted, later: LaterBytes
) -> str:
    kind: Kind = found.devices[0].kind
    table_bytes = sum(table.size_bytes for table in tables)
    weight_bytes = plan.streamed_bytes + table_bytes
    if wanted.ram_bytes is not None and weight_bytes > wanted.ram_bytes:
        return (
            f"with them weights would take {size_words(weight_bytes)} of RAM, and --ram is "
            f"{size_words(wanted.ram_bytes)}"
        )
    others_bytes = sum(with_slots(later, plan, kind)(DEFAULT_UBATCH).values())
    needed_bytes = weight_bytes + mapped_bytes(plan, kind) + others_bytes
    if needed_bytes > found.ram_bytes:
        return (
            f"with them {size_words(needed_bytes)} of RAM would be needed, and "
            f"{size_words(found.ram_bytes)} are free"
        )
    return ""
