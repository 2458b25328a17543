"""Commands of the documentation show what their pages promise. The embedded pair runs them."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from pathlib import Path

import pytest
from documented_blocks import SHOWS, commands

from specoffload.config.resolution import demo_file

_LIMIT_S = 240.0
# Commands of one page share a folder, since later ones read what earlier ones write.
PAGES = sorted({command.page for command in commands() if command.mark == SHOWS})


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_show_what_it_promises(page: str, tmp_path: Path) -> None:
    for name, file in (("MODEL", "target"), ("DRAFT", "draft")):
        for link in (f"{name}.gguf", f"{name.lower()}.gguf"):
            (tmp_path / link).symlink_to(demo_file(f"{file}.gguf"))
    (tmp_path / "question.txt").write_text("def main():\n", encoding="utf-8")
    program = tmp_path / "bin" / "specoffload"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m specoffload "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    for command in commands():
        if (command.page, command.mark) == (page, SHOWS):
            shown = output_of(command.words, tmp_path, until=command.promise)
            assert re.search(command.promise, shown), f"{command.words}\n{shown}"


def output_of(words: str, folder: Path, until: str) -> str:
    """The output of a shell command. A server is stopped as soon as it has a match for `until`."""
    serves = words.startswith("specoffload serve")
    environment = {
        **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NO_COLOR": "1",
        "COLUMNS": "120", "SPECOFFLOAD_PROFILE_DIR": str(folder / "kept"),
        "SPECOFFLOAD_MEASURE_S": "0.2",
    }  # fmt: skip
    # MODEL alone stands for a name or a file. A long answer would show nothing more.
    words = re.sub(r"\bMODEL(?= |$)", "MODEL.gguf", words)
    if words.startswith(("specoffload run", "echo")):
        words = re.sub(r"\bspecoffload run\b", "specoffload run -n 16", words)
    if serves:
        words += " --port 0"
    asks = "/dev/null" if " -p " in words else folder / "question.txt"
    with Path(asks).open("rb") as question, subprocess.Popen(
        ["bash", "-c", f"exec {words}" if serves else words], cwd=folder, env=environment,
        stdin=question, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process, selectors.DefaultSelector() as ready:  # fmt: skip
        assert process.stdout is not None
        ready.register(process.stdout, selectors.EVENT_READ)
        seen, end_s = b"", time.monotonic() + _LIMIT_S
        try:
            while not (serves and re.search(until, seen.decode(errors="replace"))):
                if time.monotonic() > end_s:
                    pytest.fail(f"{words}: no end in {_LIMIT_S:.0f} s\n{seen.decode()[-2000:]}")
                if not ready.select(0.2):
                    continue
                if not (more := os.read(process.stdout.fileno(), 65536)):
                    assert process.wait(30) == 0, seen.decode(errors="replace")
                    break
                seen += more
        finally:
            process.terminate()
    return seen.decode(errors="replace")
