"""The options of streaming, and the plan that follows from them for a device."""

from __future__ import annotations

from dataclasses import dataclass

from offload.device import DeviceChoice
from offload.plan.placement import MARGIN_BYTES, PlanRequest
from offload.schedule.splitter import Splitter
from offload.trace.trace import NO_TRACE, Trace


@dataclass(frozen=True)
class StreamingOptions(PlanRequest):
    """The options of streaming weights to a device, and of the plan.

    The engine sets the plan's budget, context and ubatch. SPECOFFLOAD_WITHOUT can turn off options
    that are on by default, to find out which part causes an error.
    """

    vram_bytes: int | None = None  # budget of weights and slots alone; None: see device_bytes
    most_tokens: int = 0  # of the largest batch, for which memory is taken at once; 0: unknown
    device_bytes: int | None = None  # whole budget on a GPU; None: free memory less a margin
    each_device_bytes: tuple[int, ...] = ()  # `device_bytes` by device; (): the same for all
    draft_device: str | None = None  # the device of the draft model; None: the plan chooses
    depth: int = 8  # cuts that copies run ahead; 0: nothing is copied while the device computes
    warmup: bool = True  # size slots by the memory free after a ubatch; False: by the header
    hybrid: bool = False  # split layers of small batches between the CPU and the device
    splitter: Splitter | None = None  # divides split layers; None: by measured costs
    record_routing: bool = False  # record what routers choose for small batches, to count hits
    trace: Trace = NO_TRACE
    cache: bool = True  # keep experts in slots for later graphs; False: copy them for each graph
    prefetch: bool = True  # guess the experts of small batches from their tokens, and promote
    bounce: bool = True  # copy weights that cannot be pinned through a pinned ring
    doorbell: bool = True  # split layers run without a wait of the host, on CUDA
    native: bool = True  # the backend itself, not Python, decides which nodes it computes


def free_bytes(choice: DeviceChoice) -> int:
    """Return the bytes that are free on the device now, less the margin for other programs."""
    return max(0, choice.device.memory_bytes()[0] - MARGIN_BYTES)


def is_counted(choice: DeviceChoice, options: StreamingOptions) -> bool:
    """True if the context, its buffers and other models are part of the device's budget."""
    return choice.on_gpu and options.vram_bytes is None
