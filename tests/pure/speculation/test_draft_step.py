"""The price of a draft step in the simulator: cheaper steps, longer drafts, more tokens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lab.simulate import seconds
from lab.simulation.compare import synthetic_traces
from lab.simulation.draft_step import in_seconds, step_effects
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import published_curves

FLAT = CostProfile.from_normalised([1.0, 0.55, 0.4, 0.33, 0.28, 0.25, 0.23, 0.21])


def test_a_curve_without_a_unit_gets_one() -> None:
    curve = in_seconds(FLAT, 0.1)
    assert curve.step_s[0] == pytest.approx(0.1)
    assert curve.step_s[7] / curve.step_s[0] == pytest.approx(FLAT.step_s[7] / FLAT.step_s[0])
    assert not curve.relative
    assert in_seconds(curve, 5.0) == curve


def test_cheaper_steps_draft_longer_and_bring_more() -> None:
    curves = {name: published_curves()[name] for name in ("glm-4.6-rpc", "deepseek-r1-0528-numa")}
    effects = step_effects(curves, synthetic_traces(800, 3)[:4], (0.02, 0.0025, 0.0007), 0.1)
    for name in curves:
        dear, before, after = [e for e in effects if e.curve == name]
        assert dear.tokens_per_s < before.tokens_per_s < after.tokens_per_s
        assert dear.round_drafted < before.round_drafted <= after.round_drafted
        assert after.draft_share < before.draft_share
        assert after.plain_tokens_per_s == pytest.approx(10.0)


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab.simulate", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_says_what_sixteen_steps_take() -> None:
    words = ["--draft-step", "0.0025,0.0007", "--tokens", "50"]
    done = simulate(*words)
    assert done.returncode == 0, done.stderr
    # Of the curves without a unit, at 100 ms a token: 16 x 2.5 ms and 16 x 0.7 ms.
    assert "16 of them take 40% to" in done.stdout
    assert "16 of them take 11% to" in done.stdout
    found = json.loads(simulate(*words, "--json").stdout)
    assert {e["draft_step_s"] for e in found["draft_steps"]} == {0.0025, 0.0007}
    assert len(found["draft_steps"]) == 2 * len(published_curves())


@pytest.mark.parametrize("text", ["0", "-1", "nan", "1,x"])
def test_a_step_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="above 0|could not convert"):
        seconds(text)
