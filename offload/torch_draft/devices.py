"""Where a torch draft can run beside a target on one of ggml's devices."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any

from offload.errors import DeviceUnavailable

_LEAST_VERSION = (2, 8)  # products of bf16 with a result in f32 on CUDA (pytorch #150812)
# ggml's names of devices that torch reaches as "cuda", ROCm's build included.
_CUDA = re.compile(r"^(?:CUDA|ROCm)(\d+)$")


def torch_device(ggml_device: str, *, on_gpu: bool) -> str:
    """torch's name of the device that the target is on: "cpu" where that is no GPU.

    Raises DeviceUnavailable: torch is absent, too old, or has no such device.
    """
    if importlib.util.find_spec("torch") is None:
        raise DeviceUnavailable(
            "the torch draft needs torch, which is not installed: pip install "
            "'specoffload[gpu-draft]'"
        )
    if not on_gpu:
        return "cpu"
    match = _CUDA.match(ggml_device)
    if match is None:
        raise DeviceUnavailable(f"torch has no device {ggml_device}; it knows CUDA and ROCm")
    return _cuda_device(importlib.import_module("torch"), int(match[1]))


def _cuda_device(torch: Any, index: int) -> str:
    version = str(torch.__version__)
    if not torch.cuda.is_available():
        raise DeviceUnavailable(f"torch {version} finds no CUDA device; install its CUDA build")
    numbers = re.findall(r"\d+", version)[:2]
    if tuple(int(n) for n in numbers) < _LEAST_VERSION:
        raise DeviceUnavailable(f"the torch draft needs torch 2.8 on CUDA, this is {version}")
    n_devices = torch.cuda.device_count()
    if index >= n_devices:
        raise DeviceUnavailable(f"torch has {n_devices} CUDA devices, and no number {index}")
    return f"cuda:{index}"
