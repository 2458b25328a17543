"""Tables of embeddings that are looked up and not multiplied: their rows, and what reading costs.

Gemma-3n and Gemma 4 look up one row for each token, with a part for each layer. Qwen3.8-Flash-Next
looks up rows by hashes of the last tokens. Such a table has gigabytes, of which a token reads
kilobytes. So it need not be in memory, and a GPU gains nothing by it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from mmap import PAGESIZE

import numpy as np
from numpy.typing import NDArray

from offload.model import ModelFacts, WeightPlace

TABLES = ("per_layer_token_embd.weight",)
_PAGE_BYTES = PAGESIZE  # the kernel reads whole pages
UNKNOWN = -1  # a token before the beginning of a text

Tokens = NDArray[np.int64]


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

    def rows(self, tokens: Tokens) -> Tokens:
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

    def rows(self, tokens: Tokens) -> Tokens:
        n = len(tokens) - self.n_before
        is_hidden = np.zeros(n, bool)
        mixed = self._part(tokens[self.n_before :], 0)
        found = []
        for distance in range(1, self.n_before + 1):
            before = tokens[self.n_before - distance :][:n]
            is_hidden = is_hidden | (before < 0) | (before == self.end_of_text)
            mixed = mixed ^ self._part(np.where(is_hidden, self.end_of_text, before), distance)
            first = (distance - 1) * self.per_gram
            for head in range(first, first + self.per_gram):
                found.append(mixed % np.uint64(self.sizes[head]) + np.uint64(self.offsets[head]))
        return np.stack(found, axis=1).astype(np.int64)

    def _part(self, tokens: Tokens, distance: int) -> NDArray[np.uint64]:
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
