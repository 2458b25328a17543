"""Opens the files that a user names. Only regular files are opened, and nothing waits for them.

A pipe without a writer blocks whoever opens it for ever. A device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

NOT_REGULAR = "it is not a regular file"


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read. Raises OSError, whose `strerror` is for the user."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return os.fdopen(handle, "rb")


def check_regular(path: Path) -> int:
    """Return the size in bytes of a regular file that the native library is to open.

    Raises OSError as `open_regular` does.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return about.st_size
