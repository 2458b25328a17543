"""Default plans beside the best prompts and answers of any plan: docs/plans.md lists all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab import best_plans
from lab.plans import PAGE, README_TITLES
from lab.synth.published import published_facts
from offload.plan.placement import PlannedModel
from offload.times.decodes import cpu_s
from offload.times.machine import TYPICAL

TITLES = ("gpt-oss-120b", "GLM-4.6", "DeepSeek-R1", "Kimi-K2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[best_plans.Row]:
    return [*best_plans.rows(tmp_path_factory.mktemp("headers"), TITLES)]


def test_a_default_plan_has_both_speeds_or_is_listed_with_its_reason(
    found: list[best_plans.Row],
) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert {row.title for row in found} == set(TITLES)
    for row in found:
        assert row.line in lines, "run scripts/lab/run best-plans"
        assert row.reason or (row.prompt_share >= 0.90 and row.decode_share >= 0.95)
        assert row.prompt_share <= 1.0
        assert row.decode_share <= 1.0


def test_the_page_lists_every_model_that_streams() -> None:
    part = PAGE.read_text("utf-8").split("<!-- best -->")[1].split("<!-- end -->")[0]
    titles = {line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")}
    assert titles - {"model"} == set(README_TITLES)


def test_kimi_k2_streams_prompts_on_12_gib(found: list[best_plans.Row], tmp_path: Path) -> None:
    """The CPU alone would compute 19 tokens/s."""
    (row,) = (row for row in found if (row.title, row.gib) == ("Kimi-K2", 12))
    facts = published_facts("Kimi-K2", tmp_path)
    model = PlannedModel(facts, best_plans.request_of(12))
    n = row.plan.n_ubatch
    alone_tps = n / float(np.asarray(cpu_s(TYPICAL, model.work, row.plan.sharing, n)))
    assert row.plan.computes_ubatches
    assert row.prompt_tps > 4 * alone_tps
