"""Puts the stand-in's NVML (tests/cuda_standin/nvml.c) in place of NVIDIA's in this process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

SOURCE = Path(__file__).parent / "cuda_standin/nvml.c"
NAME = "libnvidia-ml.so.1"


def compiled(folder: Path) -> Path | None:
    """Compile the library into a folder. Returns None without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    built = folder / NAME
    flags = ("-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{NAME}")
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(built)], check=True)
    return built


@lru_cache
def loaded(built: Path) -> ctypes.CDLL:
    """Load it. The loader finds a later library of the same name in what it has loaded."""
    return ctypes.CDLL(str(built))
