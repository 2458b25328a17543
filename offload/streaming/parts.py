"""The parts of a model: each streaming device with the layers that it computes.

ggml's scheduler gives a product to the first device that accepts the memory of its weight. So each
part has host buffers of its own, over the one store of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.device import DeviceChoice, choose_devices
from offload.errors import DeviceUnavailable, DoesNotFit
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.memory import HasAddress
from offload.model import ModelFacts
from offload.plan.devices import layer_words
from offload.plan.placement import Plan
from offload.plan.ranges import LayerRange, by_shares
from offload.plan.slot_layout import SlotLayout, SlotPool, WeightGroup
from offload.streaming.building import ExecutorBuilder
from offload.streaming.device import StreamingDevice
from offload.streaming.options import StreamingOptions, is_counted, plan_streaming


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


def divided(
    facts: ModelFacts, device: str, shares: Sequence[float]
) -> tuple[tuple[DeviceChoice, LayerRange], ...]:
    """Return the devices of `--device`, and the layers that each computes.

    `shares` are those of `--tensor-split`. Without shares, layers are divided by free memory, as in
    llama.cpp. Devices without layers are left out. Raises DeviceUnavailable.
    """
    choices = choose_devices(device, all_gpus=len(shares) > 1)
    if not choices[0].wrapped:
        return ((choices[0], LayerRange(0, facts.n_layers + 1)),)
    if shares and len(shares) != len(choices):
        raise DeviceUnavailable(
            f"--tensor-split {','.join(f'{share:g}' for share in shares)}: {len(shares)} shares, "
            f"but --device has {len(choices)} ({', '.join(c.name for c in choices)})"
        )
    found = by_shares(facts.n_layers, shares or [free_for_layers(c) for c in choices])
    return tuple((c, layers) for c, layers in zip(choices, found, strict=True) if layers)


def free_for_layers(choice: DeviceChoice) -> int:
    """Return the free memory that llama.cpp's rule divides layers by."""
    limit_bytes = None if choice.sim is None else choice.sim.vram_bytes
    return limit_bytes or choice.device.memory_bytes()[0]


def plan_parts(
    facts: ModelFacts,
    devices: Sequence[tuple[DeviceChoice, LayerRange]],
    options: StreamingOptions,
    *,
    draft_on_last: bool = False,
) -> list[Plan]:
    """Return the plan of each device's layers. All plans have the same ubatch. Raises DoesNotFit.

    Memory that `options` reserves for other models is taken from the first or the last device.
    Layers for multi-token prediction are on the last one.
    """
    if len(devices) == 1:
        (choice, layers), *_ = devices
        return [plan_streaming(facts.part(layers.first, layers.end), choice, options)]

    of_draft = len(devices) - 1 if draft_on_last else 0

    def planned(options: StreamingOptions) -> list[Plan]:
        plans = []
        for i, (choice, layers) in enumerate(devices):
            its = replace(
                options,
                mtp=options.mtp and i == len(devices) - 1,
                reserve_bytes=options.reserve_bytes if i == of_draft else 0,
            )
            part = facts.part(layers.first, layers.end)
            try:
                plans.append(plan_streaming(part, choice, its))
            except DoesNotFit as e:
                where = f"{choice.name}, {layer_words(layers, facts.n_layers)}"
                raise DoesNotFit(
                    f"{where}: {e}; or give it fewer layers with --tensor-split",
                    e.least_bytes,
                ) from e
        return plans

    plans = planned(options)
    n_ubatch = min(plan.n_ubatch for plan in plans)
    if options.context is not None and any(plan.n_ubatch > n_ubatch for plan in plans):
        context = replace(options.context, n_ubatch=n_ubatch)
        plans = planned(replace(options, context=context, most_ubatch=None))
    return plans


def joined(plans: Sequence[Plan], names: Sequence[str]) -> Plan:
    """Return the plan of all devices together. Each device's slots are pools of their own.

    The reasons begin with the devices' `names` if there are several.
    """
    if len(plans) == 1:
        return plans[0]
    pools: list[SlotPool] = []
    groups: list[WeightGroup] = []
    named = list(zip(names, plans, strict=True))
    for plan in plans:
        groups += [replace(g, pool=g.pool + len(pools)) for g in plan.layout.groups]
        pools += plan.layout.pools
    chunks = [plan.chunk_tokens for plan in plans if plan.chunk_tokens]
    crossovers = [plan.min_batch for plan in plans if plan.min_batch is not None]
    return replace(
        plans[-1],
        streamed=tuple(entry for plan in plans for entry in plan.streamed),
        resident_bytes=sum(plan.resident_bytes for plan in plans),
        layout=SlotLayout(tuple(pools), tuple(groups)),
        reasons=tuple(f"{name}: {reason}" for name, plan in named for reason in plan.reasons),
        reserve_bytes=sum(plan.reserve_bytes for plan in plans),
        min_batch=max(crossovers, default=None),
        chunk_tokens=min(chunks, default=0),
        declined=tuple(f"{name}: {why}" for name, plan in named for why in plan.declined),
        n_resident=sum(plan.n_resident for plan in plans),
    )


def size_slots(
    parts: Sequence[Part], options: StreamingOptions, warm_up: Callable[[], None]
) -> None:
    """Give slots the GPU memory that nothing else needs. Raises DoesNotFit.

    `warm_up` computes the largest ubatch on all devices.
    """
    sized = [p for p in parts if p.plan.layout.pools and is_counted(p.choice, options)]
    for part in sized:
        part.builder.use_few(part.plan, part.device)
    if sized:
        warm_up()
    for part in sized:
        part.plan = part.builder.size_slots(part.plan, part.device, part.free_before_bytes)
