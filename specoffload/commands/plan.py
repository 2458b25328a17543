"""`specoffload plan`: shows the plan of a model, from its header alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from typing import Any

from offload.costs.table import CostTable, Entry, Way
from offload.device import DeviceChoice, choose_device, choose_devices
from offload.errors import DoesNotFit
from offload.model import ModelFacts, is_experts, layer_of
from offload.model_file import read_facts
from offload.plan.context import ContextMemory, ContextOptions, context_memory
from offload.plan.devices import Division, divide, plan_parts
from offload.plan.disk import DiskUse
from offload.plan.machine import (
    TYPICAL,
    Machine,
    ModelWork,
    best_s,
    cpu_s,
    expected_hits,
    model_work,
    modelled,
    prefill_s,
)
from offload.plan.min_batch import NEVER, VERIFY_MOST
from offload.plan.placement import MARGIN_BYTES, Plan, PlanRequest, make_plan, workload_of
from offload.plan.range_times import DeviceRoom
from offload.plan.ranges import by_shares, shares_for
from offload.plan.row_draft import MtpLayer
from offload.plan.row_draft import expected_tps as mtp_tps
from offload.plan.search import prompt_s
from offload.plan.sharing import ring_slots
from offload.plan.split_room import hit_words
from offload.remote.division import divide_with, offers_of
from offload.store.store import Room, room_now
from offload.streaming.options import free_bytes
from specoffload import report
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
        found = {"decode_tps": 1 / self._decode_s(1), "prefill_tps": n_prompt / seconds}
        if self.disk is not None:
            seconds = self.disk.prompt_s(n_prompt, self.plan.n_ubatch)
            found["prefill_tps"] = min(found["prefill_tps"], n_prompt / max(seconds, 1e-9))
        if self.plan.mtp is not None:
            last = self.parts[-1] if self.parts else self
            layers = MtpLayer(last.machine, self.facts, self.plan.mtp)
            found["mtp_decode_tps"] = mtp_tps(layers, self.work, self._decode_s, ACCEPTED)
        return found

    def _decode_s(self, n_tokens: int) -> float:
        """Seconds of a decode, with those for which it waits for the disk."""
        seconds = sum(
            float(best_s(p.machine, p.work, p.plan.sharing, n_tokens, hybrid=self.splits))
            for p in self.parts or (self,)
        )
        seconds += sum(
            p.machine.per_switch_s * (2 if p.is_remote else i > 0) for i, p in enumerate(self.parts)
        )
        return seconds if self.disk is None else self.disk.with_reads(seconds, n_tokens)

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
        table = replace(tables[0], ways=ways)
        return table if self.disk is None else self.disk.table(table)


def plan_config(config: Config, own: PlanOptions) -> None:
    """Print the plan of a command line that `serve` would take, without opening anything.

    Raises BadModel or DoesNotFit.
    """
    planned = planned_for(config, own)
    _show(planned)
    report.data(as_dict(planned))


def planned_for(config: Config, own: PlanOptions) -> Planned:
    """The plan for this configuration on its device, or on the machine that `own` describes.

    Raises BadModel or DoesNotFit.
    """
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
    context = replace(options, n_ctx=options.n_ctx or facts.n_ctx_train)
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


def as_dict(planned: Planned) -> dict[str, Any]:
    """The plan as data for scripts, with sizes in bytes.

    `min_batch` is null if streaming never saves time.
    """
    plan, facts, request, room = planned.plan, planned.facts, planned.request, planned.room
    return {
        "model": facts.path.name,
        "architecture": facts.architecture,
        "ctx_size": planned.context.n_ctx,
        "ubatch": plan.n_ubatch,
        **_of_device(planned),
        "devices": [
            {
                "name": part.name,
                "layers": [part.facts.layers.start, part.facts.layers.stop - 1],
                "link_bytes_per_s": part.machine.link_bytes_per_s,
                **_of_device(part),
            }
            for part in planned.parts or (planned,)
        ],
        "expected": planned.expected,
        "hits": _hits(planned),
        "host": room
        and {
            "available_bytes": room.available_bytes,
            "limited_by": room.limited_by,
            "fits": plan.streamed_bytes <= room.available_bytes,
        },
        "disk": _disk(planned),
        "hardware": planned.hardware,
        "machine": asdict(request.machine),
        "ways": {
            way: {n: entry.seconds for n, entry in sorted(entries.items())}
            for way, entries in planned.costs.ways.items()
        },
    }


def _of_device(planned: Planned) -> dict[str, Any]:
    """Return the contents of a device's memory, or of all devices' together, for JSON."""
    plan = planned.plan
    return {
        "vram_bytes": planned.vram_bytes,
        "resident_bytes": plan.resident_bytes,
        "streamed_bytes": plan.streamed_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "reserve": asdict(planned.memory)
        | {
            "draft_bytes": planned.request.reserve_bytes,
            "mtp_bytes": 0 if plan.mtp is None else plan.mtp.device_bytes,
        },
        "slot_bytes": plan.slot_bytes,
        "slots": _slots(plan),
        "streamed_layers": _streamed_layers(plan),
        "min_batch": None if plan.min_batch == NEVER else plan.min_batch,
        "chunk_tokens": plan.chunk_tokens,
        "declined": list(plan.declined),
        "reasons": list(plan.reasons),
    }


def _slots(plan: Plan) -> dict[str, dict[str, int]]:
    """Number of slots by kind of weight. If a kind has slots in several pools, by pool too."""
    kinds = Counter(kind.name for pool in plan.layout.pools for kind in pool.kinds)
    return {
        kind.name if kinds[kind.name] == 1 else f"{kind.name} ({pool.name})": {
            "n_slots": pool.n_slots,
            "n_ring": ring_slots(pool) if pool.n_experts else 0,
            "n_experts": pool.n_experts,
            "stride_bytes": kind.stride_bytes,
        }
        for pool in plan.layout.pools
        for kind in pool.kinds
    }


def _streamed_layers(plan: Plan) -> dict[str, int]:
    return {
        "experts": len({layer_of(e.name) for e in plan.streamed if is_experts(e)}),
        "dense": len({layer_of(e.name) for e in plan.streamed if not is_experts(e)}),
    }


def expected_tps(
    plan: Plan, work: ModelWork, machine: Machine, n_prompt: int, *, splits: bool = False
) -> dict[str, float]:
    """Tokens/s of decoding and of prefill that the machine model expects.

    With `splits`, decodes may split layers.
    """
    prompt_s = prefill_s(machine, work, plan.sharing, n_prompt, plan.n_ubatch)
    return {
        "decode_tps": 1 / float(best_s(machine, work, plan.sharing, 1, hybrid=splits)),
        "prefill_tps": n_prompt / float(prompt_s),
    }


def _hits(planned: Planned) -> dict[str, Any] | None:
    """The hits that a decode with split layers is expected to have.

    None if no layer may be split or there are no slots.
    """
    if not planned.splits or not planned.plan.sharing.n_slots:
        return None
    work, hits = planned.work, planned.request.hits
    return {
        "rate": float(expected_hits(work, planned.plan.sharing, work.union(1))),
        "source": "guess" if hits is None else "counted",
        "n_tokens": 0 if hits is None else hits.n_tokens,
        "counted_on": None if hits is None else hits.counted_on.isoformat(),
    }


def _disk(planned: Planned) -> dict[str, float] | None:
    """Return the expected reads from the disk, or None if all weights fit host memory."""
    disk = planned.disk
    if disk is None:
        return None
    return {
        "bytes_per_s": disk.bytes_per_s,
        "bytes_per_token": disk.decode_bytes(1),
        "bytes_per_ubatch": disk.pass_bytes(planned.plan.n_ubatch),
        "most_decode_tps": 1 / disk.decode_s() if disk.decode_s() else 0.0,
    }


def rests_on_guess(plan: Plan, work: ModelWork, machine: Machine, *, splits: bool = False) -> bool:
    """True if the expected decode is faster than the CPU's because of guessed hits."""
    if work.hits is not None or not plan.sharing.n_slots:
        return False
    decode_s = best_s(machine, work, plan.sharing, 1, hybrid=splits)
    return bool(decode_s < cpu_s(machine, work, plan.sharing, 1))


