"""Prints the environment for compiling libllama here as shell assignments, for scripts/setup.

A compile that cannot succeed, or whose library this machine could not use, is refused at once.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cuda_toolkits import chosen, needed, toolkits  # noqa: E402
from offload.ggml.drivers import (  # noqa: E402
    CudaDriver,
    has_amd_driver,
    nvidia_driver,
    wsl_gpu_without_cuda,
)

GPUS = ("auto", "cuda", "rocm", "vulkan", "none")
_CMAKE = {
    "cuda": "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native",
    "rocm": "-DGGML_HIP=on",
    "vulkan": "-DGGML_VULKAN=on",
}
_RPC = "-DGGML_RPC=on"
_CPU_ALONE = "libllama is compiled for the CPU alone"
_TOOLKIT = (
    "install the CUDA toolkit{needed}, from NVIDIA or as the package nvidia-cuda-toolkit (11.5 in"
    " Ubuntu 22.04, 11.8 in Debian 12, 12.0 in Ubuntu 24.04), and run scripts/setup again, or"
    " take a compiled libllama (scripts/setup --wheel FILE): a wheel of specoffload for CUDA or"
    " Vulkan, or of llama-cpp-python in exactly the version of pyproject.toml"
)
_AMD = (
    f"an AMD GPU's driver is here (/dev/kfd), but {_CPU_ALONE}: scripts/setup --gpu rocm uses the"
    " GPU if ROCm is installed, and --gpu vulkan if Vulkan's tools are"
)
_WSL = (
    f"WSL2 has a GPU (/dev/dxg) but no CUDA of Windows, and {_CPU_ALONE}: for an NVIDIA card,"
    " install its driver in Windows (none in WSL2), and run scripts/setup again"
)
# What each backend is compiled with, the variables that name its folder, the usual folder, and
# what to install.
_COMPILERS = {
    "rocm": ("hipcc", ("ROCM_PATH", "HIP_PATH"), "opt/rocm", "ROCm (AMD's packages, rocm-hip-sdk)"),
    "vulkan": (
        *("glslc", ("VULKAN_SDK",), "usr"),
        "Vulkan's tools (Debian and Ubuntu: apt-get install libvulkan-dev glslc spirv-headers)",
    ),
}
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


class Refused(Exception):
    """libllama cannot be compiled as asked for. The text says why."""


def flags(
    gpu: str, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> tuple[dict[str, str], list[str]]:
    """Returns variables to set, and sentences for the user. The user's own settings come first.

    Raises Refused if `gpu` names a backend that cannot be compiled here. "auto" takes the CPU then.
    """
    found: dict[str, str] = {}
    notes: list[str] = []
    own = environ.get("CMAKE_ARGS")
    driver = nvidia_driver(root)
    compiler_args = ""
    if gpu == "cuda" or (gpu == "auto" and driver is not None):
        try:
            compiler_args = _cuda_compiler(own or "", driver or CudaDriver(), environ, root, notes)
        except Refused as e:
            if gpu == "cuda":
                raise
            notes.append(f"an NVIDIA driver is here, but {_CPU_ALONE}: {e}")
            gpu = "none"
        else:
            notes += ["libllama is compiled with CUDA (--gpu none: not)"] * (gpu == "auto")
            gpu = "cuda"
    elif gpu == "auto":
        gpu = "none"
        notes += [_AMD] * has_amd_driver(root) + [_WSL] * wsl_gpu_without_cuda(root)
    elif gpu in _COMPILERS:
        _check_compiler(gpu, environ, root)
    rpc = None if own and "GGML_RPC" in own else _RPC
    if args := _joined(own, rpc, _CMAKE.get(gpu), compiler_args):
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


def _cuda_compiler(
    own: str, driver: CudaDriver, environ: Mapping[str, str], root: Path, notes: list[str]
) -> str:
    """Returns CMake's argument that names nvcc, "" if it finds nvcc by itself. Raises Refused."""
    if "CMAKE_CUDA_COMPILER" in own:
        return ""
    here = toolkits(environ, root)
    toolkit, reasons = chosen(here, driver)
    if toolkit is None:
        why = "; ".join(reasons) or "there is no nvcc"
        raise Refused(f"{why}; {_TOOLKIT.format(needed=needed(driver))}")
    notes += reasons
    if toolkit.is_on_path:
        return ""
    notes.append(f"{toolkit} is used from {toolkit.nvcc}")
    return f"-DCMAKE_CUDA_COMPILER={shlex.quote(toolkit.nvcc)}"


def _check_compiler(gpu: str, environ: Mapping[str, str], root: Path) -> None:
    """Raises Refused unless the program is here with which a backend is compiled."""
    program, variables, usual, remedy = _COMPILERS[gpu]
    folders = [Path(environ[name]) for name in variables if environ.get(name)]
    path = [environ.get("PATH", ""), *(str(f / "bin") for f in (*folders, root / usual))]
    if shutil.which(program, path=os.pathsep.join(path)) is None:
        raise Refused(f"--gpu {gpu} needs {program}, which is not here: install {remedy}")


def check_compilers(environ: Mapping[str, str] = os.environ) -> None:
    """Raises Refused unless there is a compiler of C and one of C++."""
    for variable, program in (("CC", "cc"), ("CXX", "c++")):
        words = shlex.split(environ.get(variable) or program)
        if shutil.which(words[0], path=environ.get("PATH")) is None:
            raise Refused(
                f"there is no compiler {words[0]}, and libllama is compiled here: install one"
                f" (Debian and Ubuntu: apt-get install build-essential; {variable} names another)"
            )


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
    try:
        check_compilers()
        found, notes = flags(parser.parse_args().gpu)
    except Refused as e:
        print(f"scripts/setup: {e}", file=sys.stderr)
        sys.exit(2)
    for note in notes:
        print(f"scripts/setup: {note}", file=sys.stderr)
    for name, value in found.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
