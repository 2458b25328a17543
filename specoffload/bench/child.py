"""Commands of processes that end with this one, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs in the child before the command takes its place. The parent may have ended before prctl.
_PROGRAM = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one has ended")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as e:
    sys.exit(f"{sys.argv[2]}: {e.strerror}")
"""


def ending_with_us(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command`, and gets SIGTERM when this thread ends.

    So it also ends if this process is killed, or its terminal is closed. The kernel watches the
    thread that starts the process, so start it on one that lives as long (prctl(2),
    PR_SET_PDEATHSIG).
    """
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]
