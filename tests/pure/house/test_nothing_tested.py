"""Scripts that cannot test anything say why, and never end with 0."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
REASONS = {"test-cuda": "no CUDA build", "test-sanitized": "has no libasan.so"}


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
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\necho "${1#*=}"\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [folder / name], capture_output=True, text=True, check=False,
        env={**os.environ, "CI": ci, "CC": str(compiler), "GIT_CEILING_DIRECTORIES": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert REASONS[name] in done.stderr
    assert "nothing was tested" in done.stderr
