"""Finds or describes the machine that `specoffload plan` plans for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.device import choose_device
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.options import EngineOptions
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES
from offload.probe import probe, workers_of
from offload.store.store import Room, room_now
from offload.times.machine import TYPICAL, Machine
from specoffload.config.hardware import Hardware
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.errors import UsageError
from specoffload.opening.kept_plan import disk_rate


@dataclass(frozen=True)
class PlanTarget:
    """The machine to plan for: its devices, its rates, and words on the sizes of their memory."""

    found: Found
    machine: Machine
    why_vram: str
    each_device_bytes: tuple[int, ...] = ()  # memory of described GPUs; (): these are the machine's


def machine_of(config: Config, hardware: Hardware | None, own: PlanOptions) -> Machine:
    """Return the rates of this machine, or of the one that is described."""
    there = TYPICAL if hardware is None else hardware.machine
    return replace(
        there,
        ram_bytes_per_s=own.ram.bytes_per_s or there.ram_bytes_per_s,
        disk_bytes_per_s=own.disk_bytes_per_s
        or (disk_rate(config) if hardware is None else hardware.disk_rate),
    )


def target_of(
    facts: ModelFacts, config: Config, options: EngineOptions, hardware: Hardware | None,
    own: PlanOptions,
) -> PlanTarget:  # fmt: skip
    """Return the devices of this machine or those described.

    `options` have the rates of `machine_of`. --vram and --link have a value for each device or one
    for all. Raises UsageError or DoesNotFit.
    """
    machine = options.wanted.machine
    vram, link = config.each_device_bytes, own.link_bytes_per_s
    n = max(len(vram), len(link))
    choice = choose_device(config.device)
    has_more_ram = (own.ram.size_bytes or 0) > room_now().available_bytes
    has_memory = bool(vram) or config.device_bytes is not None
    if link and not (has_memory or choice.wrapped or hardware is not None):
        raise UsageError(
            "--link describes a GPU, and this machine has none: give its memory too, as in "
            "--vram 24GiB --link 25GB/s --ram 128GiB, or name a machine with --hardware"
        )
    is_described = (
        hardware is not None
        or (has_more_ram and choice.on_gpu)
        or (has_memory and not choice.wrapped)
    )
    if not is_described:
        here = probe(facts, options).found
        if not here.devices[0].kind.streams:
            return PlanTarget(here, machine, "no GPU here")
        if n in (0, 1, len(here.devices)):
            return _here(here, config, link)
    size, why = _vram_there(config, hardware)
    n = max(1, n)
    vram = vram if len(vram) > 1 else (size,) * n
    links = link * n if len(link) == 1 else link or (machine.link_bytes_per_s,) * n
    if len(vram) != len(links):
        raise UsageError(
            f"--vram has {len(vram)} sizes and --link {len(links)} rates: give one for all devices "
            "or one for each"
        )
    devices = tuple(
        FoundDevice(
            "GPU" if n == 1 else f"GPU{i}",
            Kind.GPU,
            its_bytes + LEAST_FREE_BYTES,
            machine=replace(machine, link_bytes_per_s=rate),
        )
        for i, (its_bytes, rate) in enumerate(zip(vram, links, strict=True))
    )
    workers = workers_of(facts, options)
    takes_all = config.device.lower() != "auto"
    return PlanTarget(Found(devices, takes_all=takes_all, workers=workers), machine, why, vram)


def _here(found: Found, config: Config, link: tuple[float, ...]) -> PlanTarget:
    """Return this machine's devices, with links as fast as --link says."""
    devices = found.devices
    if link:
        rates = link * len(devices) if len(link) == 1 else link
        devices = tuple(
            replace(device, machine=replace(device.machine, link_bytes_per_s=rate))
            for device, rate in zip(devices, rates, strict=True)
        )
    is_asked = config.device_bytes is not None or config.each_device_bytes
    what = f"what {devices[0].name} has free" if len(devices) == 1 else "what is free"
    why = "as asked for" if is_asked or devices[0].sim_bytes else f"{what}, less 1 GiB"
    if devices[0].kind is Kind.SIM and why != "as asked for":
        why = "sim:vram=SIZE sets one"
    return PlanTarget(replace(found, devices=devices), devices[0].machine, why)


def _vram_there(config: Config, hardware: Hardware | None) -> tuple[int, str]:
    """Memory of a device that is not here, and where the number comes from. Raises DoesNotFit."""
    asked = config.device_bytes
    if asked is not None:
        return asked, "as asked for"
    if hardware is None:
        free_bytes = choose_device(config.device).device.memory_bytes()[0]
        return max(0, free_bytes - MARGIN_BYTES), "what is free, less 1 GiB"
    left = hardware.vram - MARGIN_BYTES
    if left <= 0:
        raise DoesNotFit("--hardware: vram must be more than 1 GiB, which a plan leaves free")
    return left, "by --hardware, less 1 GiB"


def host_room(own: PlanOptions, hardware: Hardware | None) -> Room:
    """Return the host memory for streamed weights."""
    if own.ram.size_bytes is not None:
        return Room(own.ram.size_bytes, "--ram")
    return room_now() if hardware is None else Room(hardware.ram, "--hardware")
