"""A kept measurement that no machine can have made counts as missing, and no other one does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numa.place import Strategy
from numa.tune import Candidate, Trial, TuneResult
from offload.model_file import read_facts
from offload.plan.ubatch_search import UbatchTrial
from offload.plan.workload import PlannedWork, TokenMix
from offload.schedule.division import DeviceCosts, MeasuredCosts, SideTimes
from offload.times.mapped_reads import MappedReads
from offload.times.repeated import RepeatedRate, RepeatedTime
from offload.times.table import CostTable, DecodeTime, Way
from specoffload.config.resolution import demo_file
from specoffload.kept import (
    Kept,
    KeptDraft,
    KeptFile,
    KeptRun,
    KeptUbatch,
)
from specoffload.kept_bounds import drop_absurd, expert_bounds, is_old
from specoffload.kept_engines import KeptEngines
from specoffload.kept_values import KeptDisk, KeptLayouts, KeptLinks, KeptReads

EXPERT_BYTES = 10e6
DAY = "2026-01-02"
Change = Callable[[Kept], Any]


def profile() -> Kept:
    """A kept file with each kind of measurement."""
    costs = MeasuredCosts(
        SideTimes({1: 1e-3, 4: 2e-3}), SideTimes({1: 1e-4}, 1e-5), 1e-3, 1.2, 1.5, (0.5, 0.5),
        host_spread=0.02, device_spread=0.03, copy_spread=0.04,
    )  # fmt: skip
    table = CostTable(16, 4, {Way.IN_PLACE: {1: DecodeTime(0.1, 0.05, 3, DAY)}})
    draft = KeptDraft(0.01, step_spread=0.05)
    candidate = Candidate(Strategy.SINGLE, 4)
    reads = MappedReads(2e-6, 2e10, 1e10, 6e-6, 2.2e10)
    return Kept(
        runs=[KeptRun({"device": "d"}, table=table, split=costs, date=DAY, drafts={"m": draft},
                      splits={"CUDA0": costs})],
        engines={
            "draft": KeptEngines(
                {"torch": RepeatedTime((0.01, 0.011)), "libllama": RepeatedTime((0.02,))}, DAY
            )
        },
        numa=TuneResult(
            candidate, (Trial(candidate, {1: 0.1}, "", {1: 0.06}),), (), "node0:4c,8g", DAY, "m",
            {"device": "d"}, 40, 2,
        ),
        disks={"nvme0": KeptDisk({1: RepeatedRate((1e9,)), 8: RepeatedRate((3e9, 1e9, 3e9))}, DAY)},
        links={"CUDA0": KeptLinks([RepeatedRate((2e10,))], [RepeatedRate((1e10,))], DAY)},
        reads={"CUDA0, card": KeptReads([reads, replace(reads, bytes_per_s=1e10)], DAY)},
        layouts={"q4_K": KeptLayouts(*(RepeatedTime((s,)) for s in (1e-3, 2e-3, 1e-5, 2e-5)), DAY)},
        workers=[DeviceCosts("sim", 1, "b", costs, DAY)],
        ubatches=[KeptUbatch(
            {"c": "4096"}, 512, DAY, {512: UbatchTrial(1e-3, 0.1, 40, 2, 0.03, 0.04)},
            {"device": "d"}, PlannedWork(4096, 512),
        )],
    )  # fmt: skip


def slow_side(kept: Kept, seconds: float) -> MeasuredCosts:
    (run,) = kept.runs
    assert run.split is not None
    return replace(run.split, host=SideTimes({1: 1e-3, 4: seconds}))


def slow_numa(kept: Kept) -> None:
    assert kept.numa is not None
    (trial,) = kept.numa.trials
    kept.numa = replace(kept.numa, trials=(replace(trial, seconds={1: 1e5}),))


# What is disturbed, where it then is missing, and what the sentence says.
DISTURBED: dict[str, tuple[Change, Change, str]] = {
    "split costs": (
        lambda kept: setattr(kept.runs[0], "split", slow_side(kept, 5.0)),
        lambda kept: kept.runs[0].split is None,
        "the split costs of 2026-01-02: an expert of 4 rows takes the CPU 5 s, where 0 to 0.22 s",
    ),
    "copy": (
        lambda kept: kept.runs[0].splits.update(
            CUDA0=replace(kept.runs[0].splits["CUDA0"], copy_s=3.0)
        ),
        lambda kept: not kept.runs[0].splits,
        "the split costs of CUDA0: an expert's copy takes 2 s",
    ),
    "worker": (
        lambda kept: kept.workers.append(
            replace(kept.workers.pop(), costs=slow_side(kept, 60.0))
        ),
        lambda kept: not kept.workers,
        "the split costs of sim: ",
    ),
    "draft step": (
        lambda kept: setattr(kept.runs[0].drafts["m"], "step_s", 2.5),
        lambda kept: kept.runs[0].drafts["m"] == KeptDraft(),
        "the draft step of 2026-01-02 (m): 2.5 s, where 1e-07 to 2 s",
    ),
    "spread of split costs": (
        lambda kept: setattr(kept.runs[0], "split", replace(kept.runs[0].split, copy_spread=-1.0)),
        lambda kept: kept.runs[0].split is None,
        "the split costs of 2026-01-02: repeated timings differ by -1 times the median",
    ),
    "spread of a draft step": (
        lambda kept: setattr(kept.runs[0].drafts["m"], "step_spread", 1e30),
        lambda kept: kept.runs[0].drafts["m"] == KeptDraft(),
        "the draft step of 2026-01-02 (m): 1e+30 times the median",
    ),
    "engine": (
        lambda kept: kept.engines["draft"].seconds.update(
            torch=RepeatedTime((0.01, 0.0))
        ),
        lambda kept: not kept.engines,
        "the times of draft engines with draft: 0 s",
    ),
    "NUMA": (
        slow_numa,
        lambda kept: kept.numa is None,
        "the times of the NUMA choice: 1e+05 s",
    ),
    "disk": (
        lambda kept: kept.disks["nvme0"].rates.update({8: RepeatedRate((40.0,))}),
        lambda kept: not kept.disks,
        "the speed of disk nvme0: 40 bytes/s, where 1e+06 to 1e+12 bytes/s are possible",
    ),
    "link": (
        lambda kept: kept.links["CUDA0"].together.append(RepeatedRate((float("nan"),))),
        lambda kept: not kept.links,
        "the speed of links from RAM to CUDA0: nan bytes/s",
    ),
    "layout": (
        lambda kept: setattr(kept.layouts["q4_K"], "plain_prompt_s", RepeatedTime((1e-5, -1.0))),
        lambda kept: not kept.layouts,
        "the times of layouts of q4_K: -1 s",
    ),
    "ubatch": (
        lambda kept: kept.ubatches[0].trials.update({1024: UbatchTrial(1e-3, 1e-9)}),
        lambda kept: not kept.ubatches,
        "the times of ubatches of 2026-01-02: 1e-09 s",
    ),
    "mix": (
        lambda kept: setattr(kept, "mix", TokenMix(float("inf"), 1.0)),
        lambda kept: kept.mix == TokenMix(0, 0),
        "the mix of tokens: inf tokens",
    ),
    "imported curve": (
        lambda kept: setattr(kept, "batch_costs", "1,-0.5"),
        lambda kept: not kept.batch_costs,
        "the imported T(n): ",
    ),
}  # fmt: skip


def test_a_plausible_profile_is_kept_whole() -> None:
    kept = profile()
    assert drop_absurd(kept, EXPERT_BYTES) == []
    assert kept == profile()


@pytest.mark.parametrize("kind", DISTURBED)
def test_what_is_out_of_bounds_counts_as_missing(kind: str) -> None:
    disturb, is_missing, words = DISTURBED[kind]
    kept = profile()
    disturb(kept)
    before = copy.deepcopy(kept)
    (said,) = drop_absurd(kept, EXPERT_BYTES)
    assert is_missing(kept)
    assert said.startswith(words)
    same = [name for name in vars(kept) if getattr(kept, name) == getattr(before, name)]
    assert len(same) == len(vars(kept)) - 1, "all other measurements stay"
    assert drop_absurd(kept, EXPERT_BYTES) == []


@given(st.floats(1e3, 1e9), st.integers(1, 64), st.floats(1e9, 5e12))
def test_no_machine_from_slow_to_fast_is_doubted(
    expert_bytes: float, n_rows: int, bytes_per_s: float
) -> None:
    """A slow machine reads 1 GB/s, and takes a quarter longer for each further row."""
    seconds = (1.0 + 0.25 * (n_rows - 1)) * expert_bytes / bytes_per_s + 1e-4
    assert not expert_bounds(expert_bytes, n_rows).reason([seconds])
    assert expert_bounds(expert_bytes, n_rows).reason(
        [100.0 * seconds + 2.0 * n_rows * expert_bytes / 1e8 + 1.0]
    )


def test_a_file_is_mended_by_the_next_measurement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeptFile(tmp_path, read_facts(demo_file("target.gguf")))
    assert file.update(lambda kept: kept.put(profile().runs[0])) == ""
    data = json.loads(file.path.read_text())
    data["runs"][0]["split"]["host"]["by_rows_s"]["4"] = 5.0  # as an earlier version wrote it
    file.path.write_text(json.dumps(data))
    caplog.clear()
    for _ in range(3):
        kept, reason = file.load()
        assert reason == ""
        assert kept.runs[0].split is None
        assert kept.runs[0].drafts == profile().runs[0].drafts
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{file.path}: a measurement is not used, and is made again")
    file.update(lambda kept: setattr(kept.runs[0], "split", profile().runs[0].split))
    assert file.load()[0].runs[0].split == profile().runs[0].split
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", DISTURBED)
def test_what_is_out_of_bounds_is_not_written(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A busy machine's own times would otherwise be warned of by the next start."""
    disturb, is_missing, _ = DISTURBED[kind]
    facts = read_facts(demo_file("target.gguf"))
    used: list[Kept] = []

    def change(kept: Kept) -> None:
        for name, value in vars(profile()).items():
            if name not in ("model", "machine"):
                setattr(kept, name, value)
        disturb(kept)
        used.append(kept)

    file = KeptFile(tmp_path, facts)
    assert file.update(change) == ""
    assert not is_missing(used[0]), "a session goes on with what it measured"
    caplog.clear()
    kept, reason = file.load()
    assert reason == ""
    assert is_missing(kept)
    assert not caplog.records


@pytest.mark.parametrize(
    ("day", "old"),
    [
        ("2026-03-31", False),
        ("2026-03-02", False),
        ("2026-03-01", True),
        ("", True),
        ("x", True),
        ("2026-04-01", False),
        ("2026-04-02", True),
    ],  # fmt: skip
)
def test_a_measurement_is_old_after_30_days(day: str, old: bool) -> None:
    assert is_old(day, "2026-03-31") is old
