"""A small part of the lab's attack, on a server that is started the way users start it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rich.console import Console

from lab.attack.graphs_part import breach_of
from lab.attack.outcome import Breach, Outcome, show


@pytest.mark.parametrize(
    ("part", "only"),
    [
        ("http", "0-50"),
        ("kills", "0-1"),  # kills the engine repeatedly, and the server
        ("peers", "0-6"),  # strangers at a worker, hostile and hanging workers, hubs
        ("graphs", "0-80"),  # changed graphs for a worker
        ("limits", "0-3"),  # descriptors, a full disk, output that cannot be written
    ],
)
def test_an_attack_is_noticed_by_nobody_else(part: str, only: str) -> None:
    command = [sys.executable, "-m", "lab.attack", "--part", part, "--only", only]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_breach_is_told_with_its_command() -> None:
    console = Console(record=True, width=100)
    show([Outcome("http", 3, breaches=[Breach("no answer", "attack --only 2")])], console)
    assert "attack --only 2" in console.export_text()


@pytest.mark.parametrize(
    ("line", "is_breach"),
    [
        ("error: a graph of 127.0.0.1:4 was refused: y (MUL_MAT) lacks a source", False),
        ("error: the computing process ended (exit code 1)", False),  # an assertion of ggml
        ("error: the computing process ended (signal 11)", True),
        ("error: 'blk.0.ffn_up_exps.weight'", True),  # a KeyError's text
        ("error: guard: a weight has changed", True),
        ("error: a graph of 127.0.0.1:4 was refused: y\nTraceback (most recent call last)", True),
        ("error: a graph of 127.0.0.1:4 was refused: " + "y" * 400, True),
    ],
)
def test_an_error_of_a_worker_is_a_breach_unless_it_refuses_a_graph(
    line: str, is_breach: bool
) -> None:
    good = "error: a graph of 127.0.0.1:4 was refused: z (ADD) does not fit"
    assert breach_of([good, line]) == (line if is_breach else "")
