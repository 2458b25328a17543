"""Which page in a browser may use the server, by a request's Host and Origin. Pure.

A page from anywhere can make its visitor's browser send requests to this machine: across origins
(a POST of text/plain asks nobody), or under a name of its own that it points at 127.0.0.1 (DNS
rebinding). Both show in the headers, which a page cannot set.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specoffload.errors import UsageError

ANY = "*"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MOST_PORT = 65535
_AUTHORITY = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]{0,5}))?")
# Names as browsers send them: of RFC 3986's reg-name, what DNS and hosts files have.
_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Authority:
    """A host and a port, as RFC 9110 has them in Host: no user, path or fragment. `host` is an
    address or a name in small letters; `port` is None where none is given."""

    host: _Address | str
    port: int | None

    def port_of(self, scheme: str) -> int:
        return _DEFAULT_PORTS[scheme] if self.port is None else self.port


def read_authority(text: str) -> Authority | None:
    """None for anything but an address or a name, with or without a port."""
    found = _AUTHORITY.fullmatch(text)
    if found is None or not text.isascii():
        return None
    host, port = _host(found["host"].lower()), int(found["port"] or 0)
    if host is None or port > _MOST_PORT:
        return None
    return Authority(host, port if found["port"] else None)


def _host(text: str) -> _Address | str | None:
    try:
        if text.startswith("["):  # zones are no part of a URL: Python would take them
            return None if "%" in text else ipaddress.IPv6Address(text[1:-1])
        return ipaddress.IPv4Address(text)
    except ValueError:
        # Browsers make an address of a name that ends in a number, or refuse it.
        last = text.rstrip(".").rpartition(".")[2]
        is_name = _NAME.fullmatch(text) and not re.fullmatch(r"[0-9]+|0x[0-9a-f]*", last)
        return text if is_name else None


def _origin(text: str) -> tuple[str, Authority] | None:
    """The scheme and authority of an origin as RFC 6454 writes it; None for `null`, which is a page
    of no known place, and for what is no origin of the web."""
    scheme, separator, rest = text.partition("://")
    scheme, authority = scheme.lower(), read_authority(rest)
    if not separator or scheme not in _DEFAULT_PORTS or authority is None:
        return None
    return scheme, Authority(authority.host, authority.port_of(scheme))


def read_origins(text: str | None) -> tuple[str, ...]:
    """Origins of --cors-origins, commas between them, as browsers write them; `*` is any.

    Raises UsageError for one that is none.
    """
    parts = (part.strip() for part in (text or "").split(","))
    return tuple(_as_sent(part) for part in parts if part)


def _as_sent(text: str) -> str:
    """The text by which browsers send this origin: small letters, without the usual port."""
    if text == ANY:
        return ANY
    found = _origin(text.removesuffix("/"))
    if found is None or found[1].port == 0:
        raise UsageError(f"--cors-origins {text}: an origin looks like https://chat.example.org")
    scheme, authority = found
    is_v6 = isinstance(authority.host, ipaddress.IPv6Address)
    host = f"[{authority.host}]" if is_v6 else str(authority.host)
    is_usual = authority.port == _DEFAULT_PORTS[scheme]
    return f"{scheme}://{host}" if is_usual else f"{scheme}://{host}:{authority.port}"


def refusal(
    hosts: Sequence[str],
    page_origins: Sequence[str],
    *,
    scheme: str = "http",
    on_loopback: bool,
    origins: Collection[str],
) -> str | None:
    """Why this request is not served; None when it may be.

    `hosts` and `page_origins` are the values of all its Host and Origin headers, `scheme` is the
    one it came by. On loopback, Host must name this machine or one of the `origins` (a proxy's).
    An Origin must be the server's own or one of the `origins`.
    """
    if ANY in origins:
        return None
    if len(hosts) > 1 or len(page_origins) > 1:
        return "a request has one Host header, and one Origin header at most"
    named = [found for found in map(_origin, origins) if found is not None]
    host = read_authority(hosts[0]) if hosts else None
    if on_loopback and hosts and not (host is not None and _is_here(host, named)):
        return (
            "this server listens on loopback and is asked under another name: use 127.0.0.1 "
            "or localhost, or name the page's origin with --cors-origins"
        )
    if not page_origins:
        return None
    page = _origin(page_origins[0])
    is_own = (
        page is not None
        and host is not None
        and page == (scheme, Authority(host.host, host.port_of(page[0])))
    )
    if is_own or page in named:
        return None
    return "pages of another origin may not use this server: name theirs with --cors-origins"


def _is_here(host: Authority, named: Collection[tuple[str, Authority]]) -> bool:
    """True for an address or a name of this machine, or the host of one of the `named` origins."""
    if _is_loopback(host.host):
        return True
    return any(Authority(host.host, host.port_of(scheme)) == known for scheme, known in named)


def _is_loopback(host: _Address | str) -> bool:
    """True for 127.0.0.0/8, ::1, IPv6's forms of the former, and localhost."""
    if isinstance(host, str):
        name = host.removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return host.is_loopback if mapped is None else mapped.is_loopback
