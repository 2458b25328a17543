"""Moves prompts between host memory and a shelf, on which they outlast the engine process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import BinaryIO

from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.prompt_format import (
    Unusable,
    key_of,
    read_head,
    read_payload,
    write_prompt,
)
from specoffload.slots.prompt_shelf import PromptShelf

log = logging.getLogger("specoffload.slots")


class ShelvedPrompts:
    """The prompts of one model with one group of settings, on a shelf of its own."""

    def __init__(self, shelf: PromptShelf, made_by: Mapping[str, str]) -> None:
        """`made_by`: all that a state depends on, by name."""
        self._shelf, self._key = shelf, key_of(made_by)
        self.n_written = 0

    def take(self) -> list[StoredPrompt]:
        """Return the prompts, the oldest first, and empty the shelf.

        Prompts that cannot be used are dropped, and one line says so.
        """
        taken = []
        try:
            while (prompt := self._shelf.take_oldest(self._read)) is not None:
                taken.append(prompt)
        except (OSError, Unusable, MemoryError) as e:
            log.warning("prompts of the last run are dropped, and evaluated again: %s", e)
            self._shelf.clear()
        return taken

    def _read(self, file: BinaryIO, n_bytes: int) -> StoredPrompt:
        head, tokens = read_head(file, self._key, n_bytes)
        return read_payload(file, head, tokens)

    def keep_now(self, prompt: StoredPrompt, on_written: Callable[[float], None]) -> None:
        """Put a prompt on the shelf, as one that is older than those there.

        `on_written` gets the share of it that is written.
        """
        try:
            self._shelf.append(lambda file: write_prompt(file, self._key, prompt, on_written))
            self.n_written += 1
        except (OSError, MemoryError) as e:
            n = len(prompt.tokens)
            log.warning("a prompt of %d tokens is not kept for the next start: %s", n, e)

    def close(self) -> None:
        """Do nothing, because prompts are written at once."""
