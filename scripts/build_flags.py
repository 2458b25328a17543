"""Prints the environment for compiling libllama here as shell assignments, for scripts/setup.

libllama is always compiled with ggml's RPC, which pip's defaults leave out. Tools that were found
and tools that are missing are reported on stderr. This file imports only the standard library,
because there is no .venv yet.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

GPUS = ("auto", "cuda", "rocm", "vulkan", "none")
_CMAKE = {
    "cuda": "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native",
    "rocm": "-DGGML_HIP=on",
    "vulkan": "-DGGML_VULKAN=on",
}
_RPC = "-DGGML_RPC=on"
_NVIDIA_DRIVER = "proc/driver/nvidia/version"
_NO_NVCC = (
    "an NVIDIA driver is here but no nvcc, so libllama is compiled for the CPU alone: install the"
    " CUDA toolkit (Debian and Ubuntu: apt-get install nvidia-cuda-toolkit) and run scripts/setup"
    " again, or install one of the CUDA wheels that llama-cpp-python's README names, of exactly the"
    " version in pyproject.toml; those are not compiled for this processor, so what stays on the"
    " CPU is slower"
)
# A program that configures AMX tiles as ggml-cpu/amx/mmq.cpp does. gcc before 12.4 and 13.3 assumes
# that only 8 bytes of the configuration are used (gcc bug 114098) and drops the others. The
# processor refuses the result.
_AMX_TRIAL = r"""
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifndef __AMX_TILE__
#error no AMX
#endif
struct { uint8_t palette, start, reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; }
    __attribute__((packed, aligned(64))) typedef config_t;
__attribute__((noinline)) static void configure(void) {
    config_t tc = {0};
    tc.palette = 1;
    for (int i = 0; i < 8; i++) { tc.rows[i] = 16; tc.colsb[i] = 64; }
    _tile_loadconfig(&tc);
}
int main(void) {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0;  /* no AMX for this process */
    config_t set;
    configure();
    __asm__ volatile("sttilecfg %0" : "=m"(set));
    _tile_release();
    return set.rows[7] == 16 && set.colsb[7] == 64 ? 0 : 3;
}
"""
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


def flags(
    gpu: str, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> tuple[dict[str, str], list[str]]:
    """Returns variables to set, and sentences for the user. The user's own settings come first."""
    found: dict[str, str] = {}
    notes: list[str] = []
    if gpu == "auto":
        has_driver = (root / _NVIDIA_DRIVER).exists()
        gpu = "cuda" if has_driver and shutil.which("nvcc", path=environ.get("PATH")) else "none"
        if has_driver and gpu == "none":
            notes.append(_NO_NVCC)
        elif gpu == "cuda":
            notes.append(
                "an NVIDIA driver is here: libllama is compiled with CUDA (--gpu none: not)"
            )
    own = environ.get("CMAKE_ARGS")
    rpc = None if own and "GGML_RPC" in own else _RPC
    if args := _joined(own, rpc, _CMAKE.get(gpu)):
        found["CMAKE_ARGS"] = args
    compiler = environ.get("CC") or "cc"
    if miscompiles_amx(compiler, environ):
        notes.append(
            f"{compiler} miscompiles AMX (gcc bug 114098): libllama is compiled without it; gcc"
            " 12.4, 13.3 or newer would keep it"
        )
        for name in ("CFLAGS", "CXXFLAGS"):
            found[name] = _joined(environ.get(name), _NO_AMX)
    return found, notes


def miscompiles_amx(compiler: str, environ: Mapping[str, str] = os.environ) -> bool:
    """True if the compiler miscompiles AMX tile configurations, as tried on this processor."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "amx.c"), Path(folder, "amx")
        source.write_text(_AMX_TRIAL, encoding="ascii")
        command = [*shlex.split(compiler), "-O3", "-march=native", str(source), "-o", str(program)]
        try:
            compiled = subprocess.run(command, capture_output=True, check=False, env=dict(environ))
            if compiled.returncode:
                return False  # no AMX here, or a compiler without AMX
            return subprocess.run([str(program)], check=False).returncode != 0
        except OSError:
            return False  # no compiler: pip will say so


def _joined(*parts: str | None) -> str:
    return " ".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="auto")
    found, notes = flags(parser.parse_args().gpu)
    for note in notes:
        print(f"scripts/setup: {note}", file=sys.stderr)
    for name, value in found.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
