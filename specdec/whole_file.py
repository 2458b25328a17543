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

_MOST_LINKS = 40  # as Linux follows, see path_resolution(7)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that becomes `path` if the block succeeds, and is deleted if it fails.

    Until then its name is unique, because several servers may write `path`. Raises OSError.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(6)}.new")
    try:
        with beside.open("wb") as f:
            yield f
        _put(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _put(beside: Path, path: Path) -> None:
    """Replace `path` by the file `beside`. A file that is a mount of its own is written instead."""
    try:
        os.replace(beside, path)
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise
        with beside.open("rb") as f, path.open("r+b") as mounted:
            shutil.copyfileobj(f, mounted)
            mounted.truncate()
        beside.unlink()


@contextmanager
def named_file(path: Path) -> Iterator[BinaryIO]:
    """`whole_file` for a path that the user named. Raises OSError.

    A link stays, and the file behind it is replaced. A device, a pipe, or what is open under a name
    such as /dev/stdout is not replaced: the content is written to it at the end of the block, so
    the caller flushes earlier output of its own. A pipe needs a reader.
    """
    descriptor = named_descriptor(path)
    is_stream = path.exists() and not path.is_file() and not path.is_dir()
    if descriptor is None and not is_stream:
        with whole_file(real_path(path)) as f:
            yield f
        return
    with tempfile.NamedTemporaryFile() as f:
        yield cast(BinaryIO, f)
        f.seek(0)
        with _stream(path, descriptor) as stream:
            shutil.copyfileobj(f, stream)


def named_descriptor(path: Path) -> int | None:
    """The number of this process's descriptor that `path` names, as /dev/stdout does, or None.

    Its file may be a regular one, after `>> notes.txt`. Then it has lines that must stay, and later
    ones follow, so it can be neither replaced nor truncated.
    """
    for step in _steps(path):
        folder, name = os.path.split(step)
        if folder == f"/proc/{os.getpid()}/fd" and name.isdecimal():
            return int(name)
    return None


def real_path(path: Path) -> Path:
    """The path of the file behind the links at the end of `path`.

    Raises PermissionError for another user's link in a folder such as /tmp. Linux follows none of
    these with fs.protected_symlinks, see proc_sys_fs(5), but a file that is replaced under its real
    path would escape that check.
    """
    for step in _steps(path):
        if not os.path.islink(step):
            break
        folder, owner = os.stat(os.path.dirname(step)), os.lstat(step).st_uid
        is_shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
        if is_shared and owner not in (os.geteuid(), folder.st_uid):
            raise PermissionError(errno.EACCES, "it is a link of another user", str(path))
    return Path(os.path.realpath(path))


def _steps(path: Path) -> Iterator[str]:
    """`path`, and each path that its links lead to. Their folders are without links."""
    step = os.fspath(path)
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(os.path.dirname(step))
        step = os.path.join(folder, os.path.basename(step))
        yield step
        if not os.path.islink(step):
            return
        step = os.path.join(folder, os.readlink(step))


def _stream(path: Path, descriptor: int | None) -> BinaryIO:
    """Open a device or a pipe to write to, or `descriptor` at its place after earlier output."""
    mode = 0 if descriptor is None else os.fstat(descriptor).st_mode
    # A pipe or a terminal is opened anew, because a duplicate may not block, as its parent chose.
    if descriptor is None or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return open(path, "wb", opener=_open_now)
    return os.fdopen(os.dup(descriptor), "wb")


def _open_now(path: str, flags: int) -> int:
    """Open a stream to write. A pipe that nobody reads is an error instead of an endless wait."""
    try:
        handle = os.open(path, flags | os.O_NONBLOCK)
    except OSError as e:
        if e.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a FIFO that no program reads", path) from e
        raise
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
