"""Puts llama-cpp-python into our wheel: bundle_wheel.py OURS.whl LIBLLAMA.whl FOLDER [BACKEND.so].

BACKEND.so is ggml's library for GPUs (scripts/gpu_backend.py), which libllama loads at start.

The wheel then requires the packages of llama-cpp-python instead of llama-cpp-python itself, of
which pip's default index has only a source archive. Needs the package `wheel`, and patchelf.

llama-cpp-python has each library under three names, because a wheel has no links. Ours has it once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llama_cpp"
NEEDS_LIBLLAMA = re.compile(r"Requires-Dist: llama[-_]cpp[-_]python\b.*")
_CUDA_12 = ("cuda_runtime", "cublas")  # folders of the packages of CUDA 12, one for each
VERSIONED = re.compile(r"\.so\.\d+")  # other names of the same library


def bundle(ours: Path, libllama: Path, folder: Path, backend: Path | None = None) -> None:
    """Write the wheel with both into `folder`. Raises SystemExit if a wheel is not as expected."""
    with tempfile.TemporaryDirectory() as work:
        a, b = (_unpacked(file, Path(work, name)) for file, name in ((ours, "a"), (libllama, "b")))
        shutil.copytree(
            b / PACKAGE, a / PACKAGE,
            ignore=lambda _, names: {name for name in names if VERSIONED.search(name)},
        )  # fmt: skip
        (theirs,), (mine,) = b.glob("*.dist-info"), a.glob("*.dist-info")
        libraries = a / PACKAGE / "lib"
        for file in sorted((b / PACKAGE / "lib").iterdir()):  # some have names with versions alone
            if not (libraries / _plain(file.name)).exists():
                shutil.copy(file, libraries / _plain(file.name))
        if backend is not None:
            if "libggml-cpu.so" in "".join(_needed_by(libraries / "libggml.so")):
                sys.exit(f"{libllama.name} loads no libraries at start, so it takes no {backend}")
            shutil.copy(backend, libraries)
        _name_once(libraries)
        tag, of_gpu = _for_gpus(libraries)
        needed = [*_requirements((theirs / "METADATA").read_text("utf-8")), *of_gpu]
        metadata = mine / "METADATA"
        text, n = NEEDS_LIBLLAMA.subn("\n".join(needed), metadata.read_text("utf-8"))
        if n != 1:
            sys.exit(f"{ours.name} requires llama-cpp-python {n} times, not once")
        metadata.write_text(text, "utf-8")
        (mine / "licenses").mkdir(exist_ok=True)
        for file in (theirs / "licenses").glob("LICENSE*"):
            shutil.copy(file, mine / "licenses" / f"llama-cpp-python-{file.name}")
        folder.mkdir(parents=True, exist_ok=True)
        _wheel("pack", str(a), "-d", str(folder), *(("--build-number", tag) if tag else ()))


def _name_once(folder: Path) -> None:
    """Let the libraries in `folder` need each other by the names that they have there."""
    for file in sorted(folder.glob("*.so")):
        words = []
        for name in _needed_by(file):
            if VERSIONED.search(name) and (folder / _plain(name)).exists():
                words += ["--replace-needed", name, _plain(name)]
        subprocess.run(["patchelf", *words, "--set-soname", file.name, str(file)], check=True)


def _needed_by(library: Path) -> list[str]:
    done = subprocess.run(
        ["patchelf", "--print-needed", str(library)], check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def _plain(name: str) -> str:
    """A library's file name without its version."""
    return VERSIONED.split(name)[0] + ".so" if VERSIONED.search(name) else name


def _for_gpus(folder: Path) -> tuple[str, list[str]]:
    """The build tag for the GPU backend in `folder`, and the packages that it requires.

    CUDA's libraries are found in the folders of NVIDIA's packages. Returns "" for the CPU alone.
    """
    if (folder / "libggml-vulkan.so").exists():
        return "1vulkan", []
    cuda = folder / "libggml-cuda.so"
    if not cuda.exists():
        return "", []
    found = re.search(r"libcudart\.so\.(\d+)", "\n".join(_needed_by(cuda)))
    if found is None:
        sys.exit("libggml-cuda.so does not need libcudart.so.N")
    major = int(found[1])
    suffix, places = ("", [f"cu{major}"]) if major >= 13 else (f"-cu{major}", list(_CUDA_12))
    path = ":".join(["$ORIGIN", *(f"$ORIGIN/../../nvidia/{place}/lib" for place in places)])
    subprocess.run(["patchelf", "--set-rpath", path, str(cuda)], check=True)
    packages = ("nvidia-cuda-runtime", "nvidia-cublas")
    needed = [f"Requires-Dist: {name}{suffix} <{major + 1},>={major}" for name in packages]
    return f"1cuda{major}", needed


def _requirements(metadata: str) -> list[str]:
    """The lines of required packages, without those of extras."""
    lines = metadata.partition("\n\n")[0].splitlines()
    return [x for x in lines if x.startswith("Requires-Dist:") and "extra ==" not in x]


def _unpacked(file: Path, folder: Path) -> Path:
    _wheel("unpack", str(file), "-d", str(folder))
    (found,) = folder.iterdir()
    return found


def _wheel(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    bundle(*map(Path, sys.argv[1:]))
