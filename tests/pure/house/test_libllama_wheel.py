"""Wheels that bring libllama: which one scripts/setup takes on a machine, and what it refuses."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu_libraries import wheel_with_libllama as made

from offload.ggml import drivers
from offload.ggml.drivers import Card, CudaDriver

SCRIPT = Path(__file__).parents[3] / "scripts" / "libllama_wheel.py"
sys.path.insert(0, str(SCRIPT.parent))
import libllama_wheel  # noqa: E402  (a script, not a package)
from libllama_wheel import as_libllama, beside, best, read_wheel, unsuited  # noqa: E402

VERSION = "0.3.36"
GTX_1080 = Card("GTX 1080", (6, 1))
RTX_4090 = Card("RTX 4090", (8, 9))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def drive(
    monkeypatch: pytest.MonkeyPatch, root: Path, driver: CudaDriver | None, *files: str
) -> None:
    """Give the machine an NVIDIA driver that answers so, and other files of drivers."""
    for name in (*files, *([drivers.NVIDIA] if driver else [])):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    monkeypatch.setattr(drivers, "_asked", lambda _: driver)
    monkeypatch.setattr(libllama_wheel.ctypes.util, "find_library", lambda _: "libvulkan.so.1")


ALL = ("cuda", "vulkan", "")


@pytest.mark.parametrize(
    ("driver", "files", "there", "taken"),
    [
        (None, (), ALL, ""),
        (CudaDriver((13, 0), (RTX_4090,)), (), ALL, "cuda"),
        (CudaDriver((13, 0), (GTX_1080, RTX_4090)), (), ALL, "cuda"),
        (CudaDriver((13, 0), (GTX_1080,)), (), ALL, "vulkan"),
        (CudaDriver((12, 4), (RTX_4090,)), (), ALL, "vulkan"),
        (CudaDriver((12, 4)), (), ALL, "vulkan"),
        (CudaDriver(None), (), ALL, "cuda"),  # a driver that does not answer
        (CudaDriver((12, 4), (RTX_4090,)), (), ("cuda", ""), None),  # a compile uses the card
        (None, ("dev/dri/renderD128",), ALL, "vulkan"),
        (None, (drivers.AMD,), ALL, "vulkan"),
        (None, (drivers.AMD,), ("cuda", ""), None),
        (None, (), ("cuda", "vulkan"), None),
    ],
)
def test_the_wheel_that_uses_most_of_the_machine_is_taken(
    driver: CudaDriver | None,
    files: tuple[str, ...],
    there: tuple[str, ...],
    taken: str | None,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive(monkeypatch, root, driver, *files)
    for backend in there:
        made(tmp_path / "here", backend)
    found = best(beside([tmp_path / "here"], VERSION), VERSION, root)
    assert (None if found is None else found.backend) == taken


def test_the_newest_wheel_of_the_pinned_version_is_taken(root: Path, tmp_path: Path) -> None:
    old, new = made(tmp_path, tag="linux_1"), made(tmp_path, tag="linux_2")
    other = made(tmp_path, tag="linux_3", version="0.3.35")
    for n, file in enumerate((old, new, other)):
        os.utime(file, (n, n))
    (tmp_path / "specoffload-0.0.1-py3-none-any.whl").write_bytes(b"cut off")
    (tmp_path / "llama_cpp_python-0.3.36-py3-none-any.whl").touch()
    found = best(beside([tmp_path, tmp_path / "none"], VERSION), VERSION, root)
    assert found is not None
    assert found.file == new


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.3.35"}, "llama-cpp-python 0.3.35, and this checkout needs 0.3.36"),
        ({"tag": "manylinux_2_17_other"}, "it is for other, and this machine is"),
        ({"tag": f"manylinux_9_99_{platform.machine()}"}, "it needs glibc 9.99"),
        ({"tag": f"manylinux_2_17_{platform.machine()}"}, ""),
        ({"backend": "cuda"}, "GTX 1080 (compute capability 6.1) is older"),
    ],
)
def test_a_wheel_for_another_machine_is_refused(
    changes: dict[str, str],
    words: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive(monkeypatch, root, CudaDriver((13, 0), (GTX_1080,)))
    why = unsuited(read_wheel(made(tmp_path, **changes)), VERSION, root)
    assert words in why
    assert bool(words) is bool(why)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("specoffload-0.1.0-py3-none-any.whl", "cannot be read"),
        ("empty.whl", "does not contain libllama"),
    ],
)
def test_a_file_without_libllama_is_refused(name: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if name == "empty.whl":
        zipfile.ZipFile(file, "w").close()
    else:
        file.write_bytes(b"PK")
    with pytest.raises(libllama_wheel.Refused, match=words):
        read_wheel(file)


def test_what_our_wheel_bundles_is_installed_as_llama_cpp_python(tmp_path: Path) -> None:
    """pip installs it, and knows the version, NVIDIA's packages, and every file."""
    wheel = read_wheel(made(tmp_path, "cuda"))
    file = as_libllama(wheel, tmp_path / "made")
    assert file.name == "llama_cpp_python-0.3.36-1cuda13-py3-none-any.whl"
    place = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--no-index",
         "--target", str(place), str(file)],
        check=True, capture_output=True,
    )  # fmt: skip
    code = (
        "import importlib.metadata as m; d = m.distribution('llama-cpp-python');"
        "print(d.version, d.requires, sorted(str(f) for f in d.files if 'dist-info' not in str(f)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(place)}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert told.strip() == (
        "0.3.36 ['numpy>=1.20', 'nvidia-cublas<14,>=13'] ['llama_cpp/__init__.py',"
        " 'llama_cpp/lib/libggml-cuda.so', 'llama_cpp/lib/libllama.so',"
        " 'specoffload.libs/libgomp.so']"
    )
    assert as_libllama(read_wheel(file), tmp_path / "again") == file
