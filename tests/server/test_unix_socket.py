"""A server on a Unix socket, and keys that are read again while it runs."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from program import SERVE
from running import eventually

from specoffload.errors import UsageError
from specoffload.server.run import is_loopback, listen
from specoffload.server.unix_socket import removed_at_end

MODEL = ("--device", "cpu")


def bare(flags: list[str]) -> list[str]:
    """The command without its own address."""
    found = [*SERVE]
    for name in ("--host", "--port"):
        if name in found:
            at = found.index(name)
            del found[at : at + 2]
    return [*found, *MODEL, *flags]


@contextmanager
def on_socket(path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    with subprocess.Popen(
        bare(["--host", str(path), *flags]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        transport = httpx.HTTPTransport(uds=str(path))
        try:
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                eventually(lambda: path.exists() and is_ready(client), 60)
                yield program, client
        finally:
            program.kill()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_a_server_on_a_socket_reads_its_keys_again(tmp_path: Path) -> None:
    path, keys = tmp_path / "x.sock", tmp_path / "keys"
    keys.write_text("first\n")
    keys.chmod(0o600)
    with on_socket(path, "--api-key-file", str(keys)) as (program, client):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o117 == 0
        assert mode & 0o600 == 0o600

        def status(key: str) -> int:
            return client.get("/props", headers={"Authorization": f"Bearer {key}"}).status_code

        assert (status("first"), status("second")) == (200, 401)
        engines = children(program.pid)
        keys.write_text("second\n")
        program.send_signal(signal.SIGHUP)
        eventually(lambda: (status("first"), status("second")) == (401, 200))
        keys.write_text("\n")  # a file without keys must not let everybody in
        program.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert (status("first"), status("second"), status("none")) == (401, 200, 401)
        assert children(program.pid) == engines  # the model was not loaded again
        program.send_signal(signal.SIGTERM)
        output, _ = program.communicate(timeout=30)
    assert program.returncode == 0, output
    assert not path.exists()
    assert "keys stay as they were" in output
    assert f"listening on http+unix://{path}" in output


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_stale_socket_is_replaced_and_a_used_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with listen(str(path), 0) as first:
        assert is_loopback(first)
        with pytest.raises(UsageError, match="another program listens there"):
            listen(str(path), 0)
    assert path.exists()  # its program has died
    with listen(str(path), 0) as second, removed_at_end(second):
        assert path.exists()
    assert not path.exists()


def test_the_file_of_another_server_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with listen(str(path), 0) as first, removed_at_end(first):
        path.rename(tmp_path / "old")
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(path))
    other.close()
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "no folder", "long"])
def test_places_where_no_socket_can_be_are_one_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.sock"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "no folder":
        path = tmp_path / "none" / "x.sock"
    else:
        path = tmp_path / ("x" * 120 + ".sock")
    with pytest.raises(UsageError, match=f"--host {path}: "):
        listen(str(path), 0)
    if kind == "file":
        assert path.read_text() == "mine"
