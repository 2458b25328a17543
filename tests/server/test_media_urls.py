"""Images at http addresses: fetched within limits, from hostile servers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from pathlib import Path

import psutil
import pytest
from http_hosts import Answer, file, host, sends
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadRequest
from specoffload.server import fetching
from specoffload.server.api.images import MOST_FETCHES, ConversationImages, MediaRules
from specoffload.server.fetching import FetchLimits, fetched, place_of

TLS = Path(__file__).parents[1] / "fixtures" / "tls"
LIMITS = FetchLimits(most_bytes=10_000, seconds=1.0, only_public=False)


def redirect(address: str, status: int = 302) -> Answer:
    return file(b"", f"Location: {address}", status=f"{status} Found")


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def endless_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")


def slow(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


def slow_head(connection: socket.socket) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX-A: " + b"x" * 1000:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def silent(connection: socket.socket) -> None:
    connection.recv(1)


def get(url: str, limits: FetchLimits = LIMITS) -> bytes:
    return asyncio.run(fetched(url, limits))


def test_a_file_is_fetched_also_in_chunks_and_behind_redirects() -> None:
    chunked = sends(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n"
    )
    until_closed = sends(b"HTTP/1.0 200 OK\r\n\r\n", b"abc")
    informed = sends(
        b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n", b"Content-Length: 3\r\n\r\nabc"
    )
    for answer in (file(b"abc"), chunked, until_closed, informed):
        with host(redirect("/there?a=%20b", 307), redirect("x", 301), answer) as served:
            assert get(served.url + "/here is/ä?q=1 2") == b"abc"
        assert served.requests[0].startswith(b"GET /here%20is/%C3%A4?q=1%202 HTTP/1.1\r\n")
        assert served.requests[1].startswith(b"GET /there?a=%20b HTTP/1.1\r\n")
        assert served.requests[2].startswith(b"GET /x HTTP/1.1\r\n")
        assert b"Accept-Encoding: identity" in served.requests[2]


HOSTILE: dict[str, tuple[Answer, str]] = {
    "endless": (endless, "it has more than 10000 bytes"),
    "announced": (
        sends(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"), "it has 99999999 bytes",
    ),
    "headers": (endless_headers, "breaks off, or speaks no HTTP"),
    "slow": (slow, "fetching it takes over 1 s"),
    "slow head": (slow_head, "fetching it takes over 1 s"),
    "silent": (silent, "fetching it takes over 1 s"),
    "cut": (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nabc"), "breaks off"),
    "noise": (sends(b"\0\1\2\3 hello\r\n\r\n"), "breaks off, or speaks no HTTP"),
    "nothing": (sends(b""), "breaks off"),
    "missing": (file(b"no", status="404 Not Found"), "answers with status 404"),
    "packed": (file(b"abc", "Content-Encoding: gzip"), "compresses it"),
    "no address": (file(b"", status="302 Found"), "answers with status 302"),
    "file": (redirect("file:///etc/passwd"), "'file:///etc/passwd' is no http or https address"),
    "ftp": (redirect("ftp://127.0.0.1/x"), "is no http or https address"),
    "user": (redirect("http://a:b@127.0.0.1/"), "no user or password"),
    "circle": (redirect("/again"), "redirected more than 3 times"),
    "port": (redirect("http://127.0.0.1:99999/"), "is no valid address"),
    "closed": (redirect("http://127.0.0.1:1/"), "cannot be connected to"),
    "bracket": (redirect("http://["), r"'http://\[' is no valid address"),
    "bracketed": (redirect("//[::1"), "is no valid address"),
    "split": (redirect("/a b\tc"), "is no|answers|redirected|breaks off"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_host_gets_one_sentence(name: str) -> None:
    answer, words = HOSTILE[name]
    begin_s = time.monotonic()
    with host(answer) as served, pytest.raises(BadRequest, match=words) as refused:
        get(served.url)
    assert "\n" not in str(refused.value)
    assert time.monotonic() - begin_s < 10


def test_private_addresses_are_refused_also_behind_a_redirect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    public = FetchLimits(10_000, only_public=True)
    with host(file(b"secret")) as secret:
        port = secret.url.rpartition(":")[2]
        names = ("127.0.0.1", "localhost", "0x7f000001", "2130706433", "[::ffff:127.0.0.1]",
                 "[::1]", "0.0.0.0", "[64:ff9b::7f00:1]")  # fmt: skip
        for name in names:
            with pytest.raises(BadRequest, match="private network|no address|cannot be conn"):
                get(f"http://{name}:{port}/", public)
        # The first host counts as public, and the one that it names does not.
        with host(redirect(f"http://localhost:{port}/")) as first:
            monkeypatch.setattr(fetching, "is_public", lambda address, own: not first.requests)
            with pytest.raises(BadRequest, match="'localhost' is in a private network"):
                get(first.url, public)
        assert secret.requests == []


def test_a_name_is_looked_up_once_and_what_was_checked_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that stands for a public address first, and then for this machine, gains nothing."""
    with host(file(b"secret")) as secret:
        port = int(secret.url.rpartition(":")[2])
        answers = [["192.0.2.1", "127.0.0.1"], ["127.0.0.1"]]
        connected: list[str] = []

        async def looked_up(*_: object, **__: object) -> list[tuple[object, ...]]:
            found = answers.pop(0)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, port)) for name in found]

        async def connecting(address: str, *_: object, **__: object) -> None:
            connected.append(address)
            raise OSError("not here")

        async def all_of() -> None:
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
            await fetched(f"http://rebinding.example:{port}/", FetchLimits(10_000))

        public = {ipaddress.ip_address("192.0.2.1")}
        monkeypatch.setattr(fetching, "is_public", lambda address, own: address in public)
        monkeypatch.setattr(asyncio, "open_connection", connecting)
        with pytest.raises(BadRequest, match="cannot be connected to"):
            asyncio.run(all_of())
        assert connected == ["192.0.2.1"]
        assert answers == [["127.0.0.1"]]
        assert secret.requests == []


