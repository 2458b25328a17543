"""Each drafter's step is measured with the rows that it takes in, kept, and in the price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from resolved import config_of

from lab.options import engine_options
from lab.synth.block import BLOCK, write_block
from lab.synth.eagle import write_eagle, write_target
from lab.synth.mtp import write_mtp
from offload.decode import Batch
from offload.engine import open_engine
from offload.model_file import model_hash, read_facts
from specdec.policies.throughput import Throughput
from specdec.policies.walk import DrafterOdds
from specoffload.commands.profile import measuring_config
from specoffload.config.resolution import demo_file
from specoffload.generation.generation import GenerateOptions
from specoffload.opening.draft_model import measure_layers
from specoffload.session.session import Session
from specoffload.speculation.costs import SessionCosts


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def kept_steps(folder: Path) -> dict[str, float]:
    """The kept seconds of a draft step, by drafter's key."""
    (kept,) = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    (run,) = kept["runs"]
    return {key: draft["step_s"] for key, draft in run["drafts"].items()}


def test_a_measured_step_contains_the_rows_that_a_draft_takes_in(models: Path) -> None:
    """Four steps of one token, and two accepted tokens of the draft before: 6 tokens a draft."""
    options = engine_options(device="cpu", n_ctx=256, mtp=True, n_threads=1)
    with open_engine(write_mtp(models, "glm4moe"), options) as engine:
        layers = engine.opened.row_draft
        assert layers is not None
        step, n_computed = layers._step, 0

        def counted(batch: Batch, *rest: Any, **options: Any) -> Any:
            nonlocal n_computed
            n_computed += len(batch.tokens)
            return step(batch, *rest, **options)

        layers._step = counted
        text = [5 + i % 400 for i in range(200)]
        assert measure_layers(layers, text, lambda: float(n_computed), 16) == 6 / 4
        assert layers.length(0) == 0, "the measurement leaves nothing in the memory"


@pytest.mark.parametrize(("n_max", "n_block"), [(None, BLOCK), (3, 4), (40, BLOCK)])
def test_a_measured_block_is_as_long_as_drafted_ones(
    models: Path, n_max: int | None, n_block: int
) -> None:
    """The last token and the mask tokens, and the rows of half a draft and of the last token."""
    target = write_target(models, "qwen3moe")
    options = engine_options(
        device="cpu", n_ctx=256, n_threads=1, row_file=write_block(models, target)
    )
    with open_engine(target, options) as engine:
        layers = engine.opened.row_draft
        assert layers is not None
        step, n_computed, blocks = layers._step, 0, set[int]()

        def counted(batch: Batch, *rest: Any, taken: bool) -> Any:
            nonlocal n_computed
            n_computed += len(batch.tokens)
            if not taken:
                blocks.add(len(batch.tokens))
            return step(batch, *rest, taken=taken)

        layers._step = counted
        text = [5 + i % 400 for i in range(200)]
        n_taken = 1 + min(4, n_block - 1) // 2
        took = measure_layers(layers, text, lambda: float(n_computed), 16, n_max)
        assert took == n_block + n_taken
        assert blocks == {n_block}
        assert layers.length(0) == 0


def test_shorter_blocks_are_measured_and_kept_apart(models: Path, kept_in: Path) -> None:
    target = write_target(models, "qwen3moe")
    block = write_block(models, target)
    key = model_hash(read_facts(block))
    for n_max in (None, 2):
        given = {"--spec-type": "dflash"} | ({} if n_max is None else {"--spec-draft-n-max": n_max})
        config = config_of(
            model=target, draft=block, device="cpu", threads=1, ctx_size=256, spec_given=given
        )
        with Session(config) as session:
            assert session.costs.drafts.steps_s.keys() == {"dflash"}
            assert session.costs.drafts.profile.draft_step_s > 0
    assert kept_steps(kept_in).keys() == {key, f"{key} blocks of 2"}


def test_profile_measures_the_step_of_own_layers(models: Path, kept_in: Path) -> None:
    path = write_mtp(models, "glm4moe")
    config = measuring_config(config_of(model=path, device="cpu", threads=1, ctx_size=256))
    with Session(config, keeps_hits=False, prices=True) as session:
        assert session.costs.drafts.steps_s.keys() == {"mtp"}
        assert session.costs.drafts.profile.draft_step_s == session.costs.drafts.steps_s["mtp"] > 0
    assert kept_steps(kept_in)["own layers"] == session.costs.drafts.steps_s["mtp"]


