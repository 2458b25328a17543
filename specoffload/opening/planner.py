"""Plans a model from its header alone, on this machine or on one that is described."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offload.model_file import read_facts
from offload.opening.start import Start, start_of
from offload.options import EngineOptions
from offload.plan.decision import decide
from offload.plan.found import Found, Kind
from offload.plan.layout import Layout
from offload.probe import Here, probe
from offload.remote.watch import watching
from offload.store.store import Room, room_now
from offload.times.context import context_memory
from offload.times.machine import CORE_FLOPS, TYPICAL
from specoffload.config.hardware import hardware_of
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.opening.kept_plan import kept_for_plan
from specoffload.opening.plan_target import PlanTarget, host_room, machine_of, target_of
from specoffload.opening.planning import Planned, shown, shown_on_cpu
from specoffload.opening.target import There, target_options


class Planner:
    """Plans a configuration with contexts of any size. It looks at the machine once."""

    def __init__(
        self, config: Config, own: PlanOptions | None = None, complaints: tuple[str, ...] = ()
    ) -> None:
        """`own` describes the machine to plan for; None: this one, as a start finds it.

        The drafters of `config` must be usable; `complaints` say why others are not. Raises
        BadModel or UsageError, or WorkerUnavailable for a worker that cannot be reached.
        """
        self._config, self.facts = config, read_facts(config.model)
        self._own = own or PlanOptions()
        self._hardware = None if self._own.hardware is None else hardware_of(self._own.hardware)
        self._ram = host_room(self._own, self._hardware)
        self.kept = kept_for_plan(self._config)
        self._here: Here | None = None  # None: `own` may describe another machine
        with watching(config.remote):
            if own is None:
                self._here = probe(self.facts, target_options(config, self.kept))
                found = self._here.found
                self._machine = PlanTarget(found, found.devices[0].machine, "what is free")
            else:
                there = There(
                    machine_of(config, self._hardware, own), has_links=bool(own.link_bytes_per_s)
                )
                options = target_options(config, self.kept, there)
                self._machine = target_of(self.facts, config, options, self._hardware, own)
        self._decided: dict[tuple[int | None, bool], tuple[EngineOptions, Layout]] = {}
        self._planned: dict[tuple[int | None, bool], Planned] = {}
        self._complaints = (*self.kept.complaints, *complaints)

    def with_changes(self, changes: Mapping[str, Any]) -> Planner:
        """A planner of the same model and machine, with other values of the configuration."""
        other = copy.copy(self)
        other._config = replace(self._config, **changes)
        other._decided, other._planned = {}, {}
        return other

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
        config = self._config
        key = n_ctx, for_kept_mix
        if key not in self._decided:
            if for_kept_mix:
                config = replace(config, mix=None)
            # A context that the user did not ask for is one that the GPU has room for.
            if config.ctx_size is None and config.kv_offload is None:
                config = replace(config, kv_offload=True)
            there = None if self._here is not None else self._there(self._machine)
            options = target_options(replace(config, ctx_size=n_ctx), self.kept, there)
            self._decided[key] = options, decide(self.facts, self._found, options.wanted)
        return self._decided[key]

    @property
    def _room(self) -> Room | None:
        """The RAM for streamed weights, None if they stay in the page cache."""
        return None if self._config.mmap else self._ram

    def _shown(self, layout: Layout) -> Planned:
        room = self._room
        machine, why = self._machine.machine, self._machine.why_vram
        if layout.devices[0].kind is Kind.CPU and not layout.remote:
            machine = replace(machine, cpu_flops=self._config.threads_batch * CORE_FLOPS)
            return shown_on_cpu(layout, machine, self._complaints, room)
        if room is not None:
            taken_bytes = context_memory(layout.facts, layout.context).host_bytes
            taken_bytes += layout.devices[0].request.host_projector_bytes
            room = replace(room, available_bytes=max(0, room.available_bytes - taken_bytes))
        return shown(layout, why, self._complaints, room, self._own.hardware)

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
