"""Which page in a browser may use the server, by a request's Host and Origin. Pure.

A page from anywhere can make its visitor's browser send requests to this machine: across origins
(a POST of text/plain asks nobody), or under a name of its own that it points at 127.0.0.1 (DNS
rebinding). Both show in the headers, which a page cannot set.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from specoffload.errors import UsageError

ANY = "*"


def read_origins(text: str | None) -> tuple[str, ...]:
    """Origins of --cors-origins, commas between them, as browsers write them; `*` is any.

    Raises UsageError for one that is none.
    """
    return tuple(_origin(part.strip()) for part in (text or "").split(",") if part.strip())


def _origin(text: str) -> str:
    if text == ANY:
        return ANY
    try:
        parts = urlsplit(text)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        named = None
    if not named or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise UsageError(f"--cors-origins {text}: an origin looks like https://chat.example.org")
    return f"{parts.scheme}://{parts.netloc}".lower()


def refusal(
    host: str | None, origin: str | None, *, on_loopback: bool, origins: Collection[str]
) -> str | None:
    """Why this request is not served; None when it may be.

    On loopback, `host` must be a name of this machine or of one of the `origins` (a proxy's). An
    `origin` must be the server's own or one of the `origins`.
    """
    if ANY in origins:
        return None
    if on_loopback and host is not None and not _is_loopback(host):
        names = {urlsplit(known).netloc for known in origins}
        if host.lower() not in names:
            return (
                "this server listens on loopback and is asked under another name: use 127.0.0.1 "
                "or localhost, or name the page's origin with --cors-origins"
            )
    if origin is None or (host is not None and _netloc(origin) == host.lower()):
        return None
    if origin.lower() in origins:
        return None
    return "pages of another origin may not use this server: name theirs with --cors-origins"


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None for `null`, which is a page of no known place."""
    scheme, separator, netloc = origin.lower().partition("://")
    return netloc if separator and scheme in ("http", "https") else None


def _is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and localhost, with or without a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    name = name.rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
