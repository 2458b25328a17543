"""The lab's simulator: traces, the comparison of policies, and plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulate import (
    compare,
    named_policies,
    simulate_policies,
    synthetic_traces,
    trace_lines,
)
from lab.simulation import DraftTrace, fixed_oracle, parse_trace, published_curves, simulate
from offload.times.steadiness import is_steady
from specdec.costs.calibration import Calibration
from specdec.costs.plot import MOST_RUNS, plot_profiles, plot_reliability, profile_figure
from specdec.costs.profile import CostProfile, Timed
from specdec.errors import SpecDecError
from specdec.options import PolicyName
from specdec.policies.rules import Fixed
from specdec.types import Decision, Draft, Round
from specoffload import report

CURVES = published_curves()


def a_round(probs: Sequence[float], n_accepted: int) -> Round:
    n = len(probs)
    draft = Draft((1,) * n, tuple(probs), "draft", Decision(n, ""), n_steps=n)
    return Round(draft, n_accepted, (*[1] * n_accepted, 0), 0.0, 1.0)


def test_a_recorded_trace_has_every_token_and_knows_which_nobody_drafted() -> None:
    rounds = [a_round([0.9, 0.8], 2), a_round([], 0), a_round([0.7, 0.6], 1)]
    trace = parse_trace("\n".join(line for round_ in rounds for line in trace_lines(round_)))
    assert trace.segments == ((0, "text"),)
    assert trace.p == (0.9, 0.8, 0.0, 0.0, 0.7, 0.6)
    assert trace.accepted == (True, True, False, False, True, False)
    assert trace.unknown == {2, 3}


def test_a_replay_counts_the_tokens_it_was_asked_for_and_does_not_know() -> None:
    trace = DraftTrace(
        (0.9, 0.9, 0.0) * 4, (True, True, False) * 4, unknown=frozenset({2, 5, 8, 11})
    )
    profile = CostProfile((1.0,) * 8, 0.0)
    long, short = (simulate(trace, profile, Fixed(m)) for m in (4, 2))
    assert long.n_unknown == 3  # the last token is never drafted
    assert short.n_unknown == 0
    assert long.n_drafted == short.n_drafted == 8


def test_simulate_says_how_much_of_a_trace_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, unknown = '{"p": 0.9, "accepted": true}\n', '{"p": null, "accepted": null}\n'
    file, costs = tmp_path / "t.jsonl", tmp_path / "costs.txt"
    file.write_text((2 * known + unknown) * 9, encoding="utf-8")
    costs.write_text(",".join(f"{1 / n:.4f}" for n in range(1, 9)), encoding="utf-8")
    simulate_policies(profile=costs, trace=file, n_tokens=2000, draft_share=0.05, seed=1)
    out = capsys.readouterr().out
    assert "9 of 27 tokens are unknown" in out
    assert "--spec-draft-n-max 16" in out
    report.only_data(True)
    try:
        simulate_policies(profile=costs, trace=file, n_tokens=2000, draft_share=0.05, seed=1)
    finally:
        report.only_data(False)
    last = json.loads(capsys.readouterr().out)
    assert last["n_unknown"] == 9
    assert last["n_cut_short"]["costs"]["fixed-8"] == 8


@pytest.mark.parametrize(
    "line",
    [
        '{"p": 1.5, "accepted": true}',
        '{"p": 0.5}',
        '{"p": 0.5, "accepted": "false"}',
        '{"p": "0.5", "accepted": true}',
        '{"p": null, "accepted": true}',
        '{"p": 1' + "0" * 399 + ', "accepted": true}',
        "[" * 100_000,
    ],
)
def test_a_trace_line_that_means_nothing_is_named(line: str) -> None:
    good = '{"p": 0.5, "accepted": true}'
    with pytest.raises(SpecDecError, match="line 2 of the trace"):
        parse_trace(f"{good}\n{line}\n")
    with pytest.raises(SpecDecError, match="0 probabilities"):
        parse_trace("")


@given(
    st.lists(st.sampled_from(["right", "wrong", "unknown"]), min_size=1, max_size=60),
    st.lists(st.integers(0, 59), max_size=4),
    st.floats(0.0, 0.3),
)
@settings(max_examples=100, deadline=None)
def test_no_fixed_block_beats_the_best_one_in_hindsight_on_one_segment(
    tokens: list[str], cuts: list[int], step: float
) -> None:
    """Unknown tokens end drafts for the oracle as they do for policies."""
    p = tuple(0.0 if t == "unknown" else 0.5 for t in tokens)
    accepted = tuple(t == "right" for t in tokens)
    unknown = frozenset(i for i, t in enumerate(tokens) if t == "unknown")
    profile = CostProfile(tuple(1.0 + 0.1 * n for n in range(12)), step)
    whole = DraftTrace(p, accepted, unknown=unknown)
    best = fixed_oracle(whole, profile, 11)
    for m in range(12):
        assert simulate(whole, profile, Fixed(m)).rate <= best.rate * (1 + 1e-9)
    assert best.n_tokens == len(tokens)
    starts = sorted({0, *(c for c in cuts if c < len(tokens))})
    parts = DraftTrace(p, accepted, tuple((s, str(s)) for s in starts), unknown)
    assert fixed_oracle(parts, profile, 11).n_tokens == len(tokens)  # segments may have one token


def test_the_default_is_first_among_all_policies() -> None:
    some = {n: CURVES[n] for n in ("glm-4.6-rpc", "mistral-large-2411", "deepseek-r1-0528-numa")}
    scores = compare(some, synthetic_traces(600, seed=3))
    assert scores[0].policy == "throughput"
    assert {s.policy for s in scores} >= set(PolicyName)
    assert scores[0].least_to_plain > 0.97  # texts too short to learn much
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


@pytest.mark.parametrize(("n_runs", "n_max"), [(1, 2), (1, 64), (2, 9), (MOST_RUNS, 64)])
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
        if not low <= tick.get_loc() <= high  # ticks outside the axis are not drawn
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


def test_a_size_without_a_steady_time_is_plotted_without_a_point() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    timed = (Timed(1, 9, 0.1), Timed(2, 9, 2.11), Timed(3, 9, 0.2))
    figure = profile_figure({"run": CostProfile((1.0, 1.5, 1.6), timed=timed)}, is_steady)
    (bars,) = figure.axes[1].containers
    assert list(bars.lines[0].get_xdata()) == [1, 3]
    assert "1 of them without a steady time, so without a point" in figure._supxlabel.get_text()
    pyplot.close(figure)


def test_the_plotted_line_of_a_run_is_its_normalised_costs() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    runs = {f"run {i}": a_run(n, "x") for i, n in enumerate((9, 64))}
    figure = profile_figure(runs)
    left, right = figure.axes
    lines = {line.get_label(): line for line in left.lines}
    for label, costs in runs.items():
        sizes, values = lines[label].get_data()
        assert [*sizes] == [*range(1, costs.n_max + 1)]
        assert [*values] == pytest.approx(costs.normalised)
        assert values[0] == 1.0
    times_ms = [[*line.get_ydata()] for line in right.lines]
    for costs in runs.values():
        assert [pytest.approx(1e3 * s) for s in costs.step_s] in times_ms
    pyplot.close(figure)


def test_more_runs_than_colours_are_refused() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SpecDecError, match="room for 1 to"):
        profile_figure({str(i): a_run(4, "x") for i in range(MOST_RUNS + 1)})
