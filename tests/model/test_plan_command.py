"""`specoffload plan`: the plan of a header, for people and for scripts."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from plans import context_of
from resolved import config_of
from rich.console import Console
from typer.testing import CliRunner

from lab.synth import plan_preset, write_header_only
from lab.synth.mtp import write_mtp
from lab.synth.published import published_facts
from offload.device import choose_devices
from offload.errors import BadModel, DoesNotFit
from offload.ggml import model as library_model
from offload.model_file import read_facts
from offload.plan.objective import MeasuredDecode
from offload.plan.placement import Plan, PlanRequest, make_plan
from offload.plan.workload import TokenMix
from offload.routing.routing import SHARES, CountedHits, HitCurve
from offload.stream.link_speed import LinkSpeeds
from offload.times.context_memory import ContextOptions
from offload.times.machine import TYPICAL
from offload.times.repeated import RepeatedRate
from specoffload import kept_machine, report
from specoffload.cli import app
from specoffload.config.hardware import PRESETS, hardware_of
from specoffload.cpu_load import Load
from specoffload.errors import UsageError
from specoffload.kept import Kept, KeptFile
from specoffload.kept_machine import link_key
from specoffload.opening.speeds import rounded

GIB = 1 << 30
USED = "deepseek2.expert_used_count"
KEYS = {
    *("model", "architecture", "vram_bytes", "ctx_size", "resident_bytes", "streamed_bytes"),
    *("reserve_bytes", "reserve", "slot_bytes", "slots", "streamed_layers", "ubatch", "min_batch"),
    *("host_working_bytes", "pass_experts", "declined", "reasons", "expected", "ends", "hits"),
    *("unions", "machine", "cache", "lent_slots", "idle_slots", "own_cells"),
    "cached_routing",
    *("hardware", "ways", "llama_cpp", "slow_flags", "cards", "contexts", "host_projector_bytes"),
    *("host", "disk", "tables", "devices", "layout", "kv_overrides"),
}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("header") / "gpt-oss-120b.gguf"
    return write_header_only(plan_preset("gpt-oss-120b", size="full"), path)


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("header") / "r1.gguf"
    return write_header_only(plan_preset("deepseek-r1", size="full"), path)


@pytest.fixture(autouse=True)
def nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have measured the disk."""
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "kept"))


@pytest.fixture(autouse=True)
def no_model_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(library_model, "Model", opened)


