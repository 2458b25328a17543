"""What is measured and kept has bounds, an age and a way back, whatever its kind."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from busy_programs import busy_programs
from test_kept_list import whole

from offload.model_file import read_facts
from offload.plan.repacking import LayoutTimes, WeightKind
from offload.schedule.division import DeviceCosts
from offload.times.mapped_reads import MappedReads, reads_pay
from specdec.costs.calibration import Bins
from specoffload import kept_machine
from specoffload.commands.doctor import MachineNow, kept_models
from specoffload.commands.worker import kept_splits
from specoffload.config.options import Toggle
from specoffload.config.resolution import demo_file
from specoffload.kept import Kept, KeptFile, today
from specoffload.kept_list import AGAIN, OLD, of_machine, of_model

ABSURD = (float("nan"), float("inf"), -1e30, 1e30, -7, 10**15)
# Numbers of a file that decide nothing, or whose size means nothing, by the end of their path.
HARMLESS = {
    "elapsed": "the regimes forget all of the past, as after a long text",
    "n_observed": "the shares of regimes are updated at the next observation",
    "n_tried": "fewer starts measure, until all is measured again after 30 days",
    "n_threads": "only the costs of a worker with as many threads are used",
}
NOW = MachineNow(frozenset(), "1/1", "b")
Where = tuple[str | int, ...]


@pytest.fixture
def file(tmp_path: Path) -> KeptFile:
    """A kept file with each kind of measurement."""
    file = KeptFile(tmp_path, read_facts(demo_file("target.gguf")))

    def change(kept: Kept) -> None:
        full = whole()
        for its in fields(Kept):
            if its.name not in ("model", "machine"):
                setattr(kept, its.name, getattr(full, its.name))
        kept.runs[0].drafts["m"].calibration["draft"] = Bins()
        kept.runs[0].table.unions[1] = 4.0
        assert kept.hits is not None
        uses = {0: (3,) * kept.hits.n_experts}
        kept.hits = replace(kept.hits, uses=uses, unions={1: 4.0})

    assert file.update(change) == ""
    file.path.write_text(json.dumps(all_seen(json.loads(file.path.read_text()))))
    assert file.load()[1] == ""
    return file


def all_seen(data: Any) -> Any:
    """JSON in which sessions saw the first of each repeated measurement."""
    if isinstance(data, list):
        return [all_seen(one) for one in data]
    if not isinstance(data, dict):
        return data
    data = {key: all_seen(one) for key, one in data.items()}
    return data | {"seen": data["values"][:1]} if "seen" in data else data


def numbers(data: Any, where: Where = ()) -> Iterator[Where]:
    """The places of all numbers in JSON."""
    pairs = enumerate(data) if isinstance(data, list) else ()
    for key, value in data.items() if isinstance(data, dict) else pairs:
        if isinstance(value, dict | list):
            yield from numbers(value, (*where, key))
        elif isinstance(value, int | float):
            yield (*where, key)


def without_values(data: Any, where: Where = ()) -> Iterator[Where]:
    """The places of empty lists and objects, and of null, in JSON."""
    pairs = enumerate(data) if isinstance(data, list) else ()
    for key, value in data.items() if isinstance(data, dict) else pairs:
        if value in ([], {}, None):
            yield (*where, key)
        elif isinstance(value, dict | list):
            yield from without_values(value, (*where, key))


def test_the_file_of_these_tests_has_each_kind_of_number(file: KeptFile) -> None:
    """Otherwise a new kind of measurement would be in no test below."""
    places = without_values(json.loads(file.path.read_text()))
    assert {where[-1] for where in places} == {"node", "reasons", "complaints"}


def with_number(data: Any, where: Where, number: float) -> Any:
    changed = copy.deepcopy(data)
    inner = changed
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = number
    return changed


def number_at(data: Any, where: Where) -> Any:
    try:
        for key in where:
            data = data[key]
    except (KeyError, IndexError, TypeError):
        return None
    return data


def test_no_number_that_no_machine_gives_is_used(
    file: KeptFile, caplog: pytest.LogCaptureFixture
) -> None:
    """Each number of a file in turn is absurd. It is dropped, or the file, with a sentence."""
    caplog.set_level(logging.CRITICAL, "specoffload.kept")
    data = json.loads(file.path.read_text())
    places = [*numbers(data)]
    assert {str(where[0]) for where in places} >= {
        its.name for its in fields(Kept) if its.name not in ("model", "machine", "batch_costs",
                                                             "batch_costs_date")
    }  # fmt: skip
    used = set()
    for where in places:
        for number in ABSURD:
            file.path.write_text(json.dumps(with_number(data, where, number)))
            [*kept_models(file.path.parent, NOW)]
            kept, why = file.load()
            kept.mix_for_plan, kept.split_costs()  # noqa: B018
            if why:
                continue
            file.update(lambda _: None)
            left = number_at(json.loads(file.path.read_text()), where)
            if left is not None and (left == number or left != left):
                used.add(where[-1])
    assert used == set(HARMLESS)


def all_dated(data: Any, day: str) -> Any:
    """JSON with another day in each date."""
    if isinstance(data, dict):
        return {
            key: day if key in ("date", "counted_on", "batch_costs_date") else all_dated(its, day)
            for key, its in data.items()
        }
    return [all_dated(its, day) for its in data] if isinstance(data, list) else data


def test_nothing_is_used_for_ever_without_a_look(file: KeptFile) -> None:
    """What is 40 days old is measured again, corrected or counted in use, or tune is named."""
    day = (datetime.now(UTC).date() - timedelta(40)).isoformat()
    file.path.write_text(json.dumps(all_dated(json.loads(file.path.read_text()), day)))
    kept, why = file.load()
    assert why == ""
    listed = [*of_machine(kept), *of_model(kept, kept.runs[0])]
    cells = {one.name: one.cells(datetime.now(UTC).date())[-2:] for one in listed}
    undated = {name for name, (age, _) in cells.items() if age != "40 days"}
    assert undated == {"mix of tokens"}, "its age is in tokens"
    states = {name: state for name, (_, state) in cells.items()}
    kinds = ("corrected in use", "counted in use", "doubted: timed again", AGAIN, OLD)
    assert {name for name, state in states.items() if not state.startswith(kinds)} == set()
    again = {name.split(" (")[0] for name, state in states.items() if state == AGAIN}
    assert {"disk nvme0", "links to CUDA0", "layouts of q4_K", "draft engines"} <= again
    assert "reads of pinned memory by CUDA0, card" in again
    assert {name for name, state in states.items() if state == OLD} == {
        "threads and placement", "ubatch", "imported T(n)",
    }  # fmt: skip


KIND = WeightKind(False, "q4_K")
LAYOUTS = LayoutTimes(1e-3, 2e-3, 3e-3, 4e-3)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return busy_programs(monkeypatch)


@pytest.fixture
def each_layout(busy: set[str], monkeypatch: pytest.MonkeyPatch) -> list[LayoutTimes]:
    """The next measurements of layouts. Each start takes the first one."""
    coming: list[LayoutTimes] = []
    monkeypatch.setattr(kept_machine, "layout_times", lambda _: coming.pop(0))
    return coming


def layouts_by_start(n: int, folder: Path) -> list[LayoutTimes | None]:
    return [kept_machine.layouts_of(folder, KIND) for _ in range(n)]


@pytest.mark.parametrize(("days", "n_again"), [(0, 0), (29, 0), (30, 3)])
def test_old_times_of_layouts_are_measured_again(
    days: int, n_again: int, each_layout: list[LayoutTimes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    then = datetime.now(UTC).date() - timedelta(days)
    monkeypatch.setattr(kept_machine, "today", then.isoformat)
    slower = replace(LAYOUTS, plain_one_s=1.5e-3)
    each_layout += [LAYOUTS] * 3 + [slower] * 3
    assert layouts_by_start(4, tmp_path)[-1] == LAYOUTS
    monkeypatch.setattr(kept_machine, "today", today)
    assert layouts_by_start(4, tmp_path)[-1] == (slower if n_again else LAYOUTS)
    assert len(each_layout) == 3 - n_again


@pytest.mark.parametrize("nth", range(3))
@pytest.mark.parametrize("factor", [20.0, 1 / 20])
@pytest.mark.parametrize("name", [field.name for field in fields(LayoutTimes)])
def test_a_disturbed_measurement_of_layouts_heals(
    name: str, factor: float, nth: int, each_layout: list[LayoutTimes], tmp_path: Path
) -> None:
    """A time that is too long heals with the next start, one that is too short with the third."""
    each_layout += [LAYOUTS] * 3
    each_layout[nth] = replace(LAYOUTS, **{name: factor * getattr(LAYOUTS, name)})
    used = layouts_by_start(4, tmp_path)
    healed = 2 if factor < 1 else max(nth, 1)
    assert used[healed:] == [LAYOUTS] * (4 - healed)


def test_layouts_out_of_bounds_or_beside_other_programs_do_not_count(
    busy: set[str], each_layout: list[LayoutTimes], tmp_path: Path
) -> None:
    absurd, slow = replace(LAYOUTS, plain_one_s=-1.0), replace(LAYOUTS, plain_one_s=20.0)
    each_layout += [slow, LAYOUTS, absurd, slow, LAYOUTS]
    busy.add("a compiler")
    assert layouts_by_start(1, tmp_path) == [slow]
    busy.clear()
    assert layouts_by_start(2, tmp_path) == [LAYOUTS] * 2
    busy.add("a compiler")
    assert layouts_by_start(1, tmp_path) == [LAYOUTS]
    (kept,) = KeptFile(tmp_path).load()[0].layouts.values()
    assert kept.plain_one_s.values == (1e-3,)


CARD: Any = SimpleNamespace(words="CUDA0, card")
READS = MappedReads(2e-6, 2e10, 1e10, 6e-6, 2e10)
DISTURBED = MappedReads(2e-6, 1e9, 1e9, 6e-6, 2e10)  # by which copies would bring rows


@pytest.fixture
def each_read(busy: set[str], monkeypatch: pytest.MonkeyPatch) -> list[MappedReads]:
    """The next measurements of reads of pinned memory. Each start takes the first one."""
    coming: list[MappedReads] = []
    monkeypatch.setattr(kept_machine, "measure_reads", lambda _: coming.pop(0))
    return coming


def test_a_disturbed_measurement_of_reads_heals(
    each_read: list[MappedReads], tmp_path: Path
) -> None:
    each_read += [DISTURBED, READS, READS, DISTURBED, READS]
    used = [kept_machine.reads_of(tmp_path, CARD) for _ in range(7)]  # the last ones measure not
    # If half of them were slow beside copies, copies bring the rows.
    assert [reads_pay(reads) for reads in used] == [False, False, True, False, True, True, True]
    assert each_read == []


def test_a_measurement_of_reads_that_is_out_of_bounds_costs_no_other_one(
    each_read: list[MappedReads], tmp_path: Path
) -> None:
    absurd = replace(READS, first_s=1.0)
    each_read += [READS, absurd, DISTURBED, READS]
    used = [kept_machine.reads_of(tmp_path, CARD) for _ in range(4)]
    assert used[:2] == [READS, READS]
    kept, _ = KeptFile(tmp_path).load()
    assert kept.reads[CARD.words].measured == [READS, DISTURBED, READS]


@pytest.mark.parametrize(("days", "n_again"), [(0, 0), (29, 0), (30, 5)])
def test_old_reads_are_measured_again(
    days: int, n_again: int, each_read: list[MappedReads], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    then = datetime.now(UTC).date() - timedelta(days)
    monkeypatch.setattr(kept_machine, "today", then.isoformat)
    each_read += [READS] * 5
    for _ in range(5):
        assert kept_machine.reads_of(tmp_path, CARD) == READS
    monkeypatch.setattr(kept_machine, "today", today)
    each_read += [DISTURBED] * 5
    last = [kept_machine.reads_of(tmp_path, CARD) for _ in range(6)][-1]
    assert len(each_read) == 5 - n_again
    assert last == (DISTURBED if n_again else READS)


def test_reads_are_measured_at_each_start_if_nothing_is_kept(
    each_read: list[MappedReads], tmp_path: Path
) -> None:
    each_read += [READS, DISTURBED]
    assert [kept_machine.reads_of(None, CARD) for _ in range(2)] == [READS, DISTURBED]
    assert not [*tmp_path.iterdir()]


def test_a_worker_measures_what_is_old_or_contradicts_itself(file: KeptFile) -> None:
    """With --hybrid on nothing is measured, so that a worker splits by what there is."""

    def aged(days: int) -> tuple[DeviceCosts, ...]:
        day = (datetime.now(UTC).date() - timedelta(days)).isoformat()
        file.path.write_text(json.dumps(all_dated(json.loads(file.path.read_text()), day)))
        return kept_splits(file, Toggle.AUTO)

    assert [one.device for one in aged(29)] == ["sim"]
    assert aged(30) == ()
    assert len(kept_splits(file, Toggle.ON)) == 1
    assert kept_splits(file, Toggle.OFF) == kept_splits(None, Toggle.AUTO) == ()
