"""Run a `specoffload` command inside the test's own process, which saves a second of imports.

Real processes test exits, signals and the library's output.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from specoffload.cli import main


def command(
    *words: str | Path, stdin: str = "", env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run `specoffload` with these words, a text to read, and environment variables.

    Returns its exit code, standard output and standard error. Do not use it with --verbose, which
    would make the log of later tests verbose.
    """
    arguments = ["specoffload", *map(str, words)]
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")),
        mock.patch.dict(os.environ, dict(env), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())