def planned(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_script_reads_one_object_with_these_keys(r1: Path) -> None:
    plan = planned(str(r1), "--vram", "24GiB", "--ram", "512GiB")
    assert set(plan) == KEYS
    assert plan["resident_bytes"] + plan["reserve_bytes"] + plan["slot_bytes"] <= 24 * GIB
    assert plan["reserve_bytes"] == sum(plan["reserve"].values())
    assert set(plan["slots"]) == {"gate", "up", "down"}
    assert {slots["n_experts"] for slots in plan["slots"].values()} == {256}
    assert len({slots["n_slots"] for slots in plan["slots"].values()}) == 1, "one number per expert"
    assert plan["slots"]["gate"]["n_slots"] >= 2 * plan["pass_experts"] > 0
    assert plan["declined"] == []
    assert plan["min_batch"] < plan["ubatch"]


def test_a_plan_counts_the_experts_that_override_kv_leaves(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB")
    own, few = planned(*asked), planned(*asked, "--override-kv", f"{USED}=int:4")
    assert (own["kv_overrides"], few["kv_overrides"]) == ({}, {USED: 4})
    assert few["expected"]["decode_tps"] > 1.3 * own["expected"]["decode_tps"]
    assert few["expected"]["prefill_tps"] > own["expected"]["prefill_tps"]
    words = ["plan", *asked, "--override-kv", f"{USED}=int:4"]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert f"--override-kv: {USED} is 4 (the file: 8): texts may differ" in shown
    assert f"--override-kv {USED}=int:4" in next(
        line for line in shown.splitlines() if line.startswith("llama.cpp:")
    )


def test_a_row_says_what_cached_routing_brings_if_it_is_asked_for(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB", "-c", "4096")
    own = planned(*asked)
    assert own["cached_routing"] is None
    assert "cached routing:" not in words_of(*asked)
    some, strong = (planned(*asked, "--route-cached", s) for s in ("0.1", "1"))
    routed = [plan["cached_routing"] for plan in (some, strong)]
    assert [its["strength"] for its in routed] == [0.1, 1.0]
    assert some["expected"] == own["expected"], "the plan and its speeds are the model's own"
    speeds = [own["expected"]["decode_tps"], *(its["decode_tps"] for its in routed)]
    assert speeds == sorted(set(speeds)), "faster with each strength"
    assert routed[0]["least_decode_tps"] > own["expected"]["least_decode_tps"]
    all_kept = planned(*asked, "--route-cached", "1", "--route-keep", "8")["cached_routing"]
    assert all_kept["decode_tps"] == pytest.approx(own["expected"]["decode_tps"])
    left = words_of(*asked, "--route-cached", "1", "--route-keep", "8")
    assert (
        "--route-cached 1 changes nothing: --route-keep 8 leaves all 8 experts of a token" in left
    )
    shown = words_of(*asked, "--route-cached", "0.5")
    said = r"answers about [\d.]+(?: to [\d.]+)? tokens/s with --route-cached 0.5 \(a guess from"
    assert re.search(f"cached routing: {said} drawn routing\\). Texts differ", shown)
    assert "--route-cached 0.5" in shown.split("start: ")[1].split("llama.cpp:")[0]


def test_cached_routing_saves_copies_without_split_layers(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB", "-c", "4096", "--link", "400GB/s")
    own, some, strong = (
        planned(*asked, "--hybrid", "off", "--route-cached", s)["cached_routing"]
        for s in ("0.001", "0.1", "1")
    )
    assert own["decode_tps"] < some["decode_tps"] < strong["decode_tps"]


def test_a_plan_says_if_cached_routing_would_bring_nothing(tiny_moe: Path) -> None:
    shown = words_of(str(tiny_moe), "--vram", "24GiB", "--ram", "64GiB", "--route-cached", "0.5")
    assert "no faster answers are expected with --route-cached 0.5" in shown


def test_both_ends_of_the_choice_between_prompts_and_answers_are_printed(r1: Path) -> None:
    words = (str(r1), "--vram", "10GiB", "--ram", "512GiB", "-c", "4096", "--link", "50GB/s")
    default = planned(*words)
    here, decode = default["expected"], default["ends"]["decode"]
    assert here["prefill_tps"] > 4 * decode["prefill_tps"]
    assert here["decode_tps"] < decode["decode_tps"] / 1.1
    asked = planned(*words, "--plan-for", "decode")
    assert asked["ends"] == {}
    assert decode["decode_tps"] == pytest.approx(asked["expected"]["decode_tps"])
    assert decode["prefill_tps"] == pytest.approx(asked["expected"]["prefill_tps"])
    said_here = words_of(*words)
    ends = (
        rounded(speeds[key]) for speeds in (here, decode) for key in ("prefill_tps", "decode_tps")
    )
    said = "prompts {} tokens/s and answers {}, or {} and {} with --plan-for decode".format(*ends)
    assert said in said_here
    assert planned(str(r1), "--vram", "24GiB", "--ram", "512GiB", "-c", "4096")["ends"] == {}


def test_the_default_context_leaves_room_for_the_speed_of_prompts(r1: Path) -> None:
    words = (str(r1), "--vram", "12GiB", "--ram", "512GiB")
    least, default = planned(*words, "-c", "4096"), planned(*words)
    longer = planned(*words, "-c", "32768")
    assert longer["expected"]["decode_tps"] < least["expected"]["decode_tps"]
    assert default["expected"]["prefill_tps"] >= 0.5 * least["expected"]["prefill_tps"]
    assert default["ctx_size"] <= 32768


def test_it_follows_the_command_line_that_serve_would_have(r1: Path) -> None:
    plain = planned(str(r1), "--vram", "24GiB", "-c", "4096")
    assert planned(str(r1), "--vram", "24GiB", "-ub", "512")["ubatch"] == 512
    assert planned(str(r1), "--vram", "24GiB", "-b", "1024")["ubatch"] <= 1024
    longer = planned(str(r1), "--vram", "24GiB", "-c", "32768")
    assert longer["reserve"]["kv_bytes"] == 8 * plain["reserve"]["kv_bytes"]
    small = planned(str(r1), "--vram", "24GiB", "-c", "32768", "-ctk", "q8_0", "-ctv", "q8_0")
    assert small["reserve"]["kv_bytes"] == longer["reserve"]["kv_bytes"] * 34 // 64
    some = planned(str(r1), "--vram", "80GiB", "-ncmoe", "50")
    assert some["streamed_layers"] == {"experts": 50, "dense": 0}
    drafted = planned(str(r1), "--vram", "24GiB", "-md", str(demo_draft()), "-c", "4096")
    assert drafted["reserve"]["draft_bytes"] > 0
    assert drafted["reserve_bytes"] == plain["reserve_bytes"] + drafted["reserve"]["draft_bytes"]


def test_without_a_context_it_says_which_one_a_start_takes(r1: Path) -> None:
    asked = (str(r1), "--vram", "48GiB", "--ram", "512GiB")
    n_ctx = planned(*asked)["ctx_size"]
    least, own = planned(*asked, "-c", "4096"), planned(*asked, "-c", "0")
    assert 4096 < n_ctx <= own["ctx_size"] == 163840
    speed = planned(*asked, "-c", str(n_ctx))["expected"]["decode_tps"]
    assert speed >= 0.8 * least["expected"]["decode_tps"]
    printed = CliRunner().invoke(app, ["plan", *asked]).stdout
    assert f"context: {n_ctx:,} tokens" in " ".join(printed.split())


def test_it_names_the_flags_that_it_ignores(r1: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(r1), "-c", "4096", "-ot", "exps=CPU", "-fmoe"])
    assert "-ot exps=CPU" in done.stderr
    assert "-fmoe" in done.stderr


def demo_draft() -> Path:
    from specoffload.config.resolution import demo_file

    return demo_file("draft.gguf")


def test_a_slower_link_raises_the_threshold(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB", "--link")
    fast, slow = planned(*asked, "50GB/s"), planned(*asked, "12GB/s")
    assert slow["min_batch"] > fast["min_batch"]
    assert slow["expected"]["prefill_tps"] < fast["expected"]["prefill_tps"]


def test_several_devices_have_a_column_each_and_add_up(r1: Path) -> None:
    sizes = ("--ram", "512GiB", "-c", "4096")
    asked = (str(r1), "--vram", "24GiB,20GiB", "--link", "25GB/s,12GB/s", *sizes)
    both, alone = planned(*asked), planned(str(r1), "--vram", "24GiB", *sizes)
    assert set(both) == KEYS
    first, second = both["devices"]
    assert (first["layers"][0], second["layers"][1]) == (0, 60)
    assert first["layers"][1] + 1 == second["layers"][0]
    assert [first["vram_bytes"], second["vram_bytes"]] == [24 * GIB, 20 * GIB]
    for device in (first, second):
        used = device["resident_bytes"] + device["reserve_bytes"] + device["slot_bytes"]
        assert used <= device["vram_bytes"]
        assert device["reserve_bytes"] == sum(device["reserve"].values())
    for key in ("resident_bytes", "streamed_bytes", "reserve_bytes", "slot_bytes"):
        assert both[key] == first[key] + second[key]
    assert both["reserve_bytes"] == sum(both["reserve"].values())
    assert both["reserve"]["kv_bytes"] == alone["reserve"]["kv_bytes"]
    total = both["resident_bytes"] + both["streamed_bytes"]
    assert total == alone["resident_bytes"] + alone["streamed_bytes"]
    assert alone["devices"][0]["slots"] == alone["slots"]
    assert len(both["slots"]) == 6, "each device has slots of its own"
    printed = shown(*asked)
    assert re.search(r"│ layers +│ +0-\d+ │ +\d+-60 │", printed)
    assert "x GPU0 alone (estimate)" in printed


def test_links_are_measured_as_a_start_does(
    r1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "sim:vram=24GiB,sim:vram=20GiB"
    asked = (str(r1), "--device", device, "--ram", "512GiB")
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    monkeypatch.setattr(Load, "is_busy", False)
    coming = [LinkSpeeds((30e9, 25e9), (21e9, 20e9))] * 3
    monkeypatch.setattr(kept_machine, "link_speeds", lambda _: coming.pop())

    def links(*more: str) -> list[float]:
        return [its["link_bytes_per_s"] for its in planned(*asked, *more)["devices"]]

    assert links("--link", "8GB/s,7GB/s") == [8e9, 7e9]
    assert not [*tmp_path.iterdir()], "what is described is not measured"
    for n_left in (2, 1, 0, 0):
        assert links() == [21e9, 20e9]
        assert len(coming) == n_left, "measured as starts do, until the speeds agree"
    assert [*tmp_path.iterdir()]
    key, kept = link_key(choose_devices(device)), KeptFile(tmp_path)
    other = [RepeatedRate((rate,) * 3) for rate in (20e9, 9e9)]
    kept.update(lambda file: setattr(file.links[key], "together", other))
    assert links() == [20e9, 9e9]
    assert links("--vram", "16GiB,20GiB") == [20e9, 9e9]
    kept.update(lambda file: setattr(file.links[key], "alone", other[::-1]))
    assert links() == [9e9, 9e9], "no link is faster together with others"


def test_a_device_that_gains_nothing_is_left_out_with_the_reason(r1: Path) -> None:
    plan = planned(str(r1), "--vram", "500GiB,24GiB", "--ram", "512GiB")
    assert [device["name"] for device in plan["devices"]] == ["GPU0"]
    assert any("the whole model fits GPU0" in reason for reason in plan["reasons"])


def test_one_gpu_fewer_and_one_more_are_what_their_own_plans_say(gpt_oss: Path) -> None:
    base = (str(gpt_oss), "--ram", "128GiB", "-c", "4096")
    vram, link = ("12GiB", "8GiB", "8GiB"), ("25GB/s", "12GB/s", "12GB/s")
    found = planned(*base, "--vram", ",".join(vram[:2]), "--link", ",".join(link[:2]))
    assert [its["n_cards"] for its in found["cards"]] == [1, 2, 3]
    for n, its in enumerate(found["cards"], 1):
        alone = found
        if n != 2:
            alone = planned(*base, "--vram", ",".join(vram[:n]), "--link", ",".join(link[:n]))
        for key in ("prefill_tps", "decode_tps"):
            assert its[key] == pytest.approx(alone["expected"][key])
        assert its["slots"] > 0
    speeds = [its["decode_tps"] for its in found["cards"]]
    assert speeds == sorted(speeds)


def test_what_a_further_gpu_brings_is_shown_where_weights_stream(r1: Path, tiny_moe: Path) -> None:
    one = shown(str(r1), "--vram", "24GiB", "--link", "25GB/s", "--ram", "512GiB")
    (title,) = [line for line in one.splitlines() if "What a GPU more brings" in line]
    assert "* is this plan" in title
    assert "tensor and graph" in " ".join(one.split())
    for words in (
        (str(r1), "--vram", "24GiB,24GiB", "--ram", "512GiB", "--tensor-split", "1,1"),
        (str(tiny_moe), "--vram", "24GiB", "--link", "25GB/s"),
        (str(tiny_moe),),
    ):
        assert "What a GPU more brings" not in shown(*words), words


def test_lists_of_different_lengths_are_refused(r1: Path) -> None:
    asked = ["plan", str(r1), "--vram", "24GiB,12GiB", "--link", "1GB/s,2GB/s,3GB/s"]
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, UsageError) or result.exit_code
    assert "--vram has 2 sizes and --link 3 rates" in str(result.exception) + result.output


TOML = """
vram = "12GiB"
ram = "256GiB"
link_rate = "12GB/s"
ram_rate = 200e9
vram_rate = "360GB/s"
"""


def test_a_machine_that_is_not_there_is_planned_for_by_name_or_by_file(
    r1: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(TOML)
    as_json = tmp_path / "own.json"
    as_json.write_text(json.dumps(tomllib.loads(TOML)))
    small = planned(str(r1), "--hardware", str(own))
    assert planned(str(r1), "--hardware", str(as_json))["expected"] == small["expected"]
    large = planned(str(r1), "--hardware", "h100")
    assert (small["vram_bytes"], large["vram_bytes"]) == (11 * GIB, 79 * GIB)
    assert small["machine"]["ram_bytes_per_s"] == 200e9
    assert small["machine"]["gpu_flops"] == TYPICAL.gpu_flops, (
        "a typical GPU's, if the file does not say"
    )
    assert small["host"] == {
        "available_bytes": 256 * GIB, "limited_by": "--hardware", "fits": False,
        "others_bytes": 10 * GIB,
    }  # fmt: skip
    assert large["host"]["fits"]
    for name, tps in small["expected"].items():
        assert tps < large["expected"][name]
    changed = planned(
        str(r1), "--hardware", "h100", "--vram", "24GiB", "--link", "12GB/s", "--ram", "512GiB"
    )
    assert changed["vram_bytes"] == 24 * GIB
    assert changed["machine"]["link_bytes_per_s"] == 12e9
    assert changed["machine"]["ram_bytes_per_s"] == large["machine"]["ram_bytes_per_s"]
    assert changed["host"]["limited_by"] == "--ram"


def test_the_modelled_table_is_the_one_that_the_plan_goes_by(r1: Path) -> None:
    asked = (str(r1), "--hardware", "rtx-4090-ddr5", "--ram", "512GiB")
    plan = planned(*asked)
    in_place, streamed = plan["ways"]["in place"], plan["ways"]["streamed"]
    assert 1 / in_place["1"] == pytest.approx(plan["expected"]["decode_tps"], rel=0.3)
    pays = [int(n) for n in streamed if streamed[n] < in_place[n]]
    assert min(pays) >= plan["min_batch"] > max(int(n) for n in in_place if int(n) < min(pays))
    printed = shown(*asked)
    assert "milliseconds of a decode of n tokens (estimate)" in printed
    assert_stars_agree_with_the_table(printed)
    assert "* the way taken: the fastest, if it saves more than 3%" in printed


def test_times_of_batches_are_ranges_until_shared_experts_are_counted(
    r1: Path, counted: Callable[[float], Path]
) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB")
    guess = planned(*asked)["unions"]
    assert guess["source"] == "guess"
    least, usual, most = (guess[key]["8"] for key in ("least", "experts", "most"))
    assert 8 < least < usual < most <= 8 * 8
    printed = shown(*asked)
    assert re.search(r"│ 8 +│ +[\d,]+ to [\d,]+", printed)
    assert f"8 tokens use {least:.0f} to {most:.0f} of a layer's 256 experts (estimate" in printed
    file = KeptFile(counted(0.5).parent, read_facts(r1))

    def count(kept: Kept) -> None:
        assert kept.hits is not None
        kept.hits = replace(kept.hits, unions={1: 8.0, 8: 40.0})

    file.update(count)
    found = planned(*asked)
    assert (found["unions"]["source"], found["unions"]["n_tokens"]) == ("counted", 700)
    assert [found["unions"][key]["8"] for key in ("least", "experts", "most")] == [40.0] * 3
    after = shown(*asked)
    assert "8 tokens use 40 of a layer's 256 experts (counted on 2026-03-01 over 700" in after
    assert not re.search(r"│ 8 +│ +[\d,]+ to", after)


def test_a_model_larger_than_memory_has_a_table_without_jumps(r1: Path) -> None:
    asked = (str(r1), "--hardware", "rtx-4090-ddr5")
    ways = planned(*asked)["ways"]
    assert "in place" not in ways, "experts on the disk are read by our device alone"
    fits = planned(*asked, "--ram", "512GiB")["ways"]
    assert ways["split"]["1"] > 2 * fits["split"]["1"], "it reads the disk"
    fastest = {int(n): min(way[n] for way in ways.values() if n in way) for n in ways["streamed"]}
    for n in range(2, 17):
        assert fastest[n] <= fastest[n - 1] + fastest[1] * 1.001
    large = [fastest[n] for n in sorted(fastest) if n >= 32]
    assert large == sorted(large)
    printed = shown(*asked)
    assert "on the disk while RAM has no room for them" in " ".join(printed.split())
    assert_stars_agree_with_the_table(printed)
    assert "weights in RAM" not in printed
    assert "weights not on the GPU: 3" in printed


PLACES = {"in place": "CPU", "streamed": "GPU", "split": "GPU and CPU"}


def assert_stars_agree_with_the_table(shown: str) -> None:
    """Compare the way with a star in each row with the place in the table of batches."""
    batches = shown[shown.index("Batches (estimate") :].split("└")[0]
    said = {
        range(int(first), int(to or first) + 1): place.strip()
        for first, to, place in re.findall(r"│ (\d+)(?: to (\d+))? +│ +([\w ]+?) │", batches)
    }
    assert said
    ends = [(sizes.start, sizes.stop) for sizes in said]
    assert [stop for _, stop in ends[:-1]] == [start for start, _ in ends[1:]], "no gaps"
    header, *_ = re.findall(r"^┃ n .*", shown, re.MULTILINE)
    ways = [cell.strip() for cell in header.strip("┃").split("┃")][1:]
    rows = re.findall(r"^│ (\d+) +│(.*)│$", shown[shown.index(header) :], re.MULTILINE)
    assert len(rows) > 6
    for n, cells in rows:
        starred = [way for way, cell in zip(ways, cells.split("│"), strict=True) if "*" in cell]
        if len(ways) == 1:
            starred = ways
        assert len(starred) == 1, "the fastest way is marked"
        assert [p for sizes, p in said.items() if int(n) in sizes] == [PLACES[starred[0]]], n


@pytest.mark.parametrize("hybrid", ["auto", "on", "off"])
def test_the_table_of_batches_says_what_the_stars_say(r1: Path, hybrid: str) -> None:
    asked = [str(r1), "--hardware", "rtx-4090-ddr5", "--vram", "40GiB", "--ram", "512GiB"]
    asked += ["-c", "4096"]  # leaves room for slots
    printed = shown(*asked, "--hybrid", hybrid)
    assert_stars_agree_with_the_table(printed)
    if hybrid != "auto":
        assert ("GPU and CPU" in printed) == (hybrid == "on")


def test_an_estimate_has_at_most_three_digits(r1: Path) -> None:
    printed = shown(str(r1), "--hardware", "rtx-4090-ddr5")
    rows = re.findall(r"^│ \d+ +│(.*)│$", printed[printed.index("milliseconds of") :], re.MULTILINE)
    (first_ms,) = re.findall(r"([\d.,]+) \*", rows[0])
    (speed,) = re.findall(r"answers: about (?:[\d.]+ to )?([\d.]+)\s+token", printed)
    assert float(speed) * float(first_ms.replace(",", "")) == pytest.approx(1000, rel=0.1)
    numbers = re.findall(r"[\d.,]+", " ".join(rows))
    assert len(numbers) > 15
    for number in numbers:
        assert len(number.replace(",", "").replace(".", "").strip("0")) <= 3, number


def test_every_preset_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
    assert [name for name in PRESETS if name not in page] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "neither a machine that is known .*rtx-4090-ddr5.* nor a readable file"),
        ("{", "neither JSON nor"),
        ("{}", "vram: Field required"),
        (TOML.replace("12GB/s", "12 apples"), "link_rate: .*12 apples"),
        (TOML.replace("12GiB", "0GiB"), "vram: .*greater than 0"),
        (TOML + "disk = 1", "disk: Extra inputs"),
        (TOML.replace("12GiB", "1GiB"), "more than 1 GiB"),
    ],
)
def test_a_machine_that_cannot_be_read_is_refused(
    r1: Path, tmp_path: Path, text: str | None, words: str
) -> None:
    file = tmp_path / ("own.json" if text and text[0] == "{" else "own.toml")
    if text is not None:
        file.write_text(text)
    with pytest.raises((UsageError, DoesNotFit), match=words):
        planned(str(r1), "--hardware", str(file))


def test_people_see_what_takes_the_memory(r1: Path) -> None:
    printed = shown(str(r1), "--vram", "24GiB", "--ram", "512GiB")
    for words in ("deepseek2, 61 layers, 256 experts", "KV cache", "prompt tokens at once",
                  "cache: experts", "computed by"):  # fmt: skip
        assert words in printed


@pytest.mark.parametrize("more", [(), ("-v",)])
@pytest.mark.parametrize("vram", ["8GiB", "80GiB"])
def test_it_fits_a_terminal(
    r1: Path, vram: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_out", Console(highlight=False, width=80, force_terminal=True))
    result = CliRunner().invoke(
        app, ["plan", str(r1), "--vram", vram, *more], catch_exceptions=False
    )
    lines = re.sub(r"\x1b\[[\d;]*m", "", result.stdout).splitlines()
    assert len(lines) > 12
    assert max(map(len, lines)) <= 80
    assert all("…" not in line for line in lines), "nothing is cut"


def test_what_does_not_fit_is_refused_with_numbers_and_flags(r1: Path) -> None:
    words = r"8192\.0 MiB .* 8925\.9 for the context; .*-ctk q8_0.* or keep it in RAM \(-nkvo\)"
    with pytest.raises(DoesNotFit, match=words):
        planned(str(r1), "--vram", "8GiB", "-c", "131072", "--kv-offload")
    with pytest.raises(BadModel, match="no such file"):
        planned("missing.gguf")


def test_a_cache_in_ram_has_a_line_and_an_entry(r1: Path) -> None:
    asked = (str(r1), "--vram", "8GiB", "--ram", "512GiB", "-c", "131072")
    chosen, wanted = planned(*asked), planned(*asked, "-nkvo")
    n_bytes = 61 * 576 * 2 * 131072
    for plan, why in ((chosen, "does not fit the GPU"), (wanted, "(--no-kv-offload)")):
        cache = plan["cache"]
        assert (cache["size_bytes"], cache["attention_batch"]) == (n_bytes, 1)
        assert why in cache["why"]
        assert plan["reserve"]["kv_bytes"] == 0
        assert plan["reserve_bytes"] == sum(plan["reserve"].values())
        assert plan["host"]["available_bytes"] == 512 * GIB - n_bytes
    assert planned(*asked[:-1], "4096")["cache"] is None
    words = words_of(*asked)
    assert "The KV cache (8.6 GiB for 131,072 tokens) is in RAM" in words
    assert "each batch copies it to the GPU, which computes attention" in words


def shown(*words: str) -> str:
    """Return the output of `plan -v`."""
    result = CliRunner().invoke(app, ["plan", *words, "-v"], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def words_of(*words: str) -> str:
    return " ".join(shown(*words).split())


def test_a_gpu_that_shares_the_ram_is_said_to_need_no_copies(r1: Path) -> None:
    words = words_of(str(r1), "--hardware", "strix-halo")
    assert "specoffload is not for this machine (strix-halo): its GPU shares the RAM" in words
    assert "is not for this machine" not in words_of(str(r1), "--hardware", "rtx-4090-ddr5")
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text("utf-8").split())
    cases = readme.split("## Should I use it?")[1].split(" ## ")[0]
    assert "a Strix Halo: its GPU shares the RAM | llama.cpp. Nothing has to be copied |" in cases


def test_what_host_memory_does_not_hold_is_said_with_what_would(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "-c", "32768")
    words = words_of(*asked, "--ram", "20GiB,80GB/s")
    assert (
        "does not fit memory: 366.9 GiB of weights are not on the GPU, and RAM has room for "
        "20.0 GiB (--ram)" in words
    )
    assert "are read from the disk when a layer needs them" in words
    assert "367 GiB of free RAM (--ram plans for another machine)" in words
    assert "about 347 GiB more GPU memory" in words
    assert "80 GB/s of RAM" in words
    small = planned(*asked, "--ram", "20GiB")["host"]
    assert small == {
        "available_bytes": 20 * GIB, "limited_by": "--ram", "fits": False,
        "others_bytes": 10 * GIB,
    }  # fmt: skip
    assert planned(*asked)["host"]["fits"] == (planned(*asked)["host"]["available_bytes"] > 367e9)
    assert re.search(r"GiB at 5 GB/s, so answers have at most 0\.\d+ tokens/s", words)
    # How fast this machine's kernels are decides the size.
    n_ubatch = planned(*asked, "--ram", "20GiB,80GB/s")["ubatch"]
    assert f"GiB for every {n_ubatch} tokens (--ubatch-size)" in words
    slow, fast = (planned(*asked, "--ram", "20GiB", "--disk", f"{n}GB/s") for n in (1, 10))
    read = [its["disk"]["bytes_per_token"] for its in (slow, fast)]
    assert read[0] == pytest.approx(read[1], rel=0.1), "a fast disk may change a plan a little"
    assert min(read) > GIB
    assert fast["expected"]["decode_tps"] > 4 * slow["expected"]["decode_tps"]
    assert fast["disk"]["most_decode_tps"] > fast["expected"]["decode_tps"]
    enough = words_of(*asked, "--ram", "368GiB")
    assert "does not fit" not in enough
    assert "does not fit" not in words_of(*asked, "--mmap")


def test_a_number_of_gib_without_a_unit_is_not_taken_for_bytes(r1: Path) -> None:
    with pytest.raises(UsageError, match="--vram 24: 24 would be 24 bytes; write 24GiB for GiB"):
        planned(str(r1), "--vram", "24")


def test_what_rests_on_guessed_hits_is_a_range_and_says_so(
    r1: Path, counted: Callable[[float], Path]
) -> None:
    asked = (str(r1), "--vram", "300GiB", "--ram", "512GiB", "--hybrid", "on")
    guessed = words_of(*asked)
    assert re.search(r"answers: about \d[\d.]* to \d[\d.]* tokens/s", guessed)
    assert re.search(r"slower of both speeds assumes \d+%, as if all experts", guessed)
    assert re.search(r"assumes \d+% of experts already on the GPU \(estimate", guessed)
    counted(0.3)
    known = words_of(*asked)
    assert "on the GPU (estimate" not in known
    assert re.search(r"answers: about \d[\d.] ?tokens/s", known)
    assert "slower of both" not in known


def test_guessed_hits_give_a_range_of_speeds_and_counted_ones_a_number(
    r1: Path, counted: Callable[[float], Path]
) -> None:
    asked = (str(r1), "--vram", "300GiB", "--ram", "512GiB", "--hybrid", "on")
    guessed = planned(*asked)["expected"]
    assert 0 < guessed["least_decode_tps"] < guessed["decode_tps"]
    in_place = planned(*asked[:-1], "off")["expected"]["decode_tps"]
    assert in_place * 0.5 < guessed["least_decode_tps"], "the CPU alone is not much faster"
    counted(0.3)
    known = planned(*asked)["expected"]
    assert known["least_decode_tps"] == known["decode_tps"]


def test_hits_are_not_told_of_where_nothing_streams(tiny_moe: Path) -> None:
    words = words_of(str(tiny_moe), "--vram", "2GiB")
    assert "The whole model fits the GPU" in words
    assert "already on the GPU" not in words


def test_a_layer_that_does_not_fit_its_slots_is_said(r1: Path) -> None:
    small = planned(str(r1), "--vram", "8GiB")
    assert small["slots"]["gate"]["n_slots"] < 256
    assert small["declined"] == []
    assert 0 < 2 * small["pass_experts"] <= small["slots"]["gate"]["n_slots"]
    assert any("in passes over" in reason for reason in small["reasons"])
    # With a link slower than the CPU, copying loses.
    asked = (str(r1), "--vram", "8GiB", "--link", "0.2GB/s")
    slow = planned(*asked, "--ram", "512GiB")
    assert "of a layer's 256 experts at once" in slow["declined"][0]
    assert slow["pass_experts"] == 0
    assert slow["min_batch"] is None
    most = max(map(int, slow["ways"]["streamed"]))
    assert 8 * most <= slow["slots"]["gate"]["n_slots"], "the table has no batch that is declined"
    # Experts on the disk are read by our device, which then takes every batch.
    from_disk = planned(*asked, "--ram", "256GiB")
    assert from_disk["declined"] == []
    assert "in place" not in from_disk["ways"]


# -- the first lines, and contexts


def test_the_first_lines_answer_what_everybody_asks(r1: Path) -> None:
    asked = (str(r1), "--hardware", "rtx-4090-ddr5", "--ram", "512GiB", "-b", "4096")
    printed = CliRunner().invoke(app, ["plan", *asked], catch_exceptions=False).stdout
    lines = printed.splitlines()
    names = [line.partition(": ")[0] for line in lines[:6]]
    assert names == ["fits", "compared", "start", "llama.cpp", "prompts", "answers"]
    fits, compared, start, llama, prompts, answers = (line.partition(": ")[2] for line in lines[:6])
    plan = planned(*asked)
    assert "of 23.0 GiB on the GPU" in fits
    assert "of 512.0 GiB in RAM (--ram)" in fits
    assert "kept prompts and the system need about 10.0 GiB" in fits
    assert start == f"specoffload serve {r1} -b 4096", "flags that only describe are left out"
    rival = plan["llama_cpp"]
    assert llama.startswith(f"llama-server -m {r1} -c {plan['ctx_size']} -ngl 99 --n-cpu-moe ")
    assert f"about {rounded(plan['expected']['prefill_tps'])} tokens/s (± 40 %)" in prompts
    assert f"llama.cpp {rounded(rival['prefill_tps'])} with {rival['prompt_flags']}" in prompts
    assert rounded(plan["expected"]["decode_tps"]) in answers
    assert "(± 25 %)" in answers
    assert f"llama.cpp {rounded(rival['decode_tps'])} with --n-cpu-moe 58" in answers
    assert compared.startswith("answers like llama.cpp with ")
    assert "deepseek2" not in printed
    assert "deepseek2" in shown(*asked)


def test_the_comparison_follows_from_the_speeds_that_are_printed(
    gpt_oss: Path,
) -> None:
    asked = (str(gpt_oss), "--hardware", "rtx-4090-ddr5", "-c", "65536")
    plan, lines = planned(*asked), words_of(*asked)
    ratio = plan["expected"]["prefill_tps"] / plan["llama_cpp"]["prefill_tps"]
    assert ratio > 1.1
    assert (
        "compared: answers like llama.cpp with its cache and CPU share (b12569), prompts "
        f"{rounded(ratio)} × as fast as llama.cpp with {plan['llama_cpp']['prompt_flags']}"
    ) in lines
    assert f"-c 65536 -ngl 99 {plan['llama_cpp']['cache_flags']} (and --moe-cache-cpu-" in lines
    slow = (*asked, "-ncmoe", "26")
    assert "compared: answers 0.53 to 0.99 × as fast as llama.cpp" in words_of(*slow)
    assert "(each ± 25 %)" in lines


def test_the_ram_of_kept_prompts_and_of_the_system_is_in_the_sum(gpt_oss: Path) -> None:
    asked = (str(gpt_oss), "--vram", "24GiB", "-c", "4096", "--ram")
    needed = planned(*asked, "512GiB")["streamed_bytes"] / GIB
    assert shown(*asked, f"{needed + 11:.1f}GiB").startswith("fits: ")
    barely = shown(*asked, f"{needed + 2:.1f}GiB")
    assert barely.startswith("fits barely: ")
    assert "need about 10.0 GiB more, so 8.0 GiB are missing" in barely
    without = shown(*asked, f"{needed + 3:.1f}GiB", "--cache-ram", "0")
    assert without.startswith("fits: ")
    assert "where the system needs about 2.0 GiB" in without
    many = shown(*asked, f"{needed + 12:.1f}GiB", "--cache-ram", "16384")
    assert "need about 18.0 GiB more, so 6.0 GiB are missing (--cache-ram limits" in many
    assert shown(*asked, "30GiB").startswith("needs the disk: ")


def test_a_context_beyond_the_models_training_is_doubted(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB", "-c")
    assert "--ctx-size 200000: the model was trained for 163,840 tokens" in shown(*asked, "200000")
    assert "trained for" not in shown(*asked, "163840")
    stretched = shown(*asked, "200000", "--rope-scaling", "yarn", "--rope-scale", "80")
    assert "--ctx-size 200000: " not in stretched


def test_a_pasted_line_of_a_server_is_planned(r1: Path) -> None:
    words = ("-np", "4", "--cache-ram", "-1", "--host", "0.0.0.0", "--metrics", "--no-ui")
    asked = (str(r1), "--hardware", "rtx-4090-ddr5", "--ram", "512GiB")
    printed = shown(*asked, *words)
    assert f"start: specoffload serve {r1} -np 4 --cache-ram -1 --host 0.0.0.0" in printed
    assert planned(*asked, *words)["host"]["others_bytes"] == 2 * GIB, "they take what is left"
    wrong = CliRunner().invoke(app, ["plan", str(r1), "-np", "many"])
    assert "-np many: must be a whole number" in str(wrong.exception)
    several = CliRunner().invoke(app, ["plan", "--models-dir", "models"])
    assert "--models-dir is not a flag of plan" in str(several.exception)


def test_a_table_of_contexts_says_what_the_chosen_one_costs_and_why_short_ones_are_slower(
    gpt_oss: Path,
) -> None:
    lines = shown(str(gpt_oss), "--hardware", "rtx-4090-ddr5")
    assert (
        "The chosen 131,072 tokens cost speed: prompts 2,000 tokens/s, where --ctx-size 32768 has "
        "3,900; answers 34 to 74, where it has 35 to 82"
    ) in lines
    assert "Prompts in 4,096 tokens are slower, since they are shorter" in lines


def test_a_context_that_costs_prompts_alone_says_that_answers_are_as_fast(r1: Path) -> None:
    lines = shown(str(r1), "--hardware", "rtx-4090-epyc")
    assert re.search(r"has [\d.,]+; answers are as fast$", lines, re.M), lines


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("rtx-4090", "rtx-4090-ddr5 or rtx-4090-epyc"), ("RTX-5090-DDR4", "rtx-5090-ddr5")],
)
def test_a_machine_with_a_wrong_name_is_told_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}\\?$"):
        hardware_of(typed)


def test_a_row_of_batches_has_the_times_of_both_ends(gpt_oss: Path) -> None:
    asked = (str(gpt_oss), "--hardware", "rtx-4090-ddr5", "-c", "65536")
    expected = planned(*asked)["expected"]
    fast, slow = (1e3 / expected[name] for name in ("decode_tps", "least_decode_tps"))
    assert f"{fast:.1f} ms to {slow:.1f} ms" in shown(*asked)


def test_llama_cpp_is_not_modelled_where_its_ways_are_not(r1: Path) -> None:
    on_disk = (str(r1), "--hardware", "rtx-4090-ddr5", "-c", "4096")
    assert planned(*on_disk)["llama_cpp"] is None
    assert "compared: llama.cpp is not modelled: it reads through mmap" in shown(*on_disk)
    several = (str(r1), "--vram", "24GiB,20GiB", "--ram", "512GiB", "-c", "4096")
    assert planned(*several)["llama_cpp"] is None
    assert "compared: llama.cpp is not modelled for several devices" in shown(*several)


def test_a_chosen_context_is_shown_beside_what_others_cost(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB")
    plan = planned(*asked)
    contexts = {its["ctx_size"]: its for its in plan["contexts"]}
    assert {4096, 32768, 65536, 131072, plan["ctx_size"]} == set(contexts)
    assert contexts[plan["ctx_size"]]["decode_tps"] == plan["expected"]["decode_tps"]
    asked_for = planned(*asked, "-c", "32768")
    assert asked_for["contexts"] == [], "the user has decided"
    assert contexts[32768]["prefill_tps"] == asked_for["expected"]["prefill_tps"]
    table = shown(*asked).split("What a context costs")[1].split("└")[0]
    assert f"{plan['ctx_size']:,} *" in table
    small = planned(str(r1), "--vram", "8GiB", "--ram", "512GiB")["contexts"]
    assert {its["ctx_size"]: its["fits"] for its in small}[131072] is False


def test_plans_for_other_mixes_have_the_same_context(r1: Path) -> None:
    asked = (str(r1), "--hardware", "rtx-4070-ddr5", "--ram", "512GiB")
    sizes = {planned(*asked, "--plan-for", mix)["ctx_size"] for mix in ("auto", "decode", "1:4")}
    assert len(sizes) == 1


def test_numbers_have_the_right_plural(tiny_moe: Path, r1: Path) -> None:
    for words in (words_of(str(tiny_moe), "--vram", "2GiB"), words_of(str(r1), "--vram", "80GiB")):
        assert not re.search(r"(?<![\d.,])1 (layers|experts|tokens|batches)\b", words)


# -- without a GPU


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_facts("Qwen3-30B-A3B", tmp_path_factory.mktemp("published")).path


def test_without_a_gpu_the_plan_is_for_the_cpu_and_says_how_to_name_a_card(qwen: Path) -> None:
    asked = (str(qwen), "--ram", "64GiB,40GB/s")
    plan = planned(*asked)
    assert set(plan) == KEYS
    assert (plan["vram_bytes"], plan["slots"], plan["min_batch"]) == (0, {}, None)
    assert set(plan["ways"]) == {"in place"}
    facts = read_facts(qwen)
    assert plan["resident_bytes"] + plan["streamed_bytes"] == facts.size_bytes
    assert plan["machine"]["ram_bytes_per_s"] == 40e9
    slower = planned(*asked[:2], "64GiB,5GB/s")
    assert slower["expected"]["decode_tps"] < 0.8 * plan["expected"]["decode_tps"]
    printed = words_of(*asked)
    assert "This is the plan for the CPU of this machine" in printed
    assert "--hardware rtx-" in printed
    assert "--vram 24GiB --link 25GB/s --ram 128GiB" in printed
    assert "compared: answers and prompts like llama.cpp, which has the same CPU backend" in printed
    assert "GPU memory" not in printed
    described = planned(*asked, "--vram", "12GiB", "--link", "20GB/s")
    assert described["vram_bytes"] == 12 * GIB
    assert described["machine"]["link_bytes_per_s"] == 20e9


@pytest.mark.several_processors
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_plan_for_the_cpu_counts_the_threads_of_prompts(qwen: Path) -> None:
    one, two = (planned(str(qwen), "--ram", "64GiB,40GB/s", "-tb", n) for n in ("1", "2"))
    assert one["expected"]["prefill_tps"] < 0.6 * two["expected"]["prefill_tps"]


def test_a_plan_for_the_cpu_has_the_context_that_a_start_takes(qwen: Path) -> None:
    plan = planned(str(qwen), "--device", "cpu")
    assert plan["ctx_size"] == context_of(config_of(model=qwen, device="cpu")).n_ctx


def test_a_model_larger_than_ram_is_said_to_be_read_by_the_cpu(qwen: Path) -> None:
    small = planned(str(qwen), "--ram", "12GiB", "-c", "4096")
    assert small["host"]["fits"] is False
    assert small["disk"]["bytes_per_token"] > 0
    assert small["expected"]["decode_tps"] < small["disk"]["most_decode_tps"]
    assert "needs the disk: Qwen3-30B-A3B.gguf" in shown(str(qwen), "--ram", "12GiB", "-c", "4096")


def test_a_link_without_a_card_is_refused_with_what_is_missing(qwen: Path) -> None:
    with pytest.raises(UsageError, match="--link describes a GPU.* --vram 24GiB .*--hardware"):
        planned(str(qwen), "--link", "25GB/s")


# -- split layers


@pytest.fixture
def counted(r1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Path]:
    """A function that stores hit rates of (share of slots) ** power. Power 1 is even routing."""
    folder = tmp_path / "profiles"
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(folder))

    def keep(power: float) -> Path:
        rates = tuple(share**power for share in SHARES)
        facts = read_facts(r1)
        hits = CountedHits(256, 8, {3: rates, 4: rates}, 700.0, date(2026, 3, 1))
        file = KeptFile(folder, facts)
        assert file.update(lambda kept: kept.count(hits, TokenMix(0, 0))) == ""
        return file.path

    return keep


def test_a_plan_for_splits_says_where_its_hits_come_from(
    r1: Path, counted: Callable[[float], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (str(r1), "--vram", "80GiB", "--hybrid", "on")
    off = planned(*asked[:3], "--hybrid", "off")
    assert off["hits"] is None
    guessed = planned(*asked)
    assert guessed["hits"]["source"] == "guess"
    assert any("estimate" in reason for reason in guessed["reasons"])

    counted(1.0)
    few = planned(*asked)
    assert few["hits"]["source"] == "counted"
    assert (few["hits"]["n_tokens"], few["hits"]["counted_on"]) == (700, "2026-03-01")
    assert any("counted on 2026-03-01 over 700 tokens" in reason for reason in few["reasons"])
    monkeypatch.setenv("SPECOFFLOAD_WITHOUT", "profile")
    assert planned(*asked)["hits"]["source"] == "guess"


def test_the_expected_decode_of_a_split_rises_with_the_hits_that_were_counted(
    r1: Path, counted: Callable[[float], Path]
) -> None:
    asked = (str(r1), "--vram", "80GiB", "--ram", "512GiB", "--hybrid", "on")
    old = planned(*asked[:5], "--hybrid", "off")["expected"]["decode_tps"]
    file = counted(1.0)
    few = planned(*asked)
    file.unlink()
    counted(0.3)
    many = planned(*asked)
    assert old * 0.98 <= few["expected"]["decode_tps"] < many["expected"]["decode_tps"]
    assert few["hits"]["rate"] < many["hits"]["rate"]
    assert few["slots"]["gate"]["n_slots"] <= many["slots"]["gate"]["n_slots"]


def test_auto_plans_as_on_does(r1: Path, counted: Callable[[float], Path]) -> None:
    """Both may split layers, and measuring at the start corrects both."""
    asked = (str(r1), "--vram", "56GiB", "--ram", "512GiB")
    for exponent in (None, 0.3, 1.0):
        if exponent is not None:
            counted(exponent)
        auto, on = (planned(*asked, "--hybrid", word) for word in ("auto", "on"))
        for part in ("slots", "hits", "expected", "ubatch", "reasons"):
            assert auto[part] == on[part]
        assert auto["hits"]["source"] == ("guess" if exponent is None else "counted")


def test_auto_plans_without_splits_if_a_start_can_measure_nothing(
    r1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (str(r1), "--vram", "56GiB", "--ram", "512GiB")
    monkeypatch.setenv("SPECOFFLOAD_WITHOUT", "profile")
    off, auto = (planned(*asked, "--hybrid", word) for word in ("off", "auto"))
    assert auto["slots"] == off["slots"]
    assert auto["hits"] is None


def test_a_range_of_speeds_says_what_it_depends_on(r1: Path) -> None:
    words = words_of(str(r1), "--vram", "56GiB", "--ram", "512GiB")
    found = re.search(
        r"answers: about ([\d.]+) to ([\d.]+) tokens/s \(each ± \d+ %\), more if your texts", words
    )
    assert found is not None
    assert float(found[1]) < float(found[2])


def test_the_plan_whose_decodes_were_faster_is_taken(r1: Path) -> None:
    hits = HitCurve(tuple((share, share**0.3) for share in SHARES), 700, date(2026, 3, 1))

    def plan(hits: HitCurve, *decodes: MeasuredDecode) -> Plan:
        request = PlanRequest(
            budget_bytes=48 * GIB, n_cpu_moe="fit", plan_for_splits=True, hits=hits,
            decodes=decodes, context=ContextOptions(4096), most_ubatch=8192,
        )  # fmt: skip
        return make_plan(read_facts(r1), request)

    few = HitCurve(tuple((share, share**1.5) for share in SHARES), 700, hits.counted_on)
    chosen, other = plan(hits).sharing, plan(few).sharing
    assert chosen != other
    slower = MeasuredDecode(chosen, 0.0121)
    assert plan(hits, slower).sharing == chosen  # the other plan has no measurement
    back = plan(hits, slower, MeasuredDecode(other, 0.0021))
    assert back.n_resident == other.n_resident
    assert any("2.1 ms with this plan, and 12.1 ms" in reason for reason in back.reasons)
    assert plan(hits, slower, MeasuredDecode(other, 0.02)).sharing == chosen


def test_damaged_hits_are_said_and_the_guess_stands(
    r1: Path, counted: Callable[[float], Path]
) -> None:
    file = counted(0.5)
    file.write_text("{", encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", str(r1), "--vram", "80GiB", "--hybrid", "on", "-v"])
    assert result.exit_code == 0
    assert "is damaged and not used" in result.stdout + result.stderr
    assert "(estimate; a run will measure it)" in " ".join(result.stdout.split())


@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35"])  # with experts, and without
def test_a_plan_estimates_answers_with_drafts_by_own_layers(
    architecture: str, models: Path
) -> None:
    path = write_mtp(models, architecture)
    found = planned(str(path), "--vram", "24GiB")
    assert found["reserve"]["mtp_bytes"] > 0
    expected = found["expected"]
    assert expected["mtp_decode_tps"] >= expected["decode_tps"]
    least, most = (expected[f"{end}_mtp_decode_tps"] for end in ("least", "most"))
    assert least <= expected["mtp_decode_tps"] <= most
    assert (found["unions"] is None) == (architecture == "qwen35")
    without = planned(str(path), "--vram", "24GiB", "--spec-type", "none")
    assert without["reserve"]["mtp_bytes"] == 0
    assert "mtp_decode_tps" not in without["expected"]


def test_a_plan_says_what_the_file_of_layers_that_draft_lacks(models: Path) -> None:
    path = write_mtp(models, "glm4moe", without=r"^blk\.4\.", name="left-out")
    done = CliRunner().invoke(app, ["plan", str(path)], catch_exceptions=False)
    words = " ".join(done.stdout.split())
    assert "its layers were left out of the file, so ngram-mod and suffix draft alone" in words


@pytest.mark.parametrize(
    ("device", "total"), [("sim", "no limit sim:vram=SIZE sets one"), ("sim:vram=4MiB", "4.0 MiB")]
)
def test_a_simulated_device_holds_weights_alone(device: str, total: str) -> None:
    """Its table once counted a context that is in RAM, and had less than nothing free."""
    from specoffload.config.resolution import demo_file

    printed = words_of(str(demo_file("target.gguf")), "--device", device)
    table = printed[printed.index("GPU memory") : printed.index("Batches")]
    assert "compute buffers │" not in table
    assert "of RAM, where the simulated device computes" in table
    assert " ".join(table.replace("│", " ").split()).count(total) == 1
    assert ("free" in table) == (device != "sim")


def test_idle_conversations_are_priced_at_a_full_context(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB", "-c", "65536")
    idle = planned(*asked, "-np", "4")["idle_slots"]
    assert (idle["n_slots"], idle["n_cells"]) == (3, 3 * 16384)
    assert idle["size_bytes"] == pytest.approx(3 * 16384 * 61 * 576 * 2, rel=0.02)
    assert idle["prompt_s"] > 100 * idle["decode_s"] > 0
    words = words_of(*asked, "-np", "4")
    assert "With -np 4, 3 idle conversations with 49,152 cells of a full context would add" in words
    assert planned(*asked, "-np", "1")["idle_slots"] is None


def test_cells_of_their_own_are_named_where_they_help(r1: Path) -> None:
    asked = (str(r1), "--vram", "24GiB", "--ram", "512GiB", "-c", "65536")
    price = planned(*asked, "-np", "4")["own_cells"]
    assert (price["n_conversations"], price["depth"], price["n_prompt"]) == (4, 16384, 2048)
    assert price["own_prompt_s"] < 0.8 * price["prompt_s"]
    assert price["helps"]
    words = words_of(*asked, "-np", "4")
    assert "With --no-kv-unified, each of 4 conversations has 16,384 tokens of its own." in words
    assert planned(*asked, "-np", "1")["own_cells"] is None
    short = (*asked[:-1], "2048", "-np", "2")
    assert not planned(*short)["own_cells"]["helps"]
    assert "--no-kv-unified" not in words_of(*short)
