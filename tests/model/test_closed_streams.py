"""The program runs with standard streams that its caller closed, and no file takes their place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = (sys.executable, "-m", "specoffload", "run", "-n", "3", "-t", "1", "-p", "def f(")


def with_closed(streams: str, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run `command` after the shell has closed `streams`, `>&-` for example."""
    shell = ["sh", "-c", f'exec "$@" {streams}', "sh", *command]
    return subprocess.run(
        shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_an_answer_is_written_to_the_streams_that_are_open(streams: str) -> None:
    done = with_closed(streams, RUN)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ("3 tokens in" in done.stderr) == ("2>&-" not in streams)
    assert bool(done.stdout.strip()) == (streams == "2>&-")


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from specoffload.__main__ import main\n"
        "sys.argv = ['specoffload', '--version']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        f"    with open({str(tmp_path / 'numbers')!r}, 'w') as file:\n"
        "        links = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]\n"
        "        inherited = [os.get_inheritable(n) for n in range(3)]\n"
        "        print(file.fileno() > 2, *inherited, *links, file=file)\n"
    )
    done = with_closed("<&- >&- 2>&-", (sys.executable, "-c", program))
    assert done.returncode == 0
    expected = "True True True True /dev/null /dev/null /dev/null\n"
    assert (tmp_path / "numbers").read_text() == expected
