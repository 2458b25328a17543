"""Asks the library for a shape's tensors in a forked process, because some metadata aborts it.

A fork takes milliseconds. A new process would import and load the library again, for 0.7 s.
"""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from pathlib import Path

from offload.ggml.library.lib import library
from offload.ggml.wanted import wanted_tensors


def failure_of(header: Path) -> str:
    """Return why the library cannot list the tensors of `header`, or "" if it can."""
    said = header.with_suffix(".said")
    library()  # the forked process then has it
    with warnings.catch_warnings():
        # The process needs none of this one's threads: it reads a header, and computes nothing.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _ask(header, said)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return ""
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    reason = next((x for x in lines if "GGML_ASSERT" in x), lines[-1] if lines else "no reason")
    return reason.strip()


def _ask(header: Path, said: Path) -> None:
    """Ask in the forked process, and end it. Its errors go to the file `said`."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with said.open("wb") as file:
            os.dup2(file.fileno(), 2)
        wanted_tensors(header)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
