"""The draft's engine that a disturbed measurement chose is left again by the next starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload.model_file import read_facts
from offload.times.repeated import MOST_FROM_STARTS, RepeatedTime
from specdec.decoding.loop import StepReport
from specdec.types import Decision, Draft, Round
from specoffload.config.resolution import demo_file
from specoffload.kept import KeptFile
from specoffload.kept_engines import LIBLLAMA, TORCH, DraftSteps, KeptEngines
from specoffload.opening import draft_engine
from specoffload.opening.draft_engine import EngineChoice, keep_step, measured_choice

TRUE_S = {TORCH: 0.001, LIBLLAMA: 0.003}
VERIFY_S, N_STEPS = 0.012, 4  # of a round: a decode of the target, and the draft's steps
PER_START = 100  # decodes of a session
KEY = "draft"
Disturb = Callable[[int, str], float]  # factor on an engine's time, by the number of the start


@pytest.fixture
def file(tmp_path: Path) -> KeptFile:
    return KeptFile(tmp_path, read_facts(demo_file("target.gguf")))


class Machine:
    """Starts and sessions in virtual time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factors: Mapping[str, float] = {}
        self.is_busy = False
        self.n_measured = 0
        load = SimpleNamespace(others=lambda: SimpleNamespace(is_busy=self.is_busy))
        monkeypatch.setattr(draft_engine, "Watch", lambda: load)
        monkeypatch.setattr(draft_engine, "_measured", self._measured)

    def _measured(self, _: object, names: tuple[str, ...]) -> dict[str, float]:
        self.n_measured += len(names)
        return {name: self.factors.get(name, 1.0) * TRUE_S[name] for name in names}

    def start(self, file: KeptFile) -> EngineChoice:
        return measured_choice(file, KEY, {})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def a_round(step_s: float, n_steps: int = N_STEPS, **changes: Any) -> Round:
    draft = Draft((1,) * n_steps, (0.9,) * n_steps, "draft", Decision(1, ""), n_steps=n_steps)
    return Round(draft, 2, (1, 1, 2), step_s * n_steps, VERIFY_S, **changes)


def report(*rounds: Round) -> StepReport:
    return StepReport(0.0, 0.0, rounds=[(object(), one) for one in rounds])  # type: ignore[misc]


def session(machine: Machine, file: KeptFile, serving: float = 1.0) -> float:
    """The share of the best speed that a session of `PER_START` decodes has."""
    choice, steps = machine.start(file), DraftSteps()
    for _ in range(PER_START):
        steps.on_step(report(a_round(serving * TRUE_S[choice.name])))
    assert keep_step(file, choice, steps.step_s) == ""
    best_s, its_s = (
        VERIFY_S + N_STEPS * seconds for seconds in (min(TRUE_S.values()), TRUE_S[choice.name])
    )
    return best_s / its_s


@pytest.mark.parametrize("n_before", [0, 1, 2, 7])
@pytest.mark.parametrize(
    ("engine", "factor"), [(TORCH, 50.0), (TORCH, 3.5), (LIBLLAMA, 1 / 50), (LIBLLAMA, 0.2)]
)
def test_a_disturbed_measurement_of_an_engine_costs_little_speed(
    engine: str, factor: float, n_before: int, machine: Machine, file: KeptFile
) -> None:
    """After 100 decodes 5 %, and nothing after 1,000, whichever start was disturbed."""
    for _ in range(n_before):
        session(machine, file)
    machine.factors = {engine: factor}
    first = session(machine, file)
    machine.factors = {}
    shares = [session(machine, file) for _ in range(10)]
    assert n_before or first < 0.95, "otherwise nothing would have to heal"
    assert shares[0] >= 0.95
    assert shares[-1] == 1.0


def test_a_busy_session_does_not_change_the_engine(machine: Machine, file: KeptFile) -> None:
    for _ in range(3):
        session(machine, file)
    session(machine, file, serving=50.0)
    assert [session(machine, file) for _ in range(10)] == [1.0] * 10


def test_a_measurement_while_others_ran_counts_only_without_another(
    machine: Machine, file: KeptFile
) -> None:
    machine.is_busy, machine.factors = True, {TORCH: 50.0}
    assert [machine.start(file).name for _ in range(2)] == [LIBLLAMA] * 2
    machine.is_busy, machine.factors = False, {}
    assert machine.start(file).name == TORCH
    machine.is_busy, machine.factors = True, {TORCH: 50.0}
    for _ in range(3):
        assert machine.start(file).name == TORCH
    kept = file.load()[0].engines[KEY]
    assert kept.of(TORCH).values == (TRUE_S[TORCH],)
    n_before = machine.n_measured
    for _ in range(10):
        assert machine.start(file).name == TORCH
    assert machine.n_measured == n_before + 2, "the fifth start is the last one of a day"


