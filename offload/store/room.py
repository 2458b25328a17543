"""The memory that the streamed weights may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from numa.machine import read_limits
from offload.errors import DoesNotFit


@dataclass(frozen=True)
class Room:
    """The anonymous memory that this process may still take, and what limits it."""

    available_bytes: int
    limited_by: str


def room_now(root: Path = Path("/")) -> Room:
    """The lesser of what the machine has available and what the control group allows.

    Of the group's limit only this process's own memory is taken off: the page cache counts against
    it too, but gives way.
    """
    machine = Room(psutil.virtual_memory().available, "free memory")
    limit = read_limits(root).memory_bytes
    if limit is None:
        return machine
    used = psutil.Process().memory_info()
    left = max(0, limit - (used.rss - used.shared))
    return min(
        machine,
        Room(left, f"the control group's limit of {limit / 2**30:.1f} GiB"),
        key=lambda room: room.available_bytes,
    )


def check_room(needed_bytes: int, room: Room) -> None:
    """Raises DoesNotFit when anonymous memory for the streamed weights would not suffice."""
    if needed_bytes > room.available_bytes:
        raise DoesNotFit(
            f"the streamed weights need {needed_bytes / 2**30:.2f} GiB of memory, but "
            f"{room.available_bytes / 2**30:.2f} GiB are available ({room.limited_by}); use --mmap "
            "to keep them in the page cache"
        )
