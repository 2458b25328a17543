"""Checks who may use the server: keys, and the origins of pages in browsers.

Any web page can make its visitor's browser send requests to this machine. The browser may send them
to another origin: a POST of text/plain needs no permission. The page's own host name may also
resolve to 127.0.0.1 (DNS rebinding). The Host and Origin headers reveal both, because a page cannot
set them.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.notes import Note, NoteKind
from offload.regular_file import open_regular
from specdec.whole_file import decoded
from specoffload.errors import UsageError
from specoffload.server.api.body import has_body, ignored_header
from specoffload.server.api.refusals import problem_response
from specoffload.server.engine.messages import Event, Problem
from specoffload.server.forwarded import forwarded_host
from specoffload.server.public_addresses import IpAddress

ANY_ORIGIN = "*"
# Paths that need no key, as in llama-server (get_public_endpoints in tools/server/server-http.cpp).
# Proxies and clients ask them before they know a key. Nothing there tells of requests or texts.
_PUBLIC = frozenset({"/health", "/v1/health", "/models", "/v1/models", "/api/tags"})
# The page's files need no key, because the page asks the user for it. They are the same for
# everybody, so any origin may get them. Behind a proxy the page can then say what is wrong.
_PUBLIC_FOLDER = "/page/"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PORT = re.compile("(?::[0-9]*)?")
# Names as browsers send them: the part of RFC 3986's reg-name that DNS and hosts files use.
_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]{0,31}")
_PROGRAM_HOST = re.compile("[A-Za-z0-9._~-]{1,255}(?::[0-9]{1,5})?")  # such as an extension's id
_EVERY_HOST = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31})://\*")
# URLs of these have default ports and hosts in lower case. No pages of others than http's ask.
_SCHEMES_WITH_PORTS = frozenset({*_DEFAULT_PORTS, "ftp", "ws", "wss"})
_WITHOUT_HOST = ("null", "file://")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_OPEN_TO_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP
_MOST_NAME_CHARS = 64
_CLIENT = "specoffload.client"
_KEY_NAME = "key "  # begins the names of clients that are known by their keys
_HAS_KEY = "specoffload.has_key"
_KEY = "specoffload.key"


# ---- keys


def read_keys(typed: str | None, file: Path | None, warn: Callable[[str], None]) -> tuple[str, ...]:
    """Return the keys of --api-key, separated by commas, and of --api-key-file, one per line.

    Empty lines and lines that begin with `#` are skipped. `warn` is called with a sentence if other
    users may read or change the file. Raises UsageError for a file that cannot be read, an empty
    key, and a key that no HTTP header can carry.
    """
    keys = _checked("--api-key", typed.split(",")) if typed is not None else ()
    if file is None:
        return keys
    try:
        with open_regular(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            lines = decoded(opened.read(), str(file)).splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{file}: cannot be read as UTF-8 text ({e})") from e
    if mode & _OPEN_TO_OTHERS:
        verb = "read" if mode & stat.S_IROTH else "change"
        words = f"warning: other users may {verb} {file}, which has keys: chmod 600 {file}"
        warn(Note(NoteKind.WARNING, words))
    filled = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not filled:
        raise UsageError(f"{file} has no key: write one key a line")
    return (*keys, *_checked(f"--api-key-file {file}", filled))


def _checked(source: str, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the keys without blanks around them. Raises UsageError for an invalid key."""
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
    """Return the index in `keys` of the key that the headers carry, or None if they carry none.

    OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `X-Api-Key: KEY`. All keys are
    compared in constant time, so that the time of an answer reveals nothing about them.
    """
    scheme, _, token = (authorization or "").partition(" ")
    held = [token.strip()] if scheme.lower() == "bearer" else []
    held += [x_api_key.strip()] if x_api_key else []
    right = [
        index
        for one in held
        for index, key in enumerate(keys)
        if hmac.compare_digest(one.encode("latin-1"), key.encode("latin-1"))
    ]
    return right[0] if right else None


