"""Plans a model from its header alone, on this machine or on one that is described."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

from offload.costs.table import CostTable, Entry, Way
from offload.device import DeviceChoice, choose_device, choose_devices
from offload.errors import DoesNotFit
from offload.model import ModelFacts, is_experts
from offload.model_file import read_facts
from offload.plan.context import ContextMemory, ContextOptions, context_memory, trained_context
from offload.plan.devices import Division, divide, plan_parts
from offload.plan.disk import DiskUse
from offload.plan.machine import (
    TYPICAL,
    Machine,
    ModelWork,
    best_s,
    cpu_s,
    least_decode_s,
    model_work,
    modelled,
    prefill_s,
    with_context,
)
from offload.plan.min_batch import VERIFY_MOST
from offload.plan.placement import MARGIN_BYTES, Plan, PlanRequest, make_plan, workload_of
from offload.plan.range_times import DeviceRoom
from offload.plan.ranges import by_shares, shares_for
from offload.plan.row_draft import MtpLayer
from offload.plan.row_draft import expected_tps as mtp_tps
from offload.plan.search import prompt_s
from offload.remote.division import divide_with, offers_of
from offload.store.store import Room, room_now
from offload.streaming.options import free_bytes
from specoffload.config.hardware import Hardware, hardware_of
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.errors import UsageError
from specoffload.kept_machine import kept_links
from specoffload.session.opening import disk_rate, kept_for_plan, target_options, with_usable_layers

_GIB = 1 << 30
ACCEPTED = 0.75  # assumed share of right tokens among those that MTP layers draft
_DEFAULT_VRAM = 24 * _GIB  # device memory assumed without a GPU


@dataclass(frozen=True)
class Planned:
    """A plan, and the conditions that it was made for."""

    facts: ModelFacts
    plan: Plan
    request: PlanRequest  # with the device memory and the ubatch of the plan
    why_vram: str
    complaints: tuple[str, ...] = ()  # why kept hits, or layers that should draft, are not used
    room: Room | None = None  # host memory for streamed weights; None: they stay in the page cache
    hardware: str | None = None  # the name given as --hardware
    name: str = "GPU"
    is_remote: bool = False  # True: activations cross its link, but no weights
    # The plan of each device's part of the model; () if one device computes the whole model.
    parts: tuple[Planned, ...] = ()

    @property
    def vram_bytes(self) -> int:
        return self.request.budget_bytes or 0

    @property
    def context(self) -> ContextOptions:
        assert self.request.context is not None
        return self.request.context

    @property
    def splits(self) -> bool:
        """True if layers may be split."""
        return bool(self.request.plan_for_splits)

    @cached_property
    def work(self) -> ModelWork:
        return model_work(self.facts, self.request.hits if self.splits else None)

    @cached_property
    def memory(self) -> ContextMemory:
        if not self.parts:
            return context_memory(self.facts, self.context)
        each = [astuple(part.memory) for part in self.parts]
        return ContextMemory(*map(sum, zip(*each, strict=True)))

    @property
    def machine(self) -> Machine:
        return self.request.machine

    @cached_property
    def expected(self) -> dict[str, float]:
        """Tokens/s that the machine model expects."""
        n_prompt = workload_of(self.context.n_ctx).n_prompt
        parts = self.parts or (self,)
        each_s = [
            float(prefill_s(p.machine, p.work, p.plan.sharing, n_prompt, p.plan.n_ubatch))
            for p in parts
        ]
        n_ubatches = max(1, math.ceil(n_prompt / self.plan.n_ubatch))
        seconds = prompt_s(each_s, parts, n_ubatches, overlaps=parts[-1].plan.computes_ubatches)
        found = {
            "decode_tps": 1 / self._decode_s(1),
            "full_context_decode_tps": 1 / self._decode_s(1, with_full_context=True),
            "prefill_tps": n_prompt / seconds,
        }
        if self.disk is not None:
            seconds = self.disk.prompt_s(n_prompt, self.plan.n_ubatch)
            found["prefill_tps"] = min(found["prefill_tps"], n_prompt / max(seconds, 1e-9))
        if self.plan.mtp is not None:
            last = self.parts[-1] if self.parts else self
            layers = MtpLayer(last.machine, self.facts, self.plan.mtp)
            found["mtp_decode_tps"] = mtp_tps(layers, self.work, self._decode_s, ACCEPTED)
        return found

    @cached_property
    def least_decode_tps(self) -> float:
        """Tokens/s of decoding if the hits are the fewest that are likely.

        These are the hits of experts that are used equally often. Equals `expected["decode_tps"]`
        if no hits are guessed, or if experts are read from the disk.
        """
        if not self.is_guess or self.disk is not None:
            return self.expected["decode_tps"]
        seconds = self._between_devices_s + sum(
            least_decode_s(p.machine, p.work, p.plan.sharing, hybrid=self.splits)
            for p in self.parts or (self,)
        )
        return min(1 / seconds, self.expected["decode_tps"])

    @property
    def _between_devices_s(self) -> float:
        """Seconds in which a decode goes from one device to the next."""
        return sum(
            p.machine.per_switch_s * (2 if p.is_remote else i > 0) for i, p in enumerate(self.parts)
        )

    def _decode_s(self, n_tokens: int, *, with_full_context: bool = False) -> float:
        """Seconds of a decode, with those for which it waits for the disk."""
        seconds = self._between_devices_s
        for p in self.parts or (self,):
            work = with_context(p.work, p.facts, self.context) if with_full_context else p.work
            seconds += float(best_s(p.machine, work, p.plan.sharing, n_tokens, hybrid=self.splits))
        return seconds if self.disk is None else self.disk.with_reads(seconds, n_tokens)

    @property
    def is_guess(self) -> bool:
        """True if the expected decodes rest on guessed hits."""
        sharing = self.plan.sharing
        if self.disk is not None and self.disk.work.hits is None:
            return True
        if self.work.hits is not None or not sharing.n_slots:
            return False
        decode_s = best_s(self.machine, self.work, sharing, 1, hybrid=self.splits)
        return bool(decode_s < cpu_s(self.machine, self.work, sharing, 1))

    @cached_property
    def disk(self) -> DiskUse | None:
        """Experts read from the disk, or None if the streamed weights fit host memory."""
        plan, room = self.plan, self.room
        if room is None or plan.streamed_bytes <= room.available_bytes:
            return None
        dense_bytes = sum(e.size_bytes for e in plan.streamed if not is_experts(e))
        memory_bytes = max(0, room.available_bytes - dense_bytes)
        work = model_work(self.facts, self.request.hits)
        return DiskUse(work, plan.sharing, memory_bytes, self.request.machine.disk_bytes_per_s)

    @cached_property
    def costs(self) -> CostTable:
        """Seconds of decodes by way and size, as the machine model expects them."""
        n_most = max(VERIFY_MOST, self.plan.n_ubatch)
        tables = [
            modelled(p.machine, p.work, p.plan.sharing, n_most, splits=self.splits)
            for p in self.parts or (self,)
        ]
        ways: dict[Way, dict[int, Entry]] = {}
        for way in dict.fromkeys(way for table in tables for way in table.ways):
            # A device on which nothing streams takes the same time in every way.
            its = [table.ways.get(way, table.ways[Way.IN_PLACE]) for table in tables]
            sizes = [n for n in its[0] if all(n in entries for entries in its)]
            ways[way] = {n: Entry(sum(entries[n].seconds for entries in its)) for n in sizes}
        if self.disk is None:
            return replace(tables[0], ways=ways)
        # Experts on the disk are read by our device, so no batch is left to libllama's CPU backend.
        if Way.STREAMED in ways:
            del ways[Way.IN_PLACE]
        return self.disk.table(replace(tables[0], ways=ways))


def planned_for(config: Config, own: PlanOptions) -> Planned:
    """The plan for this configuration on its device, or on the machine that `own` describes.

    Raises BadModel or DoesNotFit, or WorkerUnavailable for a worker that cannot be reached.
    """
    config.check_unused_workers()
    n_told, config = len(config.spec.reasons), with_usable_layers(config)
    facts = read_facts(config.model)
    kept = kept_for_plan(config)
    options = target_options(config, kept)
    hardware = None if own.hardware is None else hardware_of(own.hardware)
    there = TYPICAL if hardware is None else hardware.machine
    machine = replace(
        there,
        ram_bytes_per_s=own.ram.bytes_per_s or there.ram_bytes_per_s,
        disk_bytes_per_s=own.disk_bytes_per_s
        or (disk_rate(config) if hardware is None else hardware.disk_rate),
    )
    devices, why = _devices(config, hardware, own, machine)
    machine = devices[0].machine
    is_here = replace(machine, disk_bytes_per_s=TYPICAL.disk_bytes_per_s) == TYPICAL
    room: Room | None = room_now()
    if config.mmap:
        room = None
    elif own.ram.size_bytes is not None:
        room = Room(own.ram.size_bytes, "--ram")
    elif hardware is not None:
        room = Room(hardware.ram, "--hardware")
    context = replace(options, n_ctx=options.n_ctx or trained_context(facts, options.rope))
    request = replace(
        options.streaming,
        budget_bytes=devices[0].budget_bytes,
        context=context,
        most_ubatch=options.most_ubatch,
        machine=machine,
        decodes=kept.decodes if is_here else (),  # decode times of this machine
        host_bytes=None if room is None else room.available_bytes,
        mtp=options.mtp,
    )
    complaints = (*kept.complaints, *config.spec.reasons[n_told:])
    if len(devices) == 1 and not config.remote.is_used:
        plan = make_plan(facts, request)
        if len(config.tensor_split) > 1:
            plan = plan.because(shares_for(config.tensor_split, [devices[0].name or "GPU"])[1])
        request = replace(request, context=replace(context, n_ubatch=plan.n_ubatch))
        return Planned(facts, plan, request, why, complaints, room, own.hardware, devices[0].name)
    division = _division(config, facts, devices, request)
    context = replace(context, n_ubatch=division.plan.n_ubatch)
    parts = tuple(
        Planned(
            part.facts,
            part.plan,
            replace(part.request, context=context),
            why,
            room=room,
            name=part.room.name,
            is_remote=part.room.is_remote,
        )
        for part in division.parts
    )
    plan = division.plan
    if len(parts) == 1:
        plan = plan.because(*division.reasons)
    request = replace(
        request,
        budget_bytes=sum(part.vram_bytes for part in parts),
        context=context,
        reserve_bytes=sum(part.request.reserve_bytes for part in parts),
    )
    return Planned(facts, plan, request, why, complaints, room, own.hardware, parts=parts)


def _division(
    config: Config, facts: ModelFacts, devices: Sequence[DeviceRoom], request: PlanRequest
) -> Division:
    """Return the division that a start with these devices uses. Raises DoesNotFit or UsageError."""
    if config.remote.is_used:
        return _with_remote(config, facts, devices, request)
    names = [device.name.lower() for device in devices]
    wanted = (config.spec.of_draft.device or "").lower()
    draft_on = names.index(wanted) if wanted in names else None
    shares = config.tensor_split
    if not shares:
        use_all = config.device.lower() != "auto"
        return divide(facts, devices, request, use_all=use_all, draft_on=draft_on)
    shares, words = shares_for(shares, [device.name for device in devices])
    ranges = by_shares(facts.n_layers, shares)
    division = plan_parts(facts, devices, ranges, request, draft_on=draft_on or 0)
    return replace(division, reasons=(words,) if words else ())


def _with_remote(
    config: Config, facts: ModelFacts, devices: Sequence[DeviceRoom], request: PlanRequest
) -> Division:
    """Connect to the workers of --rpc, and divide the layers between their devices and these.

    Raises DoesNotFit or DeviceUnavailable.
    """
    options, rooms = config.remote, list(devices)
    offers = offers_of(options, None, asks=True)
    if options.order == "only":  # the CPU computes what does not fit
        rooms = []
    found = divide_with(facts, rooms, offers, request, options, shares=config.tensor_split)
    if not rooms:
        cpu = replace(
            request.machine, vram_bytes_per_s=request.machine.ram_bytes_per_s,
            gpu_flops=request.machine.cpu_flops,
        )  # fmt: skip
        rooms = [DeviceRoom("CPU", None, cpu, is_counted=False, is_remote=True)]
    here = list(zip(rooms, found.local, strict=True))
    there = list(zip(found.rooms, found.remote, strict=True))
    ordered = [*here, *there] if options.order in ("only", "last") else [*there, *here]
    division = plan_parts(
        facts, [room for room, _ in ordered], [layers for _, layers in ordered], request,
        draft_on=ordered.index(here[0]),
    )  # fmt: skip
    return replace(division, reasons=(f"{division.words}: layers are divided {found.why}",))


def _devices(
    config: Config, hardware: Hardware | None, own: PlanOptions, machine: Machine
) -> tuple[list[DeviceRoom], str]:
    """Return the devices to plan for, and words on the source of their memory sizes.

    --vram and --link have a value for each device or one for all. Raises UsageError or DoesNotFit.
    """
    vram, link = config.streaming.each_device_bytes, own.link_bytes_per_s
    n, why, names = max(len(vram), len(link)), "as asked for", [""]
    if hardware is None:
        choices = choose_devices(config.device, all_gpus=not config.tensor_split)
        if len(choices) > 1 and n in (0, 1, len(choices)):
            n, names = len(choices), [choice.name for choice in choices]
            if not vram and config.streaming.device_bytes is None:
                vram = tuple(_free_bytes(choice) for choice in choices)
                why = "what is free, less 1 GiB"
            kept = kept_links(choices, config.spec.profile_dir if config.spec.use_profile else None)
            if not link and kept is not None:
                link = tuple(kept.together)
    n = max(1, n)
    if len(names) != n:
        names = ["GPU"] if n == 1 else [f"GPU{i}" for i in range(n)]
    if config.remote.is_used and names == [""]:
        names = ["GPU"]
    if len(vram) <= 1:
        size, why = _vram(config, hardware)
        vram = (size,) * n
    link = link * n if len(link) == 1 else link or (machine.link_bytes_per_s,) * n
    if len(vram) != len(link):
        raise UsageError(
            f"--vram has {len(vram)} sizes and --link {len(link)} rates: give one for all devices "
            "or one for each"
        )
    return [
        DeviceRoom(name, size, replace(machine, link_bytes_per_s=rate))
        for name, size, rate in zip(names, vram, link, strict=True)
    ], why


def _free_bytes(choice: DeviceChoice) -> int:
    limit_bytes = None if choice.sim is None else choice.sim.vram_bytes
    return limit_bytes or free_bytes(choice)


def _vram(config: Config, hardware: Hardware | None) -> tuple[int, str]:
    """Device memory to plan for, and where the number comes from. Raises DoesNotFit."""
    asked = config.streaming.device_bytes
    if asked is None and hardware is not None:
        left = hardware.vram - MARGIN_BYTES
        if left <= 0:
            raise DoesNotFit("--hardware: vram must be more than 1 GiB, which a plan leaves free")
        return left, "by --hardware, less 1 GiB"
    choice = choose_device(config.device)
    if asked is None and choice.sim is not None:
        asked = choice.sim.vram_bytes
    if asked is not None:
        return asked, "as asked for"
    if choice.on_gpu:
        return free_bytes(choice), f"what {choice.name} has free, less 1 GiB"
    return _DEFAULT_VRAM, "no GPU here: 24 GiB assumed (--vram)"
