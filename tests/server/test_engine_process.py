"""If the engine process dies or hangs, the API process reports it and starts another."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from fake_generator import TAIL, FakeFactory
from running import Running, StartServer, eventually, http

from offload.errors import DeviceFailed
from offload.stream.bell_use import BELLS
from specoffload.server.engine.health import RestartPolicy, Watchdog, describe_exit


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
    """Generating and other requests kill it in turn. Each death is blamed on one request."""
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log))
    for n in range(1, 6):  # more deaths than QUICK_RESTART allows
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


def test_the_first_request_waits_for_nothing_that_belongs_to_the_start(
    start_server: StartServer, tmp_path: Path
) -> None:
    """The vocabulary for grammars is prepared while /health says that the model is loading."""
    until = tmp_path / "prepared"
    server = start_server(FakeFactory(prepares_until=until), healthy=False)
    eventually(lambda: "preparing the vocabulary" in http.get(server.url + "/health").text)
    assert http.get(server.url + "/health").status_code == 503
    until.touch()
    server.wait_until_healthy()
    assert _completion(server, "hello").status_code == 200


def test_an_engine_that_keeps_dying_is_given_up(start_server: StartServer, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    server = start_server(FakeFactory(abort_if=broken))
    broken.touch()
    assert _completion(server, "[crash-now]").status_code == 500
    server.wait_for_end()
    assert isinstance(server.error, DeviceFailed)
    assert "for the 4th time in a row" in str(server.error)
    # A request caused the first death. The next four deaths happened while the model was loaded.
    assert sum("restarting it" in line for line in server.lines) == 4


def test_why_a_model_cannot_be_opened_again_is_said(
    start_server: StartServer, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    server = start_server(FakeFactory(bad_if=bad))
    bad.touch()
    assert _completion(server, "[crash-now]").status_code == 500
    eventually(lambda: any("is not a GGUF file" in line for line in server.lines))
    bad.unlink()
    eventually(lambda: http.get(server.url + "/health").status_code == 200)


def test_a_missing_worker_is_no_failure_of_the_engine(
    start_server: StartServer, tmp_path: Path
) -> None:
    log, lost = tmp_path / "log", tmp_path / "lost"
    server = start_server(FakeFactory(log=log, worker_lost_if=lost))
    lost.touch()
    os.kill(_pids(log)[-1], signal.SIGKILL)

    def message() -> str:
        return str(http.get(server.url + "/health").json().get("error", {}).get("message", ""))

    eventually(lambda: "the worker at 10.0.0.2:50052 cannot be reached" in message())
    # More starts than QUICK_RESTART allows failures.
    eventually(lambda: log.read_text().splitlines().count("lost") > 4, 60)
    assert "the engine starts again as soon as it answers" in message()
    lost.unlink()
    server.wait_until_healthy()
    assert _completion(server, "after").json()["choices"][0]["text"] == "after" + TAIL


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
    silent = re.search(r"gave no sign of life for (\d+) s", message)
    assert silent is not None
    assert int(silent[1]) < 5, "an answer has 0.5 s for a token, and only a prompt has 5 s"
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


def test_a_changed_model_file_is_a_503_with_the_reason_until_it_is_whole(
    start_server: StartServer, tmp_path: Path
) -> None:
    model = tmp_path / "fake.gguf"
    model.write_text("whole")
    server = start_server(FakeFactory(model_file=model))
    assert _completion(server, "before").status_code == 200
    model.write_text("half")
    assert _completion(server, "[changed]").status_code == 500
    changed = "another program wrote to fake.gguf, a file of the model, while it was open"

    def told() -> str:
        response = http.get(server.url + "/health")
        return "" if response.status_code == 200 else str(response.json()["error"]["message"])

    again = "; the engine starts again as soon as the file is whole"
    eventually(lambda: told() == changed + again)
    assert _completion(server, "not now").status_code == 503
    eventually(lambda: told() == f"{changed} (fake.gguf ends at byte 4){again}")  # it was tried
    assert server.is_alive
    model.write_text("whole")
    eventually(lambda: told() == "")
    assert _completion(server, "after").json()["choices"][0]["text"] == "after" + TAIL
    assert server.props()["engine_restarts"] == 1


def test_a_failure_that_is_known_is_one_line_and_no_traceback(
    start_server: StartServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start_server()
    for _ in range(2):
        assert _completion(server, "[fail]").status_code == 500
    server.stop()
    words = "experts could not be read: [Errno 5] Input/output error"
    assert [line.partition(": ")[2] for line in server.lines if "Errno" in line] == [words] * 2
    assert "Traceback" not in capfd.readouterr().err


def test_after_trouble_with_a_doorbell_no_engine_of_this_server_rings(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BELLS, "why_not", "")
    server = start_server()
    assert not any("doorbell" in note for note in server.props()["notes"])
    for _ in range(2):
        assert _completion(server, "[no-doorbell]").status_code == 200
    said = "the fake and the host waited for each other"
    eventually(lambda: sum(line.startswith(said) for line in server.lines) == 1)
    assert _completion(server, "[crash]").status_code == 500
    server.wait_until_healthy()
    assert f"no doorbell: {said}" in server.props()["notes"]
    later = start_server()  # as another model of the same server
    assert f"no doorbell: {said}" in later.props()["notes"]


def test_a_hang_in_the_first_trial_of_a_doorbell_starts_the_engine_without_one(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BELLS, "why_not", "")
    server = start_server(FakeFactory(hangs_in_trial=True))
    server.wait_until_healthy()
    props = server.props()
    assert props["engine_restarts"] == 1
    assert "no doorbell: the fake waits for the host for ever" in props["notes"]
