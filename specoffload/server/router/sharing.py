"""Divides the memory of a machine among models that are to be open together. Pure.

Each start plans by itself, with the device memory that it is given. So a model's share is decided
before the first one is opened, and does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """The memory that a model needs by its plans, in bytes.

    `least_device_bytes` is the smallest device memory that works, and `most_device_bytes` is what
    the model can use. `host_bytes` is RAM of its weights, whatever its share of the device is.
    """

    least_device_bytes: int
    most_device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Room:
    """Memory of a machine that models may take, in bytes."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Sharing:
    """Device bytes of each model that shares. Models without a share are opened alone."""

    needs: Mapping[str, Needs]
    room: Room
    most: int  # models that are open at once; 0: no limit
    device_bytes: Mapping[str, int]

    def fits(self, names: Sequence[str]) -> bool:
        """True if these models may be open together. Models without a plan are not refused."""
        if self.most and len(names) > self.most:
            return False
        planned = [name for name in names if name in self.needs]
        if len(planned) > 1 and any(name not in self.device_bytes for name in planned):
            return False
        device_bytes = sum(self.device_bytes.get(name, 0) for name in planned)
        host_bytes = sum(self.needs[name].host_bytes for name in planned)
        alone = len(planned) <= 1
        return alone or (
            device_bytes <= self.room.device_bytes and host_bytes <= self.room.host_bytes
        )


def share(needs: Mapping[str, Needs], room: Room, most: int) -> Sharing:
    """Return what each model gets, so that any `most` of them fit together if possible.

    All get the same, but at least what works, and at most what they can use. A model that fits
    beside no other one gets no share.
    """
    sharing = {name: its for name, its in needs.items() if _has_company(name, needs, room)}
    n = len(sharing) if most == 0 else most
    low, high = 0, room.device_bytes
    while low < high:  # find the highest level at which the neediest models fit together
        level = (low + high + 1) // 2
        neediest = sorted((_at(level, its) for its in sharing.values()), reverse=True)[:n]
        if sum(neediest) <= room.device_bytes:
            low = level
        else:
            high = level - 1
    return Sharing(needs, room, most, {name: _at(low, its) for name, its in sharing.items()})


def _at(level_bytes: int, needs: Needs) -> int:
    return max(needs.least_device_bytes, min(level_bytes, needs.most_device_bytes))


def _has_company(name: str, needs: Mapping[str, Needs], room: Room) -> bool:
    own = needs[name]
    return any(
        own.least_device_bytes + other.least_device_bytes <= room.device_bytes
        and own.host_bytes + other.host_bytes <= room.host_bytes
        for its, other in needs.items()
        if its != name
    )
