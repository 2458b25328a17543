"""The server's queue: order, overflow, and clients that disconnect."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fake_generator import TAIL, FakeFactory
from running import Running, StartServer, eventually, http


@contextmanager
def _endless(
    server: Running, prompt: str = "[forever]", n_tokens: int = -1
) -> Iterator[Iterator[str]]:
    """The lines of a stream after its first piece. By default it never ends by itself."""
    body = {"prompt": prompt, "stream": True, "max_tokens": n_tokens}
    with http.stream("POST", server.url + "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def _said(server: Running, pattern: str) -> bool:
    return any(re.fullmatch(pattern, line) for line in server.lines)


def _idle(server: Running) -> bool:
    props = server.props()
    return props["requests_processing"] == props["requests_deferred"] == 0


def _leave(server: Running, prompt: str, *, once: Callable[[], bool]) -> None:
    """Ask for a whole answer, and hang up as soon as `once()` is true."""
    body = json.dumps({"prompt": prompt}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(head.encode() + body)
        eventually(once)


def test_a_client_that_leaves_a_stream_frees_the_sequence(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log))
    with _endless(server) as lines:
        for _ in range(5):
            next(lines)
    eventually(lambda: _idle(server))
    assert _said(server, r".*#0: cancelled after \d+ tokens? in \d+\.\d s")
    assert log.read_text().splitlines()[1:] == ["start", "abandoned"]
    response = http.post(server.url + "/v1/completions", json={"prompt": "next"})
    assert response.json()["choices"][0]["text"] == "next" + TAIL


def test_a_client_that_leaves_before_a_whole_answer_frees_the_sequence(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log))
    _leave(server, "[forever]", once=lambda: "start" in log.read_text())
    eventually(lambda: _idle(server))
    assert log.read_text().splitlines()[1:] == ["start", "abandoned"]


def test_a_client_that_leaves_the_queue_is_never_started(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log))
    with _endless(server):
        _leave(server, "waiting", once=lambda: server.props()["requests_deferred"] == 1)
        eventually(lambda: server.props()["requests_deferred"] == 0)
    eventually(lambda: _idle(server))
    assert log.read_text().count("start") == 1
    assert _said(server, r".*#1: cancelled while it waited in the queue")


def test_over_the_queue_limit_is_a_503_that_says_when_to_come_back(
    start_server: StartServer,
) -> None:
    server = start_server(max_queue=2)
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "x"}
        answers.append(http.post(server.url + "/v1/completions", json=body))

    waiting = [threading.Thread(target=ask) for _ in range(2)]
    with _endless(server):
        for thread in waiting:
            thread.start()
        eventually(lambda: server.props()["requests_deferred"] == 2)
        response = http.post(server.url + "/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "unavailable_error"
        assert (
            "2 requests wait; the limit is 2 (--max-queue)" in response.json()["error"]["message"]
        )
        assert 1 <= int(response.headers["retry-after"]) <= 60
        health = http.get(server.url + "/health")
        assert health.status_code == 200, "busy is not ill"
    for thread in waiting:
        thread.join(20)
    assert [a.status_code for a in answers] == [200, 200]


def test_a_long_prefill_keeps_the_stream_alive_with_events(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specoffload.server.api.streaming._HEADER_PATIENCE_S", 0.1)
    monkeypatch.setattr("specoffload.server.api.streaming._KEEP_ALIVE_S", 0.1)
    server = start_server()
    body = {"prompt": "[prefill]", "stream": True}
    with http.stream("POST", server.url + "/v1/completions", json=body) as response:
        text = response.read().decode()
    silence, _, _ = text.partition('"["')
    assert silence.count('"text":""') >= 2
    with server.client() as client:
        stream = client.completions.create(model="any", prompt="[prefill]", stream=True)
        assert "".join(c.choices[0].text for c in stream) == "[prefill]" + TAIL


def test_stopping_the_server_lets_a_short_request_end(start_server: StartServer) -> None:
    server = start_server()
    with _endless(server, "[slow]", 10) as lines:  # 0.2 s; the server waits for 1 s
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        rest = [line for line in lines if line]
    stopping.join(20)
    assert rest[-1] == "data: [DONE]"


def test_the_time_in_the_queue_is_in_timings_and_in_the_log(start_server: StartServer) -> None:
    server = start_server()
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        body = {"prompt": "second"}
        answers.append(http.post(server.url + "/v1/completions", json=body).json())

    asking = threading.Thread(target=ask)
    with _endless(server):
        began_s = time.monotonic()
        asking.start()
        eventually(lambda: server.props()["requests_deferred"] == 1)
        time.sleep(1.2)
    asking.join()
    took_ms = 1000 * (time.monotonic() - began_s)
    timings = answers[0]["timings"]
    told_ms = timings["prompt_ms"] + timings["predicted_ms"]  # the fake's, always 750
    assert 1200 - told_ms <= timings["waited_ms"] <= took_ms - told_ms
    line = r".*#1: \d+ tokens, .+ t/s · waited \d+\.\d s · prompt .*"
    eventually(lambda: _said(server, line))
