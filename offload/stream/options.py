"""The switches of streaming, which no plan depends on."""

from __future__ import annotations

from dataclasses import dataclass

from offload.schedule.cached_choice import RouteOptions
from offload.schedule.splitter import Splitter
from offload.trace.trace import NO_TRACE, Trace


@dataclass(frozen=True)
class StreamingOptions:
    """How a run streams weights to a device.

    SPECOFFLOAD_WITHOUT can turn off what is on by default, to find out which part causes an error.
    """

    depth: int = 8  # cuts that copies run ahead; 0: nothing is copied while the device computes
    warmup: bool = True  # size slots by the memory free after a ubatch; False: by the header
    splitter: Splitter | None = None  # divides split layers; None: by measured costs
    record_routing: bool = False  # record what routers choose for small batches, to count hits
    trace: Trace = NO_TRACE
    cache: bool = True  # keep experts in slots for later graphs; False: copy them for each graph
    prefetch: bool = True  # guess the experts of small batches from their tokens, and promote
    bounce: bool = True  # copy weights that cannot be pinned through a pinned ring
    doorbell: bool = True  # split layers run without a wait of the host, on CUDA
    mla: bool = True  # MLA's value projections take the faster form; False: the library's own
    route: RouteOptions = RouteOptions()  # off: routers choose as the model does
    native: bool = True  # the backend itself, not Python, decides which nodes it computes
