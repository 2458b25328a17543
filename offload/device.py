"""Which device computes: a real GPU, the CPU, or the CPU posing as a GPU."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from offload.errors import DeviceUnavailable
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.plan.sim import SimSpec, parse_sim

_CPU = abi.GGML_BACKEND_DEVICE_TYPE_CPU
_GPU = abi.GGML_BACKEND_DEVICE_TYPE_GPU
_IGPU = abi.GGML_BACKEND_DEVICE_TYPE_IGPU


@dataclass(frozen=True)
class DeviceChoice:
    """The device a model is opened on, and why.

    `address` is the real device; `wrapped` says whether our own stands before it.
    """

    name: str
    description: str
    address: int
    wrapped: bool
    on_gpu: bool
    reason: str
    sim: SimSpec | None = None  # what the CPU posing as a GPU has; None for every other device


def devices() -> list[DeviceChoice]:
    """Every device ggml knows, as it would be chosen by name."""
    lib = library()
    found = []
    for i in range(lib.ggml_backend_dev_count()):
        address = lib.ggml_backend_dev_get(i)
        kind = lib.ggml_backend_dev_type(address)
        if kind in (_CPU, _GPU, _IGPU):
            name = lib.ggml_backend_dev_name(address).decode()
            description = lib.ggml_backend_dev_description(address).decode()
            on_gpu = kind != _CPU
            found.append(DeviceChoice(name, description, address, on_gpu, on_gpu, "asked for"))
    return found


def has_gpu() -> bool:
    """True if ggml knows a GPU here."""
    return any(device.on_gpu for device in devices())


def choose_device(wanted: str) -> DeviceChoice:
    """The device for `--device auto|NAME|cpu|sim`.

    `auto` takes the first real GPU, wrapped, else the plain CPU; `cpu` is libllama untouched;
    `sim` wraps the CPU device as if it were a GPU, `sim:...` with limits (offload/plan/sim.py).
    """
    known = devices()
    cpu = next(d for d in known if not d.on_gpu)
    gpus = [d for d in known if d.on_gpu]
    lowered = wanted.lower()
    if lowered == "cpu" or (lowered == "auto" and not gpus):
        reason = "asked for" if lowered == "cpu" else "ggml knows no GPU here"
        return DeviceChoice("cpu", cpu.description, cpu.address, False, False, reason)
    if lowered == "auto":
        best = gpus[0]
        reason = "the first GPU that ggml knows"
        return DeviceChoice(best.name, best.description, best.address, True, True, reason)
    if lowered == "sim" or lowered.startswith("sim:"):
        sim = parse_sim(wanted)
        reason = "asked for: the CPU device posing as a GPU"
        return DeviceChoice(wanted, cpu.description, cpu.address, True, False, reason, sim)
    for device in gpus:
        if device.name.lower() == lowered:
            return device
    names = ["auto", "cpu", "sim", *(d.name for d in gpus)]
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise DeviceUnavailable(f"device {wanted}: this machine has {', '.join(names)}{hint}")