def test_long_texts_do_not_change_the_engine_to_and_fro(machine: Machine, file: KeptFile) -> None:
    """Steps with a long context take longer than the other engine without a context."""
    names = []
    for _ in range(20):
        session(machine, file, serving=4.0)
        names.append(machine.start(file).name)
    assert names == [TORCH] * 20
    assert machine.n_measured <= 2 * MOST_FROM_STARTS


def test_a_session_that_contradicts_the_choice_unsettles_it(
    machine: Machine, file: KeptFile
) -> None:
    for _ in range(3):
        machine.start(file)
    for _ in range(2):
        session(machine, file, serving=2.9)
    assert file.load()[0].engines[KEY].unsettled == (), "still shorter than the other engine's"
    for _ in range(2):
        session(machine, file, serving=50.0)
    kept = file.load()[0].engines[KEY]
    assert (kept.unsettled, kept.faster) == ((TORCH,), TORCH)
    machine.factors = {TORCH: 40.0}
    assert machine.start(file).name == LIBLLAMA, "the start agrees with the sessions"


def test_engines_keep_what_another_start_measured_meanwhile(
    machine: Machine, file: KeptFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(openers: object, names: tuple[str, ...]) -> dict[str, float]:
        monkeypatch.setattr(draft_engine, "_measured", machine._measured)
        machine.start(file)
        return machine._measured(openers, names)

    monkeypatch.setattr(draft_engine, "_measured", measured)
    machine.start(file)
    assert file.load()[0].engines[KEY].of(TORCH).n == 2


def test_starts_measure_until_values_agree_and_no_more(machine: Machine, file: KeptFile) -> None:
    for _ in range(6):
        machine.start(file)
    assert machine.n_measured == 3 * 2
    file.path.unlink()
    machine.n_measured = 0
    for i in range(8):
        machine.factors = {TORCH: 1.0 + i}
        machine.start(file)
    assert machine.n_measured == MOST_FROM_STARTS + 3, "only the engine that is not settled"


def test_old_measurements_are_replaced(
    machine: Machine, file: KeptFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_engine, "today", lambda: "2026-01-01")
    for _ in range(3):
        machine.start(file)
    machine.factors = {TORCH: 10.0}
    monkeypatch.setattr(draft_engine, "today", lambda: "2026-01-30")
    assert machine.start(file).name == TORCH
    monkeypatch.setattr(draft_engine, "today", lambda: "2026-01-31")
    choice = machine.start(file)
    assert (choice.name, file.load()[0].engines[KEY].date) == (LIBLLAMA, "2026-01-31")
    assert choice.words == (
        "draft engine: libllama (a token takes 10.00 ms in torch and 3.00 ms in libllama; "
        "measured now)"
    )


def test_a_file_of_an_earlier_version_has_one_measurement(
    machine: Machine, file: KeptFile, caplog: pytest.LogCaptureFixture
) -> None:
    machine.start(file)
    data = json.loads(file.path.read_text(encoding="utf-8"))
    data["engines"][KEY]["seconds"] = {TORCH: 0.5, LIBLLAMA: 0.003}
    file.path.write_text(json.dumps(data), encoding="utf-8")
    assert file.load()[0].engines[KEY].of(TORCH) == RepeatedTime((0.5,))
    assert machine.start(file).name == TORCH, "the shorter of two times counts"
    assert caplog.records == []


def steps_of(*reports: StepReport, times: int = 20) -> float:
    steps = DraftSteps()
    for _ in range(times):
        for one in reports:
            steps.on_step(one)
    return steps.step_s


def test_only_chains_of_the_draft_model_for_one_text_are_timed() -> None:
    chain = a_round(0.25)
    assert steps_of(report(chain)) == 0.25
    assert steps_of(report(chain), times=15) == 0.0, "too few rounds"
    assert steps_of(report(chain, chain)) == 0.0, "steps of two texts take longer"
    free = Round(Draft((1,), (0.9,), "ngram-mod", Decision(1, "")), 1, (1, 2), 0.1, VERIFY_S)
    assert steps_of(report(free), report()) == 0.0
    tree = Draft((1, 2), (0.9, 0.5), "draft", Decision(1, ""), n_steps=1, n_extra_rows=1)
    assert steps_of(report(Round(tree, 1, (1,), 0.5, VERIFY_S))) == 0.0


def test_no_step_is_kept_of_an_engine_that_was_not_measured(file: KeptFile) -> None:
    assert keep_step(file, EngineChoice("torch", "asked for"), 0.1) == ""
    assert keep_step(file, EngineChoice("torch", "measured", KEY), 0.0) == ""
    assert not file.path.exists()
    keep_step(file, EngineChoice("torch", "measured", KEY), 0.1)
    assert file.load()[0].engines == {}


def test_engines_that_are_as_fast_keep_the_first() -> None:
    same = KeptEngines().with_seconds({LIBLLAMA: 0.1, TORCH: 0.1})
    assert same.faster == TORCH
