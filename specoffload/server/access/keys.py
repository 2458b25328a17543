"""API keys: how they are given, and which request has one."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from specoffload.errors import UsageError


def read_keys(typed: str | None, file: Path | None) -> tuple[str, ...]:
    """Typed keys, commas between them, then those of a file's lines; empty where none was given.

    Raises UsageError for a file that cannot be read, and for a key that no client could send or
    that anybody could guess: an empty one.
    """
    keys = _checked("--api-key", typed.split(",")) if typed is not None else ()
    if file is None:
        return keys
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{file}: cannot be read as UTF-8 text ({e})") from e
    filled = [line for line in lines if line.strip()]
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
