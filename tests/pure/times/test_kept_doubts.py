"""A disturbed trial of `tune` costs little, and a choice that decodes contradict is doubted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numa_trees import topology_of

from numa.place import Candidate, Strategy
from numa.threads import plan_threads
from numa.tune import Trial, TuneResult, search
from offload.plan.ubatch_search import UbatchTrial, fastest_ubatch, trial_of
from offload.plan.workload import PlannedWork
from offload.times.hits import Sharing
from offload.times.table import CostTable, DecodeTime, Way
from specoffload.kept import CACHE, ON_DEVICE, Kept, KeptFile, KeptRun, KeptUbatch
from specoffload.kept_doubts import comparable, threads_doubt, ubatch_doubt
from specoffload.kept_list import of_machine, of_model
from specoffload.opening import kept_plan

DAY, NEXT_DAY = "2026-01-02", "2026-01-03"
WORK = PlannedWork(4096, 512)
SETTINGS = {"device": "CUDA0, card", "threads": "8/8", CACHE: ON_DEVICE, "build": "b"}
ROWS, INTERLEAVE = Candidate(Strategy.ROWS, 8), Candidate(Strategy.INTERLEAVE, 8)
TUNED = TuneResult(
    ROWS, (Trial(ROWS, {1: 0.08}, "", {1: 0.02}), Trial(INTERLEAVE, {1: 0.1}, "", {1: 0.02})), (),
    "node0:8c,64g", DAY, "m.gguf", SETTINGS, 40, 2,
)  # fmt: skip


def run_of(one_s: float, day: str = NEXT_DAY, first_s: float = 0.0, **settings: str) -> KeptRun:
    entry = DecodeTime(one_s, 0.02, 5, day, measured_s=first_s)
    table = CostTable(16, 4, {Way.IN_PLACE: {1: entry}})
    return KeptRun({**SETTINGS, **settings}, Sharing(38, 2), table)


def test_a_choice_is_doubted_if_the_next_best_was_faster() -> None:
    assert threads_doubt(TUNED, [run_of(0.2)]) == (
        f"T(1) is 200 ms with {ROWS}, which makes {INTERLEAVE} faster "
        "(T(1) 100.0 ms when it was tried)"
    )
    assert threads_doubt(TUNED, [run_of(0.2), run_of(0.08)]) == "", "the newest run counts"


@pytest.mark.parametrize(
    ("one_s", "is_doubted"), [(0.080, False), (0.087, False), (0.1, False), (0.105, True)]
)
def test_threads_are_doubted_by_all_sizes_that_chose_them(one_s: float, is_doubted: bool) -> None:
    """8 threads have the lower T(1), and still lose: 0.137 s with 8, and 0.126 s with 16."""
    few, many = Candidate(Strategy.SINGLE, 8), Candidate(Strategy.SINGLE, 16)
    trials = Trial(many, {1: 0.080, 8: 0.2}), Trial(few, {1: 0.072, 8: 0.26})
    tuned = replace(TUNED, best=many, trials=trials)
    doubt = threads_doubt(tuned, [run_of(one_s)])
    assert bool(doubt) is is_doubted
    if is_doubted:
        assert doubt.endswith(f"{few} faster (T(1) 72.0 ms, T(8) 260.0 ms when it was tried)")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (run_of(0.104), "within both spreads"),
        (run_of(0.2, "2026-01-01"), "older than the choice"),
        (run_of(0.2, DAY), "perhaps decoded before the choice, on the same day"),
        (run_of(0.2, first_s=0.08), "slower for a long text, and not at the start"),
        (run_of(0.2, threads="4/4"), "other threads"),
        (run_of(0.2, device="cpu"), "another device"),
        (replace(run_of(0.2), sharing=Sharing(20, 2)), "fewer slots"),
        (replace(run_of(0.2), table=CostTable()), "not measured"),
    ],
)
def test_what_cannot_be_compared_raises_no_doubt(run: KeptRun, why: str) -> None:
    assert threads_doubt(TUNED, [run]) == "", why
    assert threads_doubt(replace(TUNED, settings={}), [run_of(0.2)]) == "", "an earlier version's"


UBATCH = KeptUbatch(
    {"context": "4096"}, 1024, DAY,
    {512: UbatchTrial(2e-3, 0.08, 50, 2), 1024: UbatchTrial(1.9e-3, 0.08, 40, 2)}, SETTINGS, WORK,
)  # fmt: skip


def test_a_ubatch_is_doubted_if_its_decodes_make_another_faster() -> None:
    assert ubatch_doubt(UBATCH, [run_of(0.12, ubatch="1024")]) == (
        "T(1) is 120 ms with 1024 tokens at once, which makes 512 faster"
    )
    assert ubatch_doubt(UBATCH, [run_of(0.085, ubatch="1024")]) == ""
    assert ubatch_doubt(UBATCH, [run_of(0.12, DAY, ubatch="1024")]) == "", "perhaps older"
    assert ubatch_doubt(UBATCH, [run_of(0.12, ubatch="512")]) == "", "another ubatch's decodes"
    trials = {n: replace(trial, n_slots=40) for n, trial in UBATCH.trials.items()}
    same = replace(UBATCH, trials=trials)
    assert ubatch_doubt(same, [run_of(0.12, ubatch="1024")]) == "", "both have the same slots"
    for lacks in ({"work": None}, {"run": {}}, {"n_ubatch": 0}, {"trials": {}}):
        assert ubatch_doubt(replace(UBATCH, **lacks), [run_of(0.12, ubatch="1024")]) == ""  # type: ignore[arg-type]


def test_a_doubted_ubatch_is_listed_and_the_plan_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = Kept(runs=[run_of(0.12, ubatch="1024")], ubatches=[UBATCH])
    (row,) = of_model(kept, None)
    assert row.state.startswith("not used: T(1) is 120 ms with 1024 tokens at once")
    config: Any = SimpleNamespace(spec=SimpleNamespace(kept_folder=tmp_path), plan_for_splits=True)
    monkeypatch.setattr(kept_plan, "_kept_of", lambda *_: (kept, ""))
    monkeypatch.setattr(kept_plan, "ubatch_settings", lambda _: UBATCH.settings)
    found = kept_plan.kept_for_plan(config)
    assert found.n_ubatch is None
    (sentence,) = found.reasons
    assert sentence.startswith("the ubatch that `specoffload tune` chose is not used: T(1) is 120")
    kept.runs = []
    assert (kept_plan.kept_for_plan(config).n_ubatch, kept_plan.kept_for_plan(config).reasons) == (
        1024, (),
    )  # fmt: skip


def test_doubted_threads_are_listed_and_said_by_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    KeptFile(tmp_path).update(lambda kept: setattr(kept, "numa", TUNED))
    (row,) = of_machine(KeptFile(tmp_path).load()[0], "slower: run tune")
    assert row.state == "used, but slower: run tune"
    kept = Kept(runs=[run_of(0.2)])
    config: Any = SimpleNamespace(
        spec=SimpleNamespace(kept_folder=tmp_path), model=Path("m.gguf"), threads=8
    )
    monkeypatch.setattr(kept_plan, "_kept_of", lambda *_: (kept, ""))
    sentence = kept_plan.doubted_threads(config)
    assert sentence.startswith("the tuned threads and placement are doubted: T(1) is 200 ms with")
    assert sentence.endswith("run `specoffload tune numa` again")
    config.threads = 4
    assert kept_plan.doubted_threads(config) == "", "the user's own threads"
    config.threads, config.model = 8, Path("other.gguf")
    assert kept_plan.doubted_threads(config) == "", "another model's decodes"


def test_what_makes_runs_comparable_is_what_their_decodes_depend_on() -> None:
    assert comparable(run_of(0.1, ubatch="512")) == SETTINGS


# -- one disturbed measurement of a trial ----------------------------------------------------------

TRUE = {512: (3.0e-3, 0.080, 50), 1024: (1.0e-3, 0.085, 45), 2048: (0.9e-3, 0.150, 30)}


def chosen_ubatch(spoilt: tuple[int, str, int] | None, factor: float) -> int:
    """The ubatch that a search chooses if one of a trial's measurements is disturbed."""
    trials = {}
    for n, (token_s, one_s, n_slots) in TRUE.items():
        prompts, table, decodes = [1024 * token_s] * 3, [one_s], [one_s] * 7
        if spoilt is not None and spoilt[0] == n:
            {"prompt": prompts, "table": table, "decode": decodes}[spoilt[1]][spoilt[2]] *= factor
        trials[n] = trial_of(prompts, 1024, table[0], decodes, (n_slots, 2))
    return fastest_ubatch(trials, 512, WORK)


