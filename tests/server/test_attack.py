"""A small part of what scripts/attack does, against the program as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ATTACK = Path(__file__).resolve().parents[2] / "scripts" / "attack"


def attack(*words: str) -> None:
    done = subprocess.run([sys.executable, ATTACK, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("part", "only"),
    [
        ("http", "0-100"),
        ("files", "0-100"),
        ("kills", "0-2"),  # the engine again and again, and the server
        ("limits", "0-4"),  # descriptors, a full disk, output that cannot be written or is not read
    ],
)
def test_an_attack_is_noticed_by_nobody_else(part: str, only: str) -> None:
    attack("--part", part, "--only", only)


def test_a_breach_is_told_with_its_command_and_is_a_failure(tmp_path: Path) -> None:
    sys.path.insert(0, str(ATTACK.parent))
    from attack_parts.outcome import Breach, Outcome, show
    from rich.console import Console

    console = Console(record=True, width=100)
    show([Outcome("http", 3, breaches=[Breach("no answer", "scripts/attack --only 2")])], console)
    assert "scripts/attack --only 2" in console.export_text()
