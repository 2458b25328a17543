"""Every file that a user can name is opened only if it is a regular one, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offload import regular_file
from offload.errors import BadModel
from offload.ggml.gguf import read_header
from offload.model_file import read_facts
from offload.regular_file import NOT_REGULAR, check_regular, open_regular
from specdec.whole_file import read_whole
from specoffload.config.options import ServeOptions
from specoffload.config.resolution import demo_file
from specoffload.config.rpc_secret import read_secret
from specoffload.errors import UsageError
from specoffload.server.access import read_keys
from specoffload.server.log import LogSettings, ServerLog
from specoffload.server.run import read_tls

READERS: dict[str, Callable[[Path], object]] = {
    "open_regular": open_regular,
    "check_regular": check_regular,
    "read_whole": read_whole,
    "read_header": read_header,
    "read_facts": read_facts,
    "--api-key-file": lambda path: read_keys(None, path, print),
    "--rpc-secret-file": lambda path: read_secret(path, ""),
    "--ssl-key-file": lambda path: read_tls(ServeOptions(ssl_key_file=path, ssl_cert_file=path)),
}


@pytest.fixture(params=("pipe", "device", "folder", "loop", "link to nothing", "link to a pipe"))
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "odd.gguf"
    match request.param:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "link to nothing":
            path.symlink_to(tmp_path / "none")
        case _:
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to(tmp_path / "pipe")
    return path


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused_at_once(odd: Path, reader: str) -> None:
    with pytest.raises((OSError, BadModel, UsageError)):
        READERS[reader](odd)


def test_the_sentence_is_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for reader in (open_regular, read_whole):
        with pytest.raises(OSError, match=regular_file.NOT_REGULAR):
            reader(tmp_path / "pipe")
    with pytest.raises(BadModel, match=NOT_REGULAR):
        read_facts(tmp_path / "pipe")


def test_a_log_file_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="--log-file"):
        ServerLog(LogSettings(tmp_path / "pipe"))


@pytest.mark.parametrize(
    "flags",
    [
        ["-m", "{pipe}"],
        ["--draft", "{pipe}", "-m", "{model}"],
        ["--mmproj", "{pipe}", "-m", "{model}"],
        ["-m", "{split}"],
        ["--grammar-file", "{pipe}", "-m", "{model}"],
        ["--chat-template-file", "{pipe}", "-m", "{model}"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_a_pipe_never_hangs_a_command(tmp_path: Path, flags: list[str]) -> None:
    places = {
        "pipe": tmp_path / "pipe.gguf",
        "model": demo_file("target.gguf"),
        "split": tmp_path / "m-00001-of-00002.gguf",
    }
    os.mkfifo(places["pipe"])
    os.mkfifo(places["split"])
    os.mkfifo(tmp_path / "m-00002-of-00002.gguf")
    words = [flag.format(**places) for flag in flags]
    command = [sys.executable, "-m", "specoffload", "run", "--device", "cpu", "-p", "x", "-n", "1"]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
