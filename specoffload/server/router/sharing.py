"""Divides the memory of a machine among models that are to be open together. Pure.

Each start plans by itself, with the memory that it is given. So a model's share is decided before
the first one is opened, and does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_PROMPT_SHARE = 16  # 1 / (part of the RAM that kept prompts of a model get in any case)


@dataclass(frozen=True)
class Needs:
    """The memory that a model needs by its plans, in bytes.

    `least_device_bytes` is the smallest device memory that works, and `most_device_bytes` is what
    the model can use. `host_bytes` is RAM of its weights, whatever its share of the device is.
    `prompt_bytes` is the RAM that its kept prompts may take, if there is as much.
    """

    least_device_bytes: int
    most_device_bytes: int
    host_bytes: int
    prompt_bytes: int = 0


@dataclass(frozen=True)
class Room:
    """Memory of a machine that models may take, in bytes. `device_bytes` is of all devices."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Share:
    """A model's memory: of each device that it uses, and RAM for its kept prompts."""

    each_device_bytes: tuple[int, ...]
    prompt_bytes: int


@dataclass(frozen=True)
class SharedBytes:
    """Device bytes of each model that shares. Models without a share are opened alone.

    A model has the same part of each device. `devices` has the memory of the devices that a model
    uses, in bytes. `prompt_bytes` are of each model that shares, and `shelf_bytes` of the kept
    prompts of all closed models.
    """

    needs: Mapping[str, Needs]
    room: Room
    device_bytes: Mapping[str, int]
    prompt_bytes: Mapping[str, int] = field(default_factory=dict)
    shelf_bytes: int = 0
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def fits(self, names: Sequence[str]) -> bool:
        """True if these models may be open together. Models without a plan are not refused."""
        planned = [name for name in names if name in self.needs]
        if len(planned) <= 1:
            return True
        if any(name not in self.device_bytes for name in planned):
            return False
        device_bytes = sum(self.device_bytes[name] for name in planned)
        host_bytes = sum(self.needs[n].host_bytes + self.prompt_bytes[n] for n in planned)
        host_bytes += self.shelf_bytes if len(self.needs) > len(planned) else 0
        return device_bytes <= self.room.device_bytes and host_bytes <= self.room.host_bytes

    def share_of(self, name: str) -> Share | None:
        """Return the share of a model, None if it is opened alone."""
        if name not in self.device_bytes:
            return None
        share, whole = self.device_bytes[name], self.room.device_bytes
        each = tuple(n_bytes * share // whole for n_bytes in self.devices.get(name, ()))
        return Share(each, self.prompt_bytes[name])


def share(
    needs: Mapping[str, Needs],
    room: Room,
    most: int,
    shelf_bytes: int = 0,
    devices: Mapping[str, tuple[int, ...]] | None = None,
) -> SharedBytes:
    """Return what each model gets, so that any `most` of them fit together if possible (0: all).

    All get the same, but at least what works, and at most what they can use. A model that fits
    beside no other one gets no share. `shelf_bytes` are what the kept prompts of all closed models
    may take. Those of each model, and those of the closed ones, get a sixteenth of the RAM, or more
    if weights leave more.
    """
    least_bytes = room.host_bytes // _PROMPT_SHARE
    sharing = {
        name: need
        for name, need in needs.items()
        if _has_company(name, needs, room, least_bytes, shelf_bytes)
    }
    n = len(sharing) if most == 0 else min(most, len(sharing))
    low, high = 0, room.device_bytes
    while low < high:  # find the highest level at which the neediest models fit together
        level = (low + high + 1) // 2
        neediest = sorted((_at(level, need) for need in sharing.values()), reverse=True)[:n]
        if sum(neediest) <= room.device_bytes:
            low = level
        else:
            high = level - 1
    largest = sorted((need.host_bytes for need in sharing.values()), reverse=True)[:n]
    left_bytes = max(0, room.host_bytes - sum(largest))
    part_bytes = max(least_bytes, left_bytes // (n + 1))
    return SharedBytes(
        needs,
        room,
        {name: _at(low, need) for name, need in sharing.items()},
        {name: min(part_bytes, need.prompt_bytes) for name, need in sharing.items()},
        min(part_bytes, shelf_bytes) if sharing else shelf_bytes,
        devices or {},
    )


def _at(level_bytes: int, needs: Needs) -> int:
    return max(needs.least_device_bytes, min(level_bytes, needs.most_device_bytes))


def _has_company(
    name: str, needs: Mapping[str, Needs], room: Room, least_bytes: int, shelf_bytes: int
) -> bool:
    """True if the model fits beside another one, with `least_bytes` for the prompts of each."""
    own = needs[name]
    shelf_bytes = min(shelf_bytes, least_bytes) if len(needs) > 2 else 0

    def of_host(need: Needs) -> int:
        return need.host_bytes + min(need.prompt_bytes, least_bytes)

    return any(
        own.least_device_bytes + other.least_device_bytes <= room.device_bytes
        and of_host(own) + of_host(other) + shelf_bytes <= room.host_bytes
        for beside, other in needs.items()
        if beside != name
    )
