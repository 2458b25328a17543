"""Cost curves are written, read and refused. Calibration learns what probabilities are worth."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from lab.simulation import published_curves
from specdec.costs.calibration import Bins, Calibration
from specdec.costs.profile import CostProfile, KnownCosts, Timed
from specdec.costs.profile_io import (
    format_batch_costs,
    format_batched_bench,
    load,
    parse_batch_costs,
    parse_batched_bench,
    save,
)
from specdec.errors import BadProfile


def test_a_curve_is_saved_and_loaded(tmp_path: Path) -> None:
    costs = CostProfile((1.0, 1.5, 1.7), 0.1, timed=(Timed(1, 4, 0.01),), title="a model")
    save(tmp_path / "p.json", costs)
    assert load(tmp_path / "p.json") == costs


def test_a_damaged_curve_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(path, CostProfile((1.0, 1.5), timed=(Timed(1, 2, 0.1),)))
    whole = path.read_text()
    rng = np.random.default_rng(1)
    for cut in rng.integers(0, len(whole) - 2, 20):
        path.write_text(whole[:cut])
        with pytest.raises(BadProfile):
            load(path)
    data = json.loads(whole)
    edits: tuple[dict[str, object], ...] = (
        {"step_s": []},
        {"step_s": [1.0, -2.0]},
        {"step_s": [1.0, "x"]},
        {"step_s": [1.0, math.nan]},
        {"step_s": [1.0, 10**400]},
        {"step_s": 3},
        {"draft_step_s": -1},
        {"draft_step_s": None},
        {"timed": [[1, 2]]},
        {"timed": [{"n": 9, "n_repeats": 1, "spread": 0.1}]},
    )
    for text in (*(json.dumps({**data, **edit}) for edit in edits), "[" * 100_000, "1" * 5000):
        path.write_text(text)
        with pytest.raises(BadProfile, match=r"damaged|entry 1 of the cost is inf"):
            load(path)
    with pytest.raises(BadProfile, match="cannot be read"):
        load(tmp_path / "none.json")


def test_known_costs_do_not_change() -> None:
    costs = KnownCosts(CostProfile((1.0, 1.5), 0.1), 2)
    costs.observe(1, 9.0, 0.0, 1, 9.0)
    costs.reach(4)
    assert costs.times == [1.0, 1.5, 2.0, 2.5]
    assert costs.draft_step_s == 0.1


def test_batch_costs_are_read_and_written_as_the_environment_has_them() -> None:
    values = published_curves()["deepseek-r1-0528-q4_x"].normalised
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


def test_sizes_whose_tokens_are_dearer_than_those_of_smaller_ones_are_found() -> None:
    curves = published_curves()
    assert curves["glm-4.6-rpc"].rises(1e-9) == (2, 33, 41, 49)
    assert curves["glm-4.6-rpc"].rises(0.05) == (49,)


def test_batched_bench_records_are_read_with_the_warm_up_dropped() -> None:
    lines = ["some log line"]
    for seconds in (1000.0, 1.0, 3.0):  # warm-up, then two runs of mean 2
        for n in (1, 2, 3):
            speed = n / (n * seconds)
            lines.append(json.dumps({"pp": 0, "tg": 1, "pl": n, "speed_tg": speed}))
    profile = parse_batched_bench("\n".join(lines))
    assert profile.step_s == pytest.approx((2.0, 4.0, 6.0))  # the mean of speeds gives 1.5, 3, 4.5
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
    # llama-batched-bench writes -nan, as C prints it, for the speed of no tokens.
    text = "\n".join(lines).replace('"speed_tg": 1.0', '"speed_tg": -nan')
    assert parse_batched_bench(text).step_s == pytest.approx((2.0, 3.0, 4.0))
    long = [bench_record(pp, 0, pl, speed_pp=100.0) for pp in (128, 256) for pl in (1, 2)]
    with pytest.raises(
        BadProfile, match=r"prompts alone \(-ntg 0\), of 128, 256 tokens; .* -ntg 1"
    ):
        parse_batched_bench("\n".join(long))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{broken",
        '{"tg": 1, "pl": 1, "speed_tg": 5}\n{"pl": 2}',
        '{"tg": 1, "pl": 2, "speed_tg": 5}',
        '{"tg": 1, "pl": 1, "speed_tg": 0}',
        '{"tg": 1, "pl": 1, "speed_tg": Infinity}',
        '{"tg": 1, "pl": 1, "speed_tg": "fast"}',
        '{"tg": 1, "pl": 1, "speed_tg": 1' + "0" * 399 + "}",
        '{"tg": 1, "pl": 1, "speed_tg": ' + "[" * 100_000,
    ],
)
def test_bad_bench_records_are_refused(text: str) -> None:
    with pytest.raises(BadProfile):
        parse_batched_bench(text)


def test_calibration_learns_what_a_probability_is_worth() -> None:
    calibration = Calibration()
    assert calibration.probability("draft", 0.8) == 0.8  # unchanged before any observation
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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("shift", 1e308, "shift 1e"),
        ("slope", 9.0, "slope 9"),
        ("slope", 10**400, "slope"),
        ("sum_p", [math.nan], "from 0 to 1"),
    ],
)
def test_a_calibration_edited_by_hand_is_refused(name: str, value: object, message: str) -> None:
    calibration = Calibration()
    calibration.observe("draft", 0.7, True)
    form = TypeAdapter(Bins)
    data = form.dump_python(calibration.bins["draft"])
    edited = [*value, *data[name][1:]] if isinstance(value, list) else value
    with pytest.raises(ValidationError, match=message):
        form.validate_python({**data, name: edited})
