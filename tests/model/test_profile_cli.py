"""Profiles on the command line are stored, refused with the reason, imported and exported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import command
from resolved import config_of, line_of

from specdec.costs.profile import CostProfile
from specdec.policies.throughput import Throughput
from specoffload.bench import draft_quality
from specoffload.config.resolution import demo_file, demo_prompts
from specoffload.config.speculation import measuring_only
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session


def profile(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return command("profile", "--device", "cpu", "-t", "1", *arguments)


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # nothing else on standard output
    assert isinstance(data, dict)
    return data


def opened(model: Path | None = None, **changes: object) -> Session:
    draft = None if model is None else demo_file("draft.gguf")
    return Session(
        config_of(model=model, draft=draft, device="cpu", threads=1, ctx_size=1024, **changes)
    )


@pytest.fixture(autouse=True)
def _few_texts_judge_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_quality, "_N_TEXTS", (2, 1))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_a_profile_is_measured_kept_exported_and_read_back(folder: Path, tmp_path: Path) -> None:
    costs, bench = tmp_path / "costs.txt", tmp_path / "bench.jsonl"
    words = ("--json", "--export", costs, "--plot", tmp_path / "plot.png")
    data = last_json(profile(*words))
    steps, ways = data["profile"], data["ways"]
    assert isinstance(steps, list)
    assert isinstance(ways, dict)
    assert len(steps) == 64
    assert min(steps) > 0
    assert Path(str(data["stored"])).is_file()
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert costs.read_text().startswith("GGML_BATCH_COSTS=1,")
    kept = last_json(profile("--json"))
    (entries,) = ways.values()
    assert kept["ways"]["in place"][0]["n_timed"] >= entries[0]["n_timed"], "shown as it was kept"
    again = last_json(profile("--json", "--import", costs, "--export", bench))
    assert again["relative"] is True
    seconds = [json.loads(line)["t_tg"] for line in bench.read_text().splitlines()]
    third = last_json(profile("--json", "--import", bench))
    assert third["profile"] == pytest.approx(seconds)


def test_imported_times_price_the_drafts_of_later_sessions_until_they_are_measured(
    folder: Path, tmp_path: Path
) -> None:
    costs = tmp_path / "costs.txt"
    costs.write_text("GGML_BATCH_COSTS=1,0.5,0.34,0.25,9,9,9,9")
    done = profile("--import", costs)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "later sessions of target.gguf price drafts by it" in said
    assert said.count("--import: the curve is a lower end for this mixture") == 1
    with opened() as session:
        assert any(note.startswith("profile: imported") for note in session.notes)
        assert session.costs.priced is session.costs.drafts.given is not None
        steps_s = session.costs.drafts.profile.step_s
        given = [1.0, 1.0, 1.02, 1.0, 45.0, 54.0, 63.0, 72.0]
        # The embedded target is a mixture, so the curve is a lower end.
        assert all(a >= b * (1 - 1e-9) for a, b in zip(steps_s, given, strict=True))
    assert profile("--json").returncode == 0
    with opened() as session:
        assert not any(note.startswith("profile: imported") for note in session.notes)
        assert session.costs.drafts.given is None


def test_stored_runs_are_drawn_side_by_side_without_a_model(folder: Path, tmp_path: Path) -> None:
    one, plot = tmp_path / "one.json", tmp_path / "two.png"
    last_json(profile("--json", "--export", one))
    two = tmp_path / "two.txt"
    two.write_text("1,0.8,0.7")
    flags = ("--plot-with", two, "--plot", plot, "--label", "here", "--label", "there")
    done = command("profile", one, *flags)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    done = command("profile", one)
    assert done.returncode == 2
    assert "is a profile, not a model: --plot FILE" in done.stderr
    done = command("profile", one, "--plot", plot, "--label", "a", "--label", "b")
    assert "--label b: there are only 1 profiles" in done.stderr
    done = command("profile", one, "--plot", plot, "--plot-with", tmp_path / "none.json")
    assert done.returncode == 2
    assert "none.json" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("GGML_BATCH_COSTS=1,0.9,nan", "entry 3"),
        ("1,0.9,0", "entry 3"),
        ("1,much", "entry 2"),
        ('{"step_s": [1.0', "damaged"),
        ("[]", "not a JSON object"),
        ('{"speed_tg": "fast"}', "line 1"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(
    folder: Path, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    done = command("profile", "--device", "cpu", "-t", "1", "--import", path)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("specoffload:")]
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in done.stderr


def test_the_next_start_loads_it_and_keeps_what_it_learnt(folder: Path) -> None:
    with opened() as session:
        assert any("measured in" in note for note in session.notes)
        assert session.speculation is not None
        # On some machines a step of the draft takes so long that it is not tried for long.
        flat = CostProfile(tuple(1e-3 + 1e-5 * n for n in range(16)), 1e-5)
        session.speculation.policy = Throughput(flat, session.costs.drafts.calibration)
        for text in demo_prompts("code")[:2]:
            list(session.generate(text, GenerateOptions(n_predict=24, ignore_eos=True)))
    (file,) = folder.glob("*.json")
    (run,) = json.loads(file.read_text())["runs"]
    assert any(draft["calibration"] for draft in run["drafts"].values())
    with opened() as session:
        assert any("speeds: measured on 20" in note for note in session.notes)
        assert not any("measured in" in note for note in session.notes)


def test_a_start_with_weights_that_stream_finds_what_the_command_measured(folder: Path) -> None:
    streaming = ("--device", "sim", "--n-cpu-moe", "99", "--ctx-size", "1024")
    done = profile("--json", *streaming)
    assert last_json(done)["profile"]
    config = config_of(device="sim", n_cpu_moe=99, threads=1, ctx_size=1024)
    with Session(config) as session:
        assert any("speeds: measured on" in note for note in session.notes), session.notes


def test_the_times_of_another_model_are_not_used(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(demo_file("target.gguf"), model)
    with opened(model):
        pass
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1
    model.write_bytes(bytes(raw))
    with opened(model) as session:
        assert any("measured in" in note for note in session.notes)
    assert len([*folder.glob("model-*.json")]) == 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: text.replace('"build": "', '"build": "other '), "the kept run had build"),
        (lambda text: text.replace('"seconds": ', '"seconds": -', 1), "damaged"),
    ],
    ids=["truncated", "another build", "hand-edited"],
)
def test_a_kept_file_that_does_not_fit_is_said_and_measured_anew(
    folder: Path, damage: object, words: str
) -> None:
    with opened():
        pass
    file = next(folder.glob("*.json"))
    assert callable(damage)
    file.write_text(damage(file.read_text()))
    with opened() as session:
        notes = " ".join(session.notes)
    assert words in notes
    assert "measured in" in notes
    json.loads(file.read_text())


def test_no_profile_measures_nothing_and_says_what_it_does(folder: Path) -> None:
    with opened(use_profile=False) as session:
        assert any("drafts have 4 tokens" in note for note in session.notes)
        assert session.speculation.policy.name == "fixed"
    assert not folder.exists()


@pytest.mark.parametrize(("look_ahead", "policy"), [("", "throughput"), ("2", "costs")])
def test_the_environment_gives_the_costs(
    folder: Path, look_ahead: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_BATCH_COSTS", "1,0.6,0.5,0.4")
    monkeypatch.setenv("GGML_MAX_LOOK_AHEAD", look_ahead)
    with opened() as session:
        assert session.speculation.policy.name == policy
        assert session.speculation.policy.n_max == 3
        assert any("GGML_BATCH_COSTS" in note for note in session.notes)
    assert not folder.exists()


def test_a_flag_that_changes_nothing_about_a_measurement_is_said() -> None:
    options = measuring_only(
        line_of("--spec-policy", "fixed", command="profile").options, reason="profile only measures"
    )
    assert "--spec-policy ignored: profile only measures" in options.notes


def test_a_recorded_trace_is_replayed(folder: Path, tmp_path: Path) -> None:
    rounds, costs = tmp_path / "rounds.jsonl", tmp_path / "costs.txt"
    costs.write_text("1,0.6,0.5,0.45,0.4,0.38")
    simulate = [sys.executable, "-m", "lab.simulate", "--json"]
    flags = ["-p", demo_prompts("code")[0], "-n", "24", "--device", "cpu", "-t", "1"]
    flags += ["--spec-policy", "fixed"]
    subprocess.run([*simulate, "--record", rounds, *flags], check=True)
    replayed = json.loads(
        subprocess.check_output([*simulate, "--trace", rounds, "--profile", costs])
    )
    rates = replayed["replayed"]
    assert isinstance(rates, dict)
    found = rates["costs"]
    assert found["throughput"] > 0
