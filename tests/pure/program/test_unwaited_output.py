"""Lines for an output that nobody reads wait or are dropped, and the writer goes on."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from specoffload.server import unwaited
from specoffload.server.unwaited import UnwaitedWriter

Ends = tuple[int, int]
Opened = Callable[..., UnwaitedWriter]


def pipe() -> Ends:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return reader, writer


def sockets() -> Ends:
    reader, writer = socket.socketpair()
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return reader.detach(), writer.detach()


@pytest.fixture(params=[pipe, sockets])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """The reader's and the writer's descriptor of an output that takes a few thousand bytes."""
    make: Callable[[], Ends] = request.param
    both = make()
    yield both
    for descriptor in both:
        os.close(descriptor)


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Makes writers, which end with the test."""
    with ExitStack() as ends:

        def make(*given: int) -> UnwaitedWriter:
            writer = UnwaitedWriter(*given)
            ends.callback(writer.close)
            return writer

        yield make


def read_lines(descriptor: int, last: str) -> list[str]:
    """Read until the line `last`."""
    found = ""
    while not found.endswith(f"{last}\n"):
        found += os.read(descriptor, 1 << 16).decode()
    return found.splitlines()


def test_lines_that_are_read_late_come_whole_and_in_order(ends: Ends, opened: Opened) -> None:
    reader, descriptor = ends
    writer = opened(descriptor)
    wanted = [f"line {i} {'x' * (i % 90)}" for i in range(3000)]
    for line in wanted:
        writer.write(f"{line}\n".encode())  # would wait for ever if it waited
    assert read_lines(reader, wanted[-1]) == wanted
    assert writer.n_dropped == 0


def test_too_many_lines_are_dropped_and_counted(ends: Ends, opened: Opened) -> None:
    reader, descriptor = ends
    writer = opened(descriptor, 20_000)
    wanted = [f"line {i}" for i in range(20_000)]
    for line in wanted:
        writer.write(f"{line}\n".encode())
    assert writer.n_dropped > 0
    lines = read_lines(reader, "nobody read this output")
    told = re.fullmatch(r"(\d+) lines dropped, because nobody read this output", lines[-1])
    assert told is not None
    assert lines[:-1] == wanted[: len(lines) - 1]
    assert int(told[1]) == len(wanted) - len(lines) + 1
    writer.settle(5)
    writer.write(b"and on\n")
    assert read_lines(reader, "and on") == ["and on"]


def test_several_threads_mix_no_lines(ends: Ends, opened: Opened) -> None:
    reader, descriptor = ends
    writer = opened(descriptor)

    def write(name: str) -> None:
        for i in range(1000):
            writer.write(f"{name * 30} {i}\n".encode())

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.write(b"end\n")
    lines = read_lines(reader, "end")
    for name in "abc":
        own = [line for line in lines if line.startswith(name)]
        assert own == [f"{name * 30} {i}" for i in range(1000)]
    assert len(lines) == 3001


def test_a_reader_that_left_gets_nothing_and_stops_nothing(opened: Opened) -> None:
    for fills in (False, True):
        reader, descriptor = pipe()
        writer = opened(descriptor)
        if fills:
            writer.write(b"x" * 9000 + b"\n")
        os.close(reader)
        writer.write(b"lost\n")
        writer.settle(5)
        writer.write(b"lost\n")
        assert writer.n_dropped == 0
        os.close(descriptor)


def test_an_output_that_cannot_be_opened_again_is_written_by_the_thread(
    ends: Ends, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the terminal of another user is, after `su`."""
    monkeypatch.setattr(unwaited, "_sender", lambda descriptor, closing: None)
    reader, descriptor = ends
    writer = opened(descriptor, 20_000)
    began_s = time.monotonic()
    for i in range(20_000):
        writer.write(f"line {i}\n".encode())
    assert time.monotonic() - began_s < 10
    lines = read_lines(reader, "nobody read this output")
    assert lines[:-1] == [f"line {i}" for i in range(len(lines) - 1)]
