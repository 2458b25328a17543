"""Reads the secret that a worker and its clients share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from offload.regular_file import open_regular
from offload.remote.secret import FLAG, MOST_SECRET_CHARS, VARIABLE, Secret
from specdec.whole_file import decoded
from specoffload.errors import UsageError

_MOST_FILE_BYTES = 4 * MOST_SECRET_CHARS + 1024  # blanks and a line's end are no part of a secret
_OPEN_TO_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


def read_secret(file: Path | None, variable: str) -> tuple[Secret | None, str]:
    """Return the secret in the file, or else in the variable's text. (None, ""): there is none.

    The second value is a warning if other users may read or change the file, or "". Raises
    UsageError for a file that cannot be read, and for a secret that is too short or too long.
    """
    if file is None:
        return (_secret(variable, VARIABLE) if variable else None), ""
    try:
        with open_regular(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = decoded(opened.read(_MOST_FILE_BYTES), str(file))
    except (OSError, ValueError) as e:
        raise UsageError(f"{FLAG} {file}: cannot be read as UTF-8 text ({e})") from e
    warning = ""
    if mode & _OPEN_TO_OTHERS:
        verb = "read" if mode & stat.S_IROTH else "change"
        warning = f"warning: other users may {verb} {file}, which has a secret: chmod 600 {file}"
    return _secret(text, f"{FLAG} {file}"), warning


def _secret(text: str, source: str) -> Secret:
    try:
        return Secret.of(text)
    except ValueError as e:
        raise UsageError(f"{source}: {e}") from None