def test_a_draft_model_and_own_layers_are_priced_apart_and_kept(
    kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"--spec-type": "draft-mtp,draft,ngram-mod"}
    options = {"device": "cpu", "threads": 1, "ctx_size": 512, "spec_given": given}
    files = {"model": demo_file("target.gguf"), "draft": demo_file("draft.gguf")}
    with Session(config_of(**files, **options)) as session:
        first = dict(session.costs.drafts.steps_s)
        assert first.keys() == {"mtp", "draft"}
        assert min(first.values()) > 0
        assert session.speculation is not None
        policy = session.speculation.policy
        assert isinstance(policy, Throughput)
        rebuild, steps_s = policy._rebuild, session.costs.drafts.steps_s
        priced: list[tuple[str, float, float]] = []

        def noted(source: DrafterOdds, name: str) -> None:
            rebuild(source, name)
            if name in first:
                priced.append((name, source.step / policy.rate, steps_s[name]))

        monkeypatch.setattr(policy, "_rebuild", noted)
        # Both are asked, however long a step and reading the text take on this machine.
        monkeypatch.setattr(policy, "postponed", lambda *_: None)
        monkeypatch.setattr(policy, "_wait_for_probe", lambda *_: None)
        for _ in session.generate("def area(", GenerateOptions(n_predict=300, ignore_eos=True)):
            pass
        learnt = dict(steps_s)
        for drafter in ("mtp", "draft"):  # how often plans were made depends on measured times
            noted(policy._sources[drafter], drafter)
    for drafter in ("mtp", "draft"):
        assert learnt[drafter] != first[drafter], "serving corrects the step"
        of_plans = [(price_s, step_s) for name, price_s, step_s in priced if name == drafter]
        assert len(of_plans) >= 2
        for price_s, step_s in of_plans:
            assert price_s == pytest.approx(step_s), "each drafter's own step, as learnt so far"
    assert sorted(kept_steps(kept_in).values()) == sorted(learnt.values())


def test_the_step_of_an_eagle_file_is_priced_and_kept(models: Path, kept_in: Path) -> None:
    target = write_target(models, "qwen3moe")
    eagle = write_eagle(models, target)
    config = config_of(model=target, draft=eagle, device="cpu", threads=1, ctx_size=256)
    with Session(config) as session:
        assert session.costs.drafts.steps_s.keys() == {"eagle3"}
        assert (
            session.costs.drafts.profile.draft_step_s == session.costs.drafts.steps_s["eagle3"] > 0
        )
        assert session.speculation is not None
        assert session.speculation.policy.name == "throughput"
    assert kept_steps(kept_in).keys() == {model_hash(read_facts(eagle))}


def test_rows_of_a_long_text_without_drafts_cost_no_decode(models: Path) -> None:
    options = engine_options(device="cpu", n_ctx=256, mtp=True, n_threads=1)
    with open_engine(write_mtp(models, "glm4moe"), options) as engine:
        layers, text = engine.opened.row_draft, [5 + i % 400 for i in range(80)]
        assert layers is not None
        for at in range(0, 80, 8):
            engine.sequences.extend(0, text[at : at + 8], 0)
            layers.keep_recent(0, most=32, kept=8)
        assert layers.n_taken == 0
        tail = layers.tail(0, [*text, 7])
        assert 8 < len(tail) <= 33
        assert tail == [*text, 7][-len(tail) :]
        layers.extend(0, tail)
        assert layers.length(0) == 81
        assert layers.n_taken == len(tail)
        assert layers.n_unknown_rows == 0, "the row before the kept tokens is known"


def test_what_fails_at_close_is_said_and_does_not_end_the_command(
    kept_in: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`bench --policies` once lost its final table to an error of the learner."""

    def fail(costs: SessionCosts) -> None:
        raise ValueError("1052910.9 s is not a valid time")

    monkeypatch.setattr(SessionCosts, "close", fail)
    config = config_of(model=demo_file("target.gguf"), device="cpu", threads=1, ctx_size=256)
    with Session(config) as session:
        *_, last = session.generate("def f(", GenerateOptions(n_predict=4))
    assert last.stats is not None
    assert "learnt times are not kept: 1052910.9 s is not a valid time" in caplog.text
