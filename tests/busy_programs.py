"""Lets tests say that other programs take much of the CPUs."""

from __future__ import annotations

import pytest

from specoffload.cpu_load import Load


def busy_programs(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set. While it holds anything, other programs take much of the CPUs."""
    programs = set[str]()
    monkeypatch.setattr(Load, "is_busy", property(lambda _: bool(programs)))
    return programs
