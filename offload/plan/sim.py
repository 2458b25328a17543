"""Parses a simulated device: `--device sim:vram=64MiB,bw=2GB/s,latency=20us`. Pure.

The CPU poses as a GPU with a memory budget, and copies are held to a link's speed. It runs the same
code as a GPU, so it tests that code anywhere and shows how another machine would behave. `expert=`
and `host=` set the least time of an expert of a split layer, on the device and on the CPU
(docs/hybrid.md).
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
    """Parse `device`, such as "sim:vram=64MiB". Raises DeviceUnavailable for a bad value."""
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
