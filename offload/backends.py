"""A table of the differences between ggml's backends, by the names of their devices. Pure.

ggml tells some properties of a device, such as copies on a second stream and events. This table has
the others. A backend that is not in it is taken to be able to do nothing that is optional.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """One of ggml's backends. `name`: what ggml's names of its devices begin with (CUDA0, CUDA1).

    library: its word in the name of ggml's library, libggml-*.so.
    shares_buffers: parts of one of its buffers can be buffers. The largest buffer is not limited.
    has_driver: the calls of CUDA's driver are for its devices (offload/ggml/cuda_driver.py).
    torch: torch's name of its devices, without the number; "": torch has none of them.
    on_cpu: the processor computes.
    events_hold_parts: an event's resources can be used again only after it was synchronised.
    waits_between_graphs: a copy or a graph on a stream has to wait until the graph before is done.
    serves_once: a process must not compute for a second client of a worker.
    """

    name: str
    library: str = ""
    shares_buffers: bool = False
    has_driver: bool = False
    torch: str = ""
    on_cpu: bool = False
    events_hold_parts: bool = False
    waits_between_graphs: bool = False
    serves_once: bool = False


CPU = Backend("CPU", shares_buffers=True, on_cpu=True)
SIM = Backend("sim", shares_buffers=True, on_cpu=True)  # the CPU's, posing as a GPU's
CUDA = Backend("CUDA", "cuda", shares_buffers=True, has_driver=True, torch="cuda")
ROCM = Backend(
    "ROCm", "hip", shares_buffers=True, torch="cuda"
)  # torch's build for ROCm says "cuda"
# Vulkan frees command buffers when it synchronises. It takes larger working memory for a larger
# graph, and frees the smaller one without a wait. Its backend corrupts memory when it computes
# after a client's buffers were freed, in stock rpc-servers too. All were seen on software Vulkan.
VULKAN = Backend(
    "Vulkan", "vulkan", events_hold_parts=True, waits_between_graphs=True, serves_once=True
)
METAL = Backend("MTL", "metal")
SYCL = Backend("SYCL", "sycl")
OTHER = Backend("")
BACKENDS = (CPU, SIM, CUDA, ROCM, VULKAN, METAL, SYCL)


def backend_of(device: str) -> Backend:
    """Return the backend of a device by ggml's name, or by that of `--device`. Never fails."""
    lowered = device.lower()
    return next((one for one in BACKENDS if lowered.startswith(one.name.lower())), OTHER)


def number_of(device: str) -> int | None:
    """Return a device's number in its backend, which ends ggml's name, or None."""
    digits = device.removeprefix(backend_of(device).name)
    return int(digits) if digits.isdecimal() else None