# ---- pages in browsers


class Origin(NamedTuple):
    """The origin of a page (RFC 6454), or the server that a request names."""

    scheme: str
    host: IpAddress | str  # an address, or a name in lower case
    port: int

    def __str__(self) -> str:
        """Return the origin as browsers write it, without the default port."""
        host = f"[{self.host}]" if isinstance(self.host, ipaddress.IPv6Address) else str(self.host)
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"


def _read_origin(text: str) -> Origin | None:
    """Return the origin that `text` names, or None if it names none that can be allowed.

    Returns None for `null` (a page of unknown origin), for schemes other than http and https, and
    for text that has more than a scheme, a host and a port.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return None
    name, authority = parts.hostname or "", parts.netloc.lower()
    host = _read_host(name)
    after_host = authority.removeprefix(f"[{name}]" if ":" in name else name)
    is_plain = text.lower() == f"{parts.scheme}://{authority}" and _PORT.fullmatch(after_host)
    if parts.scheme not in _DEFAULT_PORTS or host is None or not is_plain:
        return None
    return Origin(parts.scheme, host, _DEFAULT_PORTS[parts.scheme] if port is None else port)


def _read_host(name: str) -> IpAddress | str | None:
    if "%" in name or not name.isascii():
        return None  # an address with a zone, which Python accepts and URLs never have
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        # Browsers treat a name whose last label is a number as an address, or refuse it.
        last = name.rstrip(".").rpartition(".")[2]
        return name if _NAME.fullmatch(name) and not _NUMERIC.fullmatch(last) else None


def _program_origin(text: str) -> str | None:
    """Return the origin of a program's or an extension's pages as browsers send it, or None.

    It is of a scheme other than http and https, such as `app://obsidian.md`, whose host browsers
    take as it is written, `file://`, or `null`. `null` is sent for files, and by framed pages of
    any website.
    """
    if text.lower() in _WITHOUT_HOST:
        return text.lower()
    scheme, _, host = text.partition("://")
    is_own = _SCHEME.fullmatch(scheme) is not None and scheme.lower() not in _SCHEMES_WITH_PORTS
    return f"{scheme.lower()}://{host}" if is_own and _PROGRAM_HOST.fullmatch(host) else None


def read_origins(text: str | None) -> tuple[str, ...]:
    """Return the origins of --cors-origins as browsers send them.

    Browsers send origins of websites in lower case and without the default port. `text` separates
    the origins by commas; `*` is any origin, and `moz-extension://*` any origin of that scheme.
    Raises UsageError for an invalid origin.
    """
    origins = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        website = _read_origin(part.removesuffix("/"))
        if website is not None and website.port != 0:
            origins.append(str(website))
            continue
        scheme = _EVERY_HOST.fullmatch(part)
        if part == ANY_ORIGIN:
            own: str | None = part
        elif scheme is not None and scheme[1].lower() not in _SCHEMES_WITH_PORTS:
            own = part.lower()
        else:
            own = _program_origin(part) or _program_origin(part.removesuffix("/"))
        if own is None:
            raise UsageError(
                f"--cors-origins {part}: an origin looks like https://chat.example.org, or "
                "app://obsidian.md for a program, or moz-extension://* for all of a scheme"
            )
        origins.append(own)
    return tuple(origins)


def origin_pattern(origins: Iterable[str]) -> str | None:
    """Return a regular expression for the origins of schemes named as `moz-extension://*`."""
    schemes = [match[1] for origin in origins if (match := _EVERY_HOST.fullmatch(origin))]
    return f"(?:{'|'.join(map(re.escape, schemes))})://[^/]+" if schemes else None


def _is_named(page: str, origins: Collection[str]) -> bool:
    """True if one of `origins` is `page`, an origin as browsers send it, or all of its scheme."""
    scheme, _, host = page.partition("://")
    return page in origins or (bool(host) and f"{scheme}://*" in origins)


def refusal(
    hosts: Sequence[str],
    page_origins: Sequence[str],
    *,
    scheme: str = "http",
    on_loopback: bool,
    origins: Collection[str],
    public_host: str | None = None,
    fetch_sites: Sequence[str] = (),
) -> str | None:
    """Return why a request is refused, or None if it may be served.

    `hosts` and `page_origins` are the values of all its Host and Origin headers. If `on_loopback`,
    Host must name this machine or one of `origins`, for example a proxy. Origin must be the
    server's own or one of `origins`. If `origins` contains `*`, nothing is refused.

    A proxy may ask under another Host than the browser did. So the page is also the server's own
    if it is from `public_host`, which the proxy said it was asked for, or if `fetch_sites`, the
    values of Sec-Fetch-Site, are `same-origin`. Browsers send that header only over HTTPS and to
    loopback. There a page cannot change the address behind its own name: the certificate or the
    check of Host stops that.
    """
    if ANY_ORIGIN in origins:
        return None
    if len(hosts) > 1 or len(page_origins) > 1:
        return "a request has one Host header, and one Origin header at most"
    own = _read_origin(f"{scheme}://{hosts[0]}") if hosts else None
    if on_loopback and hosts and (own is None or not _is_loopback(own.host)):
        named = (_read_origin(f"{s}://{hosts[0]}") for s in _DEFAULT_PORTS)
        if not any(origin is not None and str(origin) in origins for origin in named):
            return (
                "this server is for this machine and is asked under another name: use 127.0.0.1 or "
                "localhost, also over a Unix socket, or name the page's origin with "
                "--cors-origins; a proxy should send Host 127.0.0.1 and X-Forwarded-Host"
            )
    if not page_origins or list(fetch_sites) == ["same-origin"]:
        return None
    page = _read_origin(page_origins[0])
    public = _read_origin(f"{scheme}://{public_host}") if public_host else None
    if page is not None and page in (own, public):
        return None
    name = str(page) if page is not None else _program_origin(page_origins[0])
    if name is not None and _is_named(name, origins):
        return None
    return (
        "pages of another origin may not use this server: name theirs with --cors-origins; if the "
        "page is this server's own behind a proxy, the proxy must send X-Forwarded-Host and "
        "X-Forwarded-Proto"
    )


def _is_loopback(host: IpAddress | str) -> bool:
    """Return True for 127.0.0.0/8 (also as mapped IPv6), ::1, localhost and names under it."""
    if isinstance(host, str):
        name = host.removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return (mapped or host).is_loopback


# ---- every request


@dataclass
class AccessRules:
    """Who may use the server. The keys may be replaced at any time.

    A request needs one of `keys`, if there are any. `origins` are the origins of other pages that
    may use the server. `on_loopback`: only this machine can reach the server.
    """

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    on_loopback: bool = True


ANOTHER_SITE = Problem(
    "Forbidden",
    "a page of another site, or a browser that does not say of which, may not change the list: use "
    "a program such as curl, or send `Authorization: Bearer KEY`",
    403,
    "permission_error",
    can_retry=False,
)
NEEDS_KEY = Problem(
    "Unauthorized",
    "Invalid API Key: send `Authorization: Bearer KEY`",
    401,
    "authentication_error",
    event=Event.BAD_KEY,
)


class Gate:
    """ASGI middleware that refuses requests and adds the header that names ignored parameters.

    It answers 403 to pages of other origins, 401 without a key, and 415 to browsers' bodies whose
    Content-Type is not JSON. The page's own files are for everybody.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and (added := ignored_header(scope)):
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is not None:
            await problem_response(problem)(scope, receive, send)
        else:
            await self._app(scope, receive, send_named)

    def _problem(self, scope: Scope) -> Problem | None:
        headers, rules = Headers(scope=scope), self._rules
        is_page = scope["path"] == "/" or scope["path"].startswith(_PUBLIC_FOLDER)
        if not (is_page and scope["method"] in ("GET", "HEAD")):
            reason = refusal(
                headers.getlist("host"),
                headers.getlist("origin"),
                scheme=scope["scheme"],
                on_loopback=rules.on_loopback,
                origins=rules.origins,
                public_host=forwarded_host(scope),
                fetch_sites=headers.getlist("sec-fetch-site"),
            )
            if reason is not None:
                return Problem("Forbidden", reason, 403, "permission_error", can_retry=False)
        is_public = is_page or scope["path"] in _PUBLIC
        key = held_key(rules.keys, headers.get("authorization"), headers.get("x-api-key"))
        if not is_public and rules.keys and key is None:
            return NEEDS_KEY
        address = scope["client"][0] if scope.get("client") else None
        name = client_name(key if len(rules.keys) > 1 else None, address)
        state = scope.setdefault("state", {})
        state[_CLIENT], state[_HAS_KEY] = name, not rules.keys or key is not None
        state[_KEY] = rules.keys[key] if len(rules.keys) > 1 and key is not None else ""
        return _media_problem(headers)


