"""Chooses the device that computes: a real GPU, the CPU, or the CPU posing as a GPU."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.backends import CUDA, backend_of
from offload.errors import DeviceUnavailable
from offload.ggml.backend import Device, all_devices
from offload.ggml.installed import cuda_unused, no_device_reason
from offload.units import parse_bytes, parse_rate, parse_seconds


@dataclass(frozen=True)
class DeviceChoice:
    """The device that a model is opened on, and the reason for choosing it.

    `device` is the real device. If `wrapped`, libllama sees our wrapper instead of it.
    """

    name: str
    description: str
    device: Device
    wrapped: bool
    on_gpu: bool
    reason: str
    sim: SimSpec | None = None  # limits of the simulated device; None for every other device

    @property
    def words(self) -> str:
        """The device as text, in the form that kept measurements use."""
        return f"{self.name}, {self.description}"

    @property
    def shares_ram(self) -> bool:
        """True for a GPU that shares the RAM with the CPU, so that no link leads to it."""
        return self.on_gpu and self.device.is_integrated


def devices() -> list[DeviceChoice]:
    """Return a choice for every CPU and GPU device that ggml knows.

    GPUs that share the RAM with the CPU are the last ones.
    """
    listed = []
    for device in all_devices():
        if device.kind in ("cpu", "gpu"):
            on_gpu = device.kind == "gpu"
            listed.append(
                DeviceChoice(device.name, device.description, device, on_gpu, on_gpu, "asked for")
            )
    return sorted(listed, key=lambda device: device.shares_ram)


def has_gpu() -> bool:
    """True if ggml knows a GPU on this machine."""
    return any(device.on_gpu for device in devices())


def choose_device(wanted: str) -> DeviceChoice:
    """Return the first device of `--device`. Raises DeviceUnavailable."""
    return choose_devices(wanted)[0]


def choose_devices(wanted: str, *, all_gpus: bool = False) -> tuple[DeviceChoice, ...]:
    """Return the devices for `--device A,B`. Raises DeviceUnavailable.

    Several devices are GPUs, each named once, or simulated ones, each with limits of its own. With
    `all_gpus`, `auto` means all GPUs of the machine. A GPU that the library has no code for is
    refused.
    """
    chosen = _chosen(wanted, all_gpus=all_gpus)
    for device in chosen:
        if device.on_gpu and (reason := no_device_reason(device.name)):
            raise DeviceUnavailable(
                f"{device.name} cannot be used: {reason}; --device cpu computes without it"
            )
    return chosen


def start_devices(
    wanted: str, shares: Sequence[float] = (), *, has_workers: bool = False, wraps: bool = True
) -> tuple[DeviceChoice, ...]:
    """Return the local devices that a start may use, in the order of `--device`.

    `auto` means all GPUs if `shares` (`--tensor-split`) divide the layers between several devices,
    or if a plan may. A plan divides no layers if workers hold some (`has_workers`), nor for a model
    that libllama places itself, such as a draft (not `wraps`). Raises DeviceUnavailable.
    """
    all_gpus = len(shares) > 1 if shares else wraps and not has_workers
    return choose_devices(wanted, all_gpus=all_gpus)


def _chosen(wanted: str, *, all_gpus: bool) -> tuple[DeviceChoice, ...]:
    names = device_names(wanted)
    if all_gpus and wanted.lower() == "auto":
        gpus = [choice for choice in devices() if choice.on_gpu and not choice.shares_ram]
        if len(gpus) > 1:
            return tuple(replace(gpu, reason="one of several GPUs") for gpu in gpus)
    chosen = [_choose(name) for name in names]
    if len(chosen) == 1:
        return (chosen[0],)
    for i, choice in enumerate(chosen):
        if not choice.wrapped or names[i].lower() == "auto":
            raise DeviceUnavailable(
                f"--device {wanted}: {names[i]} cannot be one of several devices; several devices "
                "are GPUs or sim"
            )
        if choice.shares_ram:
            raise DeviceUnavailable(
                f"--device {wanted}: {choice.name} shares the RAM with the CPU and cannot be one "
                "of several devices; leave it out"
            )
        if choice.sim is not None:
            chosen[i] = replace(choice, name=f"sim{i}")
        elif choice in chosen[:i]:
            n = chosen.count(choice)
            raise DeviceUnavailable(
                f"--device {wanted}: {choice.name} is named {n} times; name each GPU once"
            )
    return tuple(chosen)


def device_names(wanted: str) -> list[str]:
    """Return the names in a list of devices. The settings of `sim` have commas, too."""
    names: list[str] = []
    for part in wanted.split(","):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    return names


def _choose(wanted: str) -> DeviceChoice:
    """Return the device for one name: `auto|auto:N|NAME|cpu|sim`.

    `auto` is the first GPU, wrapped, `auto:N` the GPU with number N. Without a GPU, `auto` and
    `auto:0` are the unwrapped CPU. NAME is ggml's name of a GPU, and `cpu` the unwrapped CPU. `sim`
    wraps the CPU device as if it were a GPU, and `sim:...` also sets limits (`parse_sim`).
    """
    known = devices()
    cpu = next(d for d in known if not d.on_gpu)
    gpus = [d for d in known if d.on_gpu]
    lowered = wanted.lower()
    if lowered == "cpu" or (lowered in ("auto", "auto:0") and not gpus):
        reason = "asked for" if lowered == "cpu" else "ggml knows no GPU here"
        return DeviceChoice("cpu", cpu.description, cpu.device, False, False, reason)
    if lowered == "auto" or (lowered.startswith("auto:") and lowered[5:].isdecimal()):
        nth = int(lowered[5:] or 0)
        if nth >= len(gpus):
            raise DeviceUnavailable(
                f"--main-gpu {nth}: this machine has {len(gpus)} GPU{'s' * (len(gpus) != 1)}, and "
                "the first has number 0"
            )
        best = gpus[nth]
        reason = f"--main-gpu {nth}" if nth else "the first GPU that ggml knows"
        return DeviceChoice(best.name, best.description, best.device, True, True, reason)
    if lowered == "sim" or lowered.startswith("sim:"):
        sim = parse_sim(wanted)
        reason = "asked for: the CPU device posing as a GPU"
        return DeviceChoice(wanted, cpu.description, cpu.device, True, False, reason, sim)
    for device in gpus:
        if device.name.lower() == lowered:
            return device
    if backend_of(wanted) is CUDA and not gpus and (reason := cuda_unused()):
        raise DeviceUnavailable(f"device {wanted}: {reason}")
    names = ["auto", "cpu", "sim", *(d.name for d in gpus)]
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise DeviceUnavailable(
        f"device {wanted or repr(wanted)}: this machine has {', '.join(names)}{hint}"
    )


_KEYS = ("vram", "bw", "latency", "disk")


# Returns the bytes/s of several devices' links while all of them copy.
MeasureLinks = Callable[[Sequence[DeviceChoice]], Sequence[float]]


@dataclass(frozen=True)
class SimSpec:
    """The limits of the simulated device. None means no limit."""

    vram_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0.0
    disk_bytes_per_s: float | None = None


def parse_sim(device: str) -> SimSpec:
    """Parse `device`, such as "sim:vram=64MiB". Raises DeviceUnavailable for a bad value."""
    _, _, text = device.partition(":")
    values: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS:
            raise DeviceUnavailable(
                f"device {device}: {part!r} is not vram=SIZE, bw=RATE, latency=TIME or disk=RATE"
            )
        if key in values:
            raise DeviceUnavailable(f"device {device}: {key} is given twice; leave one of them out")
        values[key] = value
    try:
        return SimSpec(
            parse_bytes(values["vram"]) if "vram" in values else None,
            parse_rate(values["bw"]) if "bw" in values else None,
            parse_seconds(values.get("latency", "0s")),
            parse_rate(values["disk"]) if "disk" in values else None,
        )
    except ValueError as e:
        raise DeviceUnavailable(f"device {device}: {e}") from e
