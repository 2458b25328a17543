"""The engine process of a real model is killed while it answers: who waits is told, and the next
request is served as soon as the model is loaded again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
from program import Program, serving
from running import eventually, http

N_STREAMS = 16
_MORE_S = 2.0  # besides loading: noticing, the first delay of the restart policy
_LOADS = 4  # times the first loading, which had the machine to itself


def _engine(program: Program) -> psutil.Process:
    """The child that has the library loaded."""
    children = psutil.Process(program.process.pid).children()
    [engine] = [
        child
        for child in children
        if any("libllama" in place.path for place in child.memory_maps())
    ]
    return engine


def _stream(program: Program, number: int, begun: threading.Barrier) -> list[dict[str, Any]]:
    """All events of a stream that would go on to the end of the context."""
    body = {"prompt": f"def f{number}(x):\n", "stream": True, "ignore_eos": True}
    events: list[dict[str, Any]] = []
    with http.stream("POST", program.url + "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            events.append(json.loads(line[6:]))
            if len(events) == 1:
                begun.wait(60)
    return events


def test_a_kill_under_16_streams_is_told_to_each_and_the_next_request_is_served() -> None:
    began_s = time.monotonic()
    flags = ("--device", "cpu", "--parallel", str(N_STREAMS), "--ctx-size", "16384")
    with serving(*flags) as program:
        first_load_s = time.monotonic() - began_s
        begun = threading.Barrier(N_STREAMS + 1)
        with ThreadPoolExecutor(N_STREAMS) as pool:
            streams = [pool.submit(_stream, program, i, begun) for i in range(N_STREAMS)]
            begun.wait(60)
            assert http.get(program.url + "/props").json()["requests_processing"] == N_STREAMS
            os.kill(_engine(program).pid, signal.SIGKILL)
            killed_s = time.monotonic()
            for stream in streams:
                *texts, last = stream.result(60)
                assert texts
                assert all(event["choices"][0]["finish_reason"] is None for event in texts)
                assert "killed by SIGKILL" in last["error"]["message"]
                assert last["error"]["type"] == "server_error"
        body = {"prompt": "def g(x):\n", "max_tokens": 4}
        answer = http.post(program.url + "/v1/completions", json=body)
        if answer.status_code == 503:  # it says when to come again
            assert int(answer.headers["retry-after"]) >= 1
        eventually(lambda: http.get(program.url + "/health").status_code == 200, 60)
        answer = http.post(program.url + "/v1/completions", json=body)
        served_s = time.monotonic() - killed_s
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        assert http.get(program.url + "/props").json()["engine_restarts"] == 1
        assert served_s < _LOADS * first_load_s + _MORE_S
