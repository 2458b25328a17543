"""`tune` searches threads and ubatch, keeps times that agree, and later starts use them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plans import planned_for
from resolved import config_of

from lab.synth import write_preset
from lab.synth.block import write_block
from lab.synth.eagle import write_target
from offload.measuring import LEAD_TOKENS
from offload.model_file import model_hash, read_facts
from offload.plan.ubatch_search import UbatchTrial
from offload.plan.workload import PlannedWork
from offload.times.hits import Sharing
from offload.times.search import TimingRequest
from offload.times.table import CostTable, Way, entry_of
from specoffload import report
from specoffload.commands import tune_ubatch
from specoffload.commands.tune import tune_all
from specoffload.config.options import PlanOptions, Toggle
from specoffload.config.resolution import Config, demo_file
from specoffload.session.session import Session

AGREEING_MS = {1: (45.0, 45.5, 45.2, 45.1), 2: (60.0, 60.5, 60.1, 60.2)}
DEVICE = "sim:vram=600KiB,bw=50MB/s"  # experts stream through eleven slots
SPOILT_MS = {1: (97.0,), 2: (45.0,)}
Times = dict[int, tuple[float, ...]]


def fake_times(times_ms: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decodes take the given milliseconds, whoever measures them."""

    def measured(
        target: object, text: object, table: CostTable, request: TimingRequest, date: str, *,
        on_entry: Callable[[], object], **rest: object,
    ) -> None:  # fmt: skip
        for n, times in times_ms.items():
            for i in range(1, 1 + len(times)):
                table.add(Way.IN_PLACE, n, entry_of([t / 1e3 for t in times[:i]], date))
                on_entry()

    monkeypatch.setattr("specoffload.speculation.costs.measure", measured)


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def tune(
    kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Times], tuple[dict[str, Any], str]]:
    """Runs `tune` as if decodes took the given milliseconds. Returns its data, and its words."""
    said: list[str] = []
    found: list[dict[str, Any]] = []
    config: Config = config_of(
        model=demo_file("target.gguf"), device="cpu", threads=1, ctx_size=256
    )
    monkeypatch.setattr(report, "paragraph", said.append)
    monkeypatch.setattr(report, "data", found.append)
    monkeypatch.setattr("specoffload.cpu_load.Load.is_busy", False)

    def run(times_ms: Times) -> tuple[dict[str, Any], str]:
        fake_times(times_ms, monkeypatch)
        said.clear()
        tune_all(config, minutes=1.0, asked=("threads",))
        return found[-1], " ".join(said)

    return run


def kept_times(folder: Path) -> list[dict[str, Any]]:
    """The runs in the kept file; [] if there is none."""
    return [run for path in folder.glob("*.json") for run in json.loads(path.read_text())["runs"]]


def test_agreeing_times_are_kept(tune: Callable[..., Any], kept_in: Path) -> None:
    data, words = tune(AGREEING_MS)
    assert Path(data["stored"]).is_file()
    assert (data["why_not_stored"], words) == ("", "")
    (run,) = kept_times(kept_in)
    assert run["table"]["ways"]["in place"].keys() == {"1", "2"}


def test_spoilt_times_are_refused_and_nothing_is_kept(
    tune: Callable[..., Any], kept_in: Path
) -> None:
    data, words = tune(SPOILT_MS)
    assert data["stored"] is None
    assert "1 token in place was not timed twice" in data["why_not_stored"]
    assert words.startswith("not kept: a decode of 1 token")
    assert kept_times(kept_in) == []


def test_spoilt_times_leave_what_was_kept_before(tune: Callable[..., Any], kept_in: Path) -> None:
    tune(AGREEING_MS)
    (before,) = kept_times(kept_in)
    data, _ = tune({1: (97.0, 140.0, 60.0, 200.0), 2: (45.0, 45.5)})
    assert "differ by" in data["why_not_stored"]
    assert kept_times(kept_in) == [before]


