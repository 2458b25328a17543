"""The start of scripts/setup: the Python that it takes, and what a start that failed has left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
STOPPED = 7  # what the false build_flags.py ends with, once there is an environment


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which scripts/setup makes its environment, and then stops."""
    scripts = tmp_path / "checkout/scripts"
    scripts.mkdir(parents=True)
    for name in ("setup", "python_env.sh", "libllama.sh", "build_progress.py"):
        shutil.copy(SCRIPTS / name, scripts)
    for name in ("pyproject.toml", "constraints.txt", "scripts/cuda_toolkits.py"):
        (scripts.parent / name).touch()
    (scripts.parent / "pyproject.toml").write_text('    "llama-cpp-python==0.3.36",\n', "utf-8")
    (scripts / "build_flags.py").write_text(f"raise SystemExit({STOPPED})", "utf-8")
    return scripts.parent


def false_python(folder: Path, name: str, version: str, *, makes: bool = True) -> None:
    """A program that answers as a Python of this version, and that can make an environment or not.

    As on Debian without python3-venv, an environment that cannot be made has a python and no pip.
    """
    major, minor = version.split(".")
    is_old = int((int(major), int(minor)) < (3, 11))
    lib = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/pip"
    record = "import sys; print(*sys.argv[1:], file=open('pip.txt', 'a'))"
    then = (
        f'mkdir "$3/{lib}" && : >"$3/{lib}/__init__.py" && echo "{record}" >"$3/{lib}/__main__.py"'
        if makes
        else "exit 1"
    )
    text = f"""#!/bin/sh
case "$1 $2" in
    "-c import sys; sys.exit"*) exit {is_old};;
    "-c import sys; print"*) echo {version}.1;;
    "--version "*) echo Python {version}.1;;
    "-m venv") {sys.executable} -m venv --without-pip "$3" && {then};;
    *) exit 9;;
esac
"""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, "utf-8")
    (folder / name).chmod(0o755)


def setup(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    tools = checkout.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name in (
        "bash",
        "cat",
        "cut",
        "dirname",
        "grep",
        "mkdir",
        "realpath",
        "rm",
        "sed",
        "tail",
        "touch",
        "rmdir",
        "sha256sum",
    ):
        if not (tools / name).exists():
            (tools / name).symlink_to(str(shutil.which(name)))
    environ = {"PATH": f"{checkout.parent / 'bin'}:{tools}", "HOME": str(checkout), **variables}
    return subprocess.run(
        [checkout / "scripts/setup", *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def has_pip(checkout: Path) -> bool:
    python = checkout / ".venv/bin/python"
    return not subprocess.run([python, "-c", "import pip"], check=False).returncode


@pytest.mark.parametrize("left", ["without pip", "without python"])
def test_an_environment_of_a_failed_start_is_made_anew(left: str, checkout: Path) -> None:
    false_python(checkout.parent / "bin", "python3", "3.11")
    venv.create(checkout / ".venv", with_pip=False, symlinks=True)
    if left == "without python":
        for link in (checkout / ".venv/bin").glob("python*"):
            link.unlink()
    done = setup(checkout)
    assert done.returncode == STOPPED, done.stderr
    assert "made anew" in done.stderr
    assert has_pip(checkout)
    kept = os.stat(checkout / ".venv/pyvenv.cfg").st_ino
    assert "made anew" not in setup(checkout).stderr
    assert os.stat(checkout / ".venv/pyvenv.cfg").st_ino == kept


def test_a_python_without_venv_names_the_package_and_leaves_nothing(checkout: Path) -> None:
    false_python(checkout.parent / "bin", "python3", "3.12", makes=False)
    for _ in range(2):
        done = setup(checkout)
        assert done.returncode == 2
        assert "apt-get install python3.12-venv" in done.stderr
        assert not (checkout / ".venv").exists()


def test_an_old_python_names_the_variable_and_the_package(checkout: Path) -> None:
    false_python(checkout.parent / "bin", "python3", "3.10")
    done = setup(checkout)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    for words in ("python3 is Python 3.10.1", "python3.11-venv", "PYTHON=python3.11 scripts/setup"):
        assert words in done.stderr
    false_python(checkout.parent / "bin", "mypython", "3.13")
    assert setup(checkout, PYTHON="mypython").returncode == STOPPED


def test_a_newer_python_beside_an_old_one_is_found(checkout: Path) -> None:
    false_python(checkout.parent / "bin", "python3", "3.10")
    false_python(checkout.parent / "bin", "python3.12", "3.12")
    assert setup(checkout).returncode == STOPPED
    assert has_pip(checkout)


def test_a_python_that_is_there_and_does_not_run_is_passed_over(checkout: Path) -> None:
    bin_folder = checkout.parent / "bin"
    false_python(bin_folder, "python3", "3.10")
    false_python(bin_folder, "python3.12", "3.12")
    shim = bin_folder / "python3.13"
    shim.write_text(
        "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n", "utf-8"
    )
    shim.chmod(0o755)
    done = setup(checkout)
    assert done.returncode == STOPPED, done.stderr
    assert "pyenv" not in done.stderr


def test_a_folder_that_is_no_environment_is_kept(checkout: Path) -> None:
    false_python(checkout.parent / "bin", "python3", "3.12")
    (checkout / ".venv").mkdir()
    (checkout / ".venv/novel.txt").write_text("chapter one", "utf-8")
    done = setup(checkout)
    assert done.returncode == 2
    assert "no environment of Python" in done.stderr
    assert (checkout / ".venv/novel.txt").exists()


def test_a_named_python_that_is_missing_is_said(checkout: Path) -> None:
    assert "nowhere is not installed" in setup(checkout, PYTHON="nowhere").stderr


def test_a_wheel_of_libllama_is_installed_in_place_of_a_compile(checkout: Path) -> None:
    false_python(checkout.parent / "bin", "python3", "3.12")
    for name in ("none.whl", "llama_cpp_python-0.3.35-1cuda-py3-none-any.whl"):
        if name != "none.whl":
            (checkout / name).touch()
        done = setup(checkout, "--wheel", name)
        assert done.returncode == 2
        assert f"--wheel {name}" in done.stderr
        assert "llama_cpp_python-0.3.36-*.whl" in done.stderr
    wheel = checkout / "a folder" / "llama_cpp_python-0.3.36-1cuda-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    done = setup(checkout, "--wheel", str(wheel))
    assert done.returncode == 0, done.stderr
    first, second = (checkout / "pip.txt").read_text("utf-8").splitlines()
    assert f"--no-deps {wheel}" in first
    assert second.endswith("-e .[dev]")
    # The choice is kept. A wheel that has not changed is not installed again.
    for stamp in (checkout / ".venv").glob(".installed-*"):
        stamp.unlink()
    assert setup(checkout).returncode == 0
    (third,) = (checkout / "pip.txt").read_text("utf-8").splitlines()[2:]
    assert third.endswith("-e .[dev]")
