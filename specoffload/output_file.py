"""Checks the files that a command writes at its end before it begins its long work."""

from __future__ import annotations

import os
from pathlib import Path

from specoffload.errors import UsageError


def check_output(flag: str, output: Path) -> None:
    """Raise UsageError if the file that `flag` names cannot be written. It is not changed.

    An existing file may be a device, such as /dev/stdout.
    """
    folder = output.absolute().parent
    if output.is_dir():
        raise UsageError(f"{flag} {output}: is a folder; name a file")
    if not folder.is_dir():
        raise UsageError(f"{flag} {output}: there is no folder {folder}")
    if not os.access(output if output.exists() else folder, os.W_OK):
        raise UsageError(f"{flag} {output}: cannot be written (read-only, or no permission)")
