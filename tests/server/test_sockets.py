"""Slow, silent, half-closed or too many sockets do not keep other clients from being served."""

from __future__ import annotations

import logging
import re
import socket
import time
from contextlib import ExitStack, suppress

import pytest
from running import Running, StartServer, eventually, http

from specoffload.server.sockets import OncePerWhile, SocketLimits

IMPATIENT = SocketLimits(
    n_connections=8, header_s=0.3, body_s=0.3, body_bytes_per_s=10_000, keep_alive_s=1, write_s=0.5
)
BODY = b'{"prompt": "x"}'


def _connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def _head(n_bytes: int, path: str = "/v1/completions", more: str = "") -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {n_bytes}",
        more,
    )
    return "\r\n".join([line for line in lines if line] + ["", ""]).encode()


def _rest(client: socket.socket) -> bytes:
    """Everything received until the connection ends."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("part", [b"", b"GET /health HTTP/1.1\r\nHo", _head(100) + b'{"pro'])
def test_a_request_that_does_not_arrive_is_given_up(start_server: StartServer, part: bytes) -> None:
    server = start_server(limits=IMPATIENT)
    with _connect(server) as client:
        client.sendall(part)
        answer = _rest(client)
    assert answer.startswith(b"HTTP/1.1 408") == bool(part)


@pytest.mark.parametrize("more", ["Connection: close", ""])
def test_who_sends_all_before_reading_still_gets_the_refusal(
    start_server: StartServer, more: str
) -> None:
    """The body is much larger than the context and than the buffers of sockets."""
    server = start_server()
    with _connect(server) as client:
        client.sendall(_head(32 * 2**20, more=more))
        for _ in range(32):
            client.sendall(b"a" * 2**20)
        assert b" 413 " in client.recv(65536)
        if more != "Connection: close":  # the connection serves the next request
            client.sendall(_head(len(BODY)) + BODY)
            assert b" 200 OK" in client.recv(65536)
    assert http.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("more", ["Connection: close", ""])
def test_a_refused_body_is_not_read_for_ever(start_server: StartServer, more: str) -> None:
    server = start_server(limits=SocketLimits(linger_bytes=2**20))
    with _connect(server) as client, suppress(OSError):  # the server may reset the connection
        client.sendall(_head(2**30, more=more))
        for _ in range(1000):
            client.sendall(b"a" * 2**20)
        pytest.fail("a gigabyte was read")
    assert http.get(server.url + "/health").status_code == 200


def test_a_header_byte_by_byte_does_not_win_time(start_server: StartServer) -> None:
    server = start_server(limits=IMPATIENT)
    with _connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        with suppress(OSError):  # the server may close the connection
            for at in range(1000):
                client.sendall(b"X-%d: y\r\n" % at)
                time.sleep(0.02)
        assert at < 900


def test_a_long_body_that_keeps_coming_is_waited_for(start_server: StartServer) -> None:
    server = start_server(limits=IMPATIENT)
    body = b" " * 10_000 + BODY
    with _connect(server) as client:
        client.sendall(_head(len(body), more="Connection: close"))
        for at in range(0, len(body), 1000):
            client.sendall(body[at : at + 1000])
            time.sleep(0.07)  # all pauses together exceed the limit
        assert _rest(client).startswith(b"HTTP/1.1 200")


def test_silent_connections_do_not_keep_others_out(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(limits=SocketLimits(n_connections=8), has_metrics=True)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(_connect(server))
        for _ in range(5):
            assert http.get(server.url + "/health").status_code == 200
    page = http.get(server.url + "/metrics").text
    (told,) = re.findall(r"^specoffload:connections_closed_total (\S+)$", page, re.M)
    assert float(told) >= 92
    said = [r for r in caplog.records if "connections are open" in r.getMessage()]
    assert len(said) == 1


def test_when_all_connections_are_at_work_a_new_one_is_told_to_come_back(
    start_server: StartServer,
) -> None:
    server = start_server(limits=SocketLimits(n_connections=1))
    body = b'{"prompt": "[forever]", "stream": true}'
    with _connect(server) as client:
        client.sendall(_head(len(body)) + body)
        assert client.recv(1)
        refused = http.get(server.url + "/health")
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "unavailable_error"
        assert int(refused.headers["retry-after"]) >= 1
    eventually(lambda: http.get(server.url + "/health").status_code == 200)


@pytest.mark.parametrize("prompt", ["x", "[prefill]"])
def test_a_half_closed_client_gets_its_answer(start_server: StartServer, prompt: str) -> None:
    server = start_server()
    body = b'{"prompt": "%s"}' % prompt.encode()
    with _connect(server) as client:
        client.sendall(_head(len(body)) + body)
        client.shutdown(socket.SHUT_WR)
        answer = _rest(client)
    assert b"HTTP/1.1 200" in answer
    assert b'"finish_reason":"stop"' in answer


def test_one_that_hangs_up_in_its_body_is_no_traceback(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    for close in (lambda c: c.shutdown(socket.SHUT_WR), lambda c: None):
        with _connect(server) as client:
            client.sendall(_head(1000) + b'{"prompt": ')
            time.sleep(0.1)
            close(client)
    assert http.get(server.url + "/health").status_code == 200
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_a_client_that_reads_nothing_is_given_up(start_server: StartServer) -> None:
    server = start_server(limits=IMPATIENT)
    body = b'{"prompt": "[flood]", "stream": true}'
    with _connect(server) as client:
        client.sendall(_head(len(body)) + body)
        eventually(lambda: server.props()["requests_processing"] == 1)
        eventually(lambda: server.props()["requests_processing"] == 0, timeout_s=20)


def test_what_is_no_http_is_a_400_in_the_shape_of_all_errors(server: Running) -> None:
    with _connect(server) as client:
        client.sendall(b"\x16\x03\x01 tls to a plain port\r\n\r\n")
        head, _, body = _rest(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b'"type": "invalid_request_error"' in body


@pytest.mark.parametrize(
    ("line", "more", "status"),
    [
        ("GET /health HTTP/0.9", "", 505),
        ("GET /health HTTP/2.0", "", 505),
        ("GET /health", "", 400),
        ("GET /health HTTP/1.0", "", 200),
        ("GET /health HTTP/1.1", "Connection: close", 200),
        ("GET /health HTTP/1.1", "Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
        ("POST /v1/completions HTTP/1.1", "Transfer-Encoding: chunked\r\nContent-Length: 5", 400),
        ("POST /v1/completions HTTP/1.0", "Transfer-Encoding: chunked\r\nContent-Length: 5", 400),
    ],
)
def test_a_request_with_two_possible_ends_is_refused_and_its_connection_closed(
    server: Running, line: str, more: str, status: int
) -> None:
    """The bytes after it would be a second request for one server, and a body for another."""
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = "\r\n".join([part for part in (line, "Host: localhost", more) if part])
    with _connect(server) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + (smuggled if status == 400 and more else b""))
        answer = _rest(client)
    assert answer.startswith(f"HTTP/1.1 {status}".encode())
    assert answer.count(b"HTTP/1.1 ") == 1
    if status != 200:
        assert b'"type": "invalid_request_error"' in answer
        assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_refused_head_gets_a_header_alone_and_no_traceback(
    server: Running, caplog: pytest.LogCaptureFixture, before: bytes
) -> None:
    with _connect(server) as client:
        client.sendall(before + b"HEAD / HTTP/2.0\r\nHost: localhost\r\n\r\n")
        answer = _rest(client)
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505")
    assert body == b""
    assert not [record for record in caplog.records if record.exc_info]


def test_the_log_says_the_same_thing_once_in_a_while_and_how_often() -> None:
    now = 100.0
    often = OncePerWhile(60.0, lambda: now)

    def say(text: str) -> str | None:
        record = logging.LogRecord("n", logging.WARNING, "", 0, text, (), None)
        return record.getMessage() if often.filter(record) else None

    assert [say("a"), say("a"), say("b"), say("a")] == ["a", None, "b", None]
    now += 61
    assert say("a") == "a (2 more since this was last said)"
    now += 61
    assert say("a") == "a"
