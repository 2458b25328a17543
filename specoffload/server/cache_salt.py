"""Says whose prompt a request has, so that no client finds another one's prompts in a cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from offload.errors import BadRequest
from specoffload.server.access import own_key_of

_SALT_BYTES = 16
_MOST_SALT_LETTERS = 1024


def salt_of(scope: Mapping[str, Any], asked: str | None) -> str:
    """Return whose prompt a request has (`GenerateOptions.cache_salt`), from its scope.

    That is a hash of the client's key, if the server has several keys, and of the field
    `cache_salt`, which is `asked`. Returns "" if there is neither. Raises BadRequest for a field
    that is empty or too long.
    """
    if asked is not None and not 0 < len(asked) <= _MOST_SALT_LETTERS:
        raise BadRequest(
            f"cache_salt has {len(asked)} letters: 1 to {_MOST_SALT_LETTERS} are allowed"
        )
    key = own_key_of(scope)
    if not key and asked is None:
        return ""
    named = json.dumps([key, asked or ""]).encode()
    return hashlib.blake2b(named, digest_size=_SALT_BYTES).hexdigest()
