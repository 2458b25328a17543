"""The start of scripts/setup: the Python that it takes, and what a start that failed has left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from gpu_libraries import wheel_with_libllama

SCRIPTS = Path(__file__).parents[3] / "scripts"
STOPPED = 7  # what the false build_flags.py ends with, once there is an environment


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which scripts/setup makes its environment, and then stops."""
    scripts = tmp_path / "checkout/scripts"
    scripts.mkdir(parents=True)
    for name in ("setup", "python_env.sh", "libllama.sh", "build_progress.py", "libllama_wheel.py"):
        shutil.copy(SCRIPTS / name, scripts)
    (scripts.parent / "offload/ggml").mkdir(parents=True)
    for name in ("drivers.py", "gpu_code.py"):
        shutil.copy(SCRIPTS.parent / "offload/ggml" / name, scripts.parent / "offload/ggml")
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


@pytest.mark.parametrize("name", ["specoffload-0.1.0", "llama_cpp_python-0.3.36"])
def test_a_wheel_with_libllama_is_installed_in_place_of_a_compile(
    name: str, checkout: Path
) -> None:
    false_python(checkout.parent / "bin", "python3", "3.12")
    done = setup(checkout, "--wheel", "none.whl")
    assert done.returncode == 2
    assert "--wheel none.whl: there is no such file" in done.stderr
    old = wheel_with_libllama(checkout / "old", name=name, version="0.3.35")
    done = setup(checkout, "--wheel", str(old))
    assert done.returncode == 2
    assert "it has llama-cpp-python 0.3.35, and this checkout needs 0.3.36" in done.stderr
    assert "Traceback" not in done.stderr
    wheel = wheel_with_libllama(checkout / "a folder", "vulkan", name=name)
    done = setup(checkout, "--wheel", str(wheel))
    assert f"installing into .venv, with libllama from {wheel.name}\n" in done.stderr
    assert done.returncode == 0, done.stderr
    first, second = (checkout / "pip.txt").read_text("utf-8").splitlines()
    assert "--no-deps " in first
    assert first.endswith("llama_cpp_python-0.3.36-1vulkan-py3-none-any.whl")
    assert second.endswith("-e .[dev]")
    # The choice is kept. A wheel that has not changed is not installed again.
    for stamp in (checkout / ".venv").glob(".installed-*"):
        stamp.unlink()
    assert setup(checkout).returncode == 0
    (third,) = (checkout / "pip.txt").read_text("utf-8").splitlines()[2:]
    assert third.endswith("-e .[dev]")
    # A variable names another one, also when everything is installed.
    other = wheel_with_libllama(checkout / "other", name=name)
    assert setup(checkout, WHEEL=str(other)).returncode == 0
    fourth = (checkout / "pip.txt").read_text("utf-8").splitlines()[3]
    assert fourth.endswith("llama_cpp_python-0.3.36-py3-none-any.whl")


@pytest.mark.parametrize(
    ("args", "how"),
    [
        ("-DGGML_RPC=on", "on the first time: about 2 minutes"),
        ("-DGGML_RPC=on -DGGML_CUDA=on", "for CUDA on the first time: about 20 minutes on 2 cores"),
    ],
)
def test_the_time_of_a_compile_is_said_before_it_begins(
    args: str, how: str, checkout: Path
) -> None:
    false_python(checkout.parent / "bin", "python3", "3.12")
    flags = f"export CMAKE_ARGS='{args}'"
    (checkout / "scripts/build_flags.py").write_text(f"print({flags!r})", "utf-8")
    assert f"installing into .venv (libllama is compiled {how})\n" in setup(checkout).stderr


@pytest.mark.parametrize("place", [".", ".."])
def test_a_wheel_beside_the_checkout_is_found_once_and_named(place: str, checkout: Path) -> None:
    false_python(checkout.parent / "bin", "python3", "3.12")
    wheel = wheel_with_libllama((checkout / place).resolve())
    done = setup(checkout, "--gpu", "auto")
    assert done.returncode == STOPPED  # it would be compiled
    done = setup(checkout)
    assert done.returncode == 0, done.stderr
    assert f"libllama comes from {wheel} (for the CPU alone); --gpu auto compiles" in done.stderr
    assert "--no-deps" in (checkout / "pip.txt").read_text("utf-8").splitlines()[0]
    # What is installed stays. A wheel that comes later is taken if it is named.
    for stamp in (checkout / ".venv").glob(".installed-*"):
        stamp.unlink()
    wheel_with_libllama(checkout, "vulkan")
    assert "libllama comes from" not in setup(checkout).stderr
