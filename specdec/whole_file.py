"""Files written whole or not at all, also if several processes write them at once."""

from __future__ import annotations

import codecs
import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that becomes `path` if the block succeeds, and is deleted if it fails.

    Until then its name is unique, because several servers may write `path`. Raises OSError.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(6)}.new")
    try:
        with beside.open("wb") as f:
            yield f
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def named_file(path: Path) -> Iterator[BinaryIO]:
    """`whole_file` for a path that the user named. Raises OSError.

    A link stays, and the file behind it is replaced. A device or a pipe, such as /dev/stdout, is
    not replaced: the content is written to it at the end of the block. A pipe needs a reader.
    """
    is_stream = path.exists() and not path.is_file() and not path.is_dir()
    if not is_stream:
        with whole_file(Path(os.path.realpath(path))) as f:
            yield f
        return
    with tempfile.NamedTemporaryFile() as f:
        yield cast(BinaryIO, f)
        f.seek(0)
        with open(path, "wb", opener=_open_now) as stream:
            shutil.copyfileobj(f, stream)


def _open_now(path: str, flags: int) -> int:
    """Open a stream to write. A pipe that nobody reads is an error instead of an endless wait."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(handle, True)
    return handle


def write_json(path: Path, data: object) -> None:
    """Write readable JSON, whole or not at all, as `named_file` does. Raises OSError."""
    with named_file(path) as f:
        f.write((json.dumps(data, indent=1) + "\n").encode())


def is_folder(path: Path) -> bool:
    """True for a folder. False if it does not exist, or lies in one that this user may not enter.

    HOME may be another user's, for example after `sudo -u` or in a container.
    """
    try:
        return path.is_dir()
    except PermissionError:
        return False


MOST_BYTES = 64 << 20  # largest text file that a user may name


def read_whole(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file of at most `most_bytes`.

    Raises OSError, with a message for the user. Pipes and devices are refused, since pipes may
    block for ever, and devices never end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if about.st_size > most_bytes:
            size = f"it has {about.st_size} bytes, and {most_bytes} are read at most"
            raise OSError(errno.EFBIG, size, str(path))
        return file.read()


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """A file as `read_whole` reads it, as UTF-8 text. Raises OSError and UnicodeDecodeError."""
    return decoded(read_whole(path, most_bytes), str(path))


_OTHER_MARKS = (  # the longer ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def decoded(content: bytes, source: str) -> str:
    """The UTF-8 text in `content`, without the byte order mark that editors of Windows write.

    Raises OSError, which names `source`, for a mark of another encoding, and UnicodeDecodeError for
    bytes that are no UTF-8.
    """
    for mark, encoding in _OTHER_MARKS:
        if content.startswith(mark):
            raise OSError(errno.EILSEQ, f"it is {encoding} text; save it as UTF-8", source)
    return content.removeprefix(codecs.BOM_UTF8).decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Write text, whole or not at all, as `named_file` does. Raises OSError."""
    with named_file(path) as f:
        f.write(text.encode())
