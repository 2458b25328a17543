"""Compiles libmtmd and the decoder of image files, when images are first asked for.

libmtmd reads images for llama.cpp's models. Its source is in the pinned llama-cpp-python, whose
builds leave it out here: it takes a minute on one processor, and few models read images. Finished
object files stay, so an interrupted compilation goes on at the next start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload.errors import LibraryMismatch
from offload.ggml.compiling import failure_of, find_compiler
from offload.ggml.installed import package_folder
from offload.ggml.library.abi import PACKAGE_VERSION
from offload.ggml.native_build import library_build
from offload.notes import OnProgress

COMPILING = "libmtmd is compiled for images, once"  # the step that reports progress
FETCHING = "the source of libmtmd is fetched, once"
DECODER = Path(__file__).with_name("decoder.cpp")
_PIN = f"llama-cpp-python=={PACKAGE_VERSION}"
_FLAGS = ("-O2", "-fPIC", "-w", "-DNDEBUG", "-DLLAMA_SHARED", "-DGGML_SHARED")
_CPP = ("-std=c++17",)
_STB = "stb/stb_image.h"  # what the decoder needs of the archive
# Folders of the source archive that libmtmd needs, below vendor/llama.cpp.
_NEEDED = (
    *("include/", "src/llama-ext.h", "ggml/include/", "ggml/src/", "tools/mtmd/"),
    *("vendor/hash/", "vendor/stb/", "vendor/miniaudio/", "vendor/sheredom/"),
)
_INCLUDED = ("tools/mtmd", "include", "ggml/include", "ggml/src", "vendor", "vendor/hash")
_REMEDY = (
    "images need a C++ compiler and the source of the library once: install g++ (CXX names another "
    f"compiler), and if there is no network, set SDIST to the file llama_cpp_python-"
    f"{PACKAGE_VERSION}.tar.gz; without --mmproj the start needs neither"
)


@dataclass(frozen=True)
class ImageLibrary:
    """The folder of libmtmd.so, and the program that decodes image files."""

    folder: Path
    decoder: Path


def image_library(on_progress: OnProgress = lambda *_: None) -> ImageLibrary:
    """Return libmtmd for the installed libllama. The first call compiles it.

    Two processes that ask at once compile once. Raises LibraryMismatch, with what the user can do,
    if there is no compiler or no source, or if the cache folder cannot be written.
    """
    compiler = _compiler()
    folder = _cache() / _key(compiler)
    try:
        return _made(folder, compiler, on_progress)
    except OSError as e:
        raise LibraryMismatch(
            f"libmtmd cannot be compiled into {folder} ({e.strerror or e}): let this user"
            " write there, or set XDG_CACHE_HOME to another folder"
        ) from e


def _made(folder: Path, compiler: list[str], on_progress: OnProgress) -> ImageLibrary:
    """As image_library. Raises OSError too."""
    version = hashlib.sha256(DECODER.read_bytes()).hexdigest()[:8]
    library = ImageLibrary(folder, folder / f"decode-image-{version}")
    if _is_made(library):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / "lock"):
        if not _has_library(folder):
            _make_library(folder, compiler, on_progress)
        if not library.decoder.exists():
            _run([*compiler, *_FLAGS, *_CPP, f"-I{folder}"], DECODER, library.decoder)
            on_progress(COMPILING, 1.0)
    return library


def _is_made(library: ImageLibrary) -> bool:
    return _has_library(library.folder) and library.decoder.exists()


def _has_library(folder: Path) -> bool:
    return (folder / "libmtmd.so").exists() and (folder / _STB).exists()


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specoffload" / "libmtmd"


def _compiler() -> list[str]:
    compiler = find_compiler("CXX", ("c++", "g++", "clang++"))
    if not compiler:
        raise LibraryMismatch(f"there is no C++ compiler; {_REMEDY}")
    return compiler


def _key(compiler: list[str]) -> str:
    """Return a name for the folder of this library and this compiler.

    The decoder's source is not in it, so that a new decoder does not compile libmtmd again.
    """
    parts = [library_build(), str(_libraries()), platform.machine(), *_FLAGS, *_CPP, *compiler]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _libraries() -> Path:
    """Return the folder of the installed libllama."""
    package = package_folder()
    if package is None:
        raise LibraryMismatch("llama-cpp-python is not installed")
    return (package / "lib").resolve()  # two paths to one folder need one libmtmd


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock `path` in the block. The kernel frees it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_library(folder: Path, compiler: list[str], on_progress: OnProgress) -> None:
    """Make libmtmd.so in `folder`, and keep the header that the decoder needs."""
    source = folder / "source"
    if not source.exists():
        on_progress(FETCHING, 0.0)
        _unpack(_archive(folder), source)
    (folder / _STB).parent.mkdir(exist_ok=True)
    shutil.copyfile(source / "vendor" / _STB, folder / _STB)
    objects = folder / "objects"
    objects.mkdir(exist_ok=True)
    wanted = {objects / f"{path.stem}.o": path for path in _sources(source)}
    missing = [target for target in wanted if not target.exists()]
    include = [f"-I{source / folder}" for folder in _INCLUDED]
    n_done = len(wanted) - len(missing)
    on_progress(COMPILING, n_done / (len(wanted) + 1))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        runs = [
            threads.submit(
                _run, [*compiler, *_FLAGS, *_language(wanted[target]), *include, "-c"],
                wanted[target], target,
            )
            for target in missing
        ]  # fmt: skip
        try:
            for run in as_completed(runs):
                run.result()
                n_done += 1
                on_progress(COMPILING, n_done / (len(wanted) + 1))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    libraries = _libraries()
    link = [*compiler, "-shared", *map(str, wanted), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    _run([*link, "-Wl,--no-undefined", "-pthread"], None, folder / "libmtmd.so",
         ["-lllama", "-lggml", "-lggml-base"])  # fmt: skip
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(objects, ignore_errors=True)


def _sources(source: Path) -> list[Path]:
    """Return the files to compile. libmtmd's programs are left out."""
    mtmd = source / "tools/mtmd"
    programs = {"mtmd-cli.cpp", "deprecation-warning.cpp"}
    own = [path for path in (*mtmd.glob("*.cpp"), *mtmd.glob("models/*.cpp"))]
    hashes = [*(source / "vendor/hash").rglob("*.c"), *(source / "vendor/hash").glob("*.cpp")]
    # The longest file first, so that it does not run alone at the end.
    sources = [path for path in (*own, *hashes) if path.name not in programs]
    return sorted(sources, key=lambda path: -path.stat().st_size)


