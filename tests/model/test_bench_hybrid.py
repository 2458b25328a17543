"""`scripts/lab/run split` reports the right counts for a case whose split is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab import split

_S = 1e-4  # seconds per expert on either side


def test_the_sides_of_a_case_are_what_its_split_makes_them(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "_COPY_S", _S)
    case = next(case for case in split.CASES if case.name == "half each, cached")
    found = split.measure(replace(case, device_s=_S, host_s=_S), models, 2)
    n_each = 6 * 4  # half of one token's experts, in all layers
    assert found.cpu_s == pytest.approx(n_each * _S)
    assert found.device_s > n_each * _S, "and what else a step computes"
    assert found.sum_s == pytest.approx(found.cpu_s + found.device_s)
    assert found.ratio == pytest.approx(found.step_s / max(found.cpu_s, found.device_s))
    assert found.step_s > n_each * _S
