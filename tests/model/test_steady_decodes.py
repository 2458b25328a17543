"""A steady decode enters few of our files, as `scripts/lab/run entered --decode` counts them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from in_process import command

from lab.entered import STEADY, Tracer, working_way
from specoffload.config.resolution import demo_file
from specoffload.slots.batcher import Batcher

# Decodes that are followed. A copy, a lost thread or a timing enters more files in some of them.
N_STEPS = 12


@pytest.mark.parametrize(
    ("hybrid", "min_batch", "most"),
    # A small model has a faster way in one run and another one in the next, so the way is given.
    # Split layers enter 43 files, and 45 if an expert is copied to the device, with one more in a
    # run of many. Streamed ones enter 36, and 39 then.
    [("off", "off", 30), ("off", "1", 39), ("on", "auto", 46)],
    ids=["in place", "streamed", "split"],
)
def test_a_steady_decode_enters_few_files(hybrid: str, min_batch: str, most: int) -> None:
    step, tracers = Batcher.step, [Tracer() for _ in range(STEADY + N_STEPS)]
    n_steps = 0

    def followed(self: Batcher) -> Any:
        nonlocal n_steps
        n_steps += 1
        if not STEADY <= n_steps < STEADY + N_STEPS:
            return step(self)
        sys.setprofile(tracers[n_steps].note)
        try:
            return step(self)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batcher, "step", followed)
        done = command(
            "run", "-m", demo_file("target.gguf"), "--device", "sim", "--hybrid", hybrid,
            "--min-batch", min_batch,
            "-t", "1", "-c", "256", "-n", "32", "-no-cnv", "--spec-type", "none", "-p", "def f(x):",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ways = [working_way(tracer.calls) for tracer in tracers[STEADY:]]
    fewest = min(ways, key=lambda way: len(way.again))
    assert "offload/sequences/sequences.py" in fewest.again
    assert ("offload/stream/split_path.py" in fewest.again) == (hybrid == "on")
    assert len(fewest.again) <= most, [*fewest.again]
