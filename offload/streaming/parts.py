"""Chooses a model's devices and their layers, and plans each device's part.

ggml's scheduler gives a product to the first device that accepts the memory of its weight. So each
part has a host buffer type of its own, over the one store of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.device import DeviceChoice, choose_device, choose_devices
from offload.errors import DeviceUnavailable
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.memory import HasAddress
from offload.model import ModelFacts, is_experts
from offload.plan.devices import divide
from offload.plan.devices import plan_parts as divide_into
from offload.plan.placement import Plan
from offload.plan.range_times import DeviceRoom
from offload.plan.ranges import LayerRange, by_shares, shares_for
from offload.store.memory_budget import SLOTS, MemoryLimits
from offload.store.store import StoreOptions, limits_for
from offload.streaming.building import ExecutorBuilder
from offload.streaming.device import StreamingDevice
from offload.streaming.options import StreamingOptions, is_counted, room_of

MeasureLinks = Callable[[Sequence[DeviceChoice]], Sequence[float]]


@dataclass
class Part:
    """One device of a model, and the plan of its layers."""

    choice: DeviceChoice
    plan: Plan
    host: HostBufferType
    builder: ExecutorBuilder
    device: StreamingDevice
    free_before_bytes: int  # free device memory before the model was loaded

    @property
    def overrides(self) -> tuple[tuple[str, HasAddress], ...]:
        """(pattern of names, buffer type) of the part's streamed weights, for libllama."""
        plan, host = self.plan, self.host
        return (
            *((pattern, host) for pattern in plan.patterns(experts=True)),
            *((pattern, host.dense) for pattern in plan.patterns(experts=False)),
        )


@dataclass(frozen=True)
class Divided:
    """The devices that compute a model, each with its layers, and the device of a draft model."""

    parts: tuple[tuple[DeviceChoice, LayerRange], ...]
    draft: DeviceChoice | None  # None: the draft model is on none of the devices in --device
    # The devices' limits, as in StreamingOptions.
    each_device_bytes: tuple[int, ...] = ()
    each_link_bytes_per_s: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()  # sentences on the division and its reason
    n_ubatch: int | None = None  # the ubatch that the layers were divided for

    def limits(self, options: StreamingOptions) -> StreamingOptions:
        return replace(
            options,
            each_device_bytes=self.each_device_bytes,
            each_link_bytes_per_s=self.each_link_bytes_per_s,
        )


def divided(
    facts: ModelFacts,
    device: str,
    shares: Sequence[float],
    options: StreamingOptions | None,
    measure_links: MeasureLinks | None = None,
) -> Divided:
    """Return the devices of `--device` that get layers, and their layers.

    `device` is the text of `--device`, and `shares` are those of `--tensor-split`. Without shares
    the plan divides the layers, and `auto` uses all GPUs that save time. Without shares and without
    `options`, layers are divided by free memory, as in llama.cpp. `measure_links` returns each
    link's bytes/s, and is called if there are several devices. Raises DeviceUnavailable or
    DoesNotFit.
    """
    is_planned = options is not None and not shares
    choices = choose_devices(device, all_gpus=len(shares) > 1 or is_planned)
    n, first = facts.n_layers, choices[0]
    each = () if options is None else options.each_device_bytes
    if each and len(each) != len(choices):
        raise _wrong_sizes(each, choices)
    whole = Divided(((first, LayerRange(0, n + 1)),), first, each)
    if not first.wrapped:
        return whole
    notes: tuple[str, ...] = ()
    if shares:
        shares, words = shares_for(shares, [c.name for c in choices])
        notes = (words,) if words else ()
    if len(choices) == 1:
        return replace(whole, notes=notes)
    rates = () if options is None or measure_links is None else tuple(measure_links(choices))
    wanted = None if options is None else options.draft_device
    n_ubatch: int | None = None
    named = [c for c in choices if wanted is not None and c.name.lower() == wanted.lower()]
    draft = next(iter(named), None)
    if is_planned and options is not None:
        its = replace(options, each_link_bytes_per_s=rates)
        if wanted is not None and draft is None:
            its = replace(its, reserve_bytes=0)
        division = divide(
            facts, [room for room, _ in rooms_of(choices, its)], its,
            use_all=device.lower() != "auto",
            draft_on=None if draft is None else choices.index(draft),
        )  # fmt: skip
        by_name = {part.room.name: part.layers for part in division.parts}
        ranges = tuple(by_name.get(choice.name, LayerRange(0, 0)) for choice in choices)
        notes, n_ubatch = division.reasons, division.plan.n_ubatch
        if wanted is None:
            draft = next((c for c in choices if c.name == division.draft_on), None)
    else:
        ranges = by_shares(n, shares or [free_for_layers(choice) for choice in choices])
    used = [i for i, layers in enumerate(ranges) if layers]
    if wanted is None and draft is None:
        draft = choices[used[0]]
    return Divided(
        tuple((choices[i], ranges[i]) for i in used),
        draft,
        tuple(each[i] for i in used) if each else (),
        tuple(rates[i] for i in used) if rates else (),
        notes,
        n_ubatch,
    )


