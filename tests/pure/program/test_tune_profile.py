"""A tuned choice is stored, found again, used as stored, and refused if the machine has changed."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from numa_trees import topology_of

from numa.errors import PlacementRefused
from numa.place import Candidate, Strategy
from numa.topology import ONE_NODE, Topology
from numa.tune import Trial, TuneResult, fingerprint
from offload.decode import SMALL_BATCH
from offload.times.min_batch import MinBatch
from offload.times.ways import Ways
from specoffload.commands import tune
from specoffload.config.environment import Environment, Host
from specoffload.config.options import Options
from specoffload.config.resolution import Config, resolve
from specoffload.kept import MACHINE_FILE
from specoffload.kept_machine import Tuned, load_tuned, save_tuned, tuned_sentence

MODEL = Path("m.gguf")


def tuned_for(topology: Topology, best: Candidate) -> TuneResult:
    trials = (Trial(best, {1: 0.08, 8: 0.21}),)
    return TuneResult(best, trials, ("chosen",), fingerprint(topology))


def resolve_on(options: Options, topology: Topology, tuned: Tuned) -> Config:
    return resolve(options, Host(Environment(), topology, tuned, n_physical=2, n_allowed=2))


@pytest.fixture
def one(tmp_path: Path) -> Topology:
    return topology_of("one_node", tmp_path / "one")


@pytest.fixture
def two(tmp_path: Path) -> Topology:
    return topology_of("two_sockets", tmp_path / "two")


def test_what_is_kept_is_what_is_found(tmp_path: Path, two: Topology) -> None:
    folder = tmp_path / "new" / "profiles"
    result = tuned_for(two, Candidate(Strategy.SINGLE, 6, node=1, huge_pages=False))
    assert not save_tuned(folder, result)
    assert load_tuned(folder, two) == Tuned(result)
    assert [p.name for p in folder.iterdir()] == [MACHINE_FILE], "no half-written file stays"
    assert tuned_sentence(result).endswith("T(1) 80.0 ms, T(8) 210.0 ms")


def test_a_choice_for_another_machine_is_refused_with_both_named(
    tmp_path: Path, one: Topology, two: Topology
) -> None:
    save_tuned(tmp_path, tuned_for(two, Candidate(Strategy.ROWS, 8)))
    tuned = load_tuned(tmp_path, one)
    assert tuned.result is None
    assert fingerprint(two) in tuned.reason
    assert "specoffload tune numa" in tuned.reason


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 99}', "\x00"])
def test_a_damaged_file_is_said_and_not_used(tmp_path: Path, two: Topology, text: str) -> None:
    (tmp_path / MACHINE_FILE).write_text(text)
    tuned = load_tuned(tmp_path, two)
    assert tuned.result is None
    assert MACHINE_FILE in tuned.reason
    config = resolve_on(Options(model=MODEL), two, tuned)
    assert tuned.reason in config.reasons


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, two: Topology) -> None:
    (tmp_path / "file").write_text("")
    not_written = save_tuned(tmp_path / "file", tuned_for(two, Candidate(Strategy.ROWS, 8)))
    assert "SPECOFFLOAD_PROFILE_DIR" in not_written


def test_one_node_pins_nothing_and_says_so_in_one_line(one: Topology) -> None:
    config = resolve_on(Options(model=MODEL, threads=1), one, Tuned())
    assert config.numa is None
    assert (config.threads, config.threads_batch) == (1, 1)
    assert config.reasons == (ONE_NODE,)


def test_one_node_takes_the_tuned_number_of_threads_unless_one_was_typed(one: Topology) -> None:
    tuned = Tuned(tuned_for(one, Candidate(Strategy.SINGLE, 1)))
    config = resolve_on(Options(model=MODEL), one, tuned)
    assert (config.threads, config.threads_batch) == (1, 1)
    assert any("measured by" in reason for reason in config.reasons)
    typed = resolve_on(Options(model=MODEL, threads=2), one, tuned)
    assert typed.threads == 2
    assert not any("measured by" in reason for reason in typed.reasons)


def test_more_threads_than_processors_run_one_each_and_say_so(one: Topology) -> None:
    n_most = len(one.allowed_cpus)
    config = resolve_on(Options(model=MODEL, threads=n_most + 5, threads_batch=1000), one, Tuned())
    assert (config.threads, config.threads_batch) == (n_most, n_most)
    said = [r for r in config.reasons if r.startswith("threads")]
    assert len(said) == 2
    assert all(f"{n_most} threads run" in sentence for sentence in said)


def test_several_nodes_run_rows_until_something_was_measured(two: Topology) -> None:
    config = resolve_on(Options(model=MODEL), two, Tuned())
    assert config.numa is not None
    assert config.numa.candidate.strategy is Strategy.ROWS
    assert config.threads == config.numa.decode.n_threads
    assert config.threads_batch == config.numa.batch.n_threads
    assert any("nothing was measured" in reason for reason in config.reasons)


def test_a_tuned_choice_is_taken_without_asking(two: Topology) -> None:
    best = Candidate(Strategy.SINGLE, 3, node=1, huge_pages=False)
    config = resolve_on(Options(model=MODEL), two, Tuned(tuned_for(two, best)))
    plan = config.numa
    assert plan is not None
    assert plan.candidate == best
    assert config.threads == 3
    assert set(plan.decode.nodes) == {1}
    assert any("measured by `specoffload tune numa`" in reason for reason in config.reasons)


@pytest.mark.parametrize("strategy", ["interleave", "rows", "distribute", "single"])
def test_what_is_typed_beats_what_was_tuned(two: Topology, strategy: str) -> None:
    tuned = Tuned(tuned_for(two, Candidate(Strategy.SINGLE, 3, node=1)))
    config = resolve_on(Options(model=MODEL, numa=strategy, threads=2), two, tuned)
    assert config.numa is not None
    assert config.numa.candidate.strategy == strategy
    assert config.threads == 2
    assert not any("measured by" in reason for reason in config.reasons)


def test_single_keeps_every_thread_on_the_gpus_node(two: Topology) -> None:
    config = resolve_on(Options(model=MODEL, numa=Strategy.SINGLE), two, Tuned())
    plan = config.numa
    assert plan is not None
    assert plan.candidate.strategy is Strategy.SINGLE
    assert {*plan.decode.nodes, *plan.batch.nodes, *plan.draft.nodes} == {1}


def test_more_threads_than_cores_of_several_nodes_run_one_each_and_say_so(two: Topology) -> None:
    config = resolve_on(Options(model=MODEL, threads=4096), two, Tuned())
    assert config.numa is not None
    assert config.threads == config.numa.decode.n_threads < 4096
    assert any("4096 threads asked for" in reason for reason in config.reasons)


def test_none_leaves_everything_to_the_kernel_and_says_so(two: Topology) -> None:
    tuned = Tuned(tuned_for(two, Candidate(Strategy.ROWS, 3)))
    config = resolve_on(Options(model=MODEL, numa="none", threads=2), two, tuned)
    assert config.numa is None
    assert any("numa none" in reason for reason in config.reasons)


@pytest.mark.parametrize(
    ("sizes", "declined", "chosen", "why"),
    [
        ((1, 2, 3, 8), "", "batches of 1 to 3, 8 tokens", "batch costs above"),
        ((), "", "no batch", "batch costs above"),
        ((), "the layer has biases", "no batch", "the layer has biases"),
    ],
)
def test_the_table_says_which_batches_are_split_and_why_none_is(
    sizes: tuple[int, ...], declined: str, chosen: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsplit = frozenset(range(1, SMALL_BATCH + 1)) - {*sizes}
    ways = Ways(MinBatch(), may_split=True, unsplit=unsplit, declined=declined)
    weights = SimpleNamespace(hybrid=object(), ways=SimpleNamespace(now=ways), devices=())
    target = SimpleNamespace(opened=SimpleNamespace(weights=weights, devices=()))
    monkeypatch.setattr(tune, "streamed_kinds", lambda target: ())
    session: Any = SimpleNamespace(target=target, engine_choice=None)
    assert tune.chosen_rows(session) == [("--hybrid", chosen, why)]


def test_a_trial_whose_times_are_not_steady_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimpleNamespace(sequences=SimpleNamespace(length=lambda _: 0), n_vocab=100)
    calm = [0.5, *[0.001] * 7]
    wild = [0.5, *[0.001, 0.01] * 3, 0.001]
    left: list[float] = [*wild, *calm, *calm]
    monkeypatch.setattr(tune, "decode_s", lambda *_, **__: left.pop(0))
    assert median(tune._decodes_s(engine, 1)) == 0.001, "more decodes were steady"
    left[:] = [*wild[:1], *[0.001, 0.01, 0.01, 0.001, 0.001, 0.01, 0.001, 0.02] * 3]
    with pytest.raises(
        PlacementRefused, match=r"^23 decodes of 1 token took 1.0 to 20.0 ms, which"
    ):
        tune._decodes_s(engine, 1)
