"""Where a session's prompts stay after its end: on the disk, or in RAM for the next session."""

from __future__ import annotations

import logging

from offload.engine import Engine
from offload.ggml.native_build import library_build
from offload.notes import Note, OnProgress
from offload.plan.host import PROMPTS
from specoffload.config.resolution import Config
from specoffload.slots.batcher import Batcher
from specoffload.slots.own_folder import foreign_writers
from specoffload.slots.pool import PromptPlace
from specoffload.slots.prompt_files import PromptFolder
from specoffload.slots.prompt_shelf import PromptShelf
from specoffload.slots.shelved_prompts import ShelvedPrompts

# Steps of closing that report progress.
KEEPING, SHELVING = "prompts are written to the disk", "prompts are kept in RAM"

log = logging.getLogger("specoffload.session")


class KeptPrompts:
    """The folder of --cache-disk and the shelf in RAM of one session."""

    def __init__(self, config: Config, target: Engine, shelf: PromptShelf | None) -> None:
        """`shelf` has prompts of the model's last session. Raises NotWritten for a bad folder."""
        room = config.cache_disk
        self.folder: PromptFolder | None = None
        if room is not None and room.folder is not None:
            can_cut = target.sequences.can_cut_loaded
            self.folder = PromptFolder(
                room.folder, room.size_bytes, _made_by(target), can_cut=can_cut
            )
        self._shelf = None if shelf is None else ShelvedPrompts(shelf, _made_by(target))
        self._target, self._slots_folder = target, config.slot_save_path
        self.shelves = False  # True: prompts go to the shelf at the end

    @property
    def can_shelve(self) -> bool:
        """True if prompts can go to the shelf. With a folder they go to the disk instead."""
        return self.folder is None and self._shelf is not None

    @property
    def notes(self) -> tuple[Note, ...]:
        kept = () if self.folder is None else self.folder.notes
        if self._slots_folder is None:
            return kept
        harm = "put files there that a request to /slots loads"
        warning = foreign_writers("--slot-save-path", self._slots_folder, harm)
        return kept if warning is None else (*kept, warning)

    def take_back(self, batcher: Batcher) -> None:
        """Move the prompts of the last session from the shelf to the batcher's store."""
        if self._shelf is None:
            return
        with self._target.opened.taking(PROMPTS):
            shelved = self._shelf.take()
        if shelved:
            batcher.store.put_back(shelved)
            n_bytes = batcher.store.size_bytes
            log.info("prompts of the last run: %d, of %d MiB", len(shelved), n_bytes >> 20)

    def keep(self, batcher: Batcher, on_progress: OnProgress) -> None:
        """Move all prompts to the folder, or to the shelf if they are wanted there."""
        if self.folder is not None:
            place: PromptPlace = self.folder
            step, words = KEEPING, "prompts written to the disk: %d (--cache-disk)"
        elif self._shelf is not None and self.shelves:
            place, step, words = self._shelf, SHELVING, "prompts kept in RAM: %d (--cache-ram)"
        else:
            return
        if n := batcher.keep_prompts(place, lambda done: on_progress(step, done)):
            log.info(words, n)


def _made_by(target: Engine) -> dict[str, str]:
    """Return all that a saved prompt depends on, by name."""
    return {
        **target.sequences.made_by,
        "library": library_build(),
        "whole windows": str(target.layout.context.swa_full),
        "drafting layers": _drafting_layers(target),
    }


def _drafting_layers(target: Engine) -> str:
    """The layers whose caches are saved with a prompt, as text."""
    file = target.start.options.row_file
    if target.opened.row_draft is None:
        return "none"
    if file is None:
        return "the model's own"
    return f"{file.name}, {file.stat().st_size} bytes"
