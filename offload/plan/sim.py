"""`--device sim:vram=64MiB,bw=2GB/s,latency=20us`: a GPU that one does not have. Pure.

The CPU device poses as a GPU with a memory budget, and copies are held to a link's bandwidth. It
runs the scheduler's code as a GPU does: it tests it anywhere, and tells what a machine would do.
With `expert=` and `host=` each expert of a layer that is split takes at least as long as that on
the device and on the CPU (docs/hybrid.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import DeviceUnavailable
from offload.units import parse_bytes, parse_rate, parse_seconds

_KEYS = ("vram", "bw", "latency", "expert", "host")


@dataclass(frozen=True)
class SimSpec:
    """The resources of the simulated device; None: no limit."""

    vram_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0.0
    device_expert_s: float = 0.0
    host_expert_s: float = 0.0


def parse_sim(device: str) -> SimSpec:
    """The text behind `sim:`. Raises DeviceUnavailable naming what is wrong."""
    _, _, text = device.partition(":")
    values: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS:
            raise DeviceUnavailable(
                f"device {device}: {part!r} is not vram=SIZE, bw=RATE, latency=TIME, "
                "expert=TIME or host=TIME"
            )
        values[key] = value
    try:
        return SimSpec(
            parse_bytes(values["vram"]) if "vram" in values else None,
            parse_rate(values["bw"]) if "bw" in values else None,
            *(parse_seconds(values.get(key, "0s")) for key in ("latency", "expert", "host")),
        )
    except ValueError as e:
        raise DeviceUnavailable(f"device {device}: {e}") from e
