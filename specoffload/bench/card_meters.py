"""Reads the power and the clocks of a graphics card: by NVML, or from hwmon in sysfs.

ggml names a card by its PCI address, and so do NVML and the kernel. Kernel drivers such as amdgpu
describe their sensors in https://docs.kernel.org/gpu/amdgpu/thermal.html.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

_PCI = "sys/bus/pci/devices"
_POWERS = ("power1_average", "power1_input")  # microwatts; amdgpu has one or the other


class NoReading(Exception):
    """A card's power cannot be read. The text says why."""


@dataclass(frozen=True)
class CardReading:
    """A reading of a card's sensors at `at_s` of time.monotonic. None: it has no such sensor.

    `joules` is the energy that the card took since some earlier time.
    """

    at_s: float
    watts: float
    joules: float | None = None
    core_hz: float | None = None
    memory_hz: float | None = None


class CardMeter(Protocol):
    """A card's sensors. `read` raises NoReading. `limit_watts` is None if the card tells none."""

    limit_watts: float | None

    def read(self) -> CardReading: ...


def open_meter(pci_address: str | None, root: Path = Path("/")) -> CardMeter:
    """The sensors of the card at a PCI address such as 0000:01:00.0. Raises NoReading.

    `root` is where sysfs is looked for.
    """
    if pci_address is None:
        raise NoReading("its backend does not tell its PCI address")
    folders = sorted((root / _PCI / pci_address.lower() / "hwmon").glob("hwmon*"))
    meter: CardMeter
    for folder in folders:
        power = next((folder / name for name in _POWERS if (folder / name).is_file()), None)
        if power is not None:
            meter = HwmonMeter(folder, power)
            break
    else:
        meter = NvmlMeter(pci_address)
    meter.read()  # so that a sensor that cannot be read is known at once
    return meter


class HwmonMeter:
    """The sensors in a folder of hwmon."""

    def __init__(self, folder: Path, power: Path) -> None:
        self._folder, self._power = folder, power
        self.limit_watts = self._number("power1_cap", 1e-6)

    def read(self) -> CardReading:
        watts = self._number(self._power.name, 1e-6)
        if watts is None:
            raise NoReading(f"{self._power} cannot be read")
        core_hz, memory_hz = self._number("freq1_input"), self._number("freq2_input")
        return CardReading(time.monotonic(), watts, None, core_hz, memory_hz)

    def _number(self, name: str, scale: float = 1.0) -> float | None:
        """The number in a file, times `scale`. None if there is no file, or no number in it."""
        try:
            return scale * int((self._folder / name).read_text("ascii"))
        except (OSError, ValueError):
            return None


class NvmlMeter:
    """The sensors that NVIDIA's driver tells through NVML."""

    def __init__(self, pci_address: str) -> None:
        """Raises NoReading if there is no NVML, or if it does not know the card."""
        try:
            import pynvml
        except ImportError:
            raise NoReading(
                "the package nvidia-ml-py is not installed: pip install 'specoffload[power]'"
            ) from None
        self._nvml: ModuleType = pynvml
        try:
            pynvml.nvmlInit()
            self._card: Any = pynvml.nvmlDeviceGetHandleByPciBusId(pci_address)
        except pynvml.NVMLError as e:
            raise NoReading(f"NVML: {e}") from None
        self.limit_watts = self._known(pynvml.nvmlDeviceGetEnforcedPowerLimit, scale=1e-3)

    def read(self) -> CardReading:
        nvml = self._nvml
        try:
            watts = nvml.nvmlDeviceGetPowerUsage(self._card) / 1e3
        except nvml.NVMLError as e:
            raise NoReading(f"NVML: {e}") from None
        joules = self._known(nvml.nvmlDeviceGetTotalEnergyConsumption, scale=1e-3)
        core_hz = self._known(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM, scale=1e6)
        memory_hz = self._known(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM, scale=1e6)
        return CardReading(time.monotonic(), watts, joules, core_hz, memory_hz)

    def _known(self, ask: Callable[..., int], *more: object, scale: float = 1.0) -> float | None:
        """The answer of `ask`, times `scale`. None if the card or the driver does not tell it."""
        try:
            return scale * ask(self._card, *more)
        except self._nvml.NVMLError:
            return None
