"""Stored files are read as they were written, and used only for the same model and machine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.model import ModelFacts
from offload.model_file import model_hash, read_facts
from offload.plan.workload import TokenMix
from offload.routing.routing import SHARES, CountedHits, RoutingRecorder
from offload.schedule.division import DeviceCosts, MeasuredCosts, SideTimes
from offload.times.hits import Sharing
from offload.times.repeated import RepeatedTime
from offload.times.table import CostTable, DecodeTime, Way
from specdec.costs.calibration import Bins
from specoffload.commands.doctor import MachineNow, kept_models
from specoffload.config.resolution import demo_file
from specoffload.kept import Kept, KeptDraft, KeptFile, KeptRun
from specoffload.kept_engines import KeptEngines
from specoffload.session.used_experts import HitKeeper

RATES = tuple(np.linspace(0.1, 0.9, len(SHARES)).round(4).tolist())
SETTINGS = {"plan": "p", "threads": "1/1", "device": "sim", "build": "b"}


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return read_facts(demo_file("target.gguf"))


def hits_of(facts: ModelFacts) -> CountedHits:
    layers = {0: RATES, 2: RATES}
    return CountedHits(facts.n_experts, facts.n_experts_used, layers, 500.0, date(2026, 3, 1))


def a_run(n_slots: int = 100, **changes: Any) -> KeptRun:
    table = CostTable(16, 4, {Way.IN_PLACE: {1: DecodeTime(0.5, 0.1, 3, "2026-01-02")}})
    split = MeasuredCosts(SideTimes({1: 1e-4}), SideTimes({1: 1e-5}), 1e-3, 1.2, 1.5, (0.5, 0.5))
    draft = KeptDraft(0.01, {"draft": Bins()})
    run = KeptRun(SETTINGS, Sharing(n_slots), table, split, "2026-01-02", 64, 0, {"": draft})
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def test_costs_of_split_layers_are_kept_by_device(tmp_path: Path, facts: ModelFacts) -> None:
    file, costs = KeptFile(tmp_path, facts), a_run().split
    assert costs is not None
    worker = DeviceCosts("sim", 1, "b", costs, "2026-01-01")
    newer = replace(worker, date="2026-01-03", costs=replace(costs, copy_s=2e-3))
    other = replace(worker, device="CUDA0", date="2026-01-04")

    def change(kept: Kept) -> None:
        kept.put(a_run())  # of a server
        kept.put(a_run(settings=SETTINGS | {"plan": "q"}, split=None))
        for one in (worker, newer, other):
            kept.put_worker(one)

    assert file.update(change) == ""
    kept, why = file.load()
    assert why == ""
    of_run = replace(worker, date="2026-01-02")
    assert kept.split_costs() == (other, newer, of_run)


def test_what_was_kept_is_loaded(tmp_path: Path, facts: ModelFacts) -> None:
    file = KeptFile(tmp_path / "new", facts)
    assert file.load()[1] == ""
    assert not KeptFile.may_exist(tmp_path / "new", facts.path)

    def change(kept: Kept) -> None:
        kept.put(a_run())
        kept.count(hits_of(facts), TokenMix(3000, 50))
        kept.engines["draft"] = KeptEngines({"torch": RepeatedTime((0.1,))}, "2026-01-02")

    assert file.update(change) == ""
    kept, why = file.load()
    assert why == ""
    assert kept.runs == [a_run()]
    assert kept.hits == hits_of(facts)
    assert kept.mix == TokenMix(3000, 50)
    assert KeptFile.may_exist(tmp_path / "new", facts.path)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"], "one whole file"


def test_a_run_is_found_by_its_settings_and_slots_that_are_alike() -> None:
    kept = Kept(runs=[a_run()])
    assert kept.run(SETTINGS, Sharing(105)) == (a_run(), "measured on 2026-01-02")
    for settings_, sharing, words in (
        (SETTINGS | {"build": "other"}, Sharing(100), "the kept run had build 'b', not 'other'"),
        (SETTINGS, Sharing(200), "the kept run had 100 slots for experts, not 200"),
        (SETTINGS, Sharing(100, 3), "the kept run had 0 resident layers, not 3"),
    ):
        found, why = kept.run(settings_, sharing)
        assert found is None
        assert words in why
    assert Kept().run(SETTINGS, Sharing())[1] == "nothing was measured yet"
    kept.put(a_run(98, n_least=3))
    assert [run.n_least for run in kept.runs] == [3], "in the place of the one alike"
    for n in range(60):
        kept.put(a_run(settings=SETTINGS | {"plan": str(n)}))
    assert len(kept.runs) == 24


def test_the_most_tokens_decide_what_a_plan_is_made_for(facts: ModelFacts) -> None:
    kept = Kept(mix=TokenMix(1000, 100))
    assert kept.mix_for_plan is None, "too few"
    kept.count(None, TokenMix(1000, 64_000))
    assert kept.mix_for_plan == TokenMix(1 / 32, 1)
    kept.count(hits_of(facts), TokenMix(1 << 18, 0))
    assert kept.mix == TokenMix((1 << 18) + 921.0, 32_042.1), "older tokens weigh half"
    kept.count(hits_of(facts), TokenMix(0, 0))
    assert kept.hits is not None
    assert 500 < kept.hits.n_tokens < 1000


def change_of(*keys: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return change


ONE = ("runs", 0, "table", "ways", "in place", "1")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change_of("model", to="f" * 24), "of another model or machine"),
        (change_of("machine", to="a larger one"), "of another model or machine"),
        (change_of("format", to=3), "damaged"),
        (change_of(*ONE, "seconds", to=-1.0), "damaged"),
        (change_of(*ONE, "seconds", to="soon"), "damaged"),
        (change_of(*ONE, "n_timed", to=-1), "damaged"),
        (change_of("runs", 0, "table", "ways", to={"by magic": {}}), "damaged"),
        (change_of("runs", 0, "split", "copy_s", to=-1.0), "damaged"),
        (change_of("runs", 0, "split", "host", "by_rows_s", to={}), "damaged"),
        (change_of("runs", 0, "split", "kinds", to=[0.5]), "damaged"),
        (change_of("runs", to={}), "damaged"),
        (change_of("hits", "counted_on", to="soon"), "damaged"),
        (change_of("mix", "n_generated", to="many"), "damaged"),
    ],
)
def test_damage_is_said_and_the_next_update_begins_anew(
    tmp_path: Path, facts: ModelFacts, damage: Callable[[dict[str, Any]], None], said: str
) -> None:
    file = KeptFile(tmp_path, facts)

    def change(kept: Kept) -> None:
        kept.put(a_run())
        kept.count(hits_of(facts), TokenMix(3000, 50))

    file.update(change)
    data = json.loads(file.path.read_text(encoding="utf-8"))
    damage(data)
    file.path.write_text(json.dumps(data), encoding="utf-8")
    kept, why = file.load()
    assert (kept.runs, kept.hits) == ([], None)
    assert said in why
    assert str(file.path) in why
    assert file.update(lambda kept: kept.put(a_run())) == ""
    assert file.load()[0].runs == [a_run()]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_experts", 7),
        ("n_used", 99),
        ("n_tokens", -1),
        ("layers", {}),
        ("layers", {"0": [2.0] * len(SHARES)}),
        ("layers", {"0": [0.5]}),
        ("uses", {"0": [1]}),
        ("unions", {"2": 1e9}),
        ("unions", {"0": 1.0}),
    ],
)
def test_damaged_hits_are_counted_anew_and_the_rest_is_used(
    tmp_path: Path, facts: ModelFacts, key: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeptFile(tmp_path, facts)

    def change(kept: Kept) -> None:
        kept.put(a_run())
        kept.count(hits_of(facts), TokenMix(3000, 50))

    file.update(change)
    data = json.loads(file.path.read_text(encoding="utf-8"))
    data["hits"][key] = value
    file.path.write_text(json.dumps(data), encoding="utf-8")
    for _ in range(2):
        kept, why = file.load()
        assert (kept.runs, kept.hits, why) == ([a_run()], None, "")
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(file.path) in line
    assert "the counted hits: " in line


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=50)
def test_no_bytes_make_it_fail(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    file = KeptFile(tmp_path_factory.mktemp("kept"), read_facts(demo_file("target.gguf")))
    file.path.write_bytes(raw)
    assert file.load()[0].runs == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, facts: ModelFacts) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    why = KeptFile(tmp_path / "file" / "in", facts).update(lambda kept: None)
    assert why.startswith("measurements are not kept: ")
    assert "SPECOFFLOAD_PROFILE_DIR" in why


def test_the_keeper_keeps_each_token_once_and_only_enough_of_them(
    tmp_path: Path, facts: ModelFacts
) -> None:
    recorder, file, tokens = RoutingRecorder(), KeptFile(tmp_path, facts), [0, 0]
    keeper = HitKeeper(file, facts.n_experts, recorder, lambda: TokenMix(*tokens))
    rng = np.random.default_rng(0)

    def tell(n: int) -> None:
        for _ in range(n):
            for layer in (0, 1):
                ids = rng.permutation(facts.n_experts)[None, : facts.n_experts_used]
                recorder.layer(layer, facts.n_experts_used).add(ids.astype(np.int32))

    tell(60)
    tokens[:] = 40, 10
    assert keeper.keep() == ""
    assert not file.path.exists(), "too few"
    tell(60)
    tokens[:] = 900, 100
    assert not keeper.is_due, "not enough for a session that goes on"
    keeper.keep()
    keeper.keep()
    kept = file.load()[0]
    assert kept.hits is not None
    assert kept.hits.n_tokens == 120
    assert kept.mix == TokenMix(900, 100)
    tell(4096)
    assert keeper.is_due
    keeper.keep()
    assert not keeper.is_due
    tokens[0] += 1 << 16
    assert keeper.is_due, "a long session keeps them as it goes on"


NOW = MachineNow(frozenset({("cpu", "a CPU"), ("cuda0", "a GPU")}), "1/1", "b")


@pytest.mark.parametrize(
    ("settings", "now", "words"),
    [
        ({}, NOW, "1 decode time of 2026-01-02 (3 days ago), on this machine as it is now"),
        ({"device": "sim:vram=8MiB, a CPU"}, NOW, "on this machine as it is now"),
        ({"device": "CUDA1, a GPU"}, NOW, "since there is no device CUDA1, a GPU now"),
        ({"build": "old"}, NOW, "since the library is b now, it was old"),
        ({}, replace(NOW, threads="8/8"), "a start uses 8/8 threads now (one token/several)"),
    ],
)
def test_doctor_compares_what_is_kept_with_the_machine(
    tmp_path: Path, facts: ModelFacts, settings: dict[str, str], now: MachineNow, words: str
) -> None:
    run = a_run(settings=SETTINGS | {"device": "CUDA0, a GPU"} | settings)
    KeptFile(tmp_path, facts).update(lambda kept: kept.put(run))
    KeptFile(tmp_path).update(lambda kept: None)  # a file of the machine, not of a model
    (tmp_path / "amx-0123456789ab.json").write_text('{"ok": true}')
    (found,) = kept_models(tmp_path, now)
    assert found.model == "target"
    assert words in found.words(date(2026, 1, 5))
    (renamed,) = kept_models(tmp_path, now, {model_hash(facts): "demo-pair"})
    assert renamed == replace(found, model="demo-pair")


def test_doctor_prefers_the_run_that_still_holds(tmp_path: Path, facts: ModelFacts) -> None:
    file = KeptFile(tmp_path, facts)
    for build, day in (("b", "2026-01-02"), ("old", "2026-01-04")):
        run = a_run(settings=SETTINGS | {"device": "cpu, a CPU", "build": build}, date=day)
        file.update(lambda kept, run=run: kept.put(run))  # type: ignore[misc]
    (found,) = kept_models(tmp_path, NOW)
    assert (found.measured_on, found.reason) == ("2026-01-02", "")
    data = json.loads(file.path.read_text())
    file.path.write_text(json.dumps(data | {"machine": "96 processors"}))
    (found,) = kept_models(tmp_path, NOW)
    assert "it was measured on 96 processors" in found.words(date(2026, 1, 5))
    file.path.write_text(json.dumps(data | {"format": 3}))
    assert kept_models(tmp_path, NOW) == [], "earlier versions' files are ignored"
    file.path.write_text("{")
    (found,) = kept_models(tmp_path, NOW)
    assert "is damaged and not used" in found.words(date(2026, 1, 5))


def test_a_run_with_absurd_times_is_neither_written_nor_read(
    tmp_path: Path, facts: ModelFacts, caplog: pytest.LogCaptureFixture
) -> None:
    """A learner once ran away, and a session stored what it had learnt."""
    file = KeptFile(tmp_path, facts)
    absurd = CostTable(
        16, 4, {Way.IN_PLACE: {1: DecodeTime(0.5, n_timed=3), 2: DecodeTime(9e5, n_timed=3)}}
    )

    def change(kept: Kept) -> None:
        kept.put(a_run())
        kept.put(a_run(500, table=absurd))

    file.update(change)
    written = json.loads(file.path.read_text(encoding="utf-8"))
    assert [run["sharing"]["n_slots"] for run in written["runs"]] == [100]
    assert caplog.records == []
    spoilt = copy.deepcopy(written["runs"][0])  # as earlier versions wrote it
    spoilt["table"]["ways"]["in place"]["2"] = {"seconds": 9e5, "n_timed": 3}
    written["runs"].append(spoilt)
    file.path.write_text(json.dumps(written), encoding="utf-8")
    (model,) = kept_models(tmp_path, NOW)
    assert [one.value for one in model.measurements][-1] == "out of bounds"
    kept, reason = file.load()
    assert (kept.runs, reason) == ([a_run()], "")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "is made again when needed: the times of 2026-01-02: 2 tokens in place would" in line
