"""The devices of an open model, and the slots that they get after a warm-up.

ggml's scheduler gives a product to the first device that accepts the memory of its weight. So each
part has a host buffer type of its own, over the one store of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.device import DeviceChoice
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.memory import HasAddress
from offload.plan.devices import DevicePlan
from offload.plan.placement import Plan
from offload.plan.warm_up import WarmedUp
from offload.stream.building import ExecutorBuilder
from offload.stream.device import StreamingDevice
from offload.units import plural


@dataclass
class Part:
    """One device of a model, and the plan of its layers."""

    choice: DeviceChoice
    planned: DevicePlan
    plan: Plan  # the plan with the slots that the device has
    host: HostBufferType
    builder: ExecutorBuilder
    device: StreamingDevice

    @property
    def overrides(self) -> tuple[tuple[str, HasAddress], ...]:
        """(pattern of names, buffer type) of the part's streamed weights, for libllama."""
        plan, host = self.plan, self.host
        return (
            *((pattern, host) for pattern in plan.patterns(experts=True)),
            *((pattern, host.dense) for pattern in plan.patterns(experts=False)),
        )


def warm_up(
    parts: Sequence[Part], compute: Callable[[], None], *, on_workers: bool
) -> tuple[WarmedUp | None, ...]:
    """Compute with few slots, and return the memory of each part's device then.

    It is None for parts whose slots keep the planned size. `compute` computes the largest ubatch on
    all devices. With `on_workers` it is called even if no slots are sized, so that workers allocate
    their memory now. `size_slots` must follow. Raises DoesNotFit.
    """
    sized = [p for p in parts if p.plan.layout.pools and p.planned.room.is_counted]
    for part in sized:
        part.builder.use_few(part.plan, part.device)
    if sized or on_workers:
        compute()
    return tuple(
        part.builder.warmed_up(part.plan, part.device, part.planned) if part in sized else None
        for part in parts
    )


def size_slots(parts: Sequence[Part], warmed: Sequence[WarmedUp | None]) -> None:
    """Give slots the GPU memory that nothing else needs. Raises DoesNotFit."""
    for part, memory in zip(parts, warmed, strict=True):
        if memory is not None:
            part.plan = part.builder.size_slots(memory, part.device)


def lend_buffers(parts: Sequence[Part], notes: list[str]) -> None:
    """Let slots continue in compute buffers, if `size_slots` has not done it. Adds notes."""
    for part in parts:
        buffer = part.device.compute_buffer
        if buffer is None:
            continue
        if not buffer.is_ours:
            part.plan = part.builder.take_slots(part.plan, part.device)
        slots, mib = plural(part.device.n_lent, "more slot"), buffer.size_bytes / 2**20
        notes.append(
            f"slots: {slots} in the {mib:.0f} MiB of compute buffer, for experts between prompts"
        )
