"""Finds drivers of GPUs by the files that they leave, and asks CUDA's driver for its cards.

scripts/setup uses this module before any dependency is installed, so it imports nothing but the
standard library.
"""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int]  # major and minor

NVIDIA = "proc/driver/nvidia/version"
AMD = "dev/kfd"
# In WSL2, Windows has the driver. Linux sees a device of DirectX and Windows' libcuda
# (https://docs.nvidia.com/cuda/wsl-user-guide/index.html).
WSL_GPU = "dev/dxg"
_WSL_LIBRARIES = ("usr/lib/wsl/lib/libcuda.so.1", "usr/lib/wsl/lib/libcuda.so")
_LIBRARY = "libcuda.so.1"
# Oldest Linux driver of each CUDA. It runs the machine code of every later CUDA with the same major
# number (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
OLDEST_DRIVERS: dict[int, str] = {11: "450.80", 12: "525.60", 13: "580.65"}
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76
_NAME_BYTES = 256


@dataclass(frozen=True)
class Card:
    """An NVIDIA GPU. `compute` is its compute capability, such as (8, 9)."""

    name: str
    compute: Version

    def __str__(self) -> str:
        return f"{self.name} (compute capability {dotted(self.compute)})"


@dataclass(frozen=True)
class CudaDriver:
    """An NVIDIA driver. `cuda` is the newest CUDA that it runs, or None if it did not answer."""

    cuda: Version | None = None
    cards: tuple[Card, ...] = ()


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def nvidia_driver(root: Path = Path("/")) -> CudaDriver | None:
    """Return the NVIDIA driver of this machine, in WSL2 too, or None. `root` is for tests."""
    of_wsl = [root / name for name in _WSL_LIBRARIES if (root / name).exists()]
    if not ((root / NVIDIA).exists() or ((root / WSL_GPU).exists() and of_wsl)):
        return None
    names = [_LIBRARY] if root == Path("/") else []
    return _asked([*names, *map(str, of_wsl)])


def wsl_gpu_without_cuda(root: Path = Path("/")) -> bool:
    """True in a WSL2 that has a GPU but no libcuda of Windows' driver."""
    return (root / WSL_GPU).exists() and nvidia_driver(root) is None


def has_amd_driver(root: Path = Path("/")) -> bool:
    return (root / AMD).exists()


def _asked(libraries: list[str]) -> CudaDriver:
    """Ask the first library that loads. Each answer that it does not give is left out."""
    for name in libraries:
        try:
            library = C.CDLL(name)
        except OSError:
            continue
        return CudaDriver(_newest_cuda(library), _cards(library))
    return CudaDriver()


def _newest_cuda(library: C.CDLL) -> Version | None:
    version = C.c_int()
    if library.cuDriverGetVersion(C.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10  # 12040 is CUDA 12.4


def _cards(library: C.CDLL) -> tuple[Card, ...]:
    n_cards = C.c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(C.byref(n_cards)):
        return ()
    return tuple(card for n in range(n_cards.value) if (card := _card(library, n)) is not None)


def _card(library: C.CDLL, number: int) -> Card | None:
    device, major, minor = C.c_int(), C.c_int(), C.c_int()
    name = C.create_string_buffer(_NAME_BYTES)
    failed = (
        library.cuDeviceGet(C.byref(device), number)
        or library.cuDeviceGetName(name, _NAME_BYTES, device)
        or library.cuDeviceGetAttribute(C.byref(major), _COMPUTE_MAJOR, device)
        or library.cuDeviceGetAttribute(C.byref(minor), _COMPUTE_MINOR, device)
    )
    if failed:
        return None
    return Card(name.value.decode("utf-8", "replace"), (major.value, minor.value))
