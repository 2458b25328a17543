"""The log of `serve`: its file, and one line for each request."""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program import serving
from rich.console import Console
from running import Running, StartServer, eventually, http

from specoffload import report
from specoffload.errors import UsageError
from specoffload.server.log import LogSettings, ServerLog, add_words
from specoffload.server.sockets import SocketLimits

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}"


def _raw(url: str, data: bytes) -> bytes:
    """Send bytes to a server, and return all that it answers."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def _said(server: Running, pattern: str) -> None:
    eventually(lambda: any(re.fullmatch(pattern, line) for line in server.lines))


def test_each_request_is_one_line_with_client_path_status_and_time(
    start_server: StartServer,
) -> None:
    server = start_server()
    server.wait_until_healthy()
    url = server.url + "/v1/completions"
    http.post(url, json={"prompt": "a", "max_tokens": 1})
    http.post(url, json={"prompt": "a", "max_tokens": "much"})
    http.post(url, content=b"a=b", headers={"origin": server.url, "content-type": "text/plain"})
    http.get(server.url + "/nothing%0Ahere?key=secret")
    assert b" 400 " in _raw(server.url, b"GET / HTTP/1.1\r\nBad Header\r\n\r\n")
    for expected in (
        r"127\.0\.0\.1 POST /v1/completions 200 \d+\.\d{3} s: #0: 1 token, .+ t/s · prompt .+",
        r"127\.0\.0\.1 POST /v1/completions 400 \d+\.\d{3} s: .*max_tokens.*",
        r"127\.0\.0\.1 POST /v1/completions 415 \d+\.\d{3} s: .+",
        r"127\.0\.0\.1 GET /nothing%0Ahere 404 \d+\.\d{3} s: .+",
        r"127\.0\.0\.1 - - 400 \d+\.\d{3} s: .+",
    ):
        _said(server, expected)
    about = [line for line in server.lines if not re.search("/health|listening|loaded", line)]
    assert len(about) == 5


def test_answers_failures_and_lists_have_no_line_but_their_requests(
    start_server: StartServer,
) -> None:
    server = start_server()
    url = server.url + "/v1/completions"
    for body in (
        {"prompt": ["a", "b"], "max_tokens": 2},
        {"prompt": "[raise-now]"},
        {"prompt": "[raise]", "stream": True},
        {"prompt": "[refuse]\n", "stream": True},
    ):
        http.post(url, json=body)
    start = r"127\.0\.0\.1 POST /v1/completions "
    for expected in (
        start + r"200 \S+ s: #0: 2 answers, 4 tokens",
        start + r"500 \S+ s: ValueError: the fake was told to fail",
        start + r"200 \S+ s: ValueError: the fake was told to fail",
        start + r"400 \S+ s: the fake refuses this prompt",
    ):
        _said(server, expected)
    about = [line for line in server.lines if not re.search("/health|listening|loaded", line)]
    assert len(about) == 4


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_line_is_broken_between_words_on_a_terminal_alone(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, file = io.StringIO(), tmp_path / "log"
    screen = Console(file=out, width=80, force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr(report, "_out", screen)
    words = "context: 2,048 tokens, all that the model was trained for (--ctx-size)"
    ServerLog(LogSettings(file)).say(words)
    (kept,) = file.read_text().splitlines()
    assert re.fullmatch(f"{TIME} {re.escape(words)}", kept)
    shown = out.getvalue().splitlines()
    assert len(shown) == (2 if is_terminal else 1)
    assert " ".join(line.rstrip() for line in shown) == kept


def test_words_of_a_request_stay_in_its_line_and_are_cut() -> None:
    words: list[str] = []
    scope = {"specoffload.words": words}
    add_words(scope, "two\nlines " + "x" * 1000)
    add_words(scope, "")
    add_words({}, "of a request that has no line")
    assert len(words) == 1
    assert words[0].startswith("two lines x")
    assert len(words[0]) == 400


def test_a_line_has_the_time_until_the_end_of_a_stream(start_server: StartServer) -> None:
    server = start_server()
    server.wait_until_healthy()
    body = {"prompt": "[forever]", "stream": True}
    began_s = time.monotonic()
    with http.stream("POST", server.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept, because dropping it would close the connection
        next(lines)
        time.sleep(0.2)
        most_s = time.monotonic() - began_s
    pattern = (
        r"127\.0\.0\.1 POST /v1/completions 200 (\S+) s: "
        r"cut off, since the client left · #0: cancelled after .+"
    )
    _said(server, pattern)
    line = next(line for line in server.lines if "cut off" in line)
    took_s = float(re.fullmatch(pattern, line)[1])  # type: ignore[index]
    assert 0.2 <= took_s < most_s + 5


def test_a_late_body_is_one_line_with_the_status_that_the_client_got(
    start_server: StartServer,
) -> None:
    server = start_server(limits=SocketLimits(body_s=0.2))
    server.wait_until_healthy()
    header = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    assert b" 408 " in _raw(server.url, header)
    _said(server, r"127\.0\.0\.1 POST /tokenize 408 \S+ s: the request took too long to arrive")
    assert len([line for line in server.lines if "/tokenize" in line]) == 1


def test_the_program_stamps_its_lines_and_keeps_them_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("of an earlier start\n")
    with serving("--log-file", str(file), "--log-prefix") as program:
        assert http.get(program.url + "/nothing").status_code == 404
        address = program.url
        # Text that is no UTF-8 shall not end the log.
        _raw(address, b"GET /\xff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        eventually(lambda: "404" in file.read_text())
    text = file.read_text()
    earlier, *lines = text.splitlines()
    assert earlier == "of an earlier start"
    assert all(re.match(rf"{TIME} [DIWE] ", line) for line in lines), text
    assert re.search(rf"^{TIME} I listening on {address}$", text, re.MULTILINE)
    assert re.search(rf"^{TIME} I 127\.0\.0\.1 GET /nothing 404 \S+ s: .+$", text, re.MULTILINE)
    assert "demo pair" in text  # a note, which goes to standard error


def test_verbose_gives_the_reason_for_every_choice(tmp_path: Path) -> None:
    """Once each, after the model is loaded. Without -v only what an operator must know."""
    told: list[str] = []
    for more in ((), ("-v",)):
        file = tmp_path / f"log{len(more)}"
        with serving("--log-file", str(file), "--no-log-timestamps", *more):
            eventually(lambda file=file: "model loaded" in file.read_text())
            time.sleep(0.3)
        told.append(file.read_text())
    short, long = told
    reasons = ("speculation: drafts by", "draft model: draft.gguf", "one memory node")
    assert [long.count(words) for words in reasons] == [1, 1, 1], long
    assert [short.count(words) for words in reasons] == [0, 0, 0], short


def test_no_log_timestamps_leaves_lines_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    with serving("--log-file", str(file), "--no-log-timestamps"):
        pass
    assert re.search(r"^listening on http", file.read_text(), re.MULTILINE)


def test_warnings_of_both_processes_reach_the_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    script = (
        "import logging, sys; from pathlib import Path\n"
        "from specoffload.server.log import LogSettings, ServerLog\n"
        "log = ServerLog(LogSettings(Path(sys.argv[1]), prefix=True))\n"
        "log.follow_warnings()\n"
        "logging.getLogger('specoffload.engine').warning('%s is low', 'memory')\n"
        "logging.getLogger('specoffload.engine').info('not shown')\n"
    )

    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True
        )
        assert re.fullmatch(rf"{TIME} W memory is low\n", done.stderr)
    assert re.fullmatch(rf"({TIME} W memory is low\n){{2}}", file.read_text())


def test_a_file_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--log-file .*/none/log: No such file or directory"):
        ServerLog(LogSettings(tmp_path / "none" / "log"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_each_line_of_both_streams_has_the_time_and_the_letter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Notes too, which models of a router have long after the server's start."""
    log = ServerLog(LogSettings(Path("/dev/full"), prefix=True))
    log.note("a flag has no effect")  # and the file cannot be written
    log.say("one")
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{TIME} I one\n", out)
    lines = err.splitlines()
    assert re.fullmatch(rf"{TIME} I a flag has no effect", lines[0])
    assert re.match(rf"{TIME} W --log-file /dev/full: No space left on device", lines[1])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_ends_the_file_and_not_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    log = ServerLog(LogSettings(Path("/dev/full"), timestamps=False))
    log.say("one")
    log.say("two")
    out, err = capsys.readouterr()
    assert out == "one\ntwo\n"
    assert " ".join(err.split()) == (
        "--log-file /dev/full: No space left on device; lines are missing from it until it can be "
        "written again"
    )


