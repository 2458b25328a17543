"""The shelves of a server's models, on which their prompts stay in RAM while they are closed.

All of them together take at most --cache-ram. If they take more, prompts of the model that was
closed longest ago are dropped first, and its oldest ones before the others.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from specoffload.slots.prompt_shelf import PromptShelf


class ModelShelf:
    """A model's shelf. The model's engine has it between `lend` and `take_back`."""

    def __init__(self, shelves: Shelves) -> None:
        self.file = PromptShelf()
        self.is_lent = False
        self._shelves = shelves

    def lend(self) -> None:
        self.is_lent = True

    def take_back(self) -> None:
        self.is_lent = False
        self._shelves.taken_back(self)


class Shelves:
    """The shelves of all models, by a key of each."""

    def __init__(self, limit_bytes: int | None) -> None:
        """`limit_bytes`: RAM of the prompts of all closed models (None: no limit, 0: no shelf)."""
        self.limit_bytes = limit_bytes
        self._shelves: dict[Hashable, ModelShelf] = {}  # the model that was closed last is last

    @property
    def size_bytes(self) -> int:
        """RAM that the prompts of all closed models take."""
        return sum(s.file.size_bytes for s in self._shelves.values() if not s.is_lent)

    def of(self, key: Hashable) -> ModelShelf | None:
        """Return the shelf of a model; None if the limit is 0. Raises OSError."""
        if self.limit_bytes == 0:
            return None
        if key not in self._shelves:
            self._shelves[key] = ModelShelf(self)
        return self._shelves[key]

    def keep_only(self, keys: Collection[Hashable]) -> None:
        """Drop the shelves of all other models."""
        self._shelves = {key: shelf for key, shelf in self._shelves.items() if key in keys}

    def taken_back(self, shelf: ModelShelf) -> None:
        """Drop prompts until all shelves are within the limit. This one was filled last."""
        for key, one in [*self._shelves.items()]:
            if one is shelf:
                self._shelves[key] = self._shelves.pop(key)
        for one in self._shelves.values():
            while not one.is_lent and one.file.size_bytes and self._is_too_large:
                one.file.drop_oldest()

    @property
    def _is_too_large(self) -> bool:
        return self.limit_bytes is not None and self.size_bytes > self.limit_bytes
