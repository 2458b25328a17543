"""The engine process dies; the API lives on and says so."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import httpx
import openai
import pytest
from fake_generator import TAIL, FakeFactory
from running import Running, StartServer, eventually, http

from offload.errors import DeviceFailed


def _completion(server: Running, prompt: str) -> httpx.Response:
    return http.post(server.url + "/v1/completions", json={"prompt": prompt})


def _pids(log: Path) -> list[int]:
    lines = log.read_text().splitlines()
    return [int(line.removeprefix("pid ")) for line in lines if line.startswith("pid ")]


def test_a_crash_is_a_500_for_its_request_and_a_new_process_serves_the_next(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log))
    for n in (1, 2):
        response = _completion(server, "[crash-now]")
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["type"] == "server_error"
        assert "was killed by SIGABRT while it served this request" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        server.wait_until_healthy()
        assert _completion(server, "after").json()["choices"][0]["text"] == "after" + TAIL
        assert server.props()["engine_restarts"] == n
    assert len(set(_pids(log))) == 3


def test_requests_that_kill_the_engine_do_not_end_the_server_and_run_once(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Neither those that generate nor the others: one request is to blame for each death."""
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log))
    for n in range(1, 6):  # more than QUICK_RESTART has patience for
        if n % 2:
            response = http.post(server.url + "/tokenize", json={"content": "[crash-tokens]"})
        else:
            response = _completion(server, "[crash-now]")
        assert response.status_code == 500
        assert "while it served this request" in response.json()["error"]["message"]
        server.wait_until_healthy()
        assert server.props()["engine_restarts"] == n
    assert log.read_text().splitlines().count("start") == 2
    assert _completion(server, "after").json()["choices"][0]["text"] == "after" + TAIL


def test_health_is_503_while_restarting_and_waiting_requests_survive(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log, load_s=0.7))
    results: dict[str, httpx.Response] = {}

    def ask(prompt: str) -> None:
        results[prompt] = _completion(server, prompt)

    first = threading.Thread(target=ask, args=("[forever]",))
    first.start()
    eventually(lambda: server.props()["requests_processing"] == 1)
    second = threading.Thread(target=ask, args=("patient",))
    second.start()
    eventually(lambda: server.props()["requests_deferred"] == 1)
    os.kill(_pids(log)[-1], signal.SIGSEGV)
    eventually(lambda: http.get(server.url + "/health").status_code == 503)
    error = http.get(server.url + "/health").json()["error"]
    assert error["type"] == "unavailable_error"
    assert error["message"].startswith("Loading model")
    refused = _completion(server, "new")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    first.join(20)
    second.join(20)
    assert results["[forever]"].status_code == 500
    assert "SIGSEGV" in results["[forever]"].text
    assert results["patient"].json()["choices"][0]["text"] == "patient" + TAIL
    assert http.get(server.url + "/health").json() == {"status": "ok"}


def test_an_engine_that_keeps_dying_is_given_up(start_server: StartServer, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    server = start_server(FakeFactory(abort_if=broken))
    broken.touch()
    assert _completion(server, "[crash-now]").status_code == 500
    server.wait_for_end()
    assert isinstance(server.error, DeviceFailed)
    assert "for the 4th time in a row" in str(server.error)
    # The first death was a request's fault, and the four of loading are the process's own.
    assert sum("restarting it" in line for line in server.lines) == 4


def test_an_exception_is_a_500_with_its_class_and_the_process_stays(
    start_server: StartServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log))
    response = _completion(server, "[raise-now]")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "ValueError: the fake was told to fail"
    with (
        server.client() as client,
        pytest.raises(openai.APIError, match="the fake was told to fail"),
    ):
        list(client.completions.create(model="any", prompt="[raise]", stream=True))
    assert _completion(server, "after").status_code == 200
    assert server.props()["engine_restarts"] == 0
    assert len(_pids(log)) == 1
    server.stop()
    assert "Traceback" in capfd.readouterr().err, "the operator sees where it failed"
