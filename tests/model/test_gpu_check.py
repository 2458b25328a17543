"""scripts/gpu-check from end to end on `sim`, and its verdicts on logits that are wrong."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from lab import virtual_gpu
from lab.synth import plan_preset, write_header_only
from offload.device import choose_device, devices
from offload.ggml.gguf import read_header
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.workload import DECODING
from offload.sequences.sequences import Sequences
from specoffload.bench.llama_server import tune_for

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("OUT", "PYTHON")}
    return subprocess.run(
        [ROOT / "scripts" / "gpu-check", *arguments],
        capture_output=True,
        text=True,
        env={**environment, "VENV": sys.prefix, **variables},
        timeout=200,
    )


def test_a_dry_run_on_sim_measures_everything_and_ends_with_json(tmp_path: Path) -> None:
    done = run("--dry-run-sim", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "gpu-check.json").read_text("utf-8"))
    assert (tmp_path / "gpu-check.log").read_text("utf-8") == done.stdout
    assert report["ok"]
    assert report["error"] == ""
    assert report["device"].startswith("sim")
    order = ["link", "equality", "memories", "sanitizer", "decode", "split", "prefill", "tests"]
    assert list(report["parts"]) == ["imports", *order]
    assert report["gpu_tests"] == "left out with --small"
    assert report["link"]["pageable_bytes_per_s"] > 0
    assert [row["copied_bytes"] for row in report["link"]["copies"]][:2] == [64, 1024]
    assert all(row["taken_s"] > 0 for row in report["link"]["latencies"])
    assert report["link"]["why_no_words"] == "no CUDA runtime is loaded"
    check_equality(report["equality"])
    check_memories(report["memories"])
    check_decode(report["decode"])
    check_steps(report)
    assert [row["model"] for row in report["split"]] == ["qwen3moe"]
    check_split(report["split"][0])


def test_a_second_call_measures_the_draft_and_gpt_oss(tmp_path: Path) -> None:
    done = run("--second", "--dry-run-sim", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-check-second.json").read_text("utf-8"))
    assert list(report["parts"]) == ["imports", "draft", "split", "prefill", "steps-table"]
    assert [row["model"] for row in report["split"]] == ["gpt-oss"]
    check_split(report["split"][0])
    if "left_out" not in report["draft"]:
        check_draft(report["draft"])
    check_steps_table(report["steps_table"])


def check_equality(rows: list[dict[str, Any]]) -> None:
    assert {(row["type"], row["way"], row["n"]) for row in rows} == {
        (quant, way, n)
        for quant in ("q4_K", "q3_K")
        for way in ("streamed", "split", "doorbell", "CPU")
        for n in (1, 4, 9, 16)
    }
    for row in rows:
        assert row["passed"]
        assert row["kl_worst"] == 0.0, "sim computes what the CPU computes"
        assert (row["n_repairs"] > 0) == (row["way"] != "CPU")


def check_memories(rows: list[dict[str, Any]]) -> None:
    assert {row["memory"]: row["goes_back_by"] for row in rows} == {
        "full": "cut", "windows": "checkpoint", "recurrent": "checkpoint",
        "hybrid": "checkpoint", "indexer": "cut",
    }  # fmt: skip
    for row in rows:
        assert row["passed"]
        assert row["n_rows"] == 15, "three cuts, and five tokens after each"
        assert row["kl_worst"] == 0.0, "sim computes what the CPU computes"
        assert row["restores"] == (3 if row["goes_back_by"] == "checkpoint" else 0)
        assert (row["streamed_bytes"] > 0) == (row["memory"] != "recurrent")


def check_decode(rows: list[dict[str, Any]]) -> None:
    assert [row["way"] for row in rows] == [
        "resident", "100% in slots", "95% in slots", "50% in slots", "llama.cpp, resident",
        "95% in slots, rest on the CPU", "50% in slots, rest on the CPU",
    ]  # fmt: skip
    compared = [row for row in rows if "same" in row]
    assert len(compared) == 5
    assert all(row["kl_worst"] == 0.0 for row in compared)
    half, most = (next(r for r in rows if r["way"] == f"{share}% in slots") for share in (50, 100))
    assert half["streamed_bytes"] > most["streamed_bytes"] == 0
    assert rows[-1]["n_pairs_host"] > 0


def check_steps(report: dict[str, Any]) -> None:
    assert "iB of streamed weights" in report["model"]["store"]
    assert [row["n"] for row in report["steps"]] == [4, 16]
    for row in report["steps"]:
        assert row["max_difference"] == row["kl_worst"] == 0.0, "streamed is resident"
        assert row["streamed_bytes"] > 0
        assert row["transfer_s"] == pytest.approx(row["streamed_bytes"] / 1e9)
        ceiling_s = max(row["transfer_s"], row["compute_s"])
        # A busy machine may leave no steady time, and then there is no ratio.
        assert row["ratio"] in (None, pytest.approx(row["step_s"] / ceiling_s))
        for peer in ("offload", "default"):
            ratio = pytest.approx(row[f"{peer}_s"] / row["step_s"])
            assert row[f"vs_{peer}"] in (None, ratio)


def check_steps_table(found: dict[str, Any]) -> None:
    assert found["card"] is None, "sim has no card's rates"
    assert found["machine"]["link_bytes_per_s"] == 1e9
    cases: dict[str, list[str]] = {}
    for row in found["rows"]:
        cases.setdefault(row["setup"], []).append(row["case"])
        assert row["vs_plan"] == pytest.approx(row["step_s"] / row["plan_s"])
        assert row["virtual_s"] is None
        assert (row["hit_share"] is None) == row["setup"].startswith("resident")
        if row["hit_share"] is None:
            assert row["streamed_bytes"] == 0
    steps = ["decode", "drafts of changing length"]
    both = ["prompt of 32", "prompt of 128"]
    assert cases == {
        "resident": steps + both, "100 % in slots": steps, "95 % in slots": steps,
        "50 % in slots": steps + both, "resident, two devices": steps + both[1:],
        "50 % in slots, two devices": steps + both[1:],
        "10 % in slots": steps + both, "3 % in slots": steps + both,
    }  # fmt: skip


def test_steps_stand_beside_the_virtual_ones_of_the_same_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card with the name of one of the virtual table. The second of two GPUs is missing."""
    table, setting = module("steps_table", monkeypatch), module("setting", monkeypatch)
    monkeypatch.setattr(table, "MODEL", table.SMALL)
    setups = [replace(table.SETUPS[i], prompts=()) for i in (0, 3, 4)]
    monkeypatch.setattr(table, "SETUPS", setups)
    machine = table.machine_of("RTX 4090", 20e9)
    assert machine.link_bytes_per_s == 20e9
    assert machine.vram_bytes_per_s == pytest.approx(0.8 * 1008e9)
    choice = replace(choose_device("sim"), sim=None, description="NVIDIA GeForce RTX 4090")
    args = SimpleNamespace(small=False, threads=1, model_dir=None)
    report = {"link": {"pinned_bytes_per_s": 20e9}, "steps_table": {}}
    here = setting.Setting(args, tmp_path, report, Console(quiet=True), time.monotonic() + 600)
    here.choice = choice
    assert table.measure(here)
    found = report["steps_table"]
    assert found["card"] == "RTX 4090"
    kept = virtual_gpu.kept_steps_s("RTX 4090")
    timed = [row for row in found["rows"] if "left_out" not in row]
    assert [(row["setup"], row["case"]) for row in timed] == [
        (name, case)
        for name in ("resident", "50 % in slots")
        for case in ("decode", "drafts of changing length")
    ]
    for row in timed:
        assert row["virtual_s"] == kept[row["setup"], row["case"]]
        assert row["vs_virtual"] == pytest.approx(row["step_s"] / row["virtual_s"])
    left_out = {row["setup"]: row["left_out"] for row in found["rows"] if "left_out" in row}
    assert left_out == {"resident, two devices": "it needs 2 GPUs"}
    assert not list(tmp_path.iterdir()), "later parts need the disk"


