"""Reads what a reverse proxy says about the request that it passes on.

A proxy replaces the client's address, scheme and host by its own. It tells the original ones in
`Forwarded` (RFC 7239), or in the older `X-Forwarded-For`, `X-Forwarded-Proto` and
`X-Forwarded-Host`. Anybody can send these headers, so only those of trusted proxies are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

_HOST = "specoffload.forwarded_host"
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PAIR = re.compile(rf'\s*({_TOKEN})=({_TOKEN}|"(?:[^"\\]|\\.)*")\s*')
_ELEMENT = re.compile(r'(?:[^",]|"(?:[^"\\]|\\.)*")+')
_PART = re.compile(r'(?:[^";]|"(?:[^"\\]|\\.)*")+')
# All Forwarded headers together may be this long. The time to read them grows quadratically.
_MOST_CHARS = 2000


class Forwarded(NamedTuple):
    """The statements of the proxies between a client and this server.

    Each proxy states the address that it was asked from. `addresses` has them in the order of the
    proxies, beginning with the one that the client asked. `scheme` and `host` are those that this
    first proxy was asked for. What no proxy stated is empty.
    """

    addresses: tuple[str, ...] = ()
    scheme: str = ""
    host: str = ""


def read_forwarded(values: Iterable[str]) -> Forwarded | None:
    """Return what the values of all `Forwarded` headers say, or None if one cannot be read.

    Each element is one proxy's; later proxies append theirs.
    """
    text = ",".join(values)
    if len(text) > _MOST_CHARS or ",".join(elements := _ELEMENT.findall(text)) != text:
        return None
    proxies = []
    for element in elements:
        pairs = [_PAIR.fullmatch(part) for part in _PART.findall(element) if part.strip()]
        read = {pair[1].lower(): _unquoted(pair[2]) for pair in pairs if pair is not None}
        if len(read) < len(pairs):
            return None
        proxies.append(read)
    if not proxies:
        return None
    addresses = tuple(pairs["for"] for pairs in proxies if "for" in pairs)
    return Forwarded(addresses, proxies[0].get("proto", "").lower(), proxies[0].get("host", ""))


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value


def forwarded_host(scope: Mapping[str, Any]) -> str | None:
    """Return the host that a trusted proxy was asked for, or None if none said one."""
    return scope.get(_HOST)


class ForwardedHeaders:
    """ASGI middleware that puts the address, scheme and host told by a trusted proxy in the scope.

    `Forwarded` counts if no older header is sent, because most proxies set only the older ones, and
    pass on a `Forwarded` that their client made up.
    """

    def __init__(self, app: ASGIApp, trusted: list[str] | str) -> None:
        """`trusted`: the proxies' addresses as uvicorn takes them. 127.0.0.1 stands for ::1 too."""
        loopback = "127.0.0.1,::1"
        self._older = ProxyHeadersMiddleware(app, loopback if trusted == "127.0.0.1" else trusted)  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if scope["type"] == "http" and (client or ("",))[0] in self._older.trusted_hosts:
            scope = _told(scope)
        await self._older(scope, receive, send)  # type: ignore[arg-type]


def _told(scope: Scope) -> Scope:
    """Return the scope with the forwarded host, and with `Forwarded` in the older headers."""
    headers: list[tuple[bytes, bytes]] = list(scope["headers"])
    if any(name.startswith(b"x-forwarded-") for name, _ in headers):
        hosts = _values(headers, b"x-forwarded-host")
        host = ",".join(hosts).partition(",")[0].strip()
        return {**scope, _HOST: host} if host else scope
    said = read_forwarded(_values(headers, b"forwarded"))
    if said is None:
        return scope
    if said.addresses:
        headers.append((b"x-forwarded-for", ", ".join(said.addresses).encode("latin-1")))
    if said.scheme:
        headers.append((b"x-forwarded-proto", said.scheme.encode("latin-1")))
    return {**scope, "headers": headers, **({_HOST: said.host} if said.host else {})}


def _values(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in headers if name == wanted]
