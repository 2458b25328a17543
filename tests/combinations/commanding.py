"""Runs the command of a case as a process, and checks what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from combinations.cases import Case
from combinations.play import busy
from combinations.small_models import model_of

_TIMEOUT_S = 300
# Figures that mean nothing: not a number, or an uncertainty larger than the value.
_EMPTY_FIGURE = re.compile(r"\bnan\b|\binf\b|± *[0-9]{3,} *%|\? ×", re.IGNORECASE)
_JSON = ("plan as JSON",)


def faults_of(case: Case, models: Path) -> list[str]:
    """Run the case's command. Returns a sentence for each property that did not hold."""
    with tempfile.TemporaryDirectory() as folder, busy(case["machine"] == "busy"):
        return [*_faults(case, models, Path(folder))]


def words_of(case: Case, models: Path) -> list[str]:
    """The command's words, without the program's name."""
    own = case.value("command").words
    n = 2 if own[:2] == ("tune", "numa") else 1
    rest = [word for axis, _ in case.values if axis != "command" for word in case.value(axis).words]
    return [*own[:n], str(model_of(case["memory"], models)), *own[n:], *rest]


def _faults(case: Case, models: Path, kept: Path) -> Iterator[str]:
    words = words_of(case, models)
    if case["start"] != "first":
        _run(words, kept)
    if case["start"] == "damaged":
        for path in kept.rglob("*.json"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if case["start"] == "read-only":
        kept = Path("/proc/specoffload")  # no folder can be made there, not even by root
    done = _run(words, kept)
    output = done.stdout + done.stderr
    if done.returncode != 0:
        yield f"exit code {done.returncode}: {' '.join(output.split())[-300:]}"
    if "Traceback" in output:
        yield f"a traceback: {output[-300:]}"
    if found := _EMPTY_FIGURE.search(output):
        yield f"a figure that means nothing: {_line_of(output, found.start())}"
    if case["command"] in _JSON:
        try:
            json.loads(done.stdout)
        except ValueError:
            yield f"no JSON: {done.stdout[:200]!r}"


def _run(words: list[str], kept: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "SPECOFFLOAD_PROFILE_DIR": str(kept), "SPECOFFLOAD_MEASURE_S": "0.2",
        "NO_COLOR": "1", "COLUMNS": "120",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "specoffload", *words],
        input="def f(x):\n", capture_output=True, text=True, env=environment,
        timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip


def _line_of(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    return text[start : text.find("\n", at)].strip()
