"""Checks the files that a command writes at its end before it begins its long work."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from specdec.whole_file import named_descriptor, real_path
from specoffload.errors import UsageError

_NOT_WRITABLE = "cannot be written (read-only, or no permission)"


def check_output(flag: str, output: Path) -> None:
    """Raise UsageError if `named_file` cannot write the file that `flag` names. Nothing is changed.

    An existing file may be a device, such as /dev/null, or an open descriptor, as of /dev/stdout.
    """
    try:
        reason = _refusal(output)
    except OSError as e:
        reason = e.strerror or str(e)
    if reason:
        raise UsageError(f"{flag} {output}: {reason}")


def _refusal(output: Path) -> str:
    """The reason why `output` cannot be written, or "". Raises OSError."""
    if (descriptor := named_descriptor(output)) is not None:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        return _NOT_WRITABLE if mode == os.O_RDONLY else ""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(output)  # raises what `Path.exists` hides since Python 3.14
    if output.is_dir():
        return "is a folder; name a file"
    if output.exists() and not output.is_file():
        return "" if os.access(output, os.W_OK) else _NOT_WRITABLE
    real = real_path(output)  # a new file takes the place of this one
    if not real.parent.is_dir():
        return f"there is no folder {real.parent}"
    if not os.access(real.parent, os.W_OK) or (real.exists() and not os.access(real, os.W_OK)):
        return _NOT_WRITABLE
    return ""
