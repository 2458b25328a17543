"""Finds the user's compiler, and tells why it failed.

setup.py uses it before any dependency is installed, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence


def find_compiler(variable: str, names: Iterable[str]) -> list[str]:
    """Return the command that the environment's `variable` has, or the first of `names` found.

    The list is empty if there is none.
    """
    return shlex.split(os.environ.get(variable, "")) or [*filter(shutil.which, names)][:1]


def failure_of(command: Sequence[str]) -> str:
    """Run a compiler. Return why it failed, or ""."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    except subprocess.CalledProcessError as e:
        status = f"{command[0]} ended with status {e.returncode}"
        return next((line for line in e.stderr.splitlines() if "error" in line), status)
    except OSError as e:
        return str(e)
    return ""
