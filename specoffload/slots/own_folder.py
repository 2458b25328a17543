"""Makes folders for saved prompts, says who else may write to them, and keeps their secret.

A saved prompt is a state that libllama loads, and its text comes back as an answer's beginning. So
a prompt that somebody else could write is sealed with a secret (prompt_format.py).
"""

from __future__ import annotations

import grp
import os
import pwd
import secrets
import stat
import tempfile
import time
from pathlib import Path

from offload.errors import UnusableFolder
from offload.notes import Note, NoteKind

SECRET_BYTES = 32
_NO_PROMPTS = "--cache-disk: no prompts can be kept"
_MOST_LOOKS, _LOOK_S = 20, 0.05  # looks at a secret that another server is writing


def made_folder(folder: Path, cannot: str = _NO_PROMPTS) -> None:
    """Make the folder for its owner alone, unless there is one.

    Raises UnusableFolder. Its words begin with `cannot`: the flag, and what cannot be kept.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise _unusable(folder, e.strerror or str(e), cannot) from e


def foreign_writers(flag: str, folder: Path, harm: str) -> Note | None:
    """Return a warning if other users may write to the folder of `flag`; else None.

    `harm`: what they could do. Returns None for a folder that cannot be read.
    """
    try:
        about = folder.stat()
    except OSError:
        return None
    by_group = about.st_mode & stat.S_IWGRP and not _is_private(about.st_gid)
    is_foreign = about.st_uid not in (0, os.geteuid())
    if not (by_group or about.st_mode & stat.S_IWOTH or is_foreign):
        return None
    mend = f"take a folder of your own ({flag})" if is_foreign else f"chmod 700 {folder}"
    words = f"warning: other users may write to {folder} and {harm}: {mend}"
    return Note(NoteKind.WARNING, words)


def _is_private(gid: int) -> bool:
    """True for the group that many systems make for each user, with nobody else in it."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def secret_of(folder: Path) -> bytes:
    """Return the secret of this user in a folder, and make it if there is none.

    It is a file that only this user can read. Somebody else who may write to the folder cannot make
    one, because it would be that user's own. Raises UnusableFolder if the file is another user's,
    if others may read it, or if it is no secret.
    """
    path = folder / f".seal-{os.geteuid()}"
    try:
        _make_secret(path)
        about, secret = _read_secret(path)
        for _ in range(_MOST_LOOKS):  # another server is writing it
            if len(secret) == SECRET_BYTES:
                break
            time.sleep(_LOOK_S)
            about, secret = _read_secret(path)
    except OSError as e:
        raise _unusable(folder, f"{path.name}: {e.strerror or e}") from e
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_nlink > 1:
        raise _unusable(folder, f"{path.name} is not this user's own file: delete it")
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _unusable(folder, f"other users may read or change {path.name}: delete it")
    if len(secret) != SECRET_BYTES:
        raise _unusable(folder, f"{path.name} has no {SECRET_BYTES} bytes: delete it")
    return secret


def _make_secret(path: Path) -> None:
    """Write a new secret, unless there is a file. Several servers may do so at once."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))


def _read_secret(path: Path) -> tuple[os.stat_result, bytes]:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        return os.fstat(handle), file.read(SECRET_BYTES + 1)


def _unusable(folder: Path, why: str, cannot: str = _NO_PROMPTS) -> UnusableFolder:
    return UnusableFolder(f"{cannot} in {folder}: {why}")
