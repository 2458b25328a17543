"""Scripts that cannot test anything say why, and never end with 0."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
REASONS = {"test-cuda": "no CUDA build", "test-sanitized": "has no libasan.so"}
# Stands for the venv's Python. Its pytest prints FIRST as the last line of the scripts' first runs
# and LAST of the others, and ends with STATUS. Its pip cannot download.
PYTHON = """#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
*purelib*) root=$(dirname "$(dirname "$0")"); mkdir -p "$root/site"; echo "$root/site" ;;
*"pip download"*) exit 1 ;;
*"pytest"*"--ignore tests/gpu/standin"* | *"pytest"*test_player_programs*) echo "$FIRST" ;;
*"pytest"*) echo "$LAST" ;;
esac
case "$*" in *pytest*) exit "$STATUS" ;; esac
"""
GREP = """#!/bin/sh
case "$*" in *avx512*) exit 0 ;; esac
exec "$REAL_GREP" "$@"
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def ran(
    tmp_path: Path, name: str, *arguments: str, ci: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a checkout that has only what the script needs."""
    folder = tmp_path / "checkout" / "scripts"
    program(folder / "setup", "#!/bin/sh\n")
    for script in (name, "test_parts.sh"):
        shutil.copy(SCRIPTS / script, folder)
    program(tmp_path / "checkout" / ".venv" / "bin" / "python", PYTHON)
    (tmp_path / "shared" / "cuda").mkdir(parents=True)
    (tmp_path / "shared" / "cuda" / "llama_cpp_python-1.whl").touch()
    grep = shutil.which("grep")
    assert grep
    program(tmp_path / "bin" / "grep", GREP)
    library = tmp_path / "libasan.so"
    library.touch()
    program(tmp_path / "cc", f"#!/bin/sh\necho {library}\n")
    environment = {
        **os.environ, "CI": ci, "CC": str(tmp_path / "cc"), "REAL_GREP": grep, "VENV": ".venv",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FIRST": "1 passed in 1s",
        "LAST": "1 passed in 1s", "STATUS": "0",
        "GIT_CEILING_DIRECTORIES": str(tmp_path), **variables,
    }  # fmt: skip
    return subprocess.run(
        [folder / name, *arguments], capture_output=True, text=True, check=False, env=environment
    )


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """A script in place of the one that builds the stand-in. It builds nothing."""
    path = tmp_path / "checkout" / "scripts" / "build-cuda-standin"
    program(path, "#!/bin/sh\necho built\n")
    return path


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize(("ci", "status"), [("", 77), ("1", 1)])
def test_a_missing_part_is_a_failure_in_ci_and_a_skip_elsewhere(
    tmp_path: Path, name: str, ci: str, status: int
) -> None:
    folder = tmp_path / "checkout" / "scripts"
    folder.mkdir(parents=True)
    for script in (name, "test_parts.sh"):
        shutil.copy(SCRIPTS / script, folder)
    # A compiler without sanitizers prints the name that it was asked for.
    program(tmp_path / "cc", '#!/bin/sh\necho "${1#*=}"\n')
    done = subprocess.run(
        [folder / name], capture_output=True, text=True, check=False,
        env={**os.environ, "CI": ci, "CC": str(tmp_path / "cc"),
             "GIT_CEILING_DIRECTORIES": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert REASONS[name] in done.stderr
    assert "nothing was tested" in done.stderr


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize(("ci", "status"), [("", 77), ("1", 1)])
@pytest.mark.parametrize("line", ["3 skipped in 2s", "no tests ran in 2s", "9 deselected in 2s"])
@pytest.mark.parametrize("which", ["FIRST", "LAST"])
def test_a_run_in_which_no_test_passes_is_not_a_success(
    tmp_path: Path, standin: Path, name: str, ci: str, status: int, line: str, which: str
) -> None:
    pytest_status = "0" if "skipped" in line else "5"
    done = ran(tmp_path, name, ci=ci, STATUS=pytest_status, **{which: line})
    assert done.returncode == status, done.stderr
    assert "no test passed in: " in done.stderr
    assert "nothing was tested" in done.stderr


@pytest.mark.parametrize("name", REASONS)
def test_runs_that_pass_their_tests_are_a_success(tmp_path: Path, standin: Path, name: str) -> None:
    done = ran(tmp_path, name, FIRST="2 passed, 1 skipped, 1 warning in 3.10s (0:00:03)")
    assert done.returncode == 0, done.stderr
    assert "passed, 0 failed" in done.stdout


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("line", ["1 failed, 2 passed in 1s", "1 error in 1s", "Killed"])
def test_a_failed_or_broken_run_is_a_failure(
    tmp_path: Path, standin: Path, name: str, line: str
) -> None:
    done = ran(tmp_path, name, FIRST=line)
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize("name", REASONS)
def test_a_run_that_ends_with_a_status_of_failure_is_a_failure(
    tmp_path: Path, standin: Path, name: str
) -> None:
    assert ran(tmp_path, name, STATUS="3").returncode == 1


def test_a_run_for_which_the_caller_chose_no_test_is_left_out(
    tmp_path: Path, standin: Path
) -> None:
    done = ran(tmp_path, "test-cuda", "-k", "some", LAST="9 deselected in 1s")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("line", ["3 skipped in 2s", "9 deselected in 2s"])
def test_chosen_tests_that_all_skip_are_not_a_success(
    tmp_path: Path, standin: Path, name: str, line: str
) -> None:
    done = ran(tmp_path, name, "-k", "some", FIRST=line, LAST=line)
    assert done.returncode == 77, done.stderr
    assert "nothing was tested" in done.stderr


@pytest.mark.parametrize(("ci", "status"), [("", 77), ("1", 1)])
@pytest.mark.parametrize(
    ("cxx", "reason"),
    [("no-such-compiler", "no C++ compiler: no-such-compiler"), ("true", "cannot be fetched")],
)
def test_a_standin_that_cannot_be_built_says_what_is_missing(
    tmp_path: Path, ci: str, status: int, cxx: str, reason: str
) -> None:
    folder = tmp_path / "checkout" / "scripts"
    folder.mkdir(parents=True)
    shutil.copy(SCRIPTS / "build-cuda-standin", folder)
    shutil.copy(SCRIPTS.parent / "pyproject.toml", folder.parent)
    done = ran(tmp_path, "test-cuda", ci=ci, CXX=cxx, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == status, done.stderr
    assert reason in done.stderr
    assert "the stand-in for the CUDA runtime cannot be built; nothing was tested" in done.stderr


def test_a_standin_without_cuda_headers_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "checkout" / "scripts"
    folder.mkdir(parents=True)
    shutil.copy(SCRIPTS / "build-cuda-standin", folder)
    shutil.copy(SCRIPTS.parent / "pyproject.toml", folder.parent)
    pin = (SCRIPTS.parent / "pyproject.toml").read_text().split('"llama-cpp-python==')[1]
    version = pin.split('"')[0]
    headers = tmp_path / "cache" / "specoffload" / "cuda-standin" / f"llama-cpp-python-{version}"
    headers.mkdir(parents=True)
    (headers / "done").touch()
    done = ran(
        tmp_path, "test-cuda", CXX="true", XDG_CACHE_HOME=str(tmp_path / "cache"),
        CUDA_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 77, done.stderr
    assert "CUDA's headers cannot be fetched" in done.stderr


def test_a_standin_that_does_not_compile_is_a_failure(tmp_path: Path, standin: Path) -> None:
    program(standin, "#!/bin/sh\nexit 1\n")
    done = ran(tmp_path, "test-cuda")
    assert done.returncode == 1, done.stderr
    assert "does not compile" in done.stderr
