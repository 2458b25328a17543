"""Flags that make a model slower are named, with the speeds of the plan without them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resolved import config_of, line_of
from typer.testing import CliRunner

from lab.synth import plan_preset, write_header_only
from offload.notes import NoteKind, kind_of
from specoffload.cli import app
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config, demo_file
from specoffload.opening import planner as planner_module
from specoffload.opening.context_size import planner_of
from specoffload.opening.flag_costs import flag_cost
from specoffload.opening.planner import Planner
from specoffload.opening.planning import Planned
from specoffload.opening.start import session_start

CONTEXT = 65536
MACHINE = ("--hardware", "rtx-4090-ddr5", "-c", str(CONTEXT))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("header") / "gpt-oss-120b.gguf"
    return write_header_only(plan_preset("gpt-oss-120b", size="full"), path)


def planned(path: Path, *words: str) -> dict[str, Any]:
    asked = ["plan", str(path), *MACHINE, *words, "--json"]
    data: dict[str, Any] = json.loads(CliRunner().invoke(app, asked).stdout)
    return data


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("-ncmoe 26", "-ncmoe"),
        ("-ub 2048 -b 2048", "-ub and -b"),
        ("-ub 512", "-ub"),
        ("-ngl 20", "-ngl"),
        ("--min-batch 1", "--min-batch"),
        ("-nkvo", "-nkvo"),
        ("-ub 2048 -b 2048 -ngl 99 -ncmoe 26 -fa on", "-ub, -b and -ncmoe"),
        ("-ub 2048 -b 2048 -ncmoe 26 -nkvo --swa-full", "-ub, -b, -ncmoe, -nkvo and --swa-full"),
    ],
)
def test_a_flag_that_costs_speed_is_named_with_the_plan_without_it(
    gpt_oss: Path, given: str, named: str
) -> None:
    words = given.split()
    plan, best = planned(gpt_oss, *words), planned(gpt_oss)
    cost = plan["slow_flags"]
    assert cost["flags"] == named.replace(" and ", ", ").split(", ")
    for name, tps in cost["expected_without"].items():
        assert tps >= best["expected"][name] / 1.05
    printed = CliRunner().invoke(app, ["plan", str(gpt_oss), *MACHINE, *words]).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("without ")]
    assert line.startswith(f"without {named}: prompts 3,")
    assert line.endswith(f"leave {'them' if ' ' in named else 'it'} out")


@pytest.mark.parametrize("given", ["", "-ngl 99", "-fa on", "-ub 8192 -b 8192", "--vram 12GiB"])
def test_flags_that_cost_nothing_are_not_named(gpt_oss: Path, given: str) -> None:
    """A limit of memory is the user's, whatever it costs."""
    assert planned(gpt_oss, *given.split())["slow_flags"] is None


def test_each_flag_is_tried_once_at_most(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(gpt_oss, "-ub 2048 -b 2048 -ngl 99 -ncmoe 26 -fa on")
    planner = planner_of(config, PlanOptions(hardware="rtx-4090-ddr5"))
    planner.planned(CONTEXT)
    n_plans = 0
    decide = planner_module.decide

    def counted(*given: Any) -> Any:
        nonlocal n_plans
        n_plans += 1
        return decide(*given)

    monkeypatch.setattr(planner_module, "decide", counted)
    assert flag_cost(config, planner, CONTEXT) is not None
    assert n_plans <= 1 + 5


def test_a_start_says_so_in_a_line_that_is_always_shown() -> None:
    device = "sim:vram=4MiB,bw=1GB/s"
    words = ("-m", str(demo_file("target.gguf")), "-c", "1024", "--device", device)
    slow = session_start(config_of(line_of(*words, "-ub", "32").options)).notes
    (note,) = [why for why in slow if kind_of(why) is NoteKind.FLAGS]
    assert note.startswith("without -ub: prompts ")
    plain = session_start(config_of(line_of(*words).options)).notes
    assert not any(kind_of(why) is NoteKind.FLAGS for why in plain)


def test_a_flag_that_helps_and_harms_is_named_with_both_plans(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Experts take the place of a cache in RAM: the first answers are faster, and later ones far
    slower."""
    path = tmp_path_factory.mktemp("header") / "glm-4.5-air.gguf"
    write_header_only(plan_preset("glm-4.5-air", size="full"), path)
    words = ("plan", str(path), "--hardware", "rtx-4090-ddr5", "-c", "32768")
    data = [
        json.loads(CliRunner().invoke(app, [*words, *more, "--json"]).stdout)
        for more in ((), ("-nkvo",))
    ]
    without, given = (its["expected"] for its in data)
    assert given["decode_tps"] > 1.1 * without["decode_tps"]
    assert without["full_context_decode_tps"] > 3 * given["full_context_decode_tps"]
    assert data[1]["slow_flags"]["flags"] == ["-nkvo"]
    printed = CliRunner().invoke(app, [*words, "-nkvo"], env={"COLUMNS": "400"}).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("without ")]
    both = r"without -nkvo: prompts \S+ tokens/s, answers .* at the end of the context\)"
    assert re.match(both + r"; with it: prompts \S+ tokens/s, answers .* of the context\)$", line)


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "-p", "32", "-n", "4", "-r", "1"),
        ("profile",),
        ("tune", "--minutes", "0.02", "--threads", "1"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_measures_says_so(words: tuple[str, ...]) -> None:
    command, *more = words
    model = ("-m", str(demo_file("target.gguf")), "-c", "1024", "-ub", "32")
    device = ("--device", "sim:vram=4MiB,bw=1GB/s")
    done = CliRunner().invoke(app, [command, *model, *device, *more], env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    assert done.output.count("without -ub: prompts ") == 1


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_start_says_that_the_model_was_trained_for_less(device: str) -> None:
    words = ("-m", str(demo_file("target.gguf")), "--device", device, "-c")
    reasons = session_start(config_of(line_of(*words, "1000000").options)).notes
    (note,) = [why for why in reasons if kind_of(why) is NoteKind.FLAGS]
    assert re.match(r"--ctx-size 1000000: the model was trained for [\d,]+ tokens", note)
    reasons = session_start(config_of(line_of(*words, "1024").options)).notes
    assert not any(kind_of(why) is NoteKind.FLAGS for why in reasons)


def test_drafts_by_own_layers_are_one_of_the_speeds(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(gpt_oss, "-ngl 99")
    planner = planner_of(config, PlanOptions(hardware="rtx-4090-ddr5"))
    now = planner.planned(CONTEXT)
    assert flag_cost(config, planner, CONTEXT) is None

    class Without:
        """The same plan, with which own layers draft."""

        def planned(self, _n_ctx: int) -> Planned:
            drafted = {"mtp_decode_tps": 9.0 * now.expected["decode_tps"]}
            ends = {"least_mtp_decode_tps": 111.0, "most_mtp_decode_tps": 222.0}
            return _with_speeds(now, drafted | ends)

    monkeypatch.setattr(Planner, "with_changes", lambda *_: Without())
    cost = flag_cost(config, planner, CONTEXT)
    assert cost is not None
    assert "(110 to 220 with drafts by its own layers): leave it out" in cost.note


def _with_speeds(planned: Planned, more: dict[str, float]) -> Planned:
    other = replace(planned)
    other.__dict__["expected"] = planned.expected | more  # a cached property
    return other


def _config(path: Path, words: str) -> Config:
    return config_of(line_of("-m", str(path), "-c", str(CONTEXT), *words.split()).options)