def test_lines_of_polls_are_said_only_if_they_are_refused(start_server: StartServer) -> None:
    server = start_server(has_metrics=True)
    for path in ("/health", "/v1/health", "/metrics", "/props"):
        http.get(server.url + path)
    http.get(server.url + "/health", headers={"host": "example.org"})
    _said(server, r"127\.0\.0\.1 GET /health 403 .+")
    said = [line.split()[1:4] for line in server.lines if " GET " in line]
    assert said == [["GET", "/props", "200"], ["GET", "/health", "403"]]


def test_a_moved_file_is_left_and_a_new_one_begun(tmp_path: Path) -> None:
    file, moved = tmp_path / "log", tmp_path / "log.1"
    log = ServerLog(LogSettings(file, timestamps=False))
    log.keep("one")
    file.rename(moved)
    log.keep("two")
    assert (moved.read_text(), file.read_text()) == ("one\n", "two\n")


def test_a_server_whose_output_nobody_reads_goes_on(tmp_path: Path) -> None:
    """Its pipe is full after 4 KiB. The lines are in the file, and come when they are read."""
    file = tmp_path / "server.log"
    with serving("--device", "cpu", "--log-file", str(file)) as program:
        assert program.process.stdout is not None
        fcntl.fcntl(program.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        for i in range(150):
            assert http.get(f"{program.url}/nothing{i}").status_code == 404
        with program.client() as client:
            assert client.completions.create(model="any", prompt="a", max_tokens=2).choices
        assert "/nothing149 404" in file.read_text()
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(20) == 0
        first = program.process.stdout.read()
        assert "/nothing0 404" in first
        assert "/nothing149 404" not in first
