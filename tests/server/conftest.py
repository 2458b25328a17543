"""Fixtures of servers: one for all files, one for a file, or as many as a test starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from program import Program, serving
from running import Running, StartServer


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for all tests of a file. Tests must leave it unchanged."""
    running = Running()
    running.wait_until_healthy()
    yield running
    running.stop()


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """A function that starts servers for one test. They end with the test."""
    with ExitStack() as ends:

        def start_one(*args: Any, healthy: bool = True, **kwargs: Any) -> Running:
            running = Running(*args, **kwargs)
            ends.callback(lambda: running.is_alive and running.stop())
            if healthy:
                running.wait_until_healthy()
            return running

        yield start_one


@pytest.fixture(scope="session")
def pair() -> Iterator[Program]:
    """`specoffload serve` with the embedded pair on plain libllama, for all files.

    Tests must leave it unchanged. Conversations of other tests stay in their cells. If they moved
    by their price, a test's texts would depend at near ties on what ran before, and when.
    """
    with serving("--device", "cpu", "--ctx-size", "2048", "--no-cache-idle-slots") as running:
        yield running
