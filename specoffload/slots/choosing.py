"""Chooses slots and kept prompts for requests, from plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from offload.errors import DoesNotFit
from offload.sequences.sequences import Checkpoint

SIMILAR = 0.1  # share of a prompt below which a common beginning is chance
_MUCH_LOST = 0.5  # lost share of a slot's tokens above which the slot is saved first
WORTH_TOKENS = 16  # number of tokens below which evaluating is faster than copying
_WORTH_READING = 128  # and than reading from a disk


class Source(Enum):
    """The place that holds a prompt's first tokens, so that they need no evaluation."""

    NONE = "none"
    OWN = "the slot itself"
    SLOT = "another slot"
    STORE = "host memory"
    DISK = "the disk"


@dataclass(frozen=True)
class SlotState:
    """The state of a slot with regard to one prompt."""

    number: int
    is_busy: bool
    n_held: int
    n_reusable: int  # tokens of the prompt that need no evaluation in this slot
    n_shareable: int  # tokens of the prompt that another slot can take over from this slot
    last_used: int

    def without_reuse(self) -> SlotState:
        """Return this state for a prompt that may not reuse held tokens."""
        return replace(self, n_reusable=0, n_shareable=0)


@dataclass(frozen=True)
class SlotChoice:
    """The slot `number` for a prompt, and the `source` of the prompt's beginning.

    If the source is another slot, `other` is its number. If `keep` is set, the text that the slot
    holds must be saved to host memory first.
    """

    number: int
    source: Source
    other: int = -1
    keep: bool = False


def choose(
    slots: Sequence[SlotState],
    n_prompt: int,
    n_stored: int,
    wanted: int = -1,
    similar: float = SIMILAR,
    n_on_disk: int = 0,
) -> SlotChoice | None:
    """Return the slot for a prompt of `n_prompt` tokens, or None if all allowed slots are busy.

    Host memory holds the first `n_stored` tokens of the prompt, and the disk `n_on_disk`. `wanted`
    is the number of the only allowed slot (-1: any). `similar` is the least share of the prompt
    that an idle slot must hold to be chosen for its text (0: never).

    The source with the longest beginning wins. Ties go to the source that copies least. If the
    winning slot would lose much of its text, an empty slot takes over the beginning instead.
    """
    idle = [slot for slot in slots if not slot.is_busy and wanted in (-1, slot.number)]
    if not idle:
        return None
    own = max(idle, key=lambda s: (s.n_reusable, s.n_held == s.n_reusable, -s.number))
    is_similar = similar > 0 and own.n_reusable >= max(1.0, similar * n_prompt)
    n_own = own.n_reusable if is_similar else 0
    place = min(idle, key=lambda s: (s.n_held > 0, s.last_used, s.number))
    others = [s for s in slots if s.number != place.number and s.n_shareable >= WORTH_TOKENS]
    shared = max(others, key=lambda s: s.n_shareable, default=None)
    n_shared = 0 if shared is None else shared.n_shareable
    if n_on_disk >= max(n_own, n_shared, n_stored) + _WORTH_READING:
        return SlotChoice(place.number, Source.DISK, keep=_loses_much(place, 0))
    if n_stored >= WORTH_TOKENS and n_stored > max(n_own, n_shared):
        return SlotChoice(place.number, Source.STORE, keep=_loses_much(place, 0))
    splits = _loses_much(own, n_own) and not place.n_held and n_shared == n_own
    if shared is not None and (n_shared > n_own or splits):
        return SlotChoice(place.number, Source.SLOT, shared.number, keep=_loses_much(place, 0))
    if n_own:
        return SlotChoice(own.number, Source.OWN, keep=_loses_much(own, n_own))
    return SlotChoice(place.number, Source.NONE, keep=_loses_much(place, 0))


def _loses_much(slot: SlotState, n_reused: int) -> bool:
    """True if the slot would lose much of its text by keeping only `n_reused` tokens."""
    lost = slot.n_held - n_reused
    return lost >= WORTH_TOKENS and lost > _MUCH_LOST * slot.n_held


def common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the number of tokens in the common beginning of `held` and `tokens`.

    The last of `tokens` does not count: it must be evaluated, because its logits are needed.
    """
    n = 0
    for a, b in zip(held, tokens[:-1], strict=False):
        if a != b:
            break
        n += 1
    return n


# -- prompts in host memory ------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedDraft:
    """What a draft model held of a prompt: its tokens, in its own vocabulary, and its state."""

    tokens: tuple[int, ...]
    state: bytes
    parts: tuple[bytes, ...] = ()  # those of the state that come before `state`


@dataclass(frozen=True)
class StoredPrompt:
    """A saved sequence: its tokens, its state, and the checkpoints of its memory.

    A long state is saved in `parts`, and `state` is what follows them (`Sequences.saving`).
    `salt`: whose prompt it is (`GenerateOptions.cache_salt`). `draft`: what a draft model held of
    it. That is kept in RAM only, never in a file.
    """

    tokens: tuple[int, ...]
    state: bytes
    checkpoints: tuple[Checkpoint, ...] = ()
    salt: str = ""
    draft: SavedDraft | None = None
    parts: tuple[bytes, ...] = ()

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """The bytes of the state, in order."""
        return (*self.parts, self.state)

    @property
    def size_bytes(self) -> int:
        draft = () if self.draft is None else (*self.draft.parts, self.draft.state)
        return sum(map(len, (*self.pieces, *draft))) + sum(len(c.state) for c in self.checkpoints)

    def reusable(self, tokens: Sequence[int], salt: str = "", *, can_cut: bool) -> int:
        """Return the number of a prompt's first tokens that need no evaluation with this state."""
        if salt != self.salt:
            return 0
        n = common(self.tokens, tokens)
        if can_cut or n == len(self.tokens):
            return n
        return max((c.length for c in self.checkpoints if c.length <= n), default=0)


