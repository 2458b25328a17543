"""Plans a model from its header alone, on this machine or on one that is described."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.device import choose_device
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.opening.start import Start, start_of
from offload.options import EngineOptions
from offload.plan.decision import decide
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.layout import Layout
from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES
from offload.probe import Here, probe, workers_of
from offload.remote.watch import watching
from offload.store.store import HostRoom, room_now
from offload.times.context_memory import context_memory
from offload.times.machine import CORE_FLOPS, TYPICAL, Machine
from specoffload.config.hardware import Hardware, hardware_of
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.config.speculation import SpecConfig
from specoffload.errors import UsageError
from specoffload.opening.choices import StartChoices
from specoffload.opening.header import target_facts
from specoffload.opening.kept_plan import disk_rate, kept_for_plan
from specoffload.opening.planning import Planned
from specoffload.opening.target import There, target_options


@dataclass(frozen=True)
class PlanTarget:
    """The machine to plan for: its devices, its rates, and words on the sizes of their memory."""

    found: Found
    machine: Machine
    vram_reason: str
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
    size, reason = _vram_there(config, hardware)
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
    return PlanTarget(Found(devices, takes_all=takes_all, workers=workers), machine, reason, vram)


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
    reason = "as asked for" if is_asked or devices[0].sim_bytes else f"{what}, less 1 GiB"
    if devices[0].kind is Kind.SIM and reason != "as asked for":
        reason = "sim:vram=SIZE sets one"
    return PlanTarget(replace(found, devices=devices), devices[0].machine, reason)


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


def host_room(own: PlanOptions, hardware: Hardware | None) -> HostRoom:
    """Return the host memory for streamed weights."""
    if own.ram.size_bytes is not None:
        return HostRoom(own.ram.size_bytes, "--ram")
    return room_now() if hardware is None else HostRoom(hardware.ram, "--hardware")


class Planner:
    """Plans a configuration with contexts of any size. It looks at the machine once."""

    def __init__(
        self,
        config: Config,
        spec: SpecConfig,
        own: PlanOptions | None = None,
        reasons: tuple[str, ...] = (),
    ) -> None:
        """`own` describes the machine to plan for; None: this one, as a start finds it.

        `spec` has the drafters that can draft; `reasons` say why others cannot. Raises
        BadModel or UsageError, or WorkerUnavailable for a worker that cannot be reached.
        """
        self._config, self._spec, self.facts = config, spec, target_facts(config)
        self._own = own or PlanOptions()
        self._hardware = None if self._own.hardware is None else hardware_of(self._own.hardware)
        self._ram = host_room(self._own, self._hardware)
        self.kept = kept_for_plan(self._config)
        self._here: Here | None = None  # None: `own` may describe another machine
        with watching(config.remote):
            if own is None:
                asked = self.choices(config.ctx_size)
                self._here = probe(self.facts, target_options(config, asked, self.kept))
                found = self._here.found
                self._machine = PlanTarget(found, found.devices[0].machine, "what is free")
            else:
                there = There(
                    machine_of(config, self._hardware, own), has_links=bool(own.link_bytes_per_s)
                )
                asked = self.choices(config.ctx_size)
                options = target_options(config, asked, self.kept, there)
                self._machine = target_of(self.facts, config, options, self._hardware, own)
        self._decided: dict[tuple[int | None, bool], tuple[EngineOptions, Layout]] = {}
        self._planned: dict[tuple[int | None, bool], Planned] = {}
        self._reasons = (*self.kept.reasons, *reasons)

    def with_changes(self, changes: Mapping[str, Any]) -> Planner:
        """A planner of the same model and machine, with other values of the configuration."""
        other = copy.copy(self)
        other._config = replace(self._config, **changes)
        other._decided, other._planned = {}, {}
        return other

    @property
    def n_cards(self) -> int:
        """Number of GPUs that a plan may divide the layers between as it likes, or 0."""
        found = self._machine.found
        streams = all(device.kind.streams for device in found.devices)
        if not streams or found.workers or self._config.tensor_split:
            return 0
        return len(found.devices)

    def with_cards(self, n: int) -> Planner:
        """A planner of the same model and machine with `n` GPUs. Further ones are like the last."""
        machine = self._machine
        found, n_there = machine.found, len(machine.found.devices)
        more = tuple(
            replace(found.devices[-1], name=f"{found.devices[-1].name} ({i + 1} of {n})")
            for i in range(n_there, n)
        )
        asked = self._config.each_device_bytes
        other = self.with_changes(
            {"each_device_bytes": (*asked[:n], *asked[-1:] * len(more)) if asked else ()}
        )
        described = machine.each_device_bytes
        other._machine = replace(
            machine,
            found=replace(found, devices=(*found.devices[:n], *more)),
            each_device_bytes=(*described[:n], *described[-1:] * len(more)),
        )
        return other

    def choices(self, n_ctx: int | None) -> StartChoices:
        """Return the choices of a start with a context of `n_ctx` tokens."""
        choices = replace(StartChoices.as_asked(self._config), spec=self._spec, n_ctx=n_ctx)
        if self._hardware is not None:
            return choices
        return choices.on_device(choose_device(self._config.device))

    def start(self, n_ctx: int | None) -> Start:
        """Return what an engine executes on this machine, with a context of `n_ctx` tokens."""
        assert self._here is not None, "a start needs this machine"
        options, layout = self._decide(n_ctx)
        return start_of(self.facts, options, self._here, layout)

    def planned(self, n_ctx: int | None, *, for_kept_mix: bool = False) -> Planned:
        """The plan with a context of `n_ctx` tokens. Raises DoesNotFit.

        With `for_kept_mix`, the plan is made for the mix of earlier runs, whatever --plan-for says.
        """
        for_kept_mix &= self._config.mix is not None  # else it is the kept one anyway
        key = n_ctx, for_kept_mix
        if key not in self._planned:
            _, layout = self._decide(n_ctx, for_kept_mix=for_kept_mix)
            self._planned[key] = self._shown(layout)
        return self._planned[key]

    def _decide(
        self, n_ctx: int | None, *, for_kept_mix: bool = False
    ) -> tuple[EngineOptions, Layout]:
        key = n_ctx, for_kept_mix
        if key not in self._decided:
            config = replace(self._config, mix=None) if for_kept_mix else self._config
            there = None if self._here is not None else self._there(self._machine)
            options = target_options(config, self.choices(n_ctx), self.kept, there)
            self._decided[key] = options, decide(self.facts, self._found, options.wanted)
        return self._decided[key]

    @property
    def _room(self) -> HostRoom | None:
        """The RAM for streamed weights, None if they stay in the page cache."""
        return None if self._config.mmap else self._ram

    def _shown(self, layout: Layout) -> Planned:
        room = self._room
        machine, reason = self._machine.machine, self._machine.vram_reason
        if layout.devices[0].kind is Kind.CPU and not layout.remote:
            machine = replace(machine, cpu_flops=self._config.threads_batch * CORE_FLOPS)
            return _on_cpu(layout, machine, self._reasons, room)
        if room is not None:
            taken_bytes = context_memory(layout.facts, layout.context).host_bytes
            taken_bytes += layout.devices[0].request.host_projector_bytes
            room = replace(room, available_bytes=max(0, room.available_bytes - taken_bytes))
        return Planned(layout, reason, self._reasons, room, self._own.hardware)

    def _there(self, target: PlanTarget) -> There:
        """The machine that `own` describes."""
        own, hardware, machine = self._own, self._hardware, target.machine
        each = target.each_device_bytes
        gpu_bytes = each[0] if each else 0
        if hardware is not None and self._config.device_bytes is None:
            gpu_bytes = hardware.vram
        return There(
            machine,
            is_typical=replace(machine, disk_bytes_per_s=TYPICAL.disk_bytes_per_s) == TYPICAL,
            is_this=hardware is None,
            has_links=bool(own.link_bytes_per_s),
            ram_bytes=own.ram.size_bytes,
            each_device_bytes=each,
            gpu_bytes=gpu_bytes,
        )

    @property
    def _found(self) -> Found:
        """The devices and the RAM to plan with. `own` may say how much RAM there is."""
        own, found, room = self._own, self._machine.found, self._room
        if self._here is not None or room is None:
            return found
        # --ram may name more memory than this machine has.
        most_bytes = max(room_now().available_bytes, room.available_bytes)
        is_there = self._hardware is not None and own.ram.size_bytes is None
        return replace(found, ram_bytes=room.available_bytes if is_there else most_bytes)

    @property
    def on_cpu(self) -> bool:
        """True if the plan is for this machine's CPU alone."""
        found = self._machine.found
        return not (found.devices[0].kind.streams or found.workers)

    @property
    def in_ram(self) -> bool:
        """True if a context is in this machine's RAM, as a simulated device has it too."""
        found = self._machine.found
        return found.devices[0].kind is not Kind.GPU and not found.workers

    @property
    def ram_bytes(self) -> int:
        """The RAM that is free, or that `own` names."""
        ram_bytes = self._own.ram.size_bytes
        return room_now().available_bytes if ram_bytes is None else ram_bytes


def _on_cpu(
    layout: Layout, machine: Machine, reasons: tuple[str, ...], room: HostRoom | None
) -> Planned:
    """Return the plan of libllama's CPU backend, which reads all weights in place."""
    (cpu,) = layout.devices
    machine = replace(
        machine,
        vram_bytes_per_s=machine.ram_bytes_per_s,
        gpu_flops=machine.cpu_flops,
        per_switch_s=0.0,
    )
    if room is not None:  # these come first
        left_bytes = room.available_bytes - cpu.plan.reserve_bytes - cpu.plan.resident_bytes
        room = replace(room, available_bytes=max(0, left_bytes))
    cpu = replace(cpu, request=replace(cpu.request, machine=machine))
    return Planned(layout.with_devices((cpu,)), "", reasons, room)
