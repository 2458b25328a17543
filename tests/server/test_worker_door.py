"""Only the worker's own process can use ggml's server, from the first moment on."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from worker import has_rpc

from offload.ggml.library import listen_hook
from offload.remote.hello import LayersAsked
from offload.worker import door as door_module
from offload.worker.door import Door
from offload.worker.serving import WorkerOptions
from specoffload.server.worker import Computing

# Connects to every port on which a program begins to listen, and greets ggml's server there.
_STRANGER = r"""
import socket, sys
def listening():
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    return {int(row[1][9:], 16) for row in rows if row[3] == "0A"}
known = listening()
print("ready", flush=True)
while True:
    for port in listening() - known:
        known.add(port)
        with socket.socket() as s:
            s.settimeout(0.2)
            try:
                s.connect(("127.0.0.1", port))
                s.sendall(b"\x0e" + (24).to_bytes(8, "little") + bytes(24))
                answer = s.recv(8)
            except OSError:
                answer = b""
        print(port, len(answer), flush=True)
"""


@pytest.mark.skipif(not has_rpc(), reason="libllama is compiled without ggml's RPC")
def test_a_stranger_is_not_answered_while_layers_are_loaded(tiny_moe: Path) -> None:
    met = []
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", _STRANGER], stdout=subprocess.PIPE, text=True
        ) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "ready\n"
            computing = Computing(WorkerOptions(tiny_moe, "sim:vram=1MiB"), lambda _: None)
            try:
                computing.load(LayersAsked(0, 1))
                state = list(computing.states())[-1]
                assert state.is_ready, state.error
                assert not any("anybody" in note for note in state.notes)
                for line in stranger.stdout:
                    port, n_answered = map(int, line.split())
                    if port == state.port:
                        met.append(n_answered)
                        break
                with computing.connection() as ours:
                    ours.sendall(b"\x0e" + (24).to_bytes(8, "little") + bytes(24))
                    assert len(ours.recv(8)) == 8
            finally:
                computing.close()
                stranger.kill()
    assert met == [0] * 4


def on_a_thread(run: Callable[[], Any]) -> Any:
    """Run on a thread of its own, which keeps what it does to its system calls."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join(20)
    return found[0]


def answers(port: int, host: str = "127.0.0.1") -> int:
    with socket.socket() as other:
        other.settimeout(0.3)
        other.bind((host, 0))
        return other.connect_ex(("127.0.0.1", port))


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(1)
    return server


def test_the_filter_is_set_when_listen_returns() -> None:
    on_a_thread(Door)  # only the thread that makes a door is stopped
    with listening() as free:
        assert answers(free.getsockname()[1]) == 0

    def run() -> tuple[Door, socket.socket, int]:
        made = Door()
        server = listening()
        return made, server, answers(server.getsockname()[1])

    door, server, answered = on_a_thread(run)
    with server, closing(door):
        assert answered == errno.EAGAIN, "a stranger was answered before anybody waited"
        door.wait()
        assert (door.port, door.notes) == (server.getsockname()[1], [])
        with socket.socket() as ours:
            ours.bind(("127.0.0.1", 0))
            ours.settimeout(2)
            door.admit(ours.getsockname()[1])
            ours.connect(("127.0.0.1", door.port))
            assert answers(door.port) == errno.EAGAIN


def test_a_second_socket_of_the_thread_listens_too() -> None:
    def run() -> int:
        with closing(Door()), listening(), listening() as second:
            return answers(second.getsockname()[1])

    assert on_a_thread(run) == 0


def test_listen_fails_if_the_socket_cannot_be_prepared() -> None:
    def prepare(_: int) -> None:
        raise ValueError

    def run() -> int | None:
        listen_hook.before_listening(prepare)
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            try:
                server.listen(1)
            except OSError as e:
                return e.errno
        return None

    assert on_a_thread(run) == errno.EPERM


def test_a_system_that_cannot_filter_early_filters_late_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listen_hook, "_MACHINES", {})
    with closing(Door()) as door, listening() as server:
        monkeypatch.setattr(
            door_module, "_listening", lambda: socket.socket(fileno=os.dup(server.fileno()))
        )
        door.wait()
        assert answers(door.port) == errno.EAGAIN
    (note,) = door.notes
    assert note.startswith("warning: anybody with an account on this machine can use this worker")
    assert "in the instant before" in note


def test_a_system_without_packet_filters_says_that_anybody_can_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    monkeypatch.setattr(door_module, "_filter", refused)

    def run() -> tuple[Door, socket.socket]:
        return Door(), listening()

    door, server = on_a_thread(run)
    with server, closing(door):
        door.wait()
        door.admit(0)
        assert answers(door.port) == 0
    (note,) = door.notes
    assert note.endswith("because no packet filter can be set (Protocol not available)")
