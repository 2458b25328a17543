"""`bench --route-cached`: what a strength costs and brings on one text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from resolved import config_of
from splits import at_random

from specoffload.commands import bench_routing as bench
from specoffload.config.options import BenchOptions, Toggle
from specoffload.config.resolution import Config
from specoffload.errors import UsageError

N = 40


def config_with_splits() -> Config:
    config = config_of(
        device="sim:vram=8MiB", ctx_size=512, threads=1, hybrid=Toggle.ON,
        without=frozenset({"lend", "profile"}), spec_given={"--spec-type": "none"},
    )  # fmt: skip
    return replace(config, streaming=replace(config.streaming, splitter=at_random(1)))


def test_a_stronger_preference_keeps_fewer_choices_and_diverges(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.bench_routing(config_with_splits(), BenchOptions(n_predict=N, strengths=(1.0,)))
    shown = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    exact, strong = ([cell.strip() for cell in row] for row in shown)
    assert exact[:4] == ["0", "", "", ""]
    assert exact[5:7] == ["0.0000", "0.000"]
    assert 50 < float(strong[1].rstrip("%")) < 100
    assert float(strong[2].rstrip("%")) > float(strong[3].rstrip("%")), "more hits than without"
    assert float(strong[5]) > 0
    assert float(strong[7]) != float(exact[7])


def test_divergences_are_those_of_a_sum_over_tokens() -> None:
    rng = np.random.default_rng(1)
    p, q = (rng.dirichlet(np.ones(9), 4) for _ in range(2))
    found = bench.divergences(np.log(p).astype(np.float32), np.log(q).astype(np.float32))
    assert found == pytest.approx((p * np.log(p / q)).sum(axis=1), rel=1e-4)
    assert bench.divergences(np.log(p).astype(np.float32), np.log(p).astype(np.float32)).max() == 0


def test_strengths_and_lengths_are_checked() -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        bench.bench_routing(config_with_splits(), BenchOptions(strengths=(0.5, 1.5)))
    with pytest.raises(UsageError, match=r"-n 900: .* the context 512"):
        bench.bench_routing(config_with_splits(), BenchOptions(n_predict=900, strengths=(0.5,)))
