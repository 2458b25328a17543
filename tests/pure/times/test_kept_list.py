"""doctor lists each kept measurement with its value, spread, age and state."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import date
from pathlib import Path

import pytest
from test_kept_bounds import DAY, DISTURBED, EXPERT_BYTES, profile, slow_side

from offload.model_file import read_facts
from offload.plan.workload import TokenMix
from offload.routing.routing import SHARES, CountedHits
from offload.times.mapped_reads import MappedReads
from offload.times.repeated import RepeatedRate, RepeatedTime
from offload.times.table import CostTable, DecodeTime, Way
from specoffload.commands.doctor import MachineNow, kept_models
from specoffload.config.resolution import demo_file
from specoffload.kept import Kept, KeptFile
from specoffload.kept_bounds import drop_absurd
from specoffload.kept_list import (
    AGAIN,
    BUSY,
    DOUBTED,
    OLD,
    ONCE_MORE,
    USED,
    Measurement,
    age,
    of_machine,
    of_model,
    refused,
)
from specoffload.kept_values import KeptDisk, KeptLayouts, KeptLinks, KeptReads

TODAY = date(2026, 1, 5)
# Fields of a kept file that are no measurements.
NOT_MEASURED = {"model", "machine", "format", "runs", "batch_costs_date"}


def rows(found: list[Measurement]) -> dict[str, tuple[str, ...]]:
    """The cells of each row by its name."""
    return {one.name: one.cells(TODAY)[1:] for one in found}


def whole() -> Kept:
    kept = profile()
    kept.hits = CountedHits(16, 4, {0: (0.5,) * len(SHARES)}, 500.0, date(2026, 1, 4))
    kept.mix = TokenMix(3000, 50)
    kept.batch_costs, kept.batch_costs_date = "1,0.6,0.5", DAY
    return kept


def test_each_kind_of_measurement_has_a_row() -> None:
    kept = whole()
    listed = rows([*of_machine(kept), *of_model(kept, kept.runs[0])])
    assert listed["disk nvme0"] == ("3 GB/s", "±17 %", "3 days", ONCE_MORE)
    assert listed["links to CUDA0"] == (
        "20 GB/s alone, 10 GB/s together", "", "3 days", ONCE_MORE,
    )  # fmt: skip
    assert listed["reads of pinned memory by CUDA0, card"] == (
        "20 GB/s, 10 GB/s beside copies, first 2 us", "±17 %", "3 days", ONCE_MORE,
    )  # fmt: skip
    assert listed["T(1) in place"] == ("100 ms", "±5 %", "3 days", "corrected in use")
    assert listed["an expert on the CPU"] == ("1 ms", "±2 %", "3 days", "corrected in use")
    assert listed["an expert on the device"] == ("100 us", "±3 %", "3 days", "corrected in use")
    assert listed["an expert's copy of CUDA0"] == ("1 ms", "±4 %", "3 days", "corrected in use")
    assert listed["draft step (m)"] == ("10 ms", "±5 %", "3 days", "corrected in use")
    assert listed["draft engines (draft)"] == (
        "libllama 20 ms, torch 10 ms", "±2 %", "3 days", ONCE_MORE,
    )  # fmt: skip
    assert listed["hits and unions"] == ("of 500 tokens", "", "1 day", "counted in use")
    assert listed["mix of tokens"][0] == "3,000 prompt, 50 generated"
    assert listed["imported T(n)"] == ("3 sizes", "", "3 days", "used")
    assert listed["layouts of q4_K"][1:] == ("", "3 days", ONCE_MORE)
    assert listed["ubatch"] == ("512, of 1 tried", "±7 %", "3 days", "used")
    assert listed["threads and placement"][1:] == ("±6 %", "3 days", "used")
    assert "an expert on the device with sim" in listed
    n_all = len(listed)
    for field in fields(Kept):
        if field.name in NOT_MEASURED:
            continue
        without = whole()
        setattr(without, field.name, getattr(Kept(), field.name))
        n = len(of_machine(without)) + len(of_model(without, without.runs[0]))
        assert n < n_all, f"{field.name} has no row"


def test_a_row_says_what_the_next_start_does() -> None:
    kept = profile()
    kept.runs[0].table = CostTable(
        16, 4, {Way.IN_PLACE: {1: DecodeTime(2.5, 0.0, 1, DAY, measured_s=0.1)}}
    )
    kept.runs[0].split = slow_side(kept, 0.2)
    listed = rows(of_model(kept, kept.runs[0]))
    assert listed["T(1) in place"] == ("2.5 s", "", "3 days", "corrected in use, first 100 ms")
    assert listed["an expert on the CPU"][-1] == "doubted: timed again"


@pytest.mark.parametrize(
    ("n", "is_doubted", "state"),
    [(1, False, ONCE_MORE), (1, True, DOUBTED), (5, False, USED), (5, True, BUSY)],
)
def test_a_row_says_whether_the_next_start_measures(n: int, is_doubted: bool, state: str) -> None:
    kept = Kept()
    rate, time = RepeatedRate((2e9,) * n, is_doubted), RepeatedTime((1e-3,) * n, is_doubted)
    reads = MappedReads(2e-6, 2e10, 1e10, 6e-6, 2e10)
    kept.disks["sda"] = KeptDisk({1: rate, 8: rate}, DAY)
    kept.links["CUDA0, CUDA1"] = KeptLinks([rate] * 2, [rate] * 2, DAY)
    kept.layouts["q4_K"] = KeptLayouts(time, time, time, time, DAY)
    kept.reads["CUDA0"] = KeptReads([reads] * n, DAY, is_doubted)
    listed = rows(of_machine(kept))
    assert len(listed) == 4
    assert {cells[-1] for cells in listed.values()} == {state}
    assert {cells[1] for cells in listed.values()} == {"" if n == 1 else "±0 %"}
    old = {one.cells(date(2026, 3, 5))[-1] for one in of_machine(kept)}
    assert old == {AGAIN}


def test_what_only_tune_measures_is_old_after_30_days() -> None:
    kept = whole()
    found = [*of_machine(kept), *of_model(kept, kept.runs[0])]
    old = {one.name for one in found if one.cells(date(2026, 3, 5))[-1] == OLD}
    assert old == {"threads and placement", "ubatch", "imported T(n)"}


def test_a_doubt_of_what_tune_chose_is_listed_after_30_days_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specoffload.kept_list.ubatch_doubt", lambda *_: "T(1) is 120 ms")
    kept = whole()
    listed = [*of_machine(kept, "slower: run tune"), *of_model(kept, kept.runs[0])]
    states = {one.name: one.cells(date(2026, 3, 5))[-1] for one in listed}
    assert states["threads and placement"] == "used, but slower: run tune"
    assert states["ubatch"] == "not used: T(1) is 120 ms"


@pytest.mark.parametrize("kind", DISTURBED)
def test_what_is_out_of_bounds_is_listed_as_such(kind: str) -> None:
    kept = profile()
    disturb, _, words = DISTURBED[kind]
    disturb(kept)
    (found,) = refused(drop_absurd(kept, EXPERT_BYTES))
    name, value, _, _, state = found.cells(TODAY)
    assert words.removeprefix("the ").startswith(name)
    assert value == "out of bounds"
    assert state.startswith("made again: ")


def test_the_doctor_reads_a_models_measurements_from_its_file(tmp_path: Path) -> None:
    file = KeptFile(tmp_path, read_facts(demo_file("target.gguf")))
    file.update(lambda kept: kept.put(replace(profile().runs[0], settings={"device": "cpu"})))
    (model,) = kept_models(tmp_path, MachineNow(frozenset(), "1/1", "b"))
    names = [one.name for one in model.measurements]
    assert "T(1) in place" in names
    assert "draft step (m)" in names


def test_a_date_that_is_none_has_no_age() -> None:
    assert [age(day, TODAY) for day in ("", "soon", "2026-01-05", "2026-01-04", "2026-02-01")] == [
        "", "", "today", "1 day", "today",
    ]  # fmt: skip