def _media_problem(headers: Headers) -> Problem | None:
    """Return the 415 for a browser's body that is not application/json, or None.

    Browsers let pages send bodies of some other types to other origins without permission. Programs
    such as `curl -d` name such types too, and mean JSON.
    """
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not has_body(headers) or media == "application/json" or not _is_browsers(headers):
        return None
    said = f"Content-Type is {media}" if media else "Content-Type is missing"
    message = f"{said}: send application/json"
    return Problem("UnsupportedMediaType", message, 415, "invalid_request_error", can_retry=False)


def _is_browsers(headers: Headers) -> bool:
    """True if a header says that a browser sent the request. Pages cannot remove these headers."""
    by_browser = any(name in headers for name in ("origin", "referer", "cookie"))
    fetched = any(name.startswith("sec-fetch-") for name in headers.keys())  # noqa: SIM118
    return by_browser or fetched or headers.get("user-agent", "").startswith("Mozilla/")


def client_name(key: int | None, address: str | None) -> str:
    """Return the name under which a client takes turns: its key's number, or else its address.

    Only the first 64 bits of an IPv6 address are used. Addresses that share them belong to one site
    (RFC 6177).
    """
    if key is not None:
        return f"{_KEY_NAME}{key}"
    try:
        ip = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return (address or "")[:_MOST_NAME_CHARS]
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


