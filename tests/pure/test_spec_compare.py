"""The comparison of all policies, and the plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.calibration import Calibration
from specdec.compare import compare, named_policies, synthetic_traces
from specdec.errors import SpecDecError
from specdec.options import POLICIES
from specdec.plot import plot_profile, plot_reliability
from specdec.profile_io import published_curves

CURVES = published_curves()


def test_the_default_is_first_among_all_policies() -> None:
    some = {n: CURVES[n] for n in ("glm-4.6-rpc", "mistral-large-2411", "deepseek-r1-0528-numa")}
    scores = compare(some, synthetic_traces(600, seed=3))
    assert scores[0].policy == "throughput"
    assert {s.policy for s in scores} >= set(POLICIES)
    assert scores[0].least_to_plain > 0.97  # short texts: what was learnt is soon over
    for score in scores:
        assert score.least_to_oracle <= score.mean_to_oracle


def test_only_the_policies_asked_for_are_compared() -> None:
    only = {"fixed": named_policies()["fixed"]}
    one = {"glm": CURVES["glm-4.6-rpc"]}
    assert [s.policy for s in compare(one, synthetic_traces(200, 1), policies=only)] == ["fixed"]


def test_profile_and_calibration_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_profile(CURVES["mistral-large-2411"], tmp_path / "profile.png")
    calibration = Calibration()
    for i in range(100):
        calibration.observe("draft", i / 100, i % 3 > 0)
    plot_reliability(calibration, tmp_path / "reliability.png")
    for name in ("profile.png", "reliability.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SpecDecError, match="cannot be written"):
        plot_reliability(calibration, tmp_path / "missing" / "x.png")