@pytest.mark.parametrize("n", TRUE)
@pytest.mark.parametrize("factor", [0.02, 0.7, 1.3, 50.0])
def test_one_decode_of_another_length_changes_no_ubatch(n: int, factor: float) -> None:
    """Short decodes are not disturbed: some tokens find all of their experts in the slots."""
    assert chosen_ubatch((n, "decode", 3), factor) == chosen_ubatch(None, 1.0) == 1024


@pytest.mark.parametrize("n", TRUE)
@pytest.mark.parametrize("kind", [("prompt", 0), ("prompt", 2), ("table", 0), ("decode", 3)])
def test_one_disturbed_measurement_of_a_ubatch_costs_nothing(n: int, kind: tuple[str, int]) -> None:
    for factor in (1.3, 50.0):
        assert chosen_ubatch((n, *kind), factor) == chosen_ubatch(None, 1.0) == 1024


@pytest.mark.parametrize("disturbed", [Strategy.ROWS, Strategy.INTERLEAVE, Strategy.DISTRIBUTE])
@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_one_disturbed_decode_of_a_placement_costs_nothing(
    disturbed: Strategy, factor: float, tmp_path: Path
) -> None:
    topology = topology_of("two_sockets", tmp_path)
    true_s = {Strategy.ROWS: 0.1, Strategy.INTERLEAVE: 0.12, Strategy.DISTRIBUTE: 0.12}

    def measure(candidate: Candidate) -> Mapping[int, Sequence[float]]:
        one_s = true_s.get(candidate.strategy, 0.2)
        times = [one_s] * 7
        if candidate.strategy is disturbed:
            times[3] *= factor
        return {1: times, 8: [2 * s for s in times]}

    result = search(topology, plan_threads(topology), 1 << 30, measure, clock=lambda: 0.0)
    assert result.best.strategy is Strategy.ROWS
    assert all(trial.spreads == {1: 0.0, 8: 0.0} for trial in result.trials)