def rounded(value: float, n_digits: int = 2) -> str:
    """An estimate as text with `n_digits` significant digits: 96.5 is 97, or 100 with one digit."""
    return f"{float(f'{value:.{n_digits - 1}e}'):,g}" if value < 1e5 else f"{value:,.0f}"


def _host_words(planned: Planned) -> str:
    """Sentences if host memory has no room for the streamed weights, else ""."""
    plan, room, disk = planned.plan, planned.room, planned.disk
    if room is None or disk is None:
        return ""
    missing = plan.streamed_bytes - room.available_bytes
    most = planned.vram_bytes - plan.reserve_bytes + room.available_bytes
    return (
        f"This does not fit memory: {plan.streamed_bytes / _GIB:.1f} GiB of weights are used from "
        f"RAM, which has room for {room.available_bytes / _GIB:.1f} GiB ({room.limited_by}). "
        "Experts that are not in RAM are read from the disk when a layer needs them: "
        f"{disk.words(plan.n_ubatch)} {plan.streamed_bytes / _GIB:.0f} GiB of free RAM (--ram "
        f"plans for another machine), about {missing / _GIB:.0f} GiB more GPU memory, or a file "
        f"of at most {most / _GIB:.0f} GiB would avoid it"
    )


def _show(planned: Planned) -> None:
    plan, facts, work = planned.plan, planned.facts, planned.work
    machine = planned.request.machine
    experts = f", {facts.n_experts} experts, {facts.n_experts_used} used" if facts.n_experts else ""
    report.line(
        f"{facts.path.name}: {facts.architecture}, {report.bytes_text(facts.size_bytes)}, "
        f"{facts.n_layers} layers{experts}"
    )
    if planned.parts:
        _show_devices(planned.parts)
    else:
        used = [
            (name, f"{size / _GIB:.2f}", of)
            for name, size, of in _uses(planned)
            if size or name == "free"
        ]
        used.append(("GPU memory", f"{planned.vram_bytes / _GIB:.2f}", planned.why_vram))
        report.table("GPU memory", ("", "GiB", ""), used)
    if plan.streamed:
        report.line(f"weights in RAM: {report.bytes_text(plan.streamed_bytes)}")
        if words := _host_words(planned):
            report.paragraph(words)
        first = plan.min_batch
        where = f"Batches of {first} tokens or more go to the GPU; smaller ones run on the CPU"
        if first is None or first >= NEVER:
            where = "All batches run on the CPU"
        if planned.disk is not None:
            where = "All batches go to the GPU, which may leave a part of their experts to the CPU"
        report.paragraph(f"{where} (estimate; a start measures it)")
    is_guess = rests_on_guess(plan, work, machine, splits=planned.splits)
    is_guess |= planned.disk is not None and planned.disk.work.hits is None
    decode = rounded(planned.expected["decode_tps"], 1 if is_guess else 2)
    prefill = rounded(planned.expected["prefill_tps"])
    report.line(
        f"Expected speed: prompts about {prefill} tokens/s, answers about {decode} tokens/s"
    )
    if "mtp_decode_tps" in planned.expected:
        with_drafts = rounded(planned.expected["mtp_decode_tps"], 1 if is_guess else 2)
        report.line(
            f"With drafts by its own layers: answers about {with_drafts} tokens/s, if "
            f"{ACCEPTED:.0%} of the drafted tokens are right"
        )
    links = " and ".join(
        f"{p.machine.link_bytes_per_s / 1e9:.3g}"
        for p in planned.parts or (planned,)
        if not p.is_remote
    )
    to_gpu = f"{links} GB/s from RAM to the GPU{'s' if planned.parts else ''} and " if links else ""
    report.line(f"with {to_gpu}{machine.ram_bytes_per_s / 1e9:g} GB/s of RAM (--link, --ram)")
    if planned.hardware is not None and plan.streamed:
        show_modelled(planned.costs)
    assumed: tuple[str, ...] = ()
    if planned.request.plan_for_splits == "auto" and plan.sharing.n_slots:
        assumed = (hit_words(work, plan.sharing),)
    for words in (*plan.reasons, *assumed, *plan.declined, *planned.complaints):
        report.paragraph(words)


