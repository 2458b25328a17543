"""Speculation over split layers writes what the target alone would."""

from __future__ import annotations

from pathlib import Path

import pytest
from budgets import budget
from lossless_parts import (
    BATCH_NOISE,
    FIXED,
    GREEDY,
    N_PREDICT,
    SAMPLED,
    Judge,
    generate,
    open_session,
)

from offload.model import layer_of
from offload.streaming.options import StreamingOptions
from specoffload.bench.workloads import prompts
from specoffload.config.options import Toggle

pytestmark = pytest.mark.usefixtures("batches_are_cheap", "measures_briefly")


@pytest.mark.parametrize(
    "spec",
    [
        FIXED,
        {**FIXED, "--spec-accept": "reject"},
    ],
    ids=["match", "reject"],
)
def test_drafts_verified_by_split_layers_write_the_targets_own_text(
    exact: Path, judge: Judge, spec: dict[str, object]
) -> None:
    more = {
        "vram_bytes": budget(exact, StreamingOptions(), "half"),
        "n_cpu_moe": 99,
        "min_batch": "1000",
        "hybrid": Toggle.ON,
    }
    runs = []
    with open_session(exact, spec, streamed=True, **more) as opened:
        before = opened.target.counters()
        for request in (GREEDY, SAMPLED):
            for text in (prompts("code")[1], prompts("prose")[0]):
                opened.forget()
                runs.append(run := generate(opened, text, request))
                if request is SAMPLED and "--spec-accept" in spec:
                    judge.check_support(run, request)
                else:
                    judge.check(run, request)
                assert judge.distance(run) < BATCH_NOISE
        after = opened.target.counters()
    assert all(len(run.tokens) == N_PREDICT for run in runs)
    assert sum(run.n_rejected for run in runs) > 0
    assert sum(run.stats.n_accepted for run in runs) > 0
    n_rounds = sum(run.stats.n_rounds for run in runs)
    assert opened.target.plan is not None
    n_layers = len({layer_of(entry.name) for entry in opened.target.plan.streamed})
    assert after.split_layers - before.split_layers >= n_rounds * n_layers, "every round was split"
    assert after.n_pairs_host > before.n_pairs_host
    assert after.n_pairs_hit > before.n_pairs_hit
