"""Malformed requests of a seeded generator: number `i` of a seed is always the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lab.attack.bodies import ENDPOINTS, hostile_body
from lab.attack.exchange import Request, ask_for

_PATHS = (
    *ENDPOINTS,
    *(
        "/",
        "/health",
        "/v1/models",
        "/v1/models/x",
        "/props",
        "/metrics",
        "/slots",
        "/openapi.json",
    ),
    *("/page/main.js", "/page/../../etc/passwd", "/page/%2e%2e/%2e%2e/etc/passwd", "/slots/-1"),
    *("/slots/99999999999999999999?action=save", "/v1/models/%00", "//", "/v1/nothing", "/docs"),
    *("/slots?fail_on_no_slot=1", "/v1/embeddings", "/health/", "/%ff%fe", "/" + "x" * 5000),
)
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")


@dataclass(frozen=True)
class Attack:
    """What is sent. `may_hang_up`: it is no request of HTTP's, so the server may close without a
    word. `ends`: nothing more is sent after it, so that the server need not wait for it. `leaves`:
    the client does not wait for its answer."""

    data: bytes
    may_hang_up: bool = False
    ends: bool = False
    leaves: bool = False


def attack(seed: int, number: int, port: int) -> Attack:
    """Request `number` of the seed."""
    rng = Random(f"{seed}/{number}")
    kind = rng.random()
    if kind < 0.80:
        return Attack(Request(*hostile_body(rng)).raw(port))
    if kind < 0.88:
        return Attack(_headers(rng).raw(port))
    if kind < 0.92:
        method = rng.choice(_METHODS)
        return Attack(Request(rng.choice(_PATHS), b"", method).raw(port))
    if kind < 0.96:
        return _framing(rng, port)
    body = {"prompt": "import os\n", "max_tokens": 40, "stream": rng.random() < 0.5}
    return Attack(ask_for("/v1/completions", body).raw(port), leaves=True)


def _headers(rng: Random) -> Request:
    path, body = hostile_body(rng) if rng.random() < 0.3 else ("/v1/completions", b'{"prompt": ""}')
    name, value = rng.choice(
        (
            ("Host", "evil.example"),
            ("Host", ""),
            ("Host", "127.0.0.1:1@evil.example"),
            ("Origin", "http://evil.example"),
            ("Origin", "null"),
            ("Content-Type", "text/plain"),
            ("Content-Type", ""),
            ("Content-Type", "application/json; charset=utf-7"),
            ("Authorization", "Bearer " + "x" * 8000),
            ("X-Api-Key", "\x80\xff"),
            ("X-Forwarded-For", "1.2.3.4, " * 500),
            ("X-Forwarded-For", "nonsense"),
            ("X-Forwarded-Proto", "gopher"),
            ("Accept-Encoding", "gzip;q=nan"),
            ("Expect", "100-continue"),
            ("Cookie", "a=b; " * 1000),
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade, close"),
            ("X-Long", "x" * 60_000),
            ("Range", "bytes=0-"),
        )
    )
    return Request(path, body, headers={name: value})


def _framing(rng: Random, port: int) -> Attack:
    """Requests whose lines or lengths are wrong."""
    host = f"Host: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    start = f"POST /v1/completions HTTP/1.1\r\n{host}"
    body = '{"prompt": "x", "max_tokens": 1}'
    texts = (
        f"{start}Content-Length: {len(body) + 50}\r\n\r\n{body}",
        f"{start}Content-Length: 5\r\n\r\n{body}",
        f"{start}Content-Length: -1\r\n\r\n{body}",
        f"{start}Content-Length: 9999999999999999999999\r\n\r\n{body}",
        f"{start}Content-Length: 3\r\nContent-Length: 4\r\n\r\n{body}",
        f"{start}Transfer-Encoding: chunked\r\n\r\nzz\r\n{body}\r\n0\r\n\r\n",
        f"{start}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n",
        f"{start}Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        f"{start}Transfer-Encoding: gzip\r\n\r\n{body}",
        f"GET /health HTTP/1.1\r\n{host}" + "X: y\r\n" * 5000 + "\r\n",
        f"GET /health HTTP/1.1\r\n{host}\0: y\r\n\r\n",
        f"GET /he alth HTTP/1.1\r\n{host}\r\n",
        f"GET /health HTTP/9.9\r\n{host}\r\n",
        f"GET /health HTTP/1.0\r\n{host}\r\n",
        f"GET /health\r\n{host}\r\n",
        "\r\n" * 500,
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "GET /" + "a" * 100_000,
        f"POST /tokenize HTTP/1.1\r\n{host}",
        "",
    )
    return Attack(rng.choice(texts).encode("latin-1"), may_hang_up=True, ends=True)
