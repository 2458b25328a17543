"""scripts/gpu-check --pack: what it packs is all that the check needs on the other machine.

The tests download wheels. Without a network they are skipped, and fail if CI is set.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LLAMA = "llama_cpp_python"


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu_check"))
    return importlib.import_module("pack")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the installed llama-cpp-python, in place of a CUDA build."""
    return llama_wheel(tmp_path_factory.mktemp("llama"), ("llama_cpp/", LLAMA))


@pytest.fixture(scope="module")
def only_metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the metadata of llama-cpp-python alone."""
    return llama_wheel(tmp_path_factory.mktemp("metadata"), (LLAMA,))


def llama_wheel(folder: Path, beginnings: tuple[str, ...]) -> Path:
    """A wheel of the installed files whose names begin in one of these ways."""
    found = importlib.metadata.distribution(LLAMA)
    path = folder / f"{LLAMA}-{found.version}-py3-none-linux_x86_64.whl"
    names = [n for n in map(str, found.files or ()) if n.startswith(beginnings)]
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            if not name.endswith((".pyc", "direct_url.json")):
                archive.write(str(found.locate_file(name)), name)
    return path


def packed(packing: ModuleType, *words: str) -> list[Path]:
    """The wheels of a pack. Skips the test if they cannot be downloaded."""
    try:
        found: list[Path] = packing.pack(packing.arguments(words))
    except packing.CannotPack as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"wheels cannot be downloaded: {str(e).splitlines()[0]}")
    return found


# -- what is packed -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_pack_fits_that_machines_python_and_what_may_be_carried(
    packing: ModuleType, only_metadata: Path, tmp_path: Path
) -> None:
    wheels = packed(packing, str(tmp_path), "--llama", str(only_metadata))
    names = {packing.parsed(path.name)[0] for path in wheels}
    missing_there = {
        "llama-cpp-python", "gguf", "llguidance", "pydantic", "pydantic-core", "annotated-types",
        "typing-inspection", "diskcache", "fastapi", "starlette", "uvicorn", "prompt-toolkit",
    }  # fmt: skip
    assert missing_there <= names
    assert not {"numpy", "pytest", "torch"} & names
    for path in wheels:
        kinds = {(tag.interpreter, tag.abi) for tag in packing.parsed(path.name)[3]}
        assert any(
            abi in ("none", "cp312") or (abi == "abi3" and int(python[3:]) <= 12)
            for python, abi in kinds
        ), path.name
    largest_bytes = 21_600_000  # of a CUDA build for one architecture
    others = sum(path.stat().st_size for path in wheels if not path.name.startswith(LLAMA))
    assert others + largest_bytes + packing.tree_bytes() < 62 << 20, "less than 2 MiB are left"


def test_a_wheel_is_compressed_once_with_all_its_entries(
    packing: ModuleType, tmp_path: Path
) -> None:
    wheel = tmp_path / "top-1.0-py3-none-any.whl"
    lines = b"".join(b"number_%d = %d\n" % (i, i * i) for i in range(3000))
    files = {"top/numbers.py": lines, "top/noise.so": os.urandom(100)}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.getinfo("top/noise.so").external_attr = 0o755 << 16
    n_bytes = wheel.stat().st_size
    packing.compress(wheel)
    packed_once = wheel.read_bytes()
    assert len(packed_once) < n_bytes
    packing.compress(wheel)
    assert wheel.read_bytes() == packed_once
    with zipfile.ZipFile(wheel) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == files
        assert archive.getinfo("top/noise.so").external_attr == 0o755 << 16
    assert [*tmp_path.iterdir()] == [wheel]


def test_a_package_is_packed_if_it_is_missing_or_may_be_too_old(packing: ModuleType) -> None:
    package = packing.Package
    needed = {
        "absent": package("2", ("deep>=3", "fine>=1", "never>=9; python_version < '3'")),
        "deep": package("4", ("below",)),
        "fine": package("5", ()),
        "never": package("9", ()),
        "old": package("7", ("below>=2",)),
        "below": package("3", ()),
        "unasked": package("1", ()),
    }
    has = {"deep": "", "fine": "1.5", "never": "", "old": "6", "below": "1", "unasked": ""}
    found = packing.to_pack(needed, has, ["absent", "old>=7", "unasked"])
    assert found == {"absent": "2", "deep": "4", "old": "7", "below": "3"}


def test_a_file_names_what_the_machine_has(packing: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "has.txt"
    path.write_text("# comment\nNumPy==2.5  # known\nprompt_toolkit\n\n")
    assert packing.read_has(path) == {"numpy": "2.5", "prompt-toolkit": ""}


def test_without_a_cuda_build_or_with_another_release_it_says_what_is_needed(
    packing: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(packing.CannotPack, match=r"no CUDA build of llama-cpp-python==.*--llama"):
        packing.find_llama(tmp_path, None)
    other = tmp_path / "llama_cpp_python-0.3.1-py3-none-linux_x86_64.whl"
    with pytest.raises(packing.CannotPack, match="llama-cpp-python==.* is needed"):
        packing.find_llama(tmp_path, other)


# -- on the other machine -------------------------------------------------------------------------


def newest_python() -> Path:
    """Python 3.12, which the packs are for by default, or the Python of the tests."""
    found = shutil.which("python3.12")
    if found and subprocess.run([found, "-m", "pip", "--version"], capture_output=True).returncode:
        found = None
    return Path(found or sys.executable)


@pytest.mark.slow
def test_an_empty_environment_with_the_pack_runs_the_check(
    packing: ModuleType, llama: Path, tmp_path: Path
) -> None:
    """The environment has nothing but pip, so that the pack must bring every package."""
    has, folder, bare = tmp_path / "has.txt", tmp_path / "wheels", tmp_path / "bare"
    has.write_text("")
    python = newest_python()
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    packed(
        packing, str(folder), "--llama", str(llama), "--has", str(has), "--python", version,
        "--limit-mib", "500",
    )  # fmt: skip
    for name in ("gguf", "typer"):  # pip installs what is compressed, which is slow for all wheels
        packing.compress(next(folder.glob(f"{name}-*.whl")))
    subprocess.run([python, "-m", "venv", bare], check=True)

    def check(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OUT")}
        return subprocess.run(
            [ROOT / "scripts/gpu-check", *words], capture_output=True, text=True, timeout=200,
            env={**environment, "PYTHON": str(bare / "bin/python"), "WHEELS": str(folder)},
        )  # fmt: skip

    done = check("link", "--dry-run-sim")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["imports"] == []
    assert report["parts"]["link"]["status"] == "passed"
    assert report["machine"]["python"].startswith(version)

    for name in ("gguf", "pydantic_core"):
        next(folder.glob(f"{name}-*.whl")).unlink()
    done = check("link", "--dry-run-sim")
    assert done.returncode == 2
    assert "gguf is missing (needed by the project)" in done.stdout
    assert "pydantic-core is missing (needed by pydantic)" in done.stdout
    assert "imports" not in done.stdout, "nothing was installed or begun"


# -- what is missing ------------------------------------------------------------------------------


def metadata_wheel(folder: Path, name: str, *needs: str, tag: str = "py3-none-any") -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as archive:
        lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n\n")


def test_every_missing_package_is_named_with_what_needs_it(
    packing: ModuleType, tmp_path: Path
) -> None:
    needed = importlib.import_module("needed")
    metadata_wheel(tmp_path, "top", "absent>=2", "numpy", "other; extra == 'more'", "low<0.5")
    metadata_wheel(tmp_path, "low", "absent", "top", "only; sys_platform == 'win32'")
    metadata_wheel(tmp_path, "alien", tag="cp27-cp27m-win32")
    wheels, reasons = needed.wheels_in(tmp_path, needed.sys_tags())
    assert reasons == ["alien-1.0-cp27-cp27m-win32.whl is for another Python or another machine"]
    assert sorted(needed.missing(["top", "alien"], wheels)) == [
        "absent is missing (needed by low, top)",
        "alien is missing (needed by the project)",
        "low 1.0 is not <0.5 (needed by top)",
    ]


def test_a_missing_package_is_reported_within_a_second(tmp_path: Path) -> None:
    """The one absolute time that a test asserts: a lent machine's minutes are few.

    It is a processor's time, which other programs do not change much.
    """
    metadata_wheel(tmp_path, "gguf", "absent")
    words = [sys.executable, str(ROOT / "scripts" / "gpu_check" / "needed.py"), str(tmp_path)]
    taken_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert done.returncode == 2
        assert "absent is missing (needed by gguf)" in done.stdout
    assert 0 < statistics.median(taken_s) < 1.0, taken_s


@pytest.mark.parametrize(("named", "is_missing"), [("no-such-compiler", True), ("sh -c", False)])
def test_a_missing_compiler_is_named_where_the_player_is_not_compiled(
    named: str, is_missing: bool, packing: ModuleType, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    needed = importlib.import_module("needed")
    monkeypatch.setattr(needed, "ROOT", tmp_path)
    monkeypatch.setenv("CC", named)
    assert bool(needed.no_compiler()) == is_missing


def test_imports_that_fail_are_all_named(
    packing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = importlib.machinery.SourceFileLoader(
        "gpu_check_main", str(ROOT / "scripts/gpu_check/__main__.py")
    ).load_module()

    def absent(
        name: str, real: Callable[[str], ModuleType] = importlib.import_module
    ) -> ModuleType:
        if name == "llama_cpp":
            raise OSError("libcudart.so.13: cannot open shared object file")
        if name == "gguf":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(check.importlib, "import_module", absent)
    assert check.import_all() == [
        "import llama_cpp: OSError: libcudart.so.13: cannot open shared object file",
        "import gguf: ModuleNotFoundError: No module named 'gguf'",
    ]
