"""API keys: how they are given, and which request has one."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from specoffload.errors import UsageError

_COMMENT = "#"
_OPEN_TO_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


def read_keys(typed: str | None, file: Path | None, warn: Callable[[str], None]) -> tuple[str, ...]:
    """Typed keys, commas between them, then those of a file's lines; empty where none was given.

    Empty lines of the file and lines that begin with `#` are skipped. `warn` gets a sentence if
    other users may read or change the file.

    Raises UsageError for a file that cannot be read, and for a key that no client could send or
    that anybody could guess: an empty one.
    """
    keys = _checked("--api-key", typed.split(",")) if typed is not None else ()
    if file is None:
        return keys
    try:
        with file.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            lines = opened.read().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{file}: cannot be read as UTF-8 text ({e})") from e
    if stat.S_ISREG(mode) and mode & _OPEN_TO_OTHERS:
        verb = "read" if mode & stat.S_IROTH else "change"
        warn(f"warning: other users may {verb} {file}, which has keys: chmod 600 {file}")
    filled = [line for line in lines if line.strip() and not line.lstrip().startswith(_COMMENT)]
    if not filled:
        raise UsageError(f"{file} has no key, one of which stands on each line")
    return (*keys, *_checked(f"--api-key-file {file}", filled))


def _checked(source: str, keys: Iterable[str]) -> tuple[str, ...]:
    """The keys without the blanks around them. What is refused is not shown: it is secret."""
    stripped = tuple(key.strip() for key in keys)
    for at, key in enumerate(stripped, 1):
        if not key:
            raise UsageError(f"{source}: key {at} is empty, and would let everybody in")
        if not all(" " < symbol < "\x7f" or "\xa0" <= symbol <= "\xff" for symbol in key):
            raise UsageError(
                f"{source}: key {at} has blanks or letters outside Latin-1, which no HTTP header "
                "carries: choose another"
            )
    return stripped


def held_key(keys: tuple[str, ...], authorization: str | None, x_api_key: str | None) -> int | None:
    """The number of the key, from 0, that a request's headers carry; None for none of `keys`.

    OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `X-Api-Key: KEY`. Every key is
    compared, each in constant time, so that the time an answer takes tells nothing of them.
    """
    scheme, _, token = (authorization or "").partition(" ")
    held = [token.strip()] if scheme.lower() == "bearer" else []
    held += [x_api_key.strip()] if x_api_key else []
    right = [
        number
        for one in held
        for number, key in enumerate(keys)
        if hmac.compare_digest(one.encode("latin-1"), key.encode("latin-1"))
    ]
    return right[0] if right else None
