"""Finds and reads wheels that bring a compiled libllama, for scripts/setup.

libllama_wheel.py taken FILE VERSION FOLDER    prints a wheel of llama-cpp-python, made in FOLDER if
                                               FILE is specoffload's own wheel, which bundles one
libllama_wheel.py beside VERSION PLACE...      prints the wheel in these folders that suits this
                                               machine best, or nothing

This file imports only the standard library, because there is no .venv yet.
"""

from __future__ import annotations

import base64
import ctypes.util
import hashlib
import platform
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from offload.ggml.drivers import has_amd_driver, nvidia_driver  # noqa: E402
from offload.ggml.gpu_code import GpuCode, NotReadable, gpu_code  # noqa: E402

_LIBRARY = "llama_cpp/lib/libggml-{}.so"
_PARTS = ("llama_cpp/", "specoffload.libs/")  # what our wheel has of llama-cpp-python
_VERSION = re.compile(r'^__version__ = "(.+)"', re.M)
_REQUIRED = re.compile(r"^Requires-Dist: (?!.*extra ==).*$", re.M)
_TAGS = re.compile(r"^[^-]+-[^-]+-(?:(\d[^-]*)-)?([^-]+-[^-]+-([^-]+))\.whl$")
_GLIBC = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")


class Refused(Exception):
    """The wheel cannot be used. The text says why."""


@dataclass(frozen=True)
class Wheel:
    """A wheel that brings libllama. `backend`: "cuda", "vulkan", or "" for the CPU alone."""

    file: Path
    version: str  # of llama-cpp-python
    backend: str
    code: GpuCode | None = None
    is_ours: bool = False


def read_wheel(file: Path) -> Wheel:
    """Read a wheel of specoffload or llama-cpp-python. Raises Refused."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = set(archive.namelist())
            if "llama_cpp/__init__.py" not in names:
                raise Refused(f"{file.name} does not contain libllama")
            found = _VERSION.search(archive.read("llama_cpp/__init__.py").decode("utf-8"))
            backends = [b for b in ("cuda", "vulkan") if _member(names, b)]
            backend = backends[0] if backends else ""
            code = _code_of(archive, _member(names, "cuda")) if backend == "cuda" else None
    except (OSError, zipfile.BadZipFile) as e:
        raise Refused(f"{file.name} cannot be read: {e}") from e
    if found is None:
        raise Refused(f"{file.name} does not say its version of llama-cpp-python")
    return Wheel(file, found[1], backend, code, file.name.startswith("specoffload-"))


def _member(names: Iterable[str], backend: str) -> str:
    start = _LIBRARY.format(backend)
    return next((name for name in sorted(names) if name.startswith(start)), "")


def _code_of(archive: zipfile.ZipFile, member: str) -> GpuCode | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return gpu_code(Path(archive.extract(member, folder)))
        except NotReadable:
            return None


def unsuited(wheel: Wheel, version: str, root: Path = Path("/")) -> str:
    """Return why this machine cannot use the wheel, or "". `version` is the pinned one."""
    if wheel.version != version:
        return f"it has llama-cpp-python {wheel.version}, and this checkout needs {version}"
    if why := _of_another_system(wheel.file.name):
        return why
    driver = nvidia_driver(root)
    if wheel.code is None or driver is None:
        return ""
    reasons = [wheel.code.reason_on(card, driver) for card in driver.cards]
    if not reasons:
        return wheel.code.reason(driver)
    return reasons[0] if all(reasons) else ""


def _of_another_system(name: str) -> str:
    tags = _TAGS.match(name)
    found = _GLIBC.search(tags[3]) if tags else None
    if found is None:
        return ""
    if found[3] != platform.machine():
        return f"it is for {found[3]}, and this machine is {platform.machine()}"
    here = platform.libc_ver()[1]
    if here and tuple(map(int, here.split(".")[:2])) < (int(found[1]), int(found[2])):
        return f"it needs glibc {found[1]}.{found[2]}, and this system has {here}"
    return ""


def best(wheels: Sequence[Wheel], version: str, root: Path = Path("/")) -> Wheel | None:
    """Return the wheel that uses most of this machine: CUDA before Vulkan before the CPU."""
    driver = nvidia_driver(root)
    has_gpu = driver is not None or has_amd_driver(root) or any((root / "dev/dri").glob("render*"))
    wanted = {
        "cuda": driver is not None,
        "vulkan": has_gpu and ctypes.util.find_library("vulkan") is not None,
        "": driver is None and not has_amd_driver(root),  # else a compile would use more
    }
    for backend, is_wanted in wanted.items():
        for wheel in wheels:
            if is_wanted and wheel.backend == backend and not unsuited(wheel, version, root):
                return wheel
    return None


def beside(places: Sequence[Path], version: str) -> list[Wheel]:
    """Return the wheels in these folders that bring libllama, the newest first."""
    files = {
        file.resolve()
        for place in places
        for pattern in ("specoffload-*.whl", f"llama_cpp_python-{version}-*.whl")
        for file in place.glob(pattern)
    }
    found = []
    for file in sorted(files, key=lambda file: -file.stat().st_mtime):
        try:
            found.append(read_wheel(file))
        except Refused:
            continue
    return found


def as_libllama(wheel: Wheel, folder: Path) -> Path:
    """Return a wheel of llama-cpp-python with what `wheel` bundles, written into `folder`."""
    if not wheel.is_ours:
        return wheel.file
    tags = _TAGS.match(wheel.file.name)
    if tags is None:
        raise Refused(f"{wheel.file.name} is no name of a wheel")
    name = f"llama_cpp_python-{wheel.version}"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "-".join(filter(None, (name, tags[1], f"{tags[2]}.whl")))
    info = f"{name}.dist-info"
    record = []
    with zipfile.ZipFile(wheel.file) as theirs, zipfile.ZipFile(made, "w") as ours:

        def write(member: str, data: bytes) -> None:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{member},sha256={digest},{len(data)}")
            ours.writestr(member, data)

        for member in theirs.namelist():
            if member.startswith(_PARTS) and not member.endswith("/"):
                write(member, theirs.read(member))
        (metadata,) = (
            n for n in theirs.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)
        )
        required = _REQUIRED.findall(theirs.read(metadata).decode("utf-8"))
        lines = ["Metadata-Version: 2.1", "Name: llama_cpp_python", f"Version: {wheel.version}"]
        write(f"{info}/METADATA", "\n".join([*lines, *required, ""]).encode())
        tag = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tags[2]}\n"
        write(f"{info}/WHEEL", tag.encode())
        ours.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
    return made


def words(wheel: Wheel) -> str:
    backend = wheel.code.words if wheel.code is not None else wheel.backend.title()
    return f"{wheel.file} (for {backend or 'the CPU alone'})"


def main(arguments: Sequence[str]) -> None:
    what, *rest = arguments
    if what == "beside":
        version, *places = rest
        found = best(beside([Path(place) for place in places], version), version)
        if found is not None:
            print(
                f"scripts/setup: libllama comes from {words(found)}; --gpu auto compiles instead",
                file=sys.stderr,
            )
            print(found.file)
        return
    file, version, folder = rest
    try:
        wheel = read_wheel(Path(file))
        if why := unsuited(wheel, version):
            raise Refused(f"--wheel {wheel.file.name}: {why} (--gpu auto compiles instead)")
        print(as_libllama(wheel, Path(folder)))
    except Refused as e:
        print(f"scripts/setup: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
