"""scripts/gpu-check from end to end on `sim`, and its verdicts on logits that are wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offload.device import devices
from offload.model_file import read_facts
from offload.plan.placement import make_plan
from offload.plan.sharing import DECODING
from offload.synth import plan_preset, write_header_only
from specoffload.peers.tuned import tune_for

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VENV": sys.prefix}
    return subprocess.run(
        [ROOT / "scripts" / "gpu-check", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )


def test_a_dry_run_on_sim_measures_everything_and_ends_with_json() -> None:
    done = run("--dry-run-sim")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert report["error"] == ""
    assert report["device"].startswith("sim")
    assert "GiB of streamed weights" in report["model"]["store"]
    assert report["link"]["pageable_bytes_per_s"] > 0
    assert len(report["equality"]) == 8
    assert all(row["equal_share"] == 1.0 for row in report["equality"])
    assert {row["switch"] for row in report["switches"]} == {
        *("--no-slot-band", "--vector-tokens 8", "--no-native-placement", "--no-bounce"),
        *("--mla-crossover 0", "--expert-chunks on"),
    }
    assert {row["n"] for row in report["switches"]} == {4, 10, 16}
    assert all(row["step_s"] > 0 < row["default_s"] for row in report["switches"])
    assert [row["n"] for row in report["steps"]] == [4, 16]
    for row in report["steps"]:
        assert row["max_difference"] == 0.0, "streamed is resident"
        assert row["streamed_bytes"] > 0
        assert row["transfer_s"] == pytest.approx(row["streamed_bytes"] / 1e9)
        ceiling_s = max(row["transfer_s"], row["compute_s"])
        assert row["ratio"] == pytest.approx(row["step_s"] / ceiling_s)
        for peer in ("offload", "default"):
            assert row[f"vs_{peer}"] == pytest.approx(row[f"{peer}_s"] / row["step_s"])
    check_split(report["split"])


def check_split(models: list[dict[str, Any]]) -> None:
    assert [row["model"] for row in models] == ["qwen3moe", "gpt-oss"]
    for row in models:
        assert row["routing"] == "drifting"
        assert row["cached_share"] == 0.25
        assert row["max_difference"] == 0.0, "split, auto and off give the same logits"
        assert row["write_bytes_per_s"] > 0 < row["expert_copy_bytes_per_s"]
        assert row["python_s_per_layer"] > 0
        ways = {way["way"]: way for way in row["ways"]}
        assert list(ways) == ["llama.cpp", "off", "on", "auto"]
        for way in ways.values():
            assert way["tokens_per_s"] == pytest.approx(1 / way["token_s"])
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


@pytest.mark.skipif(any(d.on_gpu for d in devices()), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "no GPU here" in done.stdout


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    path = ROOT / "scripts" / "gpu_check" / "compare.py"
    spec = importlib.util.spec_from_file_location("gpu_check_compare", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rows(n: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(n, 50)).astype(np.float32)


@pytest.mark.parametrize("n_wrong", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("ties_allowed", [False, True])
def test_few_rows_may_be_near_ties_where_that_is_allowed(
    compare: ModuleType, n_wrong: int, ties_allowed: bool
) -> None:
    expected = rows(8)
    got = expected.copy()
    got[:n_wrong] += 1
    verdict = compare.compare("a", "b", got, expected, 1e-2, ties_allowed=ties_allowed)
    assert verdict.passed == (n_wrong <= (2 if ties_allowed else 0))
    assert verdict.equal_share == pytest.approx(1 - n_wrong / 8)


def test_rows_without_numbers_are_never_equal(compare: ModuleType) -> None:
    expected = rows(8)
    broken = expected.copy()
    broken[5, 7] = np.nan
    assert not compare.compare("a", "b", broken, expected, 1e-2, ties_allowed=True).passed
    assert not compare.compare("a", "b", 0 * expected, 0 * expected, 1e-2).passed


# -- split layers ---------------------------------------------------------------------------------


@pytest.fixture
def split_layers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu_check"))
    return importlib.import_module("split_layers")


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_a_quarter_of_the_experts_is_two_layers_of_eight_or_as_many_slots(
    split_layers: ModuleType, name: str, tmp_path: Path
) -> None:
    preset, changes = split_layers.FULL[name]
    planned = plan_preset(preset, routing="drifting", **changes)
    facts = read_facts(write_header_only(planned, tmp_path / "header.gguf"))
    vram_bytes, n_fit = split_layers.weights_budget(facts, 0.25)
    assert n_fit == 2
    theirs = tune_for(facts, vram_bytes=vram_bytes, reserve_bytes=0, n_ubatch=512)
    assert theirs.n_cpu_moe == 6
    for hybrid in (False, True):
        ours = make_plan(
            facts, budget_bytes=vram_bytes, n_cpu_moe="fit", hybrid=hybrid, mix=DECODING
        )
        assert ours.n_resident == 0
        n_for_biases = 1 if name == "gpt-oss" else 0  # slots hold these too
        assert [pool.n_slots for pool in ours.layout.pools] == [2 * 128 - n_for_biases]
        assert ours.resident_bytes + ours.slot_bytes <= vram_bytes


def test_models_without_time_are_left_out_before_anything_is_written(
    split_layers: ModuleType, tmp_path: Path
) -> None:
    asked = split_layers.Asked(SimpleNamespace(), tmp_path, 1, left_s=lambda: 12.0)
    rows = split_layers.measure_split(asked, lambda line: pytest.fail(f"began: {line}"))
    assert [row["left_out"] for row in rows] == ["12 s are left"] * 2
    assert not list(tmp_path.iterdir())
    assert split_layers.passed(rows, all_of_them=False)
    assert not split_layers.passed(rows, all_of_them=True)
    assert split_layers.aims(rows) == {}


def split_row(on_vs_llama: float, auto_vs_off: float, **changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "routing": "drifting",
        "cached_share": 0.25,
        "max_difference": 0.1,
        "allowed": 1.0,
        "best_rival": "llama.cpp",
        "ways": [
            {
                "way": "on",
                "vs_llama": on_vs_llama,
                "vs_off": 1.0,
                "split_layers": 8.0,
                "agreement": 0.8,
            },
            {
                "way": "auto",
                "vs_llama": 1.0,
                "vs_off": auto_vs_off,
                "split_layers": 8.0,
                "agreement": 0.8,
            },
        ],
    } | changes


def test_an_aim_that_is_missed_is_said_and_does_not_fail(split_layers: ModuleType) -> None:
    good, slow = split_row(1.2, 0.99), split_row(1.19, 0.9)
    assert list(split_layers.aims([good]).values()) == [True, True]
    assert list(split_layers.aims([slow]).values()) == [False, False]
    assert split_layers.passed([good, slow], all_of_them=True)
    cached = {"best_rival": "llama-server --moe-cache-mib 9", "vs_best_rival": {"on": 1.1}}
    split, _ = split_layers.aims([split_row(2.0, 0.99, **cached)]).items()
    assert "llama-server --moe-cache-mib 9 (1.10)" in split[0]
    assert not split[1]


def test_no_split_layer_or_other_logits_fail(split_layers: ModuleType) -> None:
    unsplit = split_row(2.0, 1.0)
    unsplit["ways"][0]["split_layers"] = 0.0
    assert not split_layers.passed([unsplit], all_of_them=False)
    another = split_row(2.0, 1.0)
    another["ways"][1]["agreement"] = 0.01
    assert not split_layers.passed([another], all_of_them=False)
    for difference in (1.4, float("nan")):
        row = split_row(2.0, 1.0, max_difference=difference)
        assert not split_layers.passed([row], all_of_them=False)


# -- scripts/gpu-check draft ----------------------------------------------------------------------


@pytest.mark.extra("torch")
def test_a_dry_run_of_the_draft_compares_both_engines_and_ends_with_json() -> None:
    done = run("draft", "--dry-run-sim")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert report["error"] == ""
    assert len(report["equality"]) == 6, "bf16 and int8 of three models; graphs need a GPU"
    assert report["bandwidth_bytes_per_s"] > 1e8
    engines = [speed["name"] for speed in report["speeds"]]
    assert engines == ["libllama", "torch", "torch, int8", "torch, 128 kept"]
    assert {(row["k"], row["engine"]) for row in report["rows"]} == {
        (k, engine) for k in (1, 4) for engine in engines
    }
    for row in report["rows"]:
        ratio = row["tokens_per_s"] / row["ceiling_tokens_per_s"]
        assert row["share_of_ceiling"] == pytest.approx(ratio)
    counters = {speed["name"]: speed["counters"] for speed in report["speeds"]}
    # 5 drafts of 1 and of 4, all in one block: a step per token, a copy per draft.
    assert counters["torch"]["n_steps"] == 25
    assert counters["torch"]["n_host_copies"] == 10
    by_name = {speed["name"]: speed for speed in report["speeds"]}
    assert by_name["torch, 128 kept"]["step_bytes"] < by_name["torch"]["step_bytes"]
    assert by_name["torch, int8"]["step_bytes"] < by_name["torch"]["step_bytes"]


@pytest.mark.skipif(any(d.on_gpu for d in devices()), reason="there is a GPU here")
def test_without_a_gpu_the_draft_check_says_so() -> None:
    done = run("draft")
    assert done.returncode == 2
    assert "no GPU here" in done.stdout
