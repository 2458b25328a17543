"""Finds out what this machine has: devices, free memory, workers' offers and the library's build.

Decisions read only what was found (`Found`), and do not ask the system again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offload.device import DeviceChoice, choose_device, start_devices
from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.cuda_driver import most_batch_tokens
from offload.ggml.library.lib import library
from offload.model import ModelFacts
from offload.options import EngineOptions
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.wanted import Wanted
from offload.remote.hello import WorkerFacts
from offload.remote.offers import Offer, offers_of
from offload.remote.speed import measured_speed
from offload.store.store import room_now
from offload.times.machine import Machine


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


def probe(facts: ModelFacts, options: EngineOptions) -> Here:
    """Look where the options say at the machine, and connect to workers.

    Raises DeviceUnavailable, LibraryMismatch or WorkerUnavailable.
    """
    wanted, shares = options.wanted, options.wanted.tensor_split
    is_planned = wanted.wrapped and not shares and not options.remote.is_used
    choices = start_devices(
        options.device, shares, has_workers=options.remote.is_used, wraps=wanted.wrapped
    )
    rates: Sequence[float] = ()
    if len(choices) > 1 and options.measure_links is not None and wanted.wrapped:
        rates = options.measure_links(choices)
    devices = [found_device(choice, wanted.machine) for choice in choices]
    if rates:
        devices = [
            replace(device, machine=replace(device.machine, link_bytes_per_s=rate))
            for device, rate in zip(devices, rates, strict=True)
        ]
    offers = _offers(facts, options)
    workers = [offer.found(wanted.machine) for offer in offers]
    unmeasured = ""
    if offers and not shares and choices[0].wrapped and all(o.device for o in offers):
        try:
            devices, workers = _with_speeds(choices, devices, offers, workers, wanted)
        except (DoesNotFit, DeviceFailed) as e:
            unmeasured = str(e)
    drafts_on = wanted.draft_device if wanted.reserve_bytes else None
    found = Found(
        tuple(devices),
        takes_all=options.device.lower() != "auto" or not is_planned,
        workers=tuple(workers),
        ram_bytes=room_now().available_bytes,
        has_mtp=library().has_nextn,
        plans_graphs=library().has_graph_reserve,
        draft_in_ram=drafts_on is not None and not choose_device(drafts_on).on_gpu,
        unmeasured=unmeasured,
    )
    return Here(found, choices, tuple(offers))


def workers_of(facts: ModelFacts, options: EngineOptions) -> tuple[FoundDevice, ...]:
    """Return only the devices that workers offer, to plan for a machine that is not this one."""
    offers, machine = _offers(facts, options), options.wanted.machine
    workers = [offer.found(machine) for offer in offers]
    if not options.wanted.tensor_split and all(offer.device for offer in offers):
        workers = [_with_speed(*pair, machine) for pair in zip(workers, offers, strict=True)]
    return tuple(workers)


def _offers(facts: ModelFacts, options: EngineOptions) -> list[Offer]:
    if not options.remote.is_used:
        return []
    wraps = options.wanted.wrapped
    return offers_of(options.remote, WorkerFacts.of(facts) if wraps else None, asks=wraps)


def found_device(choice: DeviceChoice, machine: Machine) -> FoundDevice:
    """Return what the device has now."""
    sim_bytes = None if choice.sim is None else choice.sim.vram_bytes
    kind = Kind.GPU if choice.on_gpu else Kind.SIM if choice.wrapped else Kind.CPU
    free_bytes = choice.device.memory_bytes()[0]
    return FoundDevice(
        choice.name, kind, free_bytes, sim_bytes, machine,
        shares_buffers=choice.device.backend.shares_buffers,
        most_tokens=most_batch_tokens(choice.device),
    )  # fmt: skip


def _with_speeds(
    choices: Sequence[DeviceChoice],
    devices: Sequence[FoundDevice],
    offers: Sequence[Offer],
    workers: Sequence[FoundDevice],
    wanted: Wanted,
) -> tuple[list[FoundDevice], list[FoundDevice]]:
    """Return all devices with measured rates. Raises DoesNotFit or DeviceFailed."""
    local = []
    for device, choice in zip(devices, choices if wanted.wrapped else (), strict=False):
        speed = measured_speed(choice.device)
        machine = speed.on(device.machine, is_remote=False)
        local.append(replace(device, machine=machine, measured=speed.words))
    remote = [_with_speed(*pair, wanted.machine) for pair in zip(workers, offers, strict=True)]
    return local or list(devices), remote


def _with_speed(worker: FoundDevice, offer: Offer, machine: Machine) -> FoundDevice:
    assert offer.device is not None
    speed = measured_speed(offer.device)
    return replace(worker, machine=speed.on(machine, is_remote=True), measured=speed.words)
