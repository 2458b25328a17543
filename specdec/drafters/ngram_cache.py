"""`ngram-cache`: prompt lookup with counts, kept across runs in llama.cpp's cache file.

Contexts of 4, 3, 2 and 1 tokens are looked up in the conversation's own counts, and then in the
files' counts. A token's probability is its share of the tokens that followed the context. The
files have the format of llama.cpp's `-lcs` and `-lcd`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.drafters.ngrams import HistoryDrafter, NgramKey, nothing
from specdec.errors import BadOption
from specdec.types import Draft, DraftRequest
from specdec.whole_file import named_file, read_whole

MAX_SIZE = 4
_NO_TOKEN = -1
_MOST_BYTES = 1 << 30  # largest cache file
_HEAD_BYTES = 20
_MOST_COUNTED = 2**31 - 1  # the file's counts are 32 bit
_MOST_CONTEXTS = 1 << 20  # most contexts in a dynamic cache: about 250 MB, 4 contexts per token

NgramCounts = dict[NgramKey, dict[int, int]]


class LookupCache:
    """Counts of the tokens that followed each context of 1 to 4 tokens."""

    def __init__(self) -> None:
        self.counts: NgramCounts = {}

    def add(self, history: Sequence[int], start: int) -> None:
        """Count the tokens history[start:], each after its contexts."""
        for i in range(max(start, 1), len(history)):
            token = history[i]
            for size in range(1, min(MAX_SIZE, i) + 1):
                followers = self.counts.setdefault(tuple(history[i - size : i]), {})
                followers[token] = followers.get(token, 0) + 1

    def best(self, context: Sequence[int], min_count: int) -> tuple[int, float] | None:
        """The likeliest next token and its share, by the longest context that is known.

        A context of one token needs a clear majority, since it fits in many places.
        """
        for size in range(min(MAX_SIZE, len(context)), 0, -1):
            followers = self.counts.get(tuple(context[-size:]))
            if followers is None:
                continue
            token = max(followers, key=lambda t: followers[t])
            count, total = followers[token], sum(followers.values())
            if count >= min_count and (size > 1 or 2 * count > total):
                return token, (count + 0.5 * (size - 1)) / (total + 1.0 + 0.5 * (size - 1))
        return None

    def trim(self, n_most: int = _MOST_CONTEXTS) -> None:
        """Forget rare and old contexts if there are more than `n_most`."""
        if len(self.counts) <= n_most:
            return
        common = [(k, f) for k, f in self.counts.items() if sum(f.values()) > 1]
        self.counts = dict(common[-(n_most // 2) :])

    def save(self, path: Path) -> None:
        """Write llama.cpp's lookup cache format, whole or not at all."""
        with named_file(path) as f:
            for key, followers in self.counts.items():
                padded = (*key, *[_NO_TOKEN] * (MAX_SIZE - len(key)))
                f.write(struct.pack("<4ii", *padded, len(followers)))
                for token, count in followers.items():
                    f.write(struct.pack("<ii", token, min(count, _MOST_COUNTED)))

    @classmethod
    def load(cls, path: Path, n_vocab: int | None = None) -> LookupCache:
        """Read llama.cpp's lookup cache format.

        Raises BadOption if the file cannot be read, is damaged, or is another model's, which has
        tokens beyond a vocabulary of `n_vocab`.
        """
        try:
            data = read_whole(path, _MOST_BYTES)
        except OSError as e:
            raise BadOption(f"the lookup cache {path} cannot be read: {e}") from e
        cache = cls()
        try:
            for key, followers in _records(data):
                cache.counts[key] = followers
        except (struct.error, ValueError) as e:
            raise BadOption(f"the lookup cache {path} is damaged: {e}; delete it") from e
        used = {t for key, followers in cache.counts.items() for t in (*key, *followers)}
        if n_vocab is not None and used and max(used) >= n_vocab:
            raise BadOption(
                f"the lookup cache {path} is another model's: it holds token {max(used)}, and the "
                f"vocabulary has {n_vocab}"
            )
        return cache


def _records(data: bytes) -> Iterator[tuple[NgramKey, dict[int, int]]]:
    at = 0
    while at < len(data):
        if at + _HEAD_BYTES > len(data):
            raise ValueError(f"it ends inside the record at byte {at}")
        *padded, n = struct.unpack_from("<4ii", data, at)
        at += _HEAD_BYTES
        key = tuple(t for t in padded if t != _NO_TOKEN)
        if not key or n <= 0 or any(t < 0 for t in key):
            raise ValueError(
                f"the record at byte {at - _HEAD_BYTES} has context {padded} and {n} tokens"
            )
        if at + 8 * n > len(data):
            raise ValueError(f"it ends inside the record at byte {at - _HEAD_BYTES}")
        flat = struct.unpack_from(f"<{2 * n}i", data, at)
        at += 8 * n
        followers = dict(zip(flat[::2], flat[1::2], strict=True))
        if any(t < 0 or c <= 0 for t, c in followers.items()):
            raise ValueError(f"the record at byte {at - 8 * n} counts below 1")
        yield key, followers


class NgramCache(HistoryDrafter):
    """Drafts by the conversation's counts, else by the dynamic cache, else by the static cache."""

    name = "ngram-cache"

    def __init__(
        self,
        n_draft: int = 16,
        *,
        static: LookupCache | None = None,
        dynamic: LookupCache | None = None,
    ) -> None:
        """`n_draft` is the most tokens of a draft. `static` is only read.

        `dynamic` counts the tokens of all conversations, and the caller saves it.
        """
        self._n_draft = n_draft
        self._static = static
        self.dynamic = dynamic
        self._own: dict[int, LookupCache] = {}
        self._indexed: dict[int, list[int]] = {}
        self._stale: set[int] = set()  # sequences whose next history may be a new text

    def _propose(self, asked: DraftRequest) -> Draft:
        history, own = asked.history, self._counted(asked.sequence, asked.history)
        context = list(history[-MAX_SIZE:])
        tokens: list[int] = []
        probs: list[float] = []
        while len(tokens) < min(self._n_draft, asked.limit):
            likeliest = self._next(own, context)
            if likeliest is None:
                break
            tokens.append(likeliest[0])
            probs.append(likeliest[1])
            context = [*context[-MAX_SIZE + 1 :], likeliest[0]]
        if not tokens:
            return nothing(self.name, "no context is known")
        return self._offer(asked, tokens, probs)

    def _counted(self, sequence: int, history: Sequence[int]) -> LookupCache:
        """Count the new tokens of `history`, and return the counts of this sequence alone.

        Tokens that were counted before are not counted again. If the text was changed, its own
        counts are made anew, but the dynamic cache keeps the counts of the old text.
        """
        own = self._own.setdefault(sequence, LookupCache())
        indexed = self._indexed.setdefault(sequence, [])
        if sequence in self._stale:
            self._stale.discard(sequence)
            common = len(os.path.commonprefix([indexed, list(history)]))
            if common < len(indexed):
                own = self._own[sequence] = LookupCache()
                own.add(history[:common], 0)
                del indexed[common:]
        start = len(indexed)
        own.add(history, start)
        if self.dynamic is not None:
            self.dynamic.add(history, start)
            self.dynamic.trim()
        indexed += history[start:]
        return own

    def _next(self, own: LookupCache, context: Sequence[int]) -> tuple[int, float] | None:
        best = own.best(context, 1)
        if best is None and self.dynamic is not None:
            best = self.dynamic.best(context, 2)
        if best is None and self._static is not None:
            best = self._static.best(context, 2)
        return best

    def forget(self, sequence: int) -> None:
        self._stale.add(sequence)