def test_this_machine_is_refused_by_its_own_public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = (socket.AF_INET, "203.0.114.7", "255.255.255.0", None, None)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [entry]})
    with pytest.raises(BadRequest, match="in a private network or on this machine"):
        get("http://203.0.114.7:1/", FetchLimits(10_000))


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    with contextlib.suppress(BadRequest):
        place = place_of("http://" + text)
        assert place.target.startswith("/")
        assert place.target.isascii()
        assert " " not in place.target


def collected(*urls: str, rules: MediaRules) -> list[bytes | BadRequest]:
    async def all_of() -> list[bytes | BadRequest]:
        images = ConversationImages(rules, are_read=True)
        for at, url in enumerate(urls):
            images.take(f"messages[{at}]", url)
        found = await images.fetched(asyncio.Semaphore(MOST_FETCHES))
        return [image.file for image in found]

    return asyncio.run(all_of())


def test_the_images_of_a_request_keep_their_order_and_are_fetched_once() -> None:
    rules = MediaRules(urls="all")
    with host(file(b"abc")) as one, host(file(b"def")) as two:
        urls = (one.url, "data:image/png;base64,aGk=", two.url, one.url)
        assert collected(*urls, rules=rules) == [b"abc", b"hi", b"def", b"abc"]
        assert (len(one.requests), len(two.requests)) == (1, 1)
    with host(file(b"", status="500 No")) as bad, host(slow) as late:
        begin_s = time.monotonic()
        words = r"messages\[1\]: the image cannot be fetched: 127.0.0.1 answers with status 500"
        with pytest.raises(BadRequest, match=words):
            collected(late.url, bad.url, rules=rules)
        assert time.monotonic() - begin_s < 5
    with pytest.raises(BadRequest, match="without --allow-media-urls"):
        collected(one.url, rules=MediaRules())


def test_https_needs_a_certificate_that_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    with host(file(b"abc"), tls=tls) as served:
        url = served.url.replace("127.0.0.1", "localhost")
        with pytest.raises(BadRequest, match="cannot be connected to.*certificate verify failed"):
            get(url)
        trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
        monkeypatch.setattr(ssl, "create_default_context", lambda: trusting)
        assert get(url) == b"abc"