def _wrong_sizes(each: Sequence[int], choices: Sequence[DeviceChoice]) -> DeviceUnavailable:
    return DeviceUnavailable(
        f"--vram has {len(each)} sizes, but --device has {len(choices)} "
        f"({', '.join(choice.name for choice in choices)})"
    )


def rooms_of(
    choices: Sequence[DeviceChoice], options: StreamingOptions
) -> list[tuple[DeviceRoom, str]]:
    """Return each device's room, with a sentence if it is less than asked for, otherwise "".

    Raises DeviceUnavailable if the number of sizes is not the number of devices.
    """
    each, rates = options.each_device_bytes, options.each_link_bytes_per_s
    if each and len(each) != len(choices):
        raise _wrong_sizes(each, choices)
    found = []
    for i, choice in enumerate(choices):
        its = replace(options, device_bytes=each[i]) if each else options
        if rates:
            its = replace(its, machine=replace(its.machine, link_bytes_per_s=rates[i]))
        found.append(room_of(choice, its))
    return found


def free_for_layers(choice: DeviceChoice) -> int:
    """Return the device's free bytes. llama.cpp's rule divides layers in proportion to them."""
    limit_bytes = None if choice.sim is None else choice.sim.vram_bytes
    return limit_bytes or choice.device.memory_bytes()[0]


def plan_parts(
    facts: ModelFacts,
    devices: Sequence[tuple[DeviceChoice, LayerRange]],
    options: StreamingOptions,
    draft: DeviceChoice | None = None,
    n_ubatch: int | None = None,
) -> list[Plan]:
    """Return the plan of each device's layers. All plans have the same ubatch. Raises DoesNotFit.

    The ubatch is `n_ubatch`, or the fastest one if that is None. Memory that `options` reserves for
    other models is taken from the device `draft`. Layers for multi-token prediction are on the last
    device.
    """
    choices, ranges = [choice for choice, _ in devices], [layers for _, layers in devices]
    if draft not in choices:
        options = replace(options, reserve_bytes=0)
    rooms = rooms_of(choices, options)
    draft_on = 0 if draft is None or draft not in choices else choices.index(draft)
    found = divide_into(
        facts, [room for room, _ in rooms], ranges, options, draft_on=draft_on, n_ubatch=n_ubatch
    )
    return [
        part.plan.because(lowered) if lowered else part.plan
        for part, (_, lowered) in zip(found.parts, rooms, strict=True)
    ]


def size_slots(
    parts: Sequence[Part],
    options: StreamingOptions,
    warm_up: Callable[[], None],
    *,
    on_workers: bool,
) -> None:
    """Give slots the GPU memory that nothing else needs. Raises DoesNotFit.

    `warm_up` computes the largest ubatch on all devices. With `on_workers` it is called even if no
    slots are sized, so that workers allocate their memory now.
    """
    sized = [p for p in parts if p.plan.layout.pools and is_counted(p.choice, options)]
    for part in sized:
        part.builder.use_few(part.plan, part.device)
    if sized or on_workers:
        warm_up()
    for part in sized:
        part.plan = part.builder.size_slots(part.plan, part.device, part.free_before_bytes)


def draft_bytes_in_ram(choice: DeviceChoice, options: StreamingOptions) -> int:
    """Return the bytes of RAM that a draft model takes, whose target's first device is `choice`.

    Without a device of its own, the draft model is on a device of the target.
    """
    own = options.draft_device
    if not options.reserve_bytes:
        return 0
    on_gpu = choice.on_gpu if own is None else choose_device(own).on_gpu
    return 0 if on_gpu else options.reserve_bytes


def limits_of_experts(
    plan: Plan,
    choice: DeviceChoice,
    store: StoreOptions,
    later_bytes: Callable[[int], dict[str, int]],
) -> MemoryLimits | None:
    """Return the limits of memory for the plan's experts if they do not all fit, else None.

    `later_bytes(n)` returns the bytes of RAM, besides slots, that will be taken for ubatches of n
    tokens, by purpose.
    """
    if store.keep_page_cache or not any(map(is_experts, plan.streamed)):
        return None
    dense_bytes = sum(e.size_bytes for e in plan.streamed if not is_experts(e))
    # All devices are simulated if one is. The warm-up then takes all of the memory.
    slot_bytes = 0 if choice.sim is None else plan.slot_bytes
    return limits_for(
        store,
        plan.streamed_bytes - dense_bytes,
        others_bytes=dense_bytes,
        mapped_bytes=0 if choice.on_gpu else plan.resident_bytes,
        later_bytes=lambda n: {**later_bytes(n), SLOTS: slot_bytes},
    )
