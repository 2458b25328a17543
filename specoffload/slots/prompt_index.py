"""Finds which of thousands of stored prompts begins like a new one, and which are to go. Pure.

Only a chain of hashes is kept of each prompt: one for each block of tokens, made of the block and
of the hash before it. So equal hashes mean equal beginnings, as in vLLM's prefix cache
(docs.vllm.ai, "Automatic Prefix Caching").
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK = 128  # tokens of a block; a shorter beginning is not found
_HASH_BYTES = 8


def chain(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """Return a hash for each whole block of `tokens`: of the block and all blocks before it.

    The first hash is also of the `salt`, so prompts with different salts have no hash in common.
    """
    raw, links, last = memoryview(array("i", tokens)).cast("B"), [], salt.encode()
    step = BLOCK * array("i").itemsize
    for end in range(step, len(raw) + 1, step):
        last = blake2b(last + raw[end - step : end], digest_size=_HASH_BYTES).digest()
        links.append(last)
    return links


@dataclass(frozen=True)
class IndexedPrompt:
    """A stored prompt.

    `usable` are the numbers of its first tokens from which a text can go on, ascending. They end
    with all of its tokens. If a state can be cut anywhere, that is their only element.
    """

    name: str
    n_tokens: int
    usable: tuple[int, ...]
    salt: str = ""  # whose prompt it is


def reusable(entry: IndexedPrompt, n_common: int, *, can_cut: bool) -> int:
    """Return how many tokens of a prompt need no evaluation, if `n_common` of its first are equal.

    Recurrent memory goes on only from the lengths in `entry.usable` (`can_cut` is False).
    """
    if can_cut:
        return min(n_common, entry.n_tokens)
    return max((n for n in entry.usable if n <= n_common), default=0)


class PromptIndex:
    """Hashes of stored prompts by name."""

    def __init__(self, *, can_cut: bool) -> None:
        """`can_cut`: True if a state can be shortened to any part of its prompt."""
        self._can_cut = can_cut
        self._entries: dict[str, IndexedPrompt] = {}
        self._chains: dict[str, list[bytes]] = {}
        self._names: dict[bytes, set[str]] = {}  # the prompts that have a hash in their chain

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def add(self, entry: IndexedPrompt, tokens: Sequence[int]) -> None:
        self.remove(entry.name)
        hashes = chain(tokens, entry.salt)
        self._entries[entry.name], self._chains[entry.name] = entry, hashes
        for one in hashes:
            self._names.setdefault(one, set()).add(entry.name)

    def remove(self, name: str) -> None:
        """Forget a prompt. Does nothing if it is unknown."""
        self._entries.pop(name, None)
        for one in self._chains.pop(name, ()):
            self._names[one].discard(name)
            if not self._names[one]:
                del self._names[one]

    def candidates(self, tokens: Sequence[int], most: int, salt: str = "") -> list[IndexedPrompt]:
        """Return prompts that begin like the prompt `tokens`, whose tokens are worth a comparison.

        Whole blocks are known to be equal. The prompts are the `most` that may spare most
        evaluation if the next block is equal, too, and the `most` that spare most if it is not.
        """
        alike = self._alike(tokens[:-1], salt)  # the last token is always evaluated
        ways = []
        for more in (BLOCK - 1, 0):
            spared = {
                name: reusable(self._entries[name], n * BLOCK + more, can_cut=self._can_cut)
                for name, n in alike.items()
            }
            ways += sorted(alike, key=lambda name: (-spared[name], name))[:most]
        return [self._entries[name] for name in dict.fromkeys(ways)]

    def beginnings(self, tokens: Sequence[int], salt: str = "") -> list[str]:
        """Return the names of shorter prompts that `tokens` may begin with, by whole blocks."""
        names = []
        for name, n in self._alike(tokens, salt).items():
            n_tokens = self._entries[name].n_tokens
            if n_tokens < len(tokens) and n == n_tokens // BLOCK:
                names.append(name)
        return names

    def extensions(self, tokens: Sequence[int], salt: str = "") -> list[str]:
        """Return the names of prompts that may begin with all of `tokens`, by whole blocks."""
        n_blocks = len(tokens) // BLOCK
        return [
            name
            for name, n in self._alike(tokens, salt).items()
            if n == n_blocks and self._entries[name].n_tokens >= len(tokens)
        ]

    def _alike(self, tokens: Sequence[int], salt: str) -> dict[str, int]:
        """Return the number of equal first blocks by the name of a prompt, if there is one.

        Prompts with another salt are left out, also if a hash is equal by chance.
        """
        n_blocks: dict[str, int] = {}
        for i, one in enumerate(chain(tokens, salt), 1):
            here = self._names.get(one)
            if here is None:
                break
            n_blocks |= {name: i for name in here if self._entries[name].salt == salt}
        return n_blocks


@dataclass(frozen=True)
class StoredFile:
    """A file of the folder: its size, and when it was used last (seconds since 1970)."""

    name: str
    size_bytes: int
    used_s: float


def to_evict(
    files: Iterable[StoredFile], new_bytes: int, limit_bytes: int, free_bytes: int, spare_bytes: int
) -> list[str] | None:
    """Return the files to delete before `new_bytes` are written, those used longest ago first.

    The files then take at most `limit_bytes`, and the disk keeps `spare_bytes` free. Returns None
    if no deletion makes enough room.
    """
    ordered = sorted(files, key=lambda file: (file.used_s, file.name))
    total_bytes = sum(file.size_bytes for file in ordered) + new_bytes
    missing_bytes = max(total_bytes - limit_bytes, new_bytes + spare_bytes - free_bytes)
    gone: list[str] = []
    for file in ordered:
        if missing_bytes <= 0:
            break
        gone.append(file.name)
        missing_bytes -= file.size_bytes
    return gone if missing_bytes <= 0 else None
