"""scripts/build_progress.py turns the thousands of lines of a pip build into one progress line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "build_progress.py"
STEPS = "".join(f"  [{n}/50] /usr/bin/g++ -O3 -c file{n}.cpp\n  a warning\n" for n in range(1, 51))
PIP = (
    "Looking in indexes: https://example.org/simple\n"
    "Collecting llama-cpp-python==0.3.36\n"
    "  Building wheel for llama-cpp-python (pyproject.toml): started\n"
    f"{STEPS}Installing collected packages: llama-cpp-python\n"
)


def test_a_pipe_gets_a_line_for_each_fifth_and_the_log_gets_everything(tmp_path: Path) -> None:
    log = tmp_path / "setup.log"
    log.write_text("before\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(log)], input=PIP, capture_output=True, text=True
    )
    assert done.returncode == 0
    shown = [line.split(" · ")[0] for line in done.stderr.splitlines()]
    assert shown == [f"compiling libllama: {n} of 50 files" for n in (10, 20, 30, 40, 50)]
    assert log.read_text() == "before\n" + PIP


def test_bytes_that_are_no_text_do_not_stop_it(tmp_path: Path) -> None:
    log = tmp_path / "setup.log"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(log)], input=b"\xff\n  [1/1] cc\n", capture_output=True
    )
    assert done.returncode == 0
    assert b"compiling libllama: 1 of 1 files" in done.stderr
