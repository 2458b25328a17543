"""Who asks: the name by which requests are served by turns. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

_MOST_LETTERS = 64
_NAME = "specoffload.client"


def client_name(key: int | None, address: str | None) -> str:
    """A client's name: the number of its key where there are several, else its address.

    An address of IPv6 counts by its first 64 bits, which belong to one site (RFC 6177).
    """
    if key is not None:
        return f"key {key}"
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return (address or "")[:_MOST_LETTERS]
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def note_client(scope: Any, name: str) -> None:
    """For `client_of`."""
    scope.setdefault("state", {})[_NAME] = name


def client_of(scope: Mapping[str, Any]) -> str:
    """The name that was noted of a request."""
    return str(scope.get("state", {}).get(_NAME, ""))