def _language(path: Path) -> list[str]:
    # sha1.c is C++, as it has a namespace against a clash with other libraries.
    if path.name == "sha1.c":
        return ["-x", "c++", *_CPP]
    return ["-x", "c"] if path.suffix == ".c" else [*_CPP]


def _run(
    command: list[str], source: Path | None, target: Path, last: list[str] | None = None
) -> None:
    """Run the compiler, and let `target` appear at once. Raises LibraryMismatch."""
    partial = target.with_name(target.name + ".part")
    given = [] if source is None else [str(source)]
    reason = failure_of([*command, *given, "-o", str(partial), *(last or ())])
    try:
        if not reason:
            partial.replace(target)
    except OSError as e:
        reason = str(e)
    if reason:
        raise LibraryMismatch(f"{target.name} could not be compiled ({reason}); {_REMEDY}")


def _archive(folder: Path) -> Path:
    """Return the source archive of the pinned library: SDIST, or one that pip fetches."""
    if given := os.environ.get("SDIST"):
        return Path(given)
    fetched = folder / "archive"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--no-binary", "llama-cpp-python", _PIN,
               "-d", str(fetched)]  # fmt: skip
    known = [*fetched.glob("llama_cpp_python-*.tar.gz")]
    if not known:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
        except (OSError, subprocess.CalledProcessError) as e:
            lines = (getattr(e, "stderr", "") or str(e)).strip().splitlines() or [str(e)]
            raise LibraryMismatch(
                f"the source of {_PIN} could not be fetched ({lines[-1]}); {_REMEDY}"
            ) from e
        known = [*fetched.glob("llama_cpp_python-*.tar.gz")]
    return known[0]


def _unpack(archive: Path, source: Path) -> None:
    """Unpack what libmtmd needs of the archive into the folder `source`, whole or not at all."""
    partial = source.with_name("unpacking")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                _, _, inside = member.name.partition("/vendor/llama.cpp/")
                if member.isfile() and inside.startswith(_NEEDED):
                    member.name = inside
                    tar.extract(member, partial, filter="data")
        partial.rename(source)
    except (OSError, tarfile.TarError) as e:
        raise LibraryMismatch(f"{archive} cannot be unpacked ({e}); {_REMEDY}") from e
    if archive.parent.name == "archive":
        shutil.rmtree(archive.parent, ignore_errors=True)
