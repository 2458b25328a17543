"""Finds the torch device for a draft, given the ggml device of the target."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any

from offload.errors import DeviceUnavailable

_LEAST_VERSION = (2, 8)  # products of bf16 with a result in f32 on CUDA (pytorch #150812)
# ggml's names of devices that torch reaches as "cuda", ROCm's build included.
_CUDA = re.compile(r"^(?:CUDA|ROCm)(\d+)$")


def torch_name(ggml_device: str, *, on_gpu: bool) -> str:
    """Return torch's name of one of ggml's devices: "cpu", or "cuda:N". Does not import torch.

    Raises DeviceUnavailable if torch is not installed, or has no devices of that kind.
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
    return f"cuda:{match[1]}"


def check_device(name: str) -> None:
    """Import torch, and check that it can use the device `name`.

    Raises DeviceUnavailable if the import fails, or if torch is too old for the device or does not
    have it.
    """
    try:
        torch: Any = importlib.import_module("torch")
    # torch loads CUDA's libraries itself. A library that does not fit those that ggml has loaded
    # raises OSError, ImportError or ValueError, depending on torch's version and on the library.
    except Exception as e:
        reason = str(e).partition("\n")[0] or type(e).__name__
        raise DeviceUnavailable(
            f"torch is installed and cannot be imported: {reason}; install a torch for the same "
            "CUDA version as libllama's, or pass --draft-engine llama"
        ) from e
    if name == "cpu":
        return
    version = str(torch.__version__)
    if not torch.cuda.is_available():
        raise DeviceUnavailable(f"torch {version} finds no CUDA device; install its CUDA build")
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < _LEAST_VERSION:
        raise DeviceUnavailable(f"the torch draft needs torch 2.8 on CUDA, this is {version}")
    index, n_devices = int(name.removeprefix("cuda:")), torch.cuda.device_count()
    if index >= n_devices:
        raise DeviceUnavailable(f"torch has {n_devices} CUDA devices, and no number {index}")
