"""Reads from libllama's files which GPUs they have code for. It loads none of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from offload.backends import BACKENDS, CUDA, Backend, backend_of, number_of
from offload.ggml.drivers import nvidia_driver
from offload.ggml.gpu_code import GpuCode, NotReadable, gpu_code


def package_folder() -> Path | None:
    """Return the folder of the installed llama_cpp, or None if there is none."""
    spec = importlib.util.find_spec("llama_cpp")  # importing it would load the library
    return Path(spec.origin).parent if spec and spec.origin else None


def built_for() -> str:
    """Return the GPUs of the library in words, such as "Vulkan", or "the CPU alone"."""
    names = [_words_of(one) for one in BACKENDS if _library(one) is not None]
    return " and ".join(names) or "the CPU alone"


def cuda_code() -> GpuCode | None:
    """Return the library's code for NVIDIA GPUs, or None if it was compiled without CUDA."""
    library = _library(CUDA)
    return None if library is None else _code_of(library)


def cuda_unused(root: Path = Path("/")) -> str:
    """Return why a library with CUDA uses no card of this machine's driver.

    Returns "" if the library is without CUDA, or if there is no driver. `root` is for tests.
    """
    code, driver = cuda_code(), nvidia_driver(root)
    if code is None or driver is None:
        return ""
    reasons = [code.reason(driver), *(code.reason_on(card, driver) for card in driver.cards)]
    return next(filter(None, reasons), "") or (
        "an NVIDIA driver is here, and the library has CUDA, but CUDA finds no card: nvidia-smi, "
        "CUDA_VISIBLE_DEVICES and the rights on /dev/nvidia* tell more"
    )


def no_device_reason(name: str, root: Path = Path("/")) -> str:
    """Return why the library cannot compute on the CUDA device with ggml's name `name`, or "".

    `root` is for tests.
    """
    number = number_of(name)
    if backend_of(name) is not CUDA or number is None:
        return ""
    code, driver = cuda_code(), nvidia_driver(root)
    if code is None or driver is None or number >= len(driver.cards):
        return ""  # nothing is known about the card
    return code.reason_on(driver.cards[number], driver)


def _words_of(backend: Backend) -> str:
    code = cuda_code() if backend is CUDA else None
    return code.words if code is not None else backend.name


def _library(backend: Backend) -> Path | None:
    folder = package_folder()
    if folder is None or not backend.library:
        return None
    files = sorted((folder / "lib").glob(f"libggml-{backend.library}.*"))
    return files[0] if files else None


def _code_of(library: Path) -> GpuCode | None:
    try:
        return gpu_code(library)
    except (OSError, NotReadable):  # a library for another system than Linux
        return None
