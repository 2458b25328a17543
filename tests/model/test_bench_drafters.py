"""bench --drafters measures none, each drafter of the model alone, and all together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import command
from resolved import config_of

from lab.synth.mtp import write_mtp
from specoffload.bench.paths import Measured
from specoffload.commands.bench_drafters import compared, drafters_of
from specoffload.config.resolution import demo_file
from specoffload.generation.statistics import GenerationStats


def measured(tps: float, n_rounds: int) -> Measured:
    stats = GenerationStats(
        n_tokens=100, decode_s=100 / tps, n_rounds=n_rounds, n_drafted=80, n_accepted=60
    )
    return Measured((stats,), (1.0,))


def test_all_together_are_compared_with_the_best_alone() -> None:
    found = {
        "nothing": measured(10, 100),
        "mtp": measured(20, 40),
        "all together": measured(19, 40),
    }
    result = compared(found)
    assert result["best_alone"] == "mtp"
    assert result["together_vs_best"] == pytest.approx(0.95)
    row = result["drafters"]["mtp"]
    assert (row["acceptance_rate"], row["tokens_per_round"]) == (0.75, 2.5)
    assert result["drafters"]["nothing"]["vs_best"] == pytest.approx(0.5)


def test_the_drafters_are_those_that_the_model_has_or_that_are_named(models: Path) -> None:
    path = write_mtp(models, "glm4moe")
    assert drafters_of(config_of(model=path)) == ("mtp", "ngram-mod")
    assert drafters_of(config_of(model=path, draft=path)) == ("mtp", "draft", "ngram-mod")
    assert drafters_of(config_of(model=demo_file("draft.gguf"))) == ("ngram-mod",)
    named = config_of(model=path, spec_given={"--spec-type": "suffix,draft-mtp"})
    assert drafters_of(named) == ("suffix", "mtp")


def test_bench_prints_a_row_for_each_drafter(tmp_path: Path) -> None:
    words = ["--drafters", "--device", "cpu", "-t", "1", "-n", "4", "-r", "1", "-c", "256"]
    done = command("bench", *words, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    rows = result["drafters"]
    assert [*rows] == ["nothing", "mtp", "draft", "ngram-mod", "all together"]
    assert min(row["decode_tps"] for row in rows.values()) > 0
    assert rows["nothing"]["acceptance_rate"] is None
    assert result["together_vs_best"] == rows["all together"]["vs_best"]


def test_options_that_measure_something_else_are_refused() -> None:
    words = ["bench", "--drafters", "-o", "csv"]
    done = command(*words)
    assert done.returncode != 0
    assert "--drafters compares our drafters alone" in done.stderr
