"""Run a `specoffload` command inside the test's own process, which saves a second of imports.

Real processes test exits, signals and the library's output.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from unittest import mock

from specoffload.cli import main


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `specoffload` with these words. Returns its exit code, standard output and standard
    error."""
    arguments = ["specoffload", *map(str, words)]
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())
