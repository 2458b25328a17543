"""A short walk of today, a longer one in continuous integration, and steps that once failed."""

from __future__ import annotations

import datetime
import os
from dataclasses import replace
from pathlib import Path

import pytest

from combinations.asking import Reply
from combinations.truth import Truth
from combinations.walks import recorded, report, walk_for
from specoffload.config.resolution import demo_file

SAMPLE_S = float(os.environ.get("SPECOFFLOAD_COMBINATIONS_S", "15"))
SEED = datetime.date.today().isoformat()
IS_SHORT = SAMPLE_S < 60


def test_an_answer_that_is_not_the_plain_one_is_found() -> None:
    """A lost, doubled or other letter, and each count that is wrong by one."""
    truth = Truth(demo_file("draft.gguf"), 1024)
    try:
        prompt = truth.tokens("def f(x):\n    return x")
        plain = truth.plain(prompt, 12)
        right = Reply(plain.text, reason="length", n_prompt=len(prompt), n_answer=len(plain.tokens))
        assert truth.fault_of(prompt, 12, right) == ""
        text = plain.text
        for wrong in (
            replace(right, text=text[:5] + text[6:]), replace(right, text=text[:5] + text[4:]),
            replace(right, text=text + "x"), replace(right, text=text[:-1]),
            replace(right, n_prompt=len(prompt) + 1), replace(right, n_answer=11),
            replace(right, reason="stop"),
        ):  # fmt: skip
            assert truth.fault_of(prompt, 12, wrong)
    finally:
        truth.close()


@pytest.mark.timeout(SAMPLE_S + 600)
def test_a_walk_of_today_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "walks.jsonl"
    n_steps, setting = (6, "pair") if IS_SHORT else (20, "")
    minutes = 0 if IS_SHORT else SAMPLE_S / 120
    walks = [*walk_for(minutes, SEED, record, n_steps=n_steps, setting=setting)]
    with capsys.disabled():
        print("\n" + "\n".join(report(record, SEED)))
    assert [walked.fault for walked in walks if walked.fault] == []
    assert [*recorded(record)] == walks
    assert sum(sum(walked.steps.values()) for walked in walks) >= n_steps / 2
