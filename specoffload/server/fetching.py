"""Fetches files at http addresses that requests name, within limits.

A client could use the server to reach what only the server's machine reaches. So each address that
a name stands for is checked, the checked address itself is connected to, and redirects are checked
like the first address. Variables that name proxies are ignored, because a proxy resolves names.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import h11

from offload.errors import BadRequest
from specoffload.server.public_addresses import is_public, own_addresses

_SCHEMES = {"http": 80, "https": 443}
_MOST_URL_CHARS = 4096
_MOST_HEADER_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_AGENT = "specoffload"


@dataclass(frozen=True)
class FetchLimits:
    """Limits of one file: its size, the time from the first address on, and redirects.

    With `only_public`, addresses of the machine itself and of private networks are refused.
    """

    most_bytes: int
    seconds: float = 10.0  # as in llama-server
    most_redirects: int = 3
    only_public: bool = True


class Place(NamedTuple):
    """The parts of an http address. `target` is its path with its query."""

    scheme: str
    host: str
    port: int
    target: str


def place_of(url: str) -> Place:
    """Return the parts of `url`. Raises BadRequest for anything but a complete http address."""
    if len(url) > _MOST_URL_CHARS:
        raise BadRequest(f"its address has {len(url)} characters, and at most {_MOST_URL_CHARS}")
    try:
        parts = urlsplit(url)
        scheme, port = parts.scheme.lower(), parts.port
        host = (parts.hostname or "").encode("idna").decode()
    except (ValueError, UnicodeError) as e:
        raise BadRequest(f"{_short(url)} is no valid address ({e})") from e
    if scheme not in _SCHEMES:
        raise BadRequest(f"{_short(url)} is no http or https address")
    if not host or parts.username is not None:
        raise BadRequest(f"{_short(url)} needs a host, and no user or password")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?")
    return Place(scheme, host, port or _SCHEMES[scheme], target)


def _short(url: str) -> str:
    return repr(url[:200])


async def fetched(url: str, limits: FetchLimits) -> bytes:
    """Return the file at `url`. Raises BadRequest, whose sentence goes on after "the image"."""
    try:
        async with asyncio.timeout(limits.seconds):
            for _ in range(limits.most_redirects + 1):
                answer = await _answer_of(place_of(url), limits)
                if isinstance(answer, bytes):
                    return answer
                url = _joined(url, answer)
    except TimeoutError as e:
        raise BadRequest(f"fetching it takes over {limits.seconds:g} s") from e
    raise BadRequest(f"its address is redirected more than {limits.most_redirects} times")


def _joined(url: str, place: str) -> str:
    """Return the address to which `url` is redirected by `place`. Raises BadRequest."""
    try:
        return urljoin(url, place)
    except ValueError as e:
        raise BadRequest(f"{_short(place)} is no valid address ({e})") from e


async def _answer_of(place: Place, limits: FetchLimits) -> bytes | str:
    """Return the file at `place`, or the address that it is redirected to."""
    reader, writer = await _connected(place, limits)
    try:
        return await _exchanged(place, reader, writer, limits.most_bytes)
    except (OSError, h11.RemoteProtocolError) as e:
        raise BadRequest(f"{place.host} breaks off, or speaks no HTTP ({e})") from e
    except h11.LocalProtocolError as e:
        raise BadRequest(f"{_short(place.target)} is no valid path ({e})") from e
    finally:
        writer.transport.abort()


async def _connected(
    place: Place, limits: FetchLimits
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address of the host that may be used and answers."""
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise BadRequest(f"{place.host[:200]!r} has no address ({e})") from e
    addresses = [sockaddr[0] for *_, sockaddr in infos]
    if limits.only_public:
        own = own_addresses()
        addresses = [address for address in addresses if is_public(ip_address(address), own)]
        if not addresses:
            raise BadRequest(
                f"{place.host[:200]!r} is in a private network or on this machine, and this server "
                "fetches only from public addresses"
            )
    secure = ssl.create_default_context() if place.scheme == "https" else None
    name = place.host if secure is not None else None
    error: Exception = OSError("no address")
    for address in addresses:
        try:
            return await asyncio.open_connection(
                address, place.port, ssl=secure, server_hostname=name, limit=_READ_BYTES
            )
        except (OSError, ssl.SSLError) as e:
            error = e
    raise BadRequest(f"{place.host[:200]!r} cannot be connected to ({error})") from error


async def _exchanged(
    place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most_bytes: int
) -> bytes | str:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEADER_BYTES)
    writer.write(connection.send(_request_to(place)) + connection.send(h11.EndOfMessage()))
    await writer.drain()
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            if (address := _checked(event, place.host, most_bytes)) is not None:
                return address
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > most_bytes:
                raise BadRequest(f"it has more than {most_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif isinstance(event, h11.ConnectionClosed):
            raise BadRequest(f"{place.host} breaks off")


def _request_to(place: Place) -> h11.Request:
    host = f"[{place.host}]" if ":" in place.host else place.host
    if place.port != _SCHEMES[place.scheme]:
        host += f":{place.port}"
    headers = {
        "Host": host, "User-Agent": _AGENT, "Accept": "image/*", "Accept-Encoding": "identity",
        "Connection": "close",
    }  # fmt: skip
    return h11.Request(method="GET", target=place.target, headers=list(headers.items()))


def _checked(response: h11.Response, host: str, most_bytes: int) -> str | None:
    """Return the address of a redirect, or None if the file follows. Raises BadRequest."""
    headers = {name.decode(): value.decode("latin-1") for name, value in response.headers}
    status = response.status_code
    if status in _REDIRECTS and "location" in headers:
        return headers["location"]
    if not 200 <= status < 300:
        raise BadRequest(f"{host} answers with status {status}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise BadRequest(f"{host} compresses it, which was not asked for")
    with suppress(ValueError):
        if int(headers.get("content-length", "0")) > most_bytes:
            raise BadRequest(f"it has {headers['content-length']} bytes, and at most {most_bytes}")
    return None
