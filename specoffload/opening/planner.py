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
from offload.plan.found import Found, Kind, Wanted
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
from specoffload.opening.plan_target import PlanTarget, host_room, target_of
from specoffload.opening.planning import Planned, shown, shown_on_cpu
from specoffload.opening.target import target_options, with_projector_there


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
        options = target_options(self._config, self.kept)
        self._here: Here | None = None  # None: `own` may describe another machine
        with watching(config.remote):
            if own is None:
                self._here = probe(self.facts, options.asked)
                found = self._here.found
                self._machine = PlanTarget(found, {}), found.devices[0].machine, "what is free"
            else:
                self._machine = target_of(self.facts, self._config, options, self._hardware, own)
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
        for_kept_mix &= self._config.streaming.mix is not None  # else it is the kept one anyway
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
                config = replace(config, streaming=replace(config.streaming, mix=None))
            # A context that the user did not ask for is one that the GPU has room for.
            if config.ctx_size is None and config.kv_offload is None:
                config = replace(config, kv_offload=True)
            options = target_options(replace(config, ctx_size=n_ctx), self.kept)
            wanted, found = options.wanted, self._machine[0].found
            if self._here is None:
                wanted, found = self._described(wanted, self._room)
            self._decided[key] = options, decide(self.facts, found, wanted)
        return self._decided[key]

    @property
    def _room(self) -> Room | None:
        """The RAM for streamed weights, None if they stay in the page cache."""
        return None if self._config.mmap else self._ram

    def _shown(self, layout: Layout) -> Planned:
        room = self._room
        _, machine, why = self._machine
        if layout.devices[0].kind is Kind.CPU and not layout.remote:
            machine = replace(machine, cpu_flops=self._config.threads_batch * CORE_FLOPS)
            return shown_on_cpu(layout, machine, self._complaints, room)
        if room is not None:
            taken_bytes = context_memory(layout.facts, layout.context).host_bytes
            taken_bytes += layout.devices[0].request.host_projector_bytes
            room = replace(room, available_bytes=max(0, room.available_bytes - taken_bytes))
        return shown(layout, why, self._complaints, room, self._own.hardware)

    def _described(self, wanted: Wanted, room: Room | None) -> tuple[Wanted, Found]:
        """Return `wanted` and what is found with what the options of `plan` say of the machine."""
        own, hardware = self._own, self._hardware
        here, machine, _ = self._machine
        is_here = replace(machine, disk_bytes_per_s=TYPICAL.disk_bytes_per_s) == TYPICAL
        request = replace(
            wanted.request,
            machine=machine,
            decodes=self.kept.decodes if is_here else (),  # decode times of this machine
            tuned_ubatch=wanted.request.tuned_ubatch if is_here and hardware is None else None,
        )
        if here.wanted:
            device_bytes = here.wanted["device_bytes"]
            if hardware is not None and self._config.streaming.device_bytes is None:
                device_bytes = hardware.vram
            n = len(here.found.devices)
            request = with_projector_there(request, self._config, device_bytes, n)
        wanted = replace(wanted, **here.wanted, request=request, ram_bytes=own.ram.size_bytes)
        if room is None:
            return wanted, here.found
        # --ram may name more memory than this machine has.
        most_bytes = max(room_now().available_bytes, room.available_bytes)
        is_there = hardware is not None and own.ram.size_bytes is None
        ram_bytes = room.available_bytes if is_there else most_bytes
        return wanted, replace(here.found, ram_bytes=ram_bytes)

    @property
    def on_cpu(self) -> bool:
        """True if the plan is for this machine's CPU alone."""
        found = self._machine[0].found
        return not (found.devices[0].kind.streams or found.workers)

    @property
    def in_ram(self) -> bool:
        """True if a context is in this machine's RAM, as a simulated device has it too."""
        found = self._machine[0].found
        return found.devices[0].kind is not Kind.GPU and not found.workers

    @property
    def ram_bytes(self) -> int:
        """The RAM that is free, or that `own` names."""
        ram_bytes = self._own.ram.size_bytes
        return room_now().available_bytes if ram_bytes is None else ram_bytes
