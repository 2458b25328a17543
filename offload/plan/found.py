"""The devices and memory of a machine, found or described. Pure.

Layouts are decided from these and from what is `Wanted`. Nothing here looks at the system.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES
from offload.plan.wanted import Wanted
from offload.times.machine import TYPICAL, Machine


class Kind(StrEnum):
    """The kinds of devices, by what computes on them."""

    CPU = "cpu"  # libllama's own CPU backend
    GPU = "gpu"
    SIM = "sim"  # the CPU device posing as a GPU
    STOCK = "rpc"  # a device of llama.cpp's rpc-server, on which all weights are resident
    WORKER = "worker"  # the device of a `specoffload worker`, which streams

    @property
    def is_remote(self) -> bool:
        return self in (Kind.STOCK, Kind.WORKER)

    @property
    def streams(self) -> bool:
        """True if our device wraps it, so that weights stream to it."""
        return self in (Kind.GPU, Kind.SIM)


@dataclass(frozen=True)
class FoundDevice:
    """A device, with the memory that was free on it."""

    name: str
    kind: Kind
    free_bytes: int = field(default=0, compare=False)  # it changes from one look to the next
    sim_bytes: int | None = None  # memory of a simulated device; None: no limit
    machine: Machine = TYPICAL  # its rates; the link's is that while all links copy
    measured: str = ""  # its rates in words, if they were measured on the device itself
    shares_buffers: bool = True  # parts of a buffer of its backend can be buffers
    most_tokens: int | None = None  # most tokens of a batch that its kernels take; None: unknown
    # Memory that the driver and its kernels took beyond an earlier plan, which is left to them.
    driver_bytes: int = field(default=0, compare=False)

    def room(self, wanted: Wanted, asked_bytes: int | None) -> DeviceRoom:
        """Return the memory that a plan may use, with the reason if it is less than asked for.

        `asked_bytes` is the size in --vram for this device. On a GPU the context, its buffers and a
        draft model are part of the budget, and `LEAST_FREE_BYTES` stay free whatever was asked for.
        A simulated device computes in host memory, so its budget is for weights and slots alone.
        """
        if self.kind.is_remote:
            room_bytes = max(0, self.free_bytes - MARGIN_BYTES)
            machine = replace(self.machine, attends_in_ram=False)
            return DeviceRoom(self, room_bytes, machine, is_remote=self.kind is Kind.STOCK)
        budget = wanted.vram_bytes
        reasons: tuple[str, ...] = ()
        counted = self.is_counted(wanted)
        if counted:
            free, asked = self.free_bytes, asked_bytes
            margin = MARGIN_BYTES if asked is None else LEAST_FREE_BYTES
            budget = min(free if asked is None else asked, max(0, free - margin))
            if asked is not None and budget < asked:
                reasons = (
                    f"--vram {asked / 2**30:.2f}GiB: {budget / 2**30:.2f} GiB are used, since "
                    f"{self.name} has {free / 2**30:.2f} GiB free and {margin >> 20} MiB stay free "
                    "for its driver and kernels",
                )
            if self.driver_bytes:
                budget = max(0, budget - self.driver_bytes)
                reasons += (
                    f"{self.driver_bytes / 2**20:.0f} MiB are left to the driver and kernels of "
                    f"{self.name}",
                )
        elif budget is None and self.kind is Kind.SIM:
            budget = asked_bytes or self.sim_bytes
        return DeviceRoom(
            self, budget, self.machine, counted, asked_bytes=asked_bytes, reasons=reasons
        )

    def is_counted(self, wanted: Wanted) -> bool:
        """True if the context, its buffers and other models are part of the device's budget."""
        return self.kind is Kind.GPU and wanted.vram_bytes is None

    @property
    def layer_bytes(self) -> int:
        """The free bytes by which llama.cpp's rule divides layers."""
        return self.sim_bytes or self.free_bytes


@dataclass(frozen=True)
class DeviceRoom:
    """A device that may compute layers, and the memory that their plan may use."""

    device: FoundDevice
    budget_bytes: int | None = field(default=None, compare=False)  # None: no limit
    machine: Machine = TYPICAL  # the device's rates; its link's rate while the other links copy too
    is_counted: bool = True  # False: the context and other models are not part of the budget
    is_remote: bool = False  # True: all its weights are resident, and activations cross its link
    asked_bytes: int | None = None  # --vram for this device
    reasons: tuple[str, ...] = field(default=(), compare=False)  # why the budget is less than that

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def is_here(self) -> bool:
        """False for the device of a worker, which has buffers of its own."""
        return not self.device.kind.is_remote

    @property
    def not_lent_reason(self) -> str:
        """Why the device's compute buffer cannot hold experts between prompts; "" if it can."""
        if not self.is_here:
            return "a worker computes these layers"
        if self.device.shares_buffers:
            return ""
        return f"the backend of {self.name} does not share buffers"


@dataclass(frozen=True)
class Found:
    """The devices and memory of a machine.

    `devices` are those that --device names, in its order, or those that `auto` may choose from.
    """

    devices: tuple[FoundDevice, ...]
    takes_all: bool = True  # False: `auto`, which leaves out devices that save no time
    workers: tuple[FoundDevice, ...] = ()  # the devices of --rpc
    ram_bytes: int = 1 << 62  # host memory that this process may still take
    has_mtp: bool = True  # the library has functions for multi-token prediction
    plans_graphs: bool = True  # the library has a function that plans a graph in advance
    draft_in_ram: bool = False  # -devd names a device that computes in host memory
    unmeasured: str = ""  # why the speed of workers' devices could not be measured
