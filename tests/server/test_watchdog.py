"""An engine process that does not come back is ended, and the next request is served."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from fake_generator import TAIL, FakeFactory
from running import Running, StartServer, eventually, http

from specoffload.server.engine.health import RestartPolicy, Watchdog, describe_exit

SOON = Watchdog(0.5)


def post(server: Running, prompt: str) -> tuple[int, dict[str, object]]:
    answer = http.post(server.url + "/v1/completions", json={"prompt": prompt})
    return answer.status_code, answer.json()


@pytest.mark.parametrize("prompt", ["[hang]", "[hang-now]"])
def test_a_request_that_hangs_gets_one_clear_error_and_the_next_is_served(
    start_server: StartServer, prompt: str
) -> None:
    server = start_server(watchdog=SOON if prompt == "[hang]" else Watchdog(0.1))
    status, body = post(server, prompt)
    assert status == 500
    message = str(body["error"]["message"])  # type: ignore[index]
    assert "gave no sign of life for" in message
    server.wait_until_healthy()
    assert post(server, "after")[1]["choices"][0]["text"] == "after" + TAIL  # type: ignore[index]
    assert any("gave no sign of life" in line and "restarting" in line for line in server.lines)


def test_silence_between_requests_and_long_prompts_are_no_hanging(
    start_server: StartServer,
) -> None:
    server = start_server(watchdog=Watchdog(0.3))
    assert post(server, "[prefill] this takes 0.7 s before its first token")[0] == 200
    threading.Event().wait(0.8)
    assert post(server, "after")[0] == 200
    assert server.props()["engine_restarts"] == 0


def health(server: Running) -> tuple[int, str]:
    answer = http.get(server.url + "/health")
    return answer.status_code, answer.text


def test_health_tells_of_an_engine_process_that_is_stopped(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log), watchdog=Watchdog(pulse_s=2.5))
    pid = int(log.read_text().split()[1])
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: health(server)[0] == 503)
        assert "has given no sign of life for" in health(server)[1]
    finally:
        os.kill(pid, signal.SIGCONT)
    server.wait_until_healthy()
    assert post(server, "after")[0] == 200


def test_a_step_of_any_length_does_not_make_health_flap(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    watchdog = Watchdog(0, pulse_s=2.5)
    server = start_server(FakeFactory(log=log), watchdog=watchdog)
    request = threading.Thread(target=lambda: post(server, "[hang-now]"))
    request.start()
    eventually(lambda: server.props()["requests_processing"] == 1)
    until = time.monotonic() + watchdog.pulse_s + 1
    while time.monotonic() < until:
        assert health(server)[0] == 200
        time.sleep(0.1)
    os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
    request.join(20)


def test_what_is_wrong_is_said_before_the_process_is_ended() -> None:
    watchdog = Watchdog(100.0, pulse_s=10.0)
    assert watchdog.symptom(9.0, None, reads_prompts=False) is None
    assert "no sign of life for 11 s" in str(watchdog.symptom(11.0, None, reads_prompts=False))
    assert watchdog.symptom(1.0, 49.0, reads_prompts=False) is None
    assert "one step for 51 s; at 100 s" in str(watchdog.symptom(1.0, 51.0, reads_prompts=False))
    assert watchdog.symptom(1.0, 499.0, reads_prompts=True) is None
    assert "at 1000 s" in str(watchdog.symptom(1.0, 501.0, reads_prompts=True))
    assert Watchdog(0).symptom(1.0, 1e9, reads_prompts=False) is None


POLICY = RestartPolicy(limit=4, first_delay_s=0.5, max_delay_s=3.0, healthy_after_s=60.0)


def test_delays_double_and_only_a_process_that_stayed_ready_clears_the_count() -> None:
    assert [POLICY.delay_s(n) for n in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, None]
    assert [POLICY.count(3, ready_for_s=s) for s in (None, 59.9, 60.0)] == [4, 4, 1]


def test_exits_are_described_by_code_or_signal_name() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-6) == "was killed by SIGABRT"
    assert describe_exit(-200) == "was killed by signal 200"
