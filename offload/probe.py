"""Finds out what this machine has: devices, free memory, workers' offers and the library's build.

Decisions read only what was found (`Found`), and do not ask the system again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.device import DeviceChoice, choose_device, choose_devices
from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.library.lib import library
from offload.model import ModelFacts
from offload.plan.found import Found, FoundDevice, Kind
from offload.remote.address import RemoteOptions
from offload.remote.hello import WorkerFacts
from offload.remote.offers import Offer, offers_of
from offload.remote.speed import measured_speed
from offload.store.store import room_now
from offload.times.machine import Machine

# Returns the bytes/s of several devices' links while all of them copy.
MeasureLinks = Callable[[Sequence[DeviceChoice]], Sequence[float]]


@dataclass(frozen=True)
class Here:
    """What was found, with the library's handles of these devices."""

    found: Found
    choices: tuple[DeviceChoice, ...]
    offers: tuple[Offer, ...] = ()

    def leaving(self, driver_bytes: Mapping[str, int]) -> Here:
        """Return what was found, with memory left to the drivers of devices by name."""
        devices = tuple(
            replace(device, driver_bytes=driver_bytes.get(device.name, 0))
            for device in self.found.devices
        )
        return replace(self, found=replace(self.found, devices=devices))

    def choice(self, name: str) -> DeviceChoice:
        """The local device of that name in `found`."""
        return next(choice for choice in self.choices if choice.name == name)

    def offer(self, name: str) -> Offer:
        """The remote device of that name in `found`."""
        return next(offer for offer in self.offers if offer.name == name)


@dataclass(frozen=True)
class Asked:
    """The flags that say where to look."""

    device: str = "auto"  # names of devices, separated by commas
    shares: tuple[float, ...] = ()
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    draft_device: str | None = None
    wraps: bool = True
    machine: Machine = field(default_factory=Machine)  # rates that are not measured
    measure_links: MeasureLinks | None = None  # None: typical rates


def probe(facts: ModelFacts, asked: Asked) -> Here:
    """Look at the machine, and connect to workers.

    Raises DeviceUnavailable, LibraryMismatch or WorkerUnavailable.
    """
    is_planned = asked.wraps and not asked.shares and not asked.remote.is_used
    choices = choose_devices(asked.device, all_gpus=len(asked.shares) > 1 or is_planned)
    rates: Sequence[float] = ()
    if len(choices) > 1 and asked.measure_links is not None and asked.wraps:
        rates = asked.measure_links(choices)
    devices = [found_device(choice, asked.machine) for choice in choices]
    if rates:
        devices = [
            replace(device, machine=replace(device.machine, link_bytes_per_s=rate))
            for device, rate in zip(devices, rates, strict=True)
        ]
    offers = _offers(facts, asked)
    workers = [offer.found(asked.machine) for offer in offers]
    unmeasured = ""
    if offers and not asked.shares and choices[0].wrapped and all(o.device for o in offers):
        try:
            devices, workers = _with_speeds(choices, devices, offers, workers, asked)
        except (DoesNotFit, DeviceFailed) as e:
            unmeasured = str(e)
    wanted = asked.draft_device
    found = Found(
        tuple(devices),
        takes_all=asked.device.lower() != "auto" or not is_planned,
        workers=tuple(workers),
        ram_bytes=room_now().available_bytes,
        has_mtp=library().has_nextn,
        plans_graphs=library().has_graph_reserve,
        draft_in_ram=wanted is not None and not choose_device(wanted).on_gpu,
        unmeasured=unmeasured,
    )
    return Here(found, choices, tuple(offers))


def workers_of(facts: ModelFacts, asked: Asked) -> tuple[FoundDevice, ...]:
    """Return only the devices that workers offer, to plan for a machine that is not this one."""
    offers = _offers(facts, asked)
    workers = [offer.found(asked.machine) for offer in offers]
    if not asked.shares and all(offer.device for offer in offers):
        workers = [_with_speed(*pair, asked.machine) for pair in zip(workers, offers, strict=True)]
    return tuple(workers)


def _offers(facts: ModelFacts, asked: Asked) -> list[Offer]:
    if not asked.remote.is_used:
        return []
    mine = WorkerFacts.of(facts) if asked.wraps else None
    return offers_of(asked.remote, mine, asks=asked.wraps)


def found_device(choice: DeviceChoice, machine: Machine) -> FoundDevice:
    """Return what the device has now."""
    sim_bytes = None if choice.sim is None else choice.sim.vram_bytes
    kind = Kind.GPU if choice.on_gpu else Kind.SIM if choice.wrapped else Kind.CPU
    free_bytes = choice.device.memory_bytes()[0]
    return FoundDevice(
        choice.name, kind, free_bytes, sim_bytes, machine,
        shares_buffers=choice.device.backend.shares_buffers,
    )  # fmt: skip


def _with_speeds(
    choices: Sequence[DeviceChoice],
    devices: Sequence[FoundDevice],
    offers: Sequence[Offer],
    workers: Sequence[FoundDevice],
    asked: Asked,
) -> tuple[list[FoundDevice], list[FoundDevice]]:
    """Return all devices with measured rates. Raises DoesNotFit or DeviceFailed."""
    local = []
    for device, choice in zip(devices, choices if asked.wraps else (), strict=False):
        speed = measured_speed(choice.device)
        machine = speed.on(device.machine, is_remote=False)
        local.append(replace(device, machine=machine, measured=speed.words))
    remote = [_with_speed(*pair, asked.machine) for pair in zip(workers, offers, strict=True)]
    return local or list(devices), remote


def _with_speed(worker: FoundDevice, offer: Offer, machine: Machine) -> FoundDevice:
    assert offer.device is not None
    speed = measured_speed(offer.device)
    return replace(worker, machine=speed.on(machine, is_remote=True), measured=speed.words)
