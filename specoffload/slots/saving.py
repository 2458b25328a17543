"""Slots saved to files, restored from them, or erased (llama.cpp's POST /slots/ID?action=...)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from offload.errors import BadRequest, NotWritten
from specoffload.session.generation import SlotAction, SlotResult
from specoffload.slots.slot import Slot

_MOST_NAME_BYTES = 200  # file systems take 255, and a file being written has a longer name


def change_slot(
    slots: Sequence[Slot], folder: Path | None, number: int, action: SlotAction, filename: str
) -> SlotResult:
    """Raises BadRequest for a slot that does not exist or is busy, a name that leads out of
    `folder`, and a file that cannot be read; NotWritten for one that cannot be written."""
    if not 0 <= number < len(slots):
        raise BadRequest(f"slot {number} does not exist: there are slots 0 to {len(slots) - 1}")
    slot = slots[number]
    if slot.is_busy:
        raise BadRequest(f"slot {number} is at work on a request: try again when it is idle")
    began = perf_counter()
    n_tokens = len(slot.tokens)
    if action == "erase":
        slot.clear()
        return SlotResult(n_tokens, 0, perf_counter() - began)
    path = file_of(folder, filename)
    try:
        n_bytes = slot.write(path) if action == "save" else slot.read(path)
    except OSError as e:
        if action == "save":
            raise NotWritten(
                f"slot {number} is not saved to {filename} in --slot-save-path: {e.strerror or e}"
            ) from e
        raise BadRequest(f"{filename}: {e.strerror or e}") from e
    return SlotResult(len(slot.tokens), n_bytes, perf_counter() - began)


def file_of(folder: Path | None, filename: str) -> Path:
    """The file of that name in the folder. Raises BadRequest for a name that is a path."""
    if folder is None:
        raise BadRequest("no folder for saved slots: start the server with --slot-save-path")
    if not filename or filename in (".", "..") or "\0" in filename or "\\" in filename:
        raise BadRequest(f"filename {filename!r} is no name of a file")
    if len(os.fsencode(filename)) > _MOST_NAME_BYTES:
        raise BadRequest(f"filename has {len(filename)} letters: at most {_MOST_NAME_BYTES} bytes")
    if Path(filename).name != filename:
        raise BadRequest(f"filename {filename!r} must be a name, not a path")
    return folder / filename
