"""Fixtures of the tests on the stand-in for CUDA (tests/cuda_standin), run by scripts/test-cuda."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import standin_calls
from _pytest.terminal import TerminalReporter

from offload.device import DeviceChoice

sys.path.append(str(Path(__file__).parents[2] / "server"))


# On a real GPU there is nothing to collect: these tests need packages that its machine may lack.
collect_ignore_glob = [] if standin_calls.is_loaded() else ["test_*.py"]


@pytest.fixture(scope="session")
def standin(gpu: DeviceChoice) -> DeviceChoice:
    """The stand-in's first device."""
    return gpu


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print the rows that tests recorded as `counters`, in the format of docs/gpu.md."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    found = [v for report in reports for k, v in report.user_properties if k == "counters"]
    if not found:
        return
    terminalreporter.section("calls per decode of one token, or of changing sizes, on the stand-in")
    names = list(dict.fromkeys(name for _, calls in found for name in calls))
    terminalreporter.write_line(f"| | {' | '.join(names).replace('_', ' ')} |")
    terminalreporter.write_line("| --- " * (len(names) + 1) + "|")
    for name, calls in sorted(found, key=lambda row: _ORDER.index(row[0].split(",")[0])):
        values = " | ".join(f"{calls[column]:g}" if column in calls else "" for column in names)
        terminalreporter.write_line(f"| {name} | {values} |")


_ORDER = ("resident", "streamed", "split")
