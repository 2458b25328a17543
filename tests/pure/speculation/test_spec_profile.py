"""Profiles: measured, kept true, written, read, refused; and what calibration learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from lab.simulation.fake import FakeTarget
from specdec.costs.calibration import Calibration, bin_of
from specdec.costs.measure import MeasureOptions, measure
from specdec.costs.profile import CostProfile, ProfileKey
from specdec.costs.profile_io import (
    format_batch_costs,
    format_batched_bench,
    load,
    parse_batch_costs,
    parse_batched_bench,
    published_curves,
    published_values,
    save,
)
from specdec.costs.refresh import RefreshedCosts
from specdec.errors import BadProfile

KEY = ProfileKey("m", "d", "p", "8", "CUDA0", "0.3.36")


class Clocked(FakeTarget):
    """A target on which n tokens take 2 + n/10 seconds, the first `n_cold` decodes thrice that."""

    def __init__(self, n_cold: int = 0, recurrent: bool = False) -> None:
        super().__init__(n_ctx=256, recurrent=recurrent, n_rs_seq=8)
        self.now = 0.0
        self.n_cold = n_cold

    def extend(self, sequence, tokens, n_logits=None):  # type: ignore[no-untyped-def]
        cold = 3.0 if len(self.calls) < self.n_cold else 1.0
        self.now += cold * (2.0 + len(tokens) / 10)
        return super().extend(sequence, tokens, n_logits)


@pytest.mark.parametrize("recurrent", [False, True])
def test_measuring_drops_a_whole_warm_up_set_and_averages_times(recurrent: bool) -> None:
    target, draft = Clocked(n_cold=8, recurrent=recurrent), Clocked()
    options = MeasureOptions(n_max=8, n_repeats=3, depths=(0, 20))
    text = [i % 60 for i in range(64)]
    profile = measure(target, text, options, key=KEY, clock=lambda: target.now)
    assert profile.step_s == pytest.approx([2 + n / 10 for n in range(1, 9)])
    assert [d for d, _ in profile.depths] == [0, 20]
    assert target.length(0) == 0
    step = measure(target, text, options, draft=draft, clock=lambda: target.now + draft.now)
    assert step.draft_step_s == pytest.approx(2.1)


def test_sizes_left_out_are_interpolated() -> None:
    target = Clocked()
    options = MeasureOptions(n_max=8, n_repeats=1, depths=(0,), sizes=(1, 2, 4, 8))
    profile = measure(target, list(range(60)), options, clock=lambda: target.now)
    assert profile.step_s == pytest.approx([2 + n / 10 for n in range(1, 9)])


def test_too_little_text_to_measure_on_is_refused() -> None:
    with pytest.raises(BadProfile, match="72 tokens"):
        measure(FakeTarget(), [1] * 10, MeasureOptions(n_max=8, depths=(64,)))


def test_a_profile_is_saved_and_loaded_with_its_calibration(tmp_path: Path) -> None:
    calibration = Calibration()
    for i in range(200):
        calibration.observe("draft", 0.9, i % 2 == 0)
    costs = CostProfile((1.0, 1.5, 1.7), 0.1, KEY, depths=((0, (1.0, 1.5, 1.7)),), uncertain=(2,))
    save(tmp_path / "p.json", costs, calibration)
    stored = load(tmp_path / "p.json", KEY)
    assert stored.costs == costs
    assert stored.calibration.probability("draft", 0.9) == calibration.probability("draft", 0.9)


def test_a_profile_of_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    save(tmp_path / "p.json", CostProfile((1.0, 1.5), key=KEY))
    for field in ("model", "draft", "plan", "threads", "device", "build"):
        other = ProfileKey(**{**KEY.__dict__, field: "other"})
        with pytest.raises(BadProfile, match=f"its {field} is"):
            load(tmp_path / "p.json", other)


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(path, CostProfile((1.0, 1.5), key=KEY), Calibration())
    whole = path.read_text()
    rng = np.random.default_rng(1)
    for cut in rng.integers(0, len(whole) - 2, 20):
        path.write_text(whole[:cut])
        with pytest.raises(BadProfile, match="damaged"):
            load(path)
    data = json.loads(whole)
    edits = (
        {"step_s": []},
        {"step_s": [1.0, -2.0]},
        {"step_s": [1.0, "x"]},
        {"step_s": [1.0, math.nan]},
        {"step_s": 3},
        {"draft_step_s": -1},
        {"draft_step_s": None},
        {"key": {}},
        {"format": 99},
        {"depths": [1]},
        {"depths": [{"depth": 0}]},
        {"uncertain": [0]},
        {"uncertain": [2.5]},
        {"uncertain": 2},
        {"calibration": {"draft": {}}},
        {"calibration": []},
        {"calibration": {"draft": {"total": [1], "accepted": [2], "sum_p": [1], "shift": 0}}},
    )
    for edit in edits:
        path.write_text(json.dumps({**data, **edit}))
        with pytest.raises(BadProfile):
            load(path)
    with pytest.raises(BadProfile, match="cannot be read"):
        load(tmp_path / "none.json")


def test_batch_costs_are_read_and_written_as_the_environment_has_them() -> None:
    values = published_values("deepseek-r1-0528-q4_x")
    text = ",".join(str(v) for v in values)
    profile = parse_batch_costs(text)
    assert profile.normalised == pytest.approx(values)
    assert parse_batch_costs(format_batch_costs(profile)).normalised == pytest.approx(values)
    assert profile.time(2) == pytest.approx(1.21)
    assert profile.time(64) == pytest.approx(14.592)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,0.6,nan", "entry 3"),
        ("1,0,0.5", "entry 2"),
        ("1,0.6,,0.4", "entry 3"),
        ("1,x", "entry 2"),
        ("1,-0.5", "entry 2"),
        ("0.9,0.5", "entry 1"),
        ("", "entry 1"),
    ],
)
def test_bad_batch_costs_are_refused_with_the_position(text: str, message: str) -> None:
    with pytest.raises(
        BadProfile, match=f"(GGML_BATCH_COSTS.*{message})|({message}.*GGML_BATCH_COSTS)"
    ):
        parse_batch_costs(text)


def test_an_implausible_speed_at_batch_one_is_warned_of() -> None:
    curves = published_curves()
    assert "T(2)" in curves["rtx5000ada-qwen2.5-coder-32b-v3b"].warnings[0]
    assert curves["deepseek-r1-0528-q4_x"].warnings == ()


def test_the_bumps_of_the_published_curves_are_the_documented_ones() -> None:
    curves = published_curves()
    assert curves["mistral-large-2411"].bumps == (6, 7, 33, 49, 59)
    assert curves["glm-4.6-rpc"].bumps == (2, 33, 41, 49)
    assert curves["deepseek-r1-0528-numa"].bumps == (16, 28, 31, 36, 41, 48, 54, 60)
    assert curves["deepseek-v3-0324-pp-sweep"].bumps == (2,)
    assert curves["glm-4.6-rpc"].rises(0.05) == (49,)


def test_batched_bench_records_are_read_with_the_warm_up_dropped() -> None:
    lines = ["some log line"]
    for seconds in (1000.0, 1.0, 3.0):  # the warm-up, then what the mean of times is 2 of
        for n in (1, 2, 3):
            speed = n / (n * seconds)
            lines.append(json.dumps({"pp": 0, "tg": 1, "pl": n, "speed_tg": speed}))
    profile = parse_batched_bench("\n".join(lines))
    assert profile.step_s == pytest.approx((2.0, 4.0, 6.0))  # by speeds it would be 1.5, 3, 4.5
    again = parse_batched_bench(format_batched_bench(profile))
    assert again.step_s == pytest.approx(profile.step_s)


def bench_record(pp: int, tg: int, pl: int, **speeds: float) -> str:
    return json.dumps({"pp": pp, "tg": tg, "pl": pl, "speed_pp": 1.0, "speed_tg": 1.0, **speeds})


def test_two_prompt_sizes_are_extrapolated_to_an_empty_context_and_never_mixed() -> None:
    """Steps of n slow down by 0.1 n tokens/s for each 100 tokens of prompt."""
    speeds = {
        (pp, n): n / (1.0 + 0.5 * n) - 0.1 * n * pp / 100 for pp in (100, 200) for n in (1, 2)
    }
    lines = [bench_record(pp, 1, n, speed_tg=speeds[pp, n]) for pp in (200, 100) for n in (1, 2)]
    found = parse_batched_bench("\n".join(lines))
    assert found.step_s == pytest.approx((1.5, 2.0))
    assert "prompts of 100 and 200 tokens" in found.title
    alone = parse_batched_bench("\n".join(lines[2:]))
    assert alone.step_s == pytest.approx((1 / speeds[100, 1], 2 / speeds[100, 2]))
    third = [bench_record(50, 1, n, speed_tg=1.0) for n in (1, 2)]
    for series, words in (
        ([*lines, *third], "prompts of 50, 100, 200 tokens, whose times are not one series"),
        ([*lines[:2], *third], "prompts of 50, 200 tokens"),
        ([*lines[:2], lines[2]], "prompts of 100, 200 tokens"),
        ([bench_record(200, 1, 1, speed_tg=9.0), bench_record(100, 1, 1)], "run the bench again"),
    ):
        with pytest.raises(BadProfile, match=words):
            parse_batched_bench("\n".join(series))


def test_prompts_alone_are_a_profile_if_they_have_1_2_3_tokens() -> None:
    lines = [bench_record(n, 0, 1, speed_pp=n / (1.0 + n)) for n in (1, 2, 3) for _ in range(2)]
    # llama-batched-bench writes a speed of nothing as C prints it.
    text = "\n".join(lines).replace('"speed_tg": 1.0', '"speed_tg": -nan')
    assert parse_batched_bench(text).step_s == pytest.approx((2.0, 3.0, 4.0))
    long = [bench_record(pp, 0, pl, speed_pp=100.0) for pp in (128, 256) for pl in (1, 2)]
    with pytest.raises(
        BadProfile, match=r"prompts alone \(-ntg 0\), of 128, 256 tokens; .* -ntg 1"
    ):
        parse_batched_bench("\n".join(long))


def test_bad_bench_records_are_refused() -> None:
    good = '{"tg": 1, "pl": 1, "speed_tg": 5}\n'
    for text in ("", "{broken", good + '{"pl": 2}', '{"tg": 1, "pl": 2, "speed_tg": 5}',
                 '{"tg": 1, "pl": 1, "speed_tg": 0}',
                 '{"tg": 1, "pl": 1, "speed_tg": Infinity}'):  # fmt: skip
        with pytest.raises(BadProfile):
            parse_batched_bench(text)


def test_served_rounds_keep_the_profile_true() -> None:
    costs = RefreshedCosts(CostProfile((1.0, 1.5, 1.8), 0.1), 3)
    for _ in range(400):
        costs.observe(1, 2.0, 0, 0.0)
        costs.observe(3, 3.6, 2, 0.4)
    assert costs.times[0] == pytest.approx(2.0, rel=0.05)
    assert costs.times[2] == pytest.approx(3.6, rel=0.05)
    assert costs.draft_step_s == pytest.approx(0.2, rel=0.02)
    assert 2.2 < costs.times[1] < 3.8  # a size nobody used follows the others
    assert costs.profile().step_s[0] == pytest.approx(2.0, rel=0.05)


def test_one_slow_step_moves_the_profile_little() -> None:
    costs = RefreshedCosts(CostProfile((1.0, 1.5)), 2)
    costs.observe(1, 500.0, 0, 0.0)
    for _ in range(7):
        costs.observe(1, 1.0, 0, 0.0)
    assert costs.times[0] < 1.2


def test_relative_costs_take_their_unit_from_the_first_round() -> None:
    costs = RefreshedCosts(parse_batch_costs("1,0.6,0.5"), 3)
    costs.observe(2, 0.24, 0, 0.0)
    assert costs.times[0] == pytest.approx(0.2)
    assert not costs.profile().relative


def test_calibration_learns_what_a_probability_is_worth() -> None:
    calibration = Calibration()
    assert calibration.probability("draft", 0.8) == 0.8  # taken at its word
    rng = np.random.default_rng(2)
    for p in rng.uniform(0, 1, 6000):
        calibration.observe("draft", float(p), bool(rng.random() < p**2))
    for p in (0.3, 0.6, 0.9):
        assert calibration.probability("draft", p) == pytest.approx(p**2, abs=0.12)
    assert calibration.probability("ngram-mod", 0.8) == 0.8
    points = calibration.reliability("draft")
    assert [x.mean_p for x in points] == sorted(x.mean_p for x in points)


def test_calibration_forgets_what_is_long_past() -> None:
    calibration = Calibration(half_life=50)
    for _ in range(1000):
        calibration.observe("draft", 0.9, False)
    for _ in range(300):
        calibration.observe("draft", 0.9, True)
    assert calibration.probability("draft", 0.9) > 0.9


def test_bins_cover_all_probabilities_and_what_rounding_makes_of_them() -> None:
    bins = [bin_of(p) for p in np.linspace(-0.01, 1.01, 500)]
    assert bins == sorted(bins)
    assert bin_of(1.0) == max(bins)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": [{"depth": "x", "step_s": [1.0]}]}, "a depth is 'x'"),
        ({"shift": 1e308}, "shift 1e"),
        ({"slope": 9.0}, "slope 9"),
        ({"sum_p": math.nan}, "not finite"),
    ],
)
def test_a_profile_edited_by_hand_is_refused_before_it_is_used(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    calibration = Calibration()
    calibration.observe("draft", 0.7, True)
    path = tmp_path / "p.json"
    save(path, CostProfile((1.0, 1.5)), calibration)
    data = json.loads(path.read_text(encoding="utf-8"))
    bins = data["calibration"]["draft"]
    for name, value in changes.items():
        if name == "depths":
            data[name] = value
        elif name == "sum_p":
            bins[name][0] = value
        else:
            bins[name] = value
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(BadProfile, match=f"damaged.*{message}"):
        load(path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [("1" + "0" * 399, "no time"), ("5e-324", "above 0"), ("1e200", "above 0"), ("NaN", "no time")],
)
def test_entries_that_are_no_times_are_refused_with_their_position(
    tmp_path: Path, entry: str, words: str
) -> None:
    path = tmp_path / "p.json"
    save(path, CostProfile((1.0, 1.25), key=KEY))
    path.write_text(path.read_text().replace("1.25", entry))
    with pytest.raises(BadProfile, match=f"entry 2 .*{words}"):
        load(path, KEY)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "{", ""])
def test_text_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BadProfile, match="is damaged"):
        load(path, KEY)


@pytest.mark.parametrize("speed", ["1" + "0" * 399, "[" * 100_000, '"fast"', "NaN"])
def test_bench_records_that_are_none_are_refused_with_the_line(speed: str) -> None:
    with pytest.raises(BadProfile, match="line 1"):
        parse_batched_bench('{"pl": 1, "tg": 1, "speed_tg": ' + speed + "}")


def test_a_batch_size_that_got_slower_alone_is_priced_alone() -> None:
    costs = RefreshedCosts(CostProfile((1.0, 1.2, 1.4, 1.6)), 4)
    for _ in range(400):
        costs.observe(1, 1.0, 0, 0.0)
        costs.observe(4, 3.2, 0, 0.0)
    assert costs.times[0] == pytest.approx(1.0, rel=0.05)
    assert costs.times[3] == pytest.approx(3.2, rel=0.05)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_machine_of_another_speed_keeps_the_ratios_of_sizes_that_are_not_used(
    factor: float,
) -> None:
    profile = CostProfile((1.0, 1.35, 1.7, 2.05), 0.1)
    for _ in range(3):  # what one run stores, the next loads
        costs = RefreshedCosts(profile, 4)
        for _ in range(400):
            costs.observe(1, factor, 0, 0.0)
        profile = costs.profile()
    assert profile.step_s[0] == pytest.approx(factor, rel=0.02)
    assert profile.step_s[3] / profile.step_s[0] == pytest.approx(2.05, rel=0.02)


def test_a_first_decode_that_was_slow_does_not_stay_in_a_profile_without_seconds() -> None:
    costs = RefreshedCosts(CostProfile.from_normalised((1.0, 0.6, 0.5)), 3)
    costs.observe(1, 0.05, 0, 0.0)
    for _ in range(300):
        costs.observe(1, 0.01, 0, 0.0)
    stored = costs.profile()
    assert stored.step_s[0] == pytest.approx(0.01, rel=0.02)
    assert stored.step_s[1] / stored.step_s[0] == pytest.approx(1.2, rel=0.02)


def test_the_draft_is_timed_on_its_own_tokens_however_few() -> None:
    target, draft = Clocked(), Clocked()
    options = MeasureOptions(n_max=8, n_repeats=1, depths=(0,))
    text = [i % 60 for i in range(8)]
    fed: list[int] = []
    extend = draft.extend
    draft.extend = lambda s, t, n=None: (fed.extend(t), extend(s, t, n))[1]  # type: ignore[method-assign]
    clock = lambda: target.now + draft.now  # noqa: E731
    found = measure(target, text, options, draft=draft, draft_text=[5, 6], clock=clock)
    assert found.draft_step_s == pytest.approx(2.1)
    assert set(fed) <= {5, 6}


def test_a_calibration_edited_into_numbers_that_are_none_is_refused(tmp_path: Path) -> None:
    calibration = Calibration()
    calibration.observe("draft", 0.5, True)
    data = calibration.as_data()
    for entry in ("shift", "slope"):
        edited = {"draft": {**data["draft"], entry: 10**400}}
        with pytest.raises(BadProfile, match="calibration of draft is damaged"):
            Calibration.from_data(edited)