class PromptStore:
    """Keeps prompts in host memory when other requests need their slots (llama.cpp's --cache-ram).

    Above `limit_bytes`, the least recently used prompts are evicted (None: no limit; 0: store
    nothing).
    """

    def __init__(
        self,
        limit_bytes: int | None,
        *,
        can_cut: bool,
        on_evicted: Callable[[StoredPrompt], None] | None = None,
    ) -> None:
        """`can_cut`: True if a state can be shortened to a part of its prompt.

        `on_evicted` gets the prompts that have no room here.
        """
        self._limit_bytes, self._can_cut, self._on_evicted = limit_bytes, can_cut, on_evicted
        self._prompts: list[StoredPrompt] = []  # the most recently used last

    @property
    def size_bytes(self) -> int:
        return sum(prompt.size_bytes for prompt in self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def fits(self, n_bytes: int) -> bool:
        """True if a prompt of that size can be stored, after evicting others if necessary."""
        return self._limit_bytes is None or n_bytes <= self._limit_bytes

    def has_room(self, n_bytes: int) -> bool:
        """True if a prompt of that size can be stored without losing another one."""
        limit = self._limit_bytes
        return limit is None or self.size_bytes + n_bytes <= limit or self._on_evicted is not None

    def covers(self, tokens: Sequence[int], salt: str = "") -> bool:
        """True if a stored prompt serves as well as `tokens`, so that these need not be saved."""
        return any(p.salt == salt and self._serves(p.tokens, tokens) for p in self._prompts)

    def add(
        self,
        tokens: Sequence[int],
        save: Callable[[], StoredPrompt],
        salt: str = "",
    ) -> bool:
        """Store the prompt `tokens` of `salt`, which `save` returns. Returns True if it is kept.

        Does not call `save` if a stored prompt serves as well, or if the limit is 0 and evicted
        prompts go nowhere. If they go nowhere, raises DoesNotFit for a prompt that is larger than
        the whole store.
        """
        if self.covers(tokens, salt):
            return True
        if self._limit_bytes == 0 and self._on_evicted is None:
            return False
        prompt = save()
        if self._limit_bytes is not None and prompt.size_bytes > self._limit_bytes:
            prompt = replace(prompt, draft=None)  # the draft model reads the text again
        if self._limit_bytes is not None and prompt.size_bytes > self._limit_bytes:
            if self._on_evicted is not None:
                self._on_evicted(prompt)
                return True
            raise DoesNotFit(
                f"its state takes {prompt.size_bytes / 2**20:.0f} MiB, and --cache-ram is "
                f"{self._limit_bytes / 2**20:.0f} MiB"
            )
        self._prompts = [
            p for p in self._prompts if p.salt != salt or not self._serves(tokens, p.tokens)
        ]
        self._prompts.append(prompt)
        while self._limit_bytes is not None and self.size_bytes > self._limit_bytes:
            evicted = self._prompts.pop(0)
            if self._on_evicted is not None:
                self._on_evicted(evicted)
        return True

    def put_back(self, prompts: Sequence[StoredPrompt]) -> None:
        """Add prompts of an earlier store, the oldest first, below what was stored since."""
        self._prompts[:0] = prompts
        while self._limit_bytes is not None and self.size_bytes > self._limit_bytes:
            self._prompts.pop(0)

    def remove(self, prompt: StoredPrompt) -> None:
        self._prompts = [p for p in self._prompts if p is not prompt]

    @property
    def prompts(self) -> tuple[StoredPrompt, ...]:
        """All stored prompts, the most recently used last."""
        return tuple(self._prompts)

    def reusable(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the number of a prompt's first tokens that the best stored prompt covers."""
        lengths = (p.reusable(tokens, salt, can_cut=self._can_cut) for p in self._prompts)
        return max(lengths, default=0)

    def take(self, tokens: Sequence[int], salt: str = "") -> StoredPrompt:
        """Remove the stored prompt that `reusable` found, and return it."""
        best = max(self._prompts, key=lambda p: p.reusable(tokens, salt, can_cut=self._can_cut))
        self._prompts.remove(best)
        return best

    def clear(self) -> None:
        self._prompts.clear()

    def _serves(self, longer: Sequence[int], shorter: Sequence[int]) -> bool:
        """True if the state of `longer` serves every prompt that the state of `shorter` does."""
        if not self._can_cut and len(longer) != len(shorter):
            return False
        return tuple(longer[: len(shorter)]) == tuple(shorter)