def _uses(planned: Planned) -> list[tuple[str, int, str]]:
    """Return (use, bytes, remark) for each use of a device's memory, and for the free rest."""
    plan, memory = planned.plan, planned.memory
    rows = [
        ("weights", plan.resident_bytes, ""),
        ("KV cache", memory.kv_bytes, f"{planned.context.n_ctx} tokens"),
        ("recurrent states", memory.recurrent_bytes, ""),
        (
            "compute buffers",
            memory.compute_bytes + memory.pool_bytes,
            f"{plan.n_ubatch} prompt tokens at once",
        ),
        ("draft model or EAGLE-3 file", planned.request.reserve_bytes, ""),
        *_mtp_rows(plan),
        *(
            (f"cache: {pool.name}", pool.size_bytes, f"{pool.n_slots} of {pool.n_pieces}")
            for pool in plan.layout.pools
            if pool.n_experts
        ),
        (
            "buffer: dense weights",
            sum(pool.size_bytes for pool in plan.layout.pools if not pool.n_experts),
            f"of {_streamed_layers(plan)['dense']} layers in RAM",
        ),
    ]
    used = plan.resident_bytes + plan.reserve_bytes + plan.slot_bytes
    return [*rows, ("free", planned.vram_bytes - used, "")]


def _show_devices(parts: Sequence[Planned]) -> None:
    """Print a table with a column for each device."""
    uses = [{name: size for name, size, _ in _uses(part)} for part in parts]
    names = [name for name in dict.fromkeys(n for use in uses for n in use) if name != "free"]
    sizes = [(name, [use.get(name, 0) for use in uses]) for name in (*names, "free")]
    sizes.append(("GPU memory", [part.vram_bytes for part in parts]))
    layers = [part.facts.layers for part in parts]
    pools = [[p for p in part.plan.layout.pools if p.n_experts] for part in parts]
    rows = [
        ("layers", *(f"{its.start}-{its.stop - 1}" for its in layers)),
        ("layers with experts in RAM", *(f"{_streamed_layers(p.plan)['experts']}" for p in parts)),
        ("cached experts", *(f"{sum(pool.n_slots for pool in its)}" for its in pools)),
        *(
            (f"GiB: {name}", *(f"{b / _GIB:.2f}" for b in each))
            for name, each in sizes
            if any(each)
        ),
        (
            "GB/s from RAM",
            *(
                "network" if part.is_remote else f"{part.machine.link_bytes_per_s / 1e9:.3g}"
                for part in parts
            ),
        ),
    ]
    report.table("Devices", ("", *(part.name for part in parts)), rows)


def _mtp_rows(plan: Plan) -> list[tuple[str, int, str]]:
    """Rows of the table on the layers for multi-token prediction, if they draft."""
    if plan.mtp is None:
        return []
    return [
        ("layers that draft", plan.mtp.weight_bytes, "for multi-token prediction (--spec-type)"),
        ("their KV cache and buffers", plan.mtp.context_bytes, ""),
    ]


def show_modelled(table: CostTable) -> None:
    """Print the expected decode times of every way at powers of two, the fastest with a star."""
    ways = [way for way in Way if table.has(way)]
    rows = []
    n = 1
    while n <= table.n_most:
        known = [way for way in ways if n <= max(table.ways[way])]
        best = min(known, key=lambda way: table.seconds(way, n))
        cells = [
            f"{table.seconds(way, n) * 1e3:,.1f}{' *' if way is best and len(ways) > 1 else ''}"
            if way in known
            else ""
            for way in ways
        ]
        rows.append((str(n), *cells))
        n *= 2
    title = "milliseconds of a decode of n tokens (estimate)"
    report.table(title, ("n", *(str(way) for way in ways)), rows)