def owner_of(scope: Mapping[str, Any]) -> str:
    """Return whose stored responses a request may name: its key's if the server has several.

    Otherwise all clients have the same. They know only the ids that they were told.
    """
    name = client_of(scope)
    return name if name.startswith(_KEY_NAME) else ""


def client_of(scope: Mapping[str, Any]) -> str:
    """Return the client name that the gate stored in a request's scope."""
    return str(scope.get("state", {}).get(_CLIENT, ""))


def has_key(scope: Mapping[str, Any]) -> bool:
    """True if the gate found one of the server's keys, or the server has none."""
    return bool(scope.get("state", {}).get(_HAS_KEY, False))


def may_change(scope: Scope) -> bool:
    """True if a GET may change something: it is no request that another site's page can cause.

    An image or a link of any page causes a GET without an Origin header. The gate has checked this
    header if there is one. Browsers say the page's site in Sec-Fetch-Site over HTTPS and to
    loopback. Elsewhere a request of a browser counts only with a key, which no other page can add.
    """
    headers = Headers(scope=scope)
    if "origin" in headers:
        return True
    sites = headers.getlist("sec-fetch-site")
    if sites:
        return set(sites) <= {"same-origin", "none"}
    by_key = "authorization" in headers or "x-api-key" in headers
    return by_key or not _is_browsers(headers)


def own_key_of(scope: Mapping[str, Any]) -> str:
    """Return the key of a request's client, or "" unless the server has several keys."""
    return str(scope.get("state", {}).get(_KEY, ""))