def test_a_busy_machine_is_a_reason_to_keep_nothing(
    tune: Callable[..., Any], kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specoffload.cpu_load.Load.is_busy", True)
    data, words = tune(AGREEING_MS)
    assert data["stored"] is None
    assert "other programs took" in words
    assert kept_times(kept_in) == []


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "mixture.gguf"
    return write_preset("qwen3-235b-a22b", path, size="tiny", seed=3, n_layer=4)


@pytest.fixture
def streaming(kept_in: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Returns the configuration of a start whose experts stream, as found on this machine now."""
    fake_times(AGREEING_MS, monkeypatch)
    monkeypatch.setattr("specoffload.cpu_load.Load.is_busy", False)

    def config() -> Config:
        return config_of(
            model=mixture, device="sim:vram=600KiB,bw=50MB/s", ctx_size=1024, threads=1
        )

    return config


def tuned(config: Config, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    found: list[dict[str, Any]] = []
    with monkeypatch.context() as patch:
        patch.setattr(report, "data", found.append)
        tune_all(config, minutes=5.0, asked=("threads",))
    rows: dict[str, dict[str, str]] = found[-1]["found"]
    return rows


def test_the_tuned_ubatch_is_planned_and_opened(
    streaming: Callable[[], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 128 tokens are made to look fastest, and the plan would not choose these."""
    planned = planned_for(streaming(), PlanOptions()).plan.n_ubatch
    assert planned == 512

    def measured(self: object, session: Session) -> UbatchTrial:
        return UbatchTrial(session.target.layout.context.n_ubatch * 1e-3, 1e-3)

    monkeypatch.setattr(tune_ubatch._UbatchSearch, "_measured", measured)
    row = tuned(streaming(), monkeypatch)["--ubatch-size"]
    assert row["chosen"] == "128"
    assert "512: prompts" in row["why"]
    words = "Prompts are computed 128 tokens at once, which was the fastest"
    plan = planned_for(streaming(), PlanOptions()).plan
    assert plan.n_ubatch == 128
    assert any(words in reason for reason in plan.reasons)
    with Session(streaming()) as session:
        assert session.target.layout.context.n_ubatch == 128
        assert any(words in note for note in session.notes)
    given = config_of(model=streaming().model, device=DEVICE, ctx_size=1024, ubatch_size=256)
    assert planned_for(given, PlanOptions()).layout.context.n_ubatch == 256  # a flag wins


def test_an_interrupted_search_goes_on_where_it_was(
    streaming: Callable[[], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []

    def measured(self: object, session: Session) -> UbatchTrial:
        timed.append(session.target.layout.context.n_ubatch)
        if len(timed) == 2:
            raise KeyboardInterrupt
        return UbatchTrial(1e-3 if timed[-1] == 512 else 2e-3, 1e-3)

    monkeypatch.setattr(tune_ubatch._UbatchSearch, "_measured", measured)
    with contextlib.suppress(KeyboardInterrupt):
        tuned(streaming(), monkeypatch)
    assert timed == [512, 1024]
    with Session(streaming()) as session:
        assert session.target.layout.context.n_ubatch == 512  # an unfinished search chooses nothing
    row = tuned(streaming(), monkeypatch)["--ubatch-size"]
    assert timed == [512, 1024, 1024, 256]
    timed.clear()
    assert tuned(streaming(), monkeypatch)["--ubatch-size"] == row
    assert timed == [], "the same day, a search that ended is not repeated"


@pytest.mark.parametrize("n_ctx", [1024, 64])
def test_a_trial_decodes_what_follows_its_prompts(
    n_ctx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode of the prompt's own tokens would find their experts in the slots."""
    decoded: list[list[int]] = []
    n_tokens = [0]

    def extend(_: int, tokens: list[int], n_logits: int | None = None) -> None:
        decoded.append([*tokens])
        n_tokens[0] += len(tokens)
        assert n_tokens[0] <= n_ctx

    sequences: Any = SimpleNamespace(
        n_ctx=n_ctx, extend=extend, length=lambda _: n_tokens[0],
        rewind=lambda _, n: n_tokens.__setitem__(0, n),
    )  # fmt: skip
    context = SimpleNamespace(n_ubatch=64)
    target = SimpleNamespace(
        sequences=sequences, n_ctx=n_ctx, layout=SimpleNamespace(context=context)
    )
    table = CostTable(16, 4, {Way.IN_PLACE: {1: entry_of([0.1])}})
    costs = SimpleNamespace(run=SimpleNamespace(sharing=Sharing(40, 2), table=table))
    session: Any = SimpleNamespace(target=target, costs=costs)
    monkeypatch.setattr(tune_ubatch, "real_text", lambda _: [*range(1000)])
    search: Any = SimpleNamespace(_work=PlannedWork(256, 64))
    trial = tune_ubatch._UbatchSearch._measured(search, session)
    n = len(decoded[0])
    assert n == min(128, n_ctx - 8)
    assert decoded == [[*range(n)]] * 3 + [[n + i] for i in range(LEAD_TOKENS + 7)]
    assert (trial.n_slots, trial.n_resident, n_tokens) == (40, 2, [0])
    assert trial.decode_s <= 0.1


def test_every_measured_choice_has_a_row(
    kept_in: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(AGREEING_MS, monkeypatch)
    monkeypatch.setattr("specoffload.cpu_load.Load.is_busy", False)
    target = write_preset("deepseek-v3", models / "tune-rows.gguf", size="tiny", seed=3)
    draft = write_preset("qwen2.5-0.5b", models / "tune-draft.gguf", size="tiny", seed=3)
    config = config_of(
        model=target, draft=draft, device="sim", vram_bytes=1 << 20, ctx_size=512, threads=1,
        ubatch_size=128, hybrid=Toggle.ON,
    )  # fmt: skip
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(report, "data", found.append)
    tune_all(config, minutes=0.1, asked=("threads", "ubatch_size"))
    rows = found[-1]["found"]
    assert [*rows] == [
        "threads and placement", "--ubatch-size", "--min-batch", "--hybrid", "MLA", "draft engine",
    ]  # fmt: skip
    assert all(row["chosen"] for row in rows.values())
    assert rows["--min-batch"]["chosen"].startswith("experts in batches of ")
    assert rows["--hybrid"]["chosen"].startswith("batches of ")
    assert rows["MLA"]["chosen"].startswith("broadcast form for up to ")
    assert rows["draft engine"]["chosen"] == "libllama"


def test_a_block_draft_is_measured_and_its_step_used(
    kept_in: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(AGREEING_MS, monkeypatch)
    monkeypatch.setattr("specoffload.cpu_load.Load.is_busy", False)
    target = write_target(models, "qwen3moe")
    draft = write_block(models, target, "dflash2")
    config = config_of(model=target, draft=draft, device="cpu", threads=1, ctx_size=256)
    tune_all(config, minutes=0.1, asked=("threads",))
    (run,) = kept_times(kept_in)
    (step_s,) = [kept["step_s"] for kept in run["drafts"].values()]
    assert [*run["drafts"]] == [model_hash(read_facts(draft))]
    monkeypatch.setattr(
        "specoffload.speculation.draft_prices.step_by_depth_s",
        lambda *_: pytest.fail("a kept step is measured again"),
    )
    with Session(config) as session:
        assert session.costs.drafts.steps_s == {"dflash": step_s}
        assert session.speculation is not None
        assert session.speculation.policy.name == "throughput"


def test_threads_are_searched_once_a_day_and_used_by_what_follows(
    kept_in: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(AGREEING_MS, monkeypatch)
    monkeypatch.setattr("specoffload.cpu_load.Load.is_busy", False)
    # Decodes of under 1 ms have no steady times while other tests run.
    monkeypatch.setattr("specoffload.commands.tune.is_steady", lambda _: True)
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(report, "data", found.append)
    for _ in range(2):
        tune_all(config_of(model=mixture, device="cpu", ctx_size=256), minutes=0.1)
    first, again = (data["found"]["threads and placement"] for data in found)
    assert first["why"].startswith("measured now: T(1)")
    assert again["why"].startswith("measured today: T(1)")
    assert again["chosen"] == first["chosen"]
    (path,) = kept_in.glob("mixture-*.json")
    (run,) = json.loads(path.read_text())["runs"]
    n = first["chosen"].split(" thread")[0].split()[-1]
    assert run["settings"]["threads"] == f"{n}/{n}"
