"""scripts/gpu-check from end to end on `sim`, and its verdicts on logits that are wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lab.synth import plan_preset, write_header_only
from offload.device import devices
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.sharing import DECODING
from specoffload.bench.llama_server import tune_for

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "gpu-check", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "VENV": sys.prefix},
        timeout=200,
    )


def test_a_dry_run_on_sim_measures_everything_and_ends_with_json() -> None:
    done = run("--dry-run-sim")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert report["error"] == ""
    assert report["device"].startswith("sim")
    assert "iB of streamed weights" in report["model"]["store"]
    assert report["link"]["pageable_bytes_per_s"] > 0
    assert [row["n"] for row in report["steps"]] == [4, 16]
    for row in report["steps"]:
        assert row["max_difference"] == 0.0, "streamed is resident"
        assert row["streamed_bytes"] > 0
        assert row["transfer_s"] == pytest.approx(row["streamed_bytes"] / 1e9)
        ceiling_s = max(row["transfer_s"], row["compute_s"])
        assert row["ratio"] == pytest.approx(row["step_s"] / ceiling_s)
        for peer in ("offload", "default"):
            assert row[f"vs_{peer}"] == pytest.approx(row[f"{peer}_s"] / row["step_s"])
    assert [row["model"] for row in report["split"]] == ["qwen3moe", "gpt-oss"]
    for row in report["split"]:
        check_split(row)
    if "left_out" not in report["draft"]:
        check_draft(report["draft"])


def check_split(row: dict[str, Any]) -> None:
    assert row["routing"] == "drifting"
    assert row["cached_share"] == 0.25
    assert row["max_difference"] == 0.0, "split, auto and off give the same logits"
    assert row["expert_copy_bytes_per_s"] > 0
    ways = {way["way"]: way for way in row["ways"]}
    assert list(ways) == ["llama.cpp", "off", "on", "auto"]
    assert ways["llama.cpp"]["vs_llama"] == ways["off"]["vs_off"] == 1.0
    assert ways["off"]["split_layers"] == 0
    assert all(way["agreement"] > 0.9 for way in ways.values())
    on = ways["on"]
    n_used, n_layers = 4, on["split_layers"]
    assert 0 < n_layers <= row["n_layers"]
    pairs = on["n_pairs_hit"] + on["n_pairs_streamed"] + on["n_pairs_host"]
    assert pairs == n_used * n_layers
    assert on["hit_share"] == pytest.approx(on["n_pairs_hit"] / pairs)
    assert on["split_s"] >= on["host_s"] > 0
    assert any("--hybrid auto" in line for line in row["notes"]["auto"])


def check_draft(found: dict[str, Any]) -> None:
    assert len(found["equality"]) == 3, "bf16 of three models; f32 and graphs need a GPU"
    assert found["bandwidth_bytes_per_s"] > 1e8
    speeds = {speed["name"]: speed for speed in found["speeds"]}
    assert list(speeds) == ["libllama", "torch", "torch, 128 kept"]
    assert {(row["k"], row["engine"]) for row in found["rows"]} == {
        (k, engine) for k in (1, 4) for engine in speeds
    }
    for row in found["rows"]:
        ratio = row["tokens_per_s"] / row["ceiling_tokens_per_s"]
        assert row["share_of_ceiling"] == pytest.approx(ratio)
    # 18 drafts of 1 token and 18 of 4 tokens take one step per token and one copy per draft.
    assert speeds["torch"]["counters"]["n_steps"] == 90
    assert speeds["torch"]["counters"]["n_host_copies"] == 36
    assert speeds["torch, 128 kept"]["step_bytes"] < speeds["torch"]["step_bytes"]


@pytest.mark.skipif(any(d.on_gpu for d in devices()), reason="there is a GPU here")
@pytest.mark.parametrize("part", [(), ("draft",)])
def test_without_a_gpu_it_says_so(part: tuple[str, ...]) -> None:
    done = run(*part)
    assert done.returncode == 2
    assert "no GPU here" in done.stdout


# -- split layers ---------------------------------------------------------------------------------


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu_check"))
    return importlib.import_module("split")


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_a_quarter_of_the_experts_is_two_layers_of_eight_or_as_many_slots(
    split: ModuleType, name: str, tmp_path: Path
) -> None:
    preset, changes = split.FULL[name]
    planned = plan_preset(preset, routing="drifting", **changes)
    facts = read_facts(write_header_only(planned, tmp_path / "header.gguf"))
    vram_bytes, n_fit = split.weights_budget(facts, 0.25)
    assert n_fit == 2
    theirs = tune_for(facts, vram_bytes=vram_bytes, reserve_bytes=0, n_ubatch=512)
    assert theirs.n_cpu_moe == 6
    for hybrid in (False, True):
        ours = make_plan(
            facts,
            PlanRequest(
                budget_bytes=vram_bytes, n_cpu_moe="fit", plan_for_splits=hybrid, mix=DECODING
            ),
        )
        assert ours.n_resident == 0
        n_for_biases = 1 if name == "gpt-oss" else 0  # slots hold these too
        assert [pool.n_slots for pool in ours.layout.pools] == [2 * 128 - n_for_biases]
        assert ours.resident_bytes + ours.slot_bytes <= vram_bytes


def test_models_without_time_are_left_out_before_anything_is_written(
    split: ModuleType, tmp_path: Path
) -> None:
    args = SimpleNamespace(small=False, part="split", limit_s=12.0)
    lines: list[str] = []
    setting = SimpleNamespace(args=args, folder=tmp_path, report={"split": [], "aims": {}},
                              left_s=lambda: 12.0, say=lines.append)  # fmt: skip
    assert not split.measure(setting)
    rows = setting.report["split"]
    assert [row["left_out"] for row in rows] == ["12 s are left"] * 2
    assert len(lines) == 2
    assert not list(tmp_path.iterdir())
    assert split.passed(rows, all_of_them=False)
    assert split.aims(rows) == {}


def split_row(on_vs_llama: float, auto_vs_off: float, **changes: Any) -> dict[str, Any]:
    good = {"split_layers": 8.0, "agreement": 0.8}
    ways = [
        {"way": "on", "vs_llama": on_vs_llama, "vs_off": 1.0, **good},
        {"way": "auto", "vs_llama": 1.0, "vs_off": auto_vs_off, **good},
    ]
    return {"model": "m", "routing": "drifting", "cached_share": 0.25, "max_difference": 0.1,
            "allowed": 1.0, "best_rival": "llama.cpp", "ways": ways} | changes  # fmt: skip


def test_an_aim_that_is_missed_is_said_and_does_not_fail(split: ModuleType) -> None:
    good, slow = split_row(1.2, 0.99), split_row(1.19, 0.9)
    assert list(split.aims([good]).values()) == [True, True]
    assert list(split.aims([slow]).values()) == [False, False]
    assert split.passed([good, slow], all_of_them=True)
    cached = {"best_rival": "llama-server --moe-cache-mib 9", "vs_best_rival": {"on": 1.1}}
    aim, _ = split.aims([split_row(2.0, 0.99, **cached)]).items()
    assert "llama-server --moe-cache-mib 9 (1.10)" in aim[0]
    assert not aim[1]


def test_no_split_layer_or_other_logits_fail(split: ModuleType) -> None:
    unsplit = split_row(2.0, 1.0)
    unsplit["ways"][0]["split_layers"] = 0.0
    another = split_row(2.0, 1.0)
    another["ways"][1]["agreement"] = 0.01
    different = [split_row(2.0, 1.0, max_difference=d) for d in (1.4, float("nan"))]
    for row in (unsplit, another, *different):
        assert not split.passed([row], all_of_them=False)
