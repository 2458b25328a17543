"""Processes of the server: what they send, what ends them, and what they leave open."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import psutil
import pytest

from specoffload.server.spawned import IGNORED_SIGNALS, Spawned, answer_of


def _double(line: Connection, n: int) -> None:
    line.send((2 * n, {sig: signal.getsignal(sig) is signal.SIG_IGN for sig in IGNORED_SIGNALS}))


def _dies(line: Connection) -> None:
    os._exit(3)


def _echoes(line: Connection) -> None:
    line.send(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    while True:
        line.send(line.recv())


def test_the_answer_of_a_process_comes_back_and_it_ignores_the_terminal() -> None:
    doubled, ignores = answer_of("double", _double, 21)
    assert doubled == 42
    assert ignores == dict.fromkeys(IGNORED_SIGNALS, True)


def test_a_process_without_an_answer_leaves_no_file_open() -> None:
    with pytest.raises(EOFError):  # the first one starts multiprocessing's tracker, which stays
        answer_of("dies", _dies)
    before = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(EOFError):
            answer_of("dies", _dies)
    assert psutil.Process().num_fds() == before


def test_signals_do_not_end_it_and_a_kill_does() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = Spawned("echoes", _echoes, theirs)
    assert theirs.closed
    assert not ours.recv() & IGNORED_SIGNALS, "they are ignored, and not blocked for its children"
    for sig in IGNORED_SIGNALS:
        os.kill(process.pid, sig)
    ours.send("still here")
    assert ours.recv() == "still here"
    assert process.join(0.0) is None
    process.kill()
    assert process.join() == -signal.SIGKILL
    process.kill()  # after its end
    assert process.join() == -signal.SIGKILL
    ours.close()


def test_its_end_of_the_pipe_is_closed_if_it_cannot_be_started() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with pytest.raises(AttributeError, match="pickle"):
        Spawned("never", lambda line: None, theirs)
    assert theirs.closed
    with pytest.raises(EOFError):
        ours.recv()
    ours.close()
