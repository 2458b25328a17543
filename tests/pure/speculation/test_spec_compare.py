"""The comparison of all policies, and the plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.simulate import compare, named_policies, synthetic_traces
from specdec.costs.calibration import Calibration
from specdec.costs.plot import MOST_RUNS, plot_profiles, plot_reliability, profile_figure
from specdec.costs.profile import CostProfile, Timed
from specdec.costs.profile_io import published_curves
from specdec.errors import SpecDecError
from specdec.options import PolicyName

CURVES = published_curves()


def test_the_default_is_first_among_all_policies() -> None:
    some = {n: CURVES[n] for n in ("glm-4.6-rpc", "mistral-large-2411", "deepseek-r1-0528-numa")}
    scores = compare(some, synthetic_traces(600, seed=3))
    assert scores[0].policy == "throughput"
    assert {s.policy for s in scores} >= set(PolicyName)
    assert scores[0].least_to_plain > 0.97  # short texts: what was learnt is soon over
    for score in scores:
        assert score.least_to_oracle <= score.mean_to_oracle


def test_only_the_policies_asked_for_are_compared() -> None:
    only = {"fixed": named_policies()["fixed"]}
    one = {"glm": CURVES["glm-4.6-rpc"]}
    assert [s.policy for s in compare(one, synthetic_traces(200, 1), policies=only)] == ["fixed"]


def test_profile_and_calibration_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = CURVES["mistral-large-2411"]
    plot_profiles({"mistral": curve}, tmp_path / "profile.png")
    calibration = Calibration()
    for i in range(100):
        calibration.observe("draft", i / 100, i % 3 > 0)
    plot_reliability(calibration, tmp_path / "reliability.png")
    for name in ("profile.png", "reliability.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SpecDecError, match="cannot be written"):
        plot_reliability(calibration, tmp_path / "missing" / "x.png")


def a_run(n_max: int, title: str, *, relative: bool = False) -> CostProfile:
    """A measured profile with sizes that were interpolated."""
    steps = tuple(0.01 * (1 + 0.1 * n + 0.02 * (n % 3)) for n in range(n_max))
    timed = tuple(Timed(n, 4, 0.02 * n / n_max) for n in range(1, n_max + 1) if n % 5 or n < 3)
    return CostProfile(steps, relative=relative, timed=timed, title=title)


@pytest.mark.parametrize("n_runs", [1, 2, MOST_RUNS])
@pytest.mark.parametrize("n_max", [2, 9, 64])
def test_no_two_words_of_a_plot_lie_over_one_another(n_runs: int, n_max: int) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    runs = {f"run {i} of many": a_run(n_max, f"a-model-of-{i}.gguf on sim") for i in range(n_runs)}
    figure = profile_figure(runs)
    figure.canvas.draw()
    beyond = {
        label
        for axes in figure.axes
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not low <= tick.get_loc() <= high  # these are not drawn
    }
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(pyplot.Text)
        if text.get_visible() and text.get_text().strip() and text not in beyond
    ]
    pyplot.close(figure)
    words = {text for text, _ in boxes}
    assert {"ms" in word for word in words} == {True, False}, "units stand somewhere"
    assert any("measured 4 times each" in word for word in words)
    assert any("interpolated" in word for word in words) == (n_max > 2)
    for i, (text, box) in enumerate(boxes):
        for other, its in boxes[i + 1 :]:
            apart = box.x1 <= its.x0 or its.x1 <= box.x0 or box.y1 <= its.y0 or its.y1 <= box.y0
            assert apart, (text, other)


def test_more_runs_than_colours_are_refused() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SpecDecError, match="room for 1 to"):
        profile_figure({str(i): a_run(4, "x") for i in range(MOST_RUNS + 1)})
