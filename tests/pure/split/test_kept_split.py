"""Measured costs of split layers as a file: back as they were written, or not used and why."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan.machine import Sharing
from offload.plan.placement import MeasuredDecode
from offload.split.costs import MOST_ROWS, MeasuredCosts, SideTimes
from specdec.costs.profile import ProfileKey
from specoffload.speculation.kept_split import (
    DecodeTimes,
    MeasuredSplit,
    kept_decodes,
    load_split,
    store_split,
)

KEY = ProfileKey("model", "", "plan", "2/4", "sim", "build")
SIDE = SideTimes({1: 1e-5, 8: 3e-5}, 2e-6)
SPLIT = MeasuredSplit(
    MeasuredCosts(SIDE, SIDE, 4e-5, 1.5, 1.75, (0.375, 0.625)),
    DecodeTimes(64, {1: 0.2, 8: 0.3}, {1: 0.1, 8: 0.4}),
    date(2026, 3, 1),
    Sharing(40, 3, 1),
)

seconds = st.floats(1e-9, 1e3)
slowdowns = st.floats(1.0, 8.0)
kinds = st.sampled_from([(1.0,), (2 / 3, 1 / 3), (0.3, 0.3, 0.4)])
sides = st.builds(
    SideTimes, st.dictionaries(st.integers(1, MOST_ROWS), seconds, min_size=1, max_size=4), seconds
)


@st.composite
def decode_times(draw: st.DrawFn) -> DecodeTimes:
    both = draw(st.dictionaries(st.integers(1, MOST_ROWS), st.tuples(seconds, seconds), min_size=1))
    return DecodeTimes(
        draw(st.integers(1, MOST_ROWS)),
        {n: old for n, (old, _) in both.items()},
        {n: split for n, (_, split) in both.items()},
    )


splits = st.builds(
    MeasuredSplit,
    st.builds(MeasuredCosts, sides, sides, seconds, slowdowns, slowdowns, kinds),
    st.none() | decode_times(),
    st.dates(),
    st.builds(Sharing, *[st.integers(0, 1 << 30)] * 3),
)


@settings(deadline=None)  # it writes a file
@given(splits)
def test_what_was_kept_comes_back_as_it_was(split: MeasuredSplit) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "below" / "split.json"
        assert store_split(path, KEY, split) is None
        found, why = load_split(path, KEY, 0)
    assert found == split
    assert why == f"kept from {split.measured_on}: {path}"


def test_what_was_never_kept_is_said(tmp_path: Path) -> None:
    assert load_split(tmp_path / "none.json", KEY, 0) == (None, "nothing was kept yet")


@pytest.mark.parametrize("field", ["model", "plan", "threads", "device", "build"])
def test_of_another_run_nothing_is_used(field: str, tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    store_split(path, KEY, SPLIT)
    found, why = load_split(path, replace(KEY, **{field: "another"}), 0)
    assert found is None
    assert f"of another run: its {field} is" in why


def test_smaller_batches_than_are_asked_for_were_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    store_split(path, KEY, SPLIT)
    assert load_split(path, KEY, 64)[0] == SPLIT
    store_split(path, KEY, replace(SPLIT, times=DecodeTimes(16, {1: 0.2}, {1: 0.1})))
    found, why = load_split(path, KEY, 64)
    assert found is None
    assert "up to 16 tokens, not 64" in why
    store_split(path, KEY, replace(SPLIT, times=None))
    assert load_split(path, KEY, 0)[0] is not None, "--hybrid on compares nothing"
    assert load_split(path, KEY, 1)[0] is None


def test_decodes_are_kept_without_costs_and_nothing_at_all_is_no_measurement(
    tmp_path: Path,
) -> None:
    path = tmp_path / "split.json"
    store_split(path, KEY, replace(SPLIT, costs=None))
    assert load_split(path, KEY, 64)[0] == replace(SPLIT, costs=None)
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(data | {"times": None}), encoding="utf-8")
    found, why = load_split(path, KEY, 0)
    assert found is None
    assert "is damaged" in why


def _without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize("name", ["format", "key", "measured_on", "costs", "times"])
def test_a_file_without_one_of_its_parts_is_damaged(name: str, tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    store_split(path, KEY, SPLIT)
    path.write_text(json.dumps(_without(json.loads(path.read_text()), name)))
    found, why = load_split(path, KEY, 0)
    assert found is None
    assert f"{path} is damaged: " in why


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format": 3', '"format": 1', "of another version"),
        ('"link_slowdown": 1.75', '"link_slowdown": 0.5', "damaged"),
        ("0.375", "0.5", "damaged"),
        ("0.375", "-0.375", "damaged"),
        ("2026-03-01", "yesterday", "damaged"),
        ("0.2", "-0.2", "damaged"),
        ("0.2", "NaN", "damaged"),
        ("0.2", "0", "damaged"),
        ("0.2", "1" + "0" * 400, "damaged"),
        ("0.2", '"fast"', "damaged"),
        ('"n_most": 64', '"n_most": 65', "damaged"),
        ('"n_most": 64', '"n_most": true', "damaged"),
        ('"old_s": [', '"old_s": [[3, 1.0],', "damaged"),
        ("4e-05", "-1", "damaged"),
        ('"by_rows_s"', '"by_cows"', "damaged"),
        ('"device": "sim",', "", "of another run"),
        ("{", "[" * 10_000, "cannot be read"),
        ("}", "", "cannot be read"),
    ],
)
def test_damage_is_told_in_one_sentence(old: str, new: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    store_split(path, KEY, SPLIT)
    whole = path.read_text()
    assert old in whole
    path.write_text(whole.replace(old, new))
    found, why = load_split(path, KEY, 0)
    assert found is None
    assert words in why
    assert "\n" not in why
    assert len(why) < len(str(path)) + 300


def test_what_is_no_file_of_ours_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    for content, words in (
        (b"[]", "damaged"),
        (b"null", "damaged"),
        (b"\xff\xfe", "cannot be read"),
        (b" " * ((1 << 20) + 1), "are read at most"),
    ):
        path.write_bytes(content)
        found, why = load_split(path, KEY, 0)
        assert found is None
        assert words in why
    path.unlink()
    path.mkdir()
    assert "cannot be read" in load_split(path, KEY, 0)[1]


def test_a_folder_that_cannot_be_written_is_said_and_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    failed = store_split(file / "split.json", KEY, SPLIT)
    assert failed is not None
    assert failed.startswith("not kept: ")


def test_decodes_of_all_plans_are_found_of_the_same_model_and_machine(tmp_path: Path) -> None:
    def kept(name: str, key: ProfileKey, split: MeasuredSplit, at: int) -> None:
        path = tmp_path / f"m[1]-{name}-split.json"
        assert store_split(path, key, split) is None
        os.utime(path, (at, at))

    assert kept_decodes(tmp_path / "none", "m[1]", KEY) == ()
    kept("a", KEY, SPLIT, 200)
    other = replace(SPLIT, sharing=Sharing(90), times=DecodeTimes(64, {1: 0.3}, {1: 0.4}))
    kept("b", replace(KEY, plan="another plan"), other, 100)
    kept("c", KEY, replace(SPLIT, times=None), 300)  # by --hybrid on: nothing was compared
    kept("d", KEY, replace(SPLIT, times=DecodeTimes(64, {8: 0.3}, {8: 0.4})), 300)
    for field in ("model", "threads", "device", "build"):
        kept(field, replace(KEY, **{field: "another"}), SPLIT, 300)
    (tmp_path / "m[1]-e-split.json").write_text("{", encoding="utf-8")
    (tmp_path / "m[1]-f-split.json").write_text("[]", encoding="utf-8")
    (tmp_path / "m1-g-split.json").write_bytes((tmp_path / "m[1]-a-split.json").read_bytes())
    found = kept_decodes(tmp_path, "m[1]", KEY)
    assert found == (MeasuredDecode(Sharing(90), 0.3), MeasuredDecode(Sharing(40, 3, 1), 0.1))
