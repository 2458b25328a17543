"""Commands that measure go back in a text. Each runs with one model of each kind of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from combinations.cases import Case
from combinations.commanding import faults_of

MEMORIES = ("full", "windows", "sinks", "recurrent", "hybrid", "mla", "indexer")
COMMANDS = ("run", "tune", "profile", "bench")  # the first one measures at its first start


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_measures_runs_with_every_kind_of_memory(
    models: Path, command: str, memory: str
) -> None:
    case = Case.of("command", command=command, memory=memory, device="sim")
    assert faults_of(case, models) == []
