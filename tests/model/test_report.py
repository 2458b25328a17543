"""`specoffload report` writes one file, which Ctrl-C does not lose and which names nobody."""

from __future__ import annotations

import getpass
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import command
from resolved import config_of

from specoffload.bench.paths import measure_in_turns
from specoffload.commands import report_machine as module
from specoffload.config.options import BenchOptions
from specoffload.config.resolution import demo_file
from specoffload.cpu_load import Load, Watch

FEW = ("-r", "1", "-n", "4", "-p", "32", "-c", "512", "-t", "1")
SMALL = BenchOptions(n_predict=4, repetitions=2, n_prompt=32)


@pytest.fixture(autouse=True)
def _own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "profiles"))
    monkeypatch.setenv("SPECOFFLOAD_MEASURE_S", "1")


def test_a_model_without_drafts_is_reported_and_nobody_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "Annas-secret-folder"
    folder.mkdir()
    model, file = folder / "annas-private-tune.gguf", folder / "out.json"
    shutil.copy(demo_file("target.gguf"), model)
    done = command("report", model, "--device", "cpu", "--spec-type", "none", *FEW, "-o", file)
    assert done.returncode == 0, done.stderr
    assert "predicted beside measured" in done.stdout
    assert "written to" in done.stdout
    written = file.read_text("utf-8")
    for name in (
        "annas",
        "secret",
        "private",
        str(tmp_path),
        getpass.getuser(),
        socket.gethostname(),
    ):
        assert name.lower() not in written.lower()
    data = json.loads(written)
    assert data["missing"] == {}
    assert data["ended_in"] == ""
    assert list(data["speeds"]) == ["wrapped"]
    assert len(data["speeds"]["wrapped"]["answer_tps"]) == 1
    assert data["predicted"]["wrapped"]["prompt_tps"] > 0
    assert {term["what"] for term in data["terms"]} >= {"answers", "prompts"}
    for what, plural in (("answers", "answer_tps"), ("prompts", "prompt_tps")):
        (term,) = [term for term in data["terms"] if term["what"] == what]
        assert term["measured"] == data["speeds"]["wrapped"][plural][0]
        assert term["ratio"] == pytest.approx(term["predicted"] / term["measured"])


def _stopping_after(n: int) -> Callable[..., Any]:
    """`measure_in_turns`, in which Ctrl-C arrives after `n` repetitions."""

    def measure(paths: Any, work: Any, *, on_measured: Callable[..., None], **given: Any) -> Any:
        left = n

        def counted(*row: Any) -> None:
            nonlocal left
            on_measured(*row)
            left -= 1
            if not left:
                raise KeyboardInterrupt

        return measure_in_turns(paths, work, on_measured=counted, **given)

    return measure


def test_ctrl_c_keeps_what_was_measured_on_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "measure_in_turns", _stopping_after(1))
    monkeypatch.setattr(Watch, "others", lambda _: Load(others=0.9, n_cpus=2))
    file = tmp_path / "out.json"
    config = config_of(device="sim,sim", threads=1, ctx_size=512)
    with pytest.raises(KeyboardInterrupt):
        module.report_machine(config, SMALL, file)
    data = json.loads(file.read_text("utf-8"))
    assert data["ended_in"] == "speeds"
    assert len(data["speeds"]["wrapped"]["answer_tps"]) == 1
    assert "spec" not in data["speeds"]
    assert data["batches"], "the times that the session had measured by then"
    assert data["counters"]["copies"] >= 0
    assert len(data["devices"]) == 2
    assert "answers" in {term["what"] for term in data["terms"]}
    shown = " ".join(capsys.readouterr().out.split())
    assert "ended early, in the part speeds" in shown
    assert "on sim the CPU takes the place of a GPU" in shown
    assert "a report of an idle machine says more" in shown
    assert data["others_share"] == 0.9


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-o", "there.json"), "--output there.json: exists already"),
        (("-o", "none/out.json"), "--output none/out.json: cannot be written (No such file"),
        (("-m", "absent.gguf"), "absent.gguf"),
        (("--vs", "llama-server=absent"), "there is no file absent"),
        (("-r", "0"), "must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("mine")
    done = command("report", "--device", "cpu", *words)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("specoffload:")]
    assert why in line
    assert "Traceback" not in done.stderr
    assert (tmp_path / "there.json").read_text() == "mine"
    assert not (tmp_path / "specoffload-report.json").exists()


def test_a_part_that_fails_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.errors import DoesNotFit

    def fails(*_: object) -> Any:
        raise DoesNotFit(f"no room in {tmp_path}")

    monkeypatch.setattr(module, "Planner", fails)
    monkeypatch.setattr(module, "measure_in_turns", lambda *_, **__: {})
    file = tmp_path / "out.json"
    module.report_machine(config_of(device="cpu", threads=1, ctx_size=512), SMALL, file)
    data = json.loads(file.read_text("utf-8"))
    assert data["missing"] == {"plan": "left out"}
    assert data["model"]["n_layers"] == 4
    assert data["terms"] == []


def test_a_report_that_a_fault_ended_does_not_look_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("a fault")

    monkeypatch.setattr(module, "Planner", fails)
    file = tmp_path / "out.json"
    with pytest.raises(RuntimeError, match="a fault"):
        module.report_machine(config_of(device="cpu", threads=1, ctx_size=512), SMALL, file)
    data = json.loads(file.read_text("utf-8"))
    assert data["ended_in"] == "plan"
    assert data["model"]["n_layers"] == 4


def test_answers_are_measured_without_doorbells_too_where_layers_ran_behind_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    bells: list[bool] = []

    def measure(paths: Any, *_: object, **__: object) -> dict[str, Any]:
        asked.append(list(paths))
        bells.append(next(iter(paths.values())).args[0].streaming.doorbell)
        return {}

    monkeypatch.setattr(module, "measure_in_turns", measure)
    config = config_of(device="cpu", threads=1, ctx_size=512)
    run = module._Report(config, SMALL, tmp_path / "out.json")
    run.data["doorbell"] = {"layers_rung": 12}
    run.measure(lambda *_: None)
    assert asked[-1] == ["without doorbell"]
    assert bells[-1] is False
    assert bells[0] is True
