"""The drafters that draft if the user names none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mtp_parts import written
from resolved import config_of

from lab.synth import write_preset
from lab.synth.mtp import write_mtp
from specdec.options import OF_TEXT
from specoffload.session.session import Session

TOKENS = [5, 6, 7, 8] * 10


def opened(path: Path, device: str, **given: Any) -> Session:
    return Session(config_of(model=path, device=device, threads=1, ctx_size=512, **given))


@pytest.fixture(scope="module")
def recurrent(models: Path) -> Path:
    return write_preset("qwen3next", models / "default-qwen3next.gguf", size="tiny", seed=3)


def test_the_text_drafts_for_a_model_without_drafters(tiny_moe: Path) -> None:
    with opened(tiny_moe, "sim") as session:
        line = f"speculation: drafts by {', '.join(OF_TEXT)}, lengths by throughput"
        assert any(note.startswith(line) for note in session.notes)
        drafted = written(session, TOKENS, n=24)
    with opened(tiny_moe, "sim", spec_given={"--spec-type": "none"}) as session:
        assert session.speculation is None
        assert written(session, TOKENS, n=24) == drafted


def test_the_cpu_alone_measures_nothing_for_drafts_that_nobody_asked_for(tiny_moe: Path) -> None:
    with opened(tiny_moe, "cpu") as session:
        assert session.speculation is None
        why = "drafts: off, because on a CPU alone, measuring what they cost"
        assert any(note.startswith(why) for note in session.notes)
    with opened(tiny_moe, "cpu", spec_given={"--spec-type": "suffix"}) as session:
        assert session.speculation is not None


def test_a_recurrent_model_takes_no_snapshots_for_drafts_that_nobody_asked_for(
    recurrent: Path,
) -> None:
    with opened(recurrent, "sim") as session:
        assert session.speculation is None
        assert session.target.layout.context.n_rs_seq == 0
        assert any("needs memory for snapshots of its state" in note for note in session.notes)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_own_layers_a_draft_model_and_the_text_draft_together(models: Path, device: str) -> None:
    path = write_mtp(models, "glm4moe")
    plain = {"spec_given": {"--spec-type": "none"}}
    with opened(path, device, **plain) as session:
        expected = written(session, TOKENS, n=24)
    with opened(path, device, draft=path) as session:
        assert session.speculation is not None
        parts = [drafter.name for drafter in session.speculation.drafter.every]  # type: ignore[attr-defined]
        assert parts == [*OF_TEXT, "mtp", "draft"]
        assert written(session, TOKENS, n=24) == expected