def test_setups_without_time_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first setup takes longer than the time that is left after it."""
    table = module("steps_table", monkeypatch)
    tried = []

    def slow(setting: Any, path: Path, facts: Any, setup: Any, *others: Any) -> None:
        tried.append(setup.name)
        time.sleep(0.05)

    monkeypatch.setattr(table, "_measure_setup", slow)
    monkeypatch.setattr(table, "read_facts", lambda path: None)
    monkeypatch.setattr(table, "device_names", lambda setting: ["a", "b"])
    setting = SimpleNamespace(
        args=SimpleNamespace(small=False), report={"steps_table": {"card": None}},
        left_s=lambda: 0.04, say=lambda line: None, save=lambda: None,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    table._measure_setups(setting, tmp_path, table.TYPICAL, rows)
    assert tried == ["resident"]
    assert [row["left_out"] for row in rows] == ["0 s are left"] * (len(table.SETUPS) - 1)


@pytest.mark.parametrize(
    ("description", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("NVIDIA GeForce RTX 3060 Ti", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", None),
        ("AMD EPYC", None),
    ],
)
def test_a_card_is_known_by_its_whole_name(
    description: str, card: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module("steps_table", monkeypatch).card_named(description) == card


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
    assert all(way["same"] and way["kl_worst"] < 1e-3 for way in ways.values())
    on = ways["on"]
    n_used, n_layers = 4, on["split_layers"]
    assert 0 < n_layers <= row["n_layers"]
    pairs = on["n_pairs_hit"] + on["n_pairs_streamed"] + on["n_pairs_host"]
    assert pairs == n_used * n_layers
    assert on["hit_share"] == pytest.approx(on["n_pairs_hit"] / pairs)
    # The CPU's share follows from measured times, so a busy machine may leave it nothing.
    # `decode` has a way with a fixed share.
    assert pairs > on["n_pairs_hit"], "a quarter of the experts is not all that the text uses"
    assert (on["host_s"] > 0) == (on["n_pairs_host"] > 0)
    assert on["split_s"] >= on["host_s"]
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


def test_sigterm_removes_the_models_and_keeps_the_results(tmp_path: Path) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    words = [sys.executable, str(ROOT / "scripts/gpu_check"), "--dry-run-sim", "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": paths}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert any("writing" in line for line in started.stdout)
        started.terminate()
        assert started.wait(20) == 128 + 15
    assert not list(scratch.iterdir())
    report = json.loads((out / "gpu-check.json").read_text("utf-8"))
    assert report["parts"]["link"]["status"] == "passed"


def test_models_fit_the_memory_that_they_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, split, decode = (module(n, monkeypatch) for n in ("steps", "split", "decode"))
    shapes = {"deepseek-v3": steps.BIG, "qwen3-30b-a3b": decode.FULL, **dict(split.FULL.values())}
    sizes = {name: plan_preset(name, **changes).size_bytes for name, changes in shapes.items()}
    # docs/gpu.md says 20 GB of disk, of which the results take little.
    assert max(sizes.values()) < 19e9, sizes
    assert sizes["qwen3-30b-a3b"] > 15e9, "all layers and experts"


@pytest.mark.skipif(any(d.on_gpu for d in devices()), reason="there is a GPU here")
@pytest.mark.parametrize("part", [(), ("draft",)])
def test_without_a_gpu_it_says_so(part: tuple[str, ...]) -> None:
    done = run(*part)
    assert done.returncode == 2
    assert "no GPU here" in done.stdout


def test_a_part_asked_for_by_name_that_is_left_out_fails(tmp_path: Path) -> None:
    done = run("sanitizer", "--dry-run-sim", "--out", str(tmp_path), PATH=without_sanitizer())
    assert done.returncode == 1
    assert "sanitizer is left out: compute-sanitizer is not on the PATH" in done.stdout


def without_sanitizer() -> str:
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(f for f in folders if not Path(f, "compute-sanitizer").exists())


@pytest.mark.parametrize(
    ("status", "summary", "expected"),
    [(0, "0 errors", True), (86, "2 errors", False), (1, "0 errors", False), (1, "", None)],
)
def test_what_compute_sanitizer_finds_decides(
    status: int, summary: str, expected: bool | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A stand-in for the tool. If it finds no errors, it runs the program that it is given."""
    equality, parts = module("equality", monkeypatch), module("timed_parts", monkeypatch)
    tool = tmp_path / "compute-sanitizer"
    last = f"========= ERROR SUMMARY: {summary}" if summary else "========= no device"
    tool.write_text(
        "#!/bin/sh\n"
        'while [ "${1#--}" != "$1" ]; do shift 2; done\n'  # its options come in pairs
        + ('"$@" || exit 3\n' if status == 0 else "")
        + f"echo '{last}'\nexit {status}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "scripts")]))
    args = SimpleNamespace(device="auto", dry_run_sim=True, small=True)
    setting = SimpleNamespace(args=args, folder=tmp_path, report={"sanitizer": {}})
    if expected is None:
        with pytest.raises(parts.LeftOut, match="status 1 and no summary"):
            equality.sanitized(setting)
    else:
        assert equality.sanitized(setting) is expected
    assert summary in setting.report["sanitizer"]["summary"]
    assert setting.report["sanitizer"]["status"] == status
    assert bool(list(tmp_path.glob("equality-*.gguf"))) == (status == 0)


# -- equality -------------------------------------------------------------------------------------


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu_check"))
    return importlib.import_module(name)


def roll_experts(facts: Any, weights: NDArray[np.uint8]) -> None:
    """Give every token wrong experts in the second layer."""
    for entry in facts.expert_weights:
        if entry.name.startswith("blk.1."):
            at = entry.offset_bytes
            experts = weights[at : at + entry.size_bytes].reshape(facts.n_experts, -1)
            experts[:] = np.roll(experts, 1, axis=0).copy()


def round_otherwise(facts: Any, weights: NDArray[np.uint8]) -> None:
    """Change norms by 0.4 %, as rounding in other kernels changes activations."""
    rng = np.random.default_rng(1)
    for entry in read_header(facts.path).tensors:
        if entry.name.endswith("ffn_norm.weight"):
            at = entry.offset_bytes
            norm = weights[at : at + entry.size_bytes].view(np.float32)
            norm *= (1 + 0.004 * rng.standard_normal(len(norm))).astype(np.float32)


def compared(
    equality: ModuleType, path: Path, changed: Path
) -> dict[tuple[str, int], dict[str, Any]]:
    """The part's verdicts by way and batch size. `changed` is the file that is streamed."""
    args = SimpleNamespace(small=True, inside=False)
    setting = SimpleNamespace(args=args, choice=choose_device("sim"))
    return {(row["way"], row["n"]): row for row in equality.rows_of(setting, path, changed)}


@pytest.fixture(params=["q4_K", "q3_K"])
def file(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """A file of the part, and a copy of it to change."""
    path, changed = tmp_path / "model.gguf", tmp_path / "changed.gguf"
    module("decisive", monkeypatch).write_decisive(path, request.param)
    shutil.copy(path, changed)
    return path, changed


def test_rounding_stays_within_the_limits_with_room(
    file: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_otherwise(read_facts(file[0]), np.memmap(file[1], np.uint8, "r+"))
    rows = compared(module("equality", monkeypatch), *file)
    assert all(row["same"] and row["far_share"] == 0 for row in rows.values())
    assert 0 < max(row["kl_worst"] for row in rows.values()) < 0.01
    assert all(row["kl_worst"] == 0 for (way, _), row in rows.items() if way == "CPU")


def test_a_layer_with_wrong_experts_breaks_the_limit(
    file: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_experts(read_facts(file[0]), np.memmap(file[1], np.uint8, "r+"))
    rows = compared(module("equality", monkeypatch), *file)
    assert {key: row["same"] for key, row in rows.items()} == {
        key: key[0] == "CPU" for key in rows
    }  # which reads the whole file


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("n", [1, 9])
def test_one_wrong_expert_breaks_the_limit(
    file: tuple[Path, Path], layer: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of one text, the only one that tells, gets another expert's weights once."""
    equality, decisive = module("equality", monkeypatch), module("decisive", monkeypatch)
    path, changed = file
    facts, weights = read_facts(path), np.memmap(changed, np.uint8, "r+")
    wrong = decisive.chosen_experts(path, layer, 37 * (n - 1) + 11 * n)[0]
    for entry in facts.expert_weights:
        if entry.name.startswith(f"blk.{layer}."):
            at = entry.offset_bytes
            experts = weights[at : at + entry.size_bytes].reshape(facts.n_experts, -1)
            experts[wrong] = experts[wrong - 1].copy()
    rows = compared(equality, path, changed)
    assert not rows["streamed", n]["same"]
    assert not rows["split", n]["same"]


@pytest.mark.parametrize("n", [1, 4, 9, 16])
def test_one_corrupt_row_breaks_the_limit(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equality = module("equality", monkeypatch)
    path = tmp_path / "model.gguf"
    module("decisive", monkeypatch).write_decisive(path, "q4_K")
    computed = equality._computed

    def corrupt(*arguments: Any) -> Any:
        rows, counted = computed(*arguments)
        if arguments[-1].get("min_batch"):  # streamed or split
            rows[n][0] = rows[n][-1]  # the first row of the first text gets that of another token
        return rows, counted

    monkeypatch.setattr(equality, "_computed", corrupt)
    rows = compared(equality, path, path)
    assert {key for key, row in rows.items() if not row["same"]} == {
        (way, n) for way in ("streamed", "split", "doorbell")
    }


@pytest.mark.parametrize(
    ("kl", "is_same"),
    [
        ([0.0] * 10, True),
        ([0.0] * 5 + [3.0] * 5, True),
        ([0.0] * 4 + [0.02] * 6, False),
        ([0.0] * 9 + [float("nan")], False),
        ([], False),
    ],
)
def test_half_of_the_rows_may_be_far_and_none_may_be_no_number(
    kl: list[float], is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = module("logits", monkeypatch)
    assert logits.judged(np.array(kl))["same"] is is_same


@pytest.mark.parametrize(
    ("kl", "is_same"),
    [
        ([0.009] * 54, True),
        ([0.0] * 53 + [0.02], True),
        ([0.0] * 50 + [0.02] * 4, False),
        ([0.0] * 53 + [0.04], False),
        ([0.0] * 53 + [float("nan")], False),
        ([0.0] * 5 + [0.02], False),
        ([], False),
    ],
)
def test_with_decisive_routers_few_rows_may_be_far_and_none_very_far(
    kl: list[float], is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = module("logits", monkeypatch)
    assert logits.judged(np.array(kl), logits.STRICT)["same"] is is_same


# -- memories -------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["full", "windows", "recurrent", "hybrid", "indexer"])
def test_a_memory_that_still_holds_the_rejected_draft_is_found(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our device's text keeps one token of each rejected draft, as a wrong cut would."""
    memories = module("memories", monkeypatch)
    path = tmp_path / "model.gguf"
    memories.MEMORIES[memory](path)
    followed = memories._followed

    def cut_wrongly(setting: Any, file: Path, changes: dict[str, Any]) -> Any:
        if "wrapped" in changes:
            return followed(setting, file, changes)
        with monkeypatch.context() as patched:
            restore, rewind = Sequences.restore, Sequences.rewind

            def restored(self: Sequences, sequence: int, checkpoint: object) -> None:
                restore(self, sequence, checkpoint)
                self.extend(sequence, [1], 0)

            def rewound(self: Sequences, sequence: int, length: int) -> None:
                rewind(self, sequence, length and length + 1)

            patched.setattr(Sequences, "restore", restored)
            patched.setattr(Sequences, "rewind", rewound)
            return followed(setting, file, changes)

    args = SimpleNamespace(small=True)
    setting = SimpleNamespace(args=args, choice=choose_device("sim"))
    assert memories.row_of(setting, path)["passed"]
    monkeypatch.setattr(memories, "_followed", cut_wrongly)
    row = memories.row_of(setting, path)
    assert not row["same"]
    assert not row["passed"]


# -- split layers ---------------------------------------------------------------------------------


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("split", monkeypatch)


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
        n_for_biases = 1 if name == "gpt-oss" else 0  # slots hold these too
        n_slots = sum(pool.n_slots for pool in ours.layout.pools)
        assert ours.n_resident * 128 + n_slots in (2 * 128, 2 * 128 - n_for_biases)
        assert ours.resident_bytes + ours.slot_bytes <= vram_bytes


def test_models_without_time_are_left_out_before_anything_is_written(
    split: ModuleType, tmp_path: Path
) -> None:
    args = SimpleNamespace(small=False, part="split", models=("qwen3moe", "gpt-oss"))
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
    good = {"split_layers": 8.0, "same": True}
    ways = [
        {"way": "on", "vs_llama": on_vs_llama, "vs_off": 1.0, **good},
        {"way": "auto", "vs_llama": 1.0, "vs_off": auto_vs_off, **good},
    ]
    return {"model": "m", "routing": "drifting", "cached_share": 0.25, "max_difference": 0.1,
            "best_rival": "llama.cpp", "ways": ways} | changes  # fmt: skip


def test_an_aim_that_is_missed_is_said_and_does_not_fail(split: ModuleType) -> None:
    good, slow = split_row(1.2, 0.99), split_row(1.19, 0.9)
    assert list(split.aims([good]).values()) == [True, True]
    assert list(split.aims([slow]).values()) == [False, False]
    assert split.passed([good, slow], all_of_them=True)
    cached = {"best_rival": "llama-server --moe-cache-mib 9", "vs_best_rival": {"on": 1.1}}
    aim, _ = split.aims([split_row(2.0, 0.99, **cached)]).items()
    assert "llama-server --moe-cache-mib 9 (1.10)" in aim[0]
    assert not aim[1]


def test_an_aim_whose_ratio_means_nothing_is_missed(split: ModuleType) -> None:
    way = split.Way("auto", 0, rounds_s=[1.0, 1.0, 1.0])
    other = split.Way("off", 0, rounds_s=[0.1, 1.0, 9.0])
    assert way.times_as_fast_as(other) is None
    assert way.times_as_fast_as(way) == 1.0
    row = split_row(1.2, 0.99)
    row["ways"][1]["vs_off"] = None
    assert split.aims([row])[
        "m, drifting, 25% cached: auto no slower than off (no steady time)"
    ] is (False)


def test_no_split_layer_or_other_logits_fail(split: ModuleType) -> None:
    unsplit = split_row(2.0, 1.0)
    unsplit["ways"][0]["split_layers"] = 0.0
    another = split_row(2.0, 1.0)
    another["ways"][1]["same"] = False
    for row in (unsplit, another):
        assert not split.passed([row], all_of_them=False)
