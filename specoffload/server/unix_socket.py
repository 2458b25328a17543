"""Listens on a Unix socket: `--host /run/specoffload.sock`, as llama-server takes it.

Only programs of this machine reach it, and only users whom the file's permissions let in.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from specoffload.errors import UsageError

_ENDING = ".sock"  # by which llama-server tells a socket from a name
_NEVER = 0o117  # nobody executes the file, and other users may not connect
_CONNECT_S = 1.0


def is_socket_path(host: str) -> bool:
    return "/" in host or host.endswith(_ENDING)


def listen_at(path: Path, backlog: int) -> socket.socket:
    """Return a listening socket. Replaces one that no program listens on any more.

    The owner may connect, and the group unless the umask forbids it. Raises UsageError.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o777)
    os.umask(umask | _NEVER)
    try:
        listener.bind(str(path))
        listener.listen(backlog)
    except (OSError, ValueError) as e:
        listener.close()
        reason = e.strerror or str(e) if isinstance(e, OSError) else str(e)
        raise UsageError(f"--host {path}: cannot listen there ({reason})") from e
    finally:
        os.umask(umask)
    return listener


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # bind says what is wrong
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"--host {path}: the file is there and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_S)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as e:
            raise UsageError(f"--host {path}: {e.strerror or e}") from e
    raise UsageError(f"--host {path}: another program listens there")


@contextlib.contextmanager
def removed_at_end(listener: socket.socket) -> Iterator[None]:
    """Remove the file of a Unix socket after the block, unless another program has replaced it."""
    if listener.family != socket.AF_UNIX:
        yield
        return
    path = Path(listener.getsockname())
    made = path.lstat().st_ino
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == made:
                path.unlink()
