"""bench compares our sessions with llama.cpp in a child process and llama-server over HTTP."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from resolved import config_of

from lab.options import engine_options
from lab.synth import plan_preset, write_header_only, write_preset
from offload.engine import open_engine
from offload.errors import DeviceFailed, DeviceUnavailable
from offload.model import ModelFacts
from offload.model_file import read_facts
from specoffload.bench.drafts import (
    PlainText,
    compared,
    plain_text,
    speculative_text,
    split_text,
)
from specoffload.bench.llama_server import (
    TunedLlama,
    cache_settings,
    combined_ways,
    followed_s,
    load_settings,
    measure_server,
    measure_ways,
    mtp_sweep,
    server_name,
    unread_policy,
    ways_of,
)
from specoffload.bench.paths import Llama
from specoffload.config.environment import Environment, read_host
from specoffload.config.options import Options
from specoffload.config.resolution import demo_file, resolve
from specoffload.session.session import Session

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "path": str(demo_file("target.gguf")),
    "device": None,
    "cpu_weights": "",
    "repack": False,
    "flash_attn": -1,
    "n_ctx": 512,
    "n_batch": 512,
    "n_ubatch": 512,
    "n_threads": 1,
    "n_threads_batch": 1,
}


def test_the_child_writes_what_our_engine_writes() -> None:
    with Llama(OPTIONS) as llama:
        prompt = llama.tokenize("def fibonacci(n):")
        _, token = llama.prefill(prompt)
        written = [token, *llama.decode(token, 20, start=len(prompt))[0]]
        again = [token, *llama.decode(token, 20, start=len(prompt))[0]]
    assert written == again
    with open_engine(demo_file("target.gguf"), engine_options(device="cpu", n_ctx=512)) as engine:
        assert engine.tokenize("def fibonacci(n):") == prompt
        row = engine.sequences.extend(0, prompt, 1)[0]
        ours = [int(np.argmax(row))]
        for _ in range(20):
            ours.append(int(np.argmax(engine.sequences.extend(0, ours[-1:], 1)[0])))
    assert written == ours


def test_what_llama_cpp_refuses_is_a_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF but no more")
    with pytest.raises(DeviceFailed, match="could not be loaded"):
        Llama({**OPTIONS, "path": str(bad)})
    with Llama(OPTIONS) as llama:
        with pytest.raises(DeviceFailed, match="decoding .* failed"):
            llama.prefill([1] * 600)  # more tokens than the context holds
        assert llama.prefill([1, 2])[0] > 0, "it goes on"


def test_a_child_that_dies_is_a_sentence() -> None:
    with Llama(OPTIONS) as llama:
        llama._process.kill()
        with pytest.raises(DeviceFailed, match="ended with status"):
            llama.prefill([1, 2])


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--help" in sys.argv:
    print("--spec-draft-n-max N")
    if "new" in sys.argv[0]: print("--moe-cache-mib N")
    if "direct" in sys.argv[0]: print("-lm, --load-mode MODE  none, mmap or dio")
    raise SystemExit
if "--moe-cache-mib" in sys.argv: assert "new" in sys.argv[0]
held = []
drafts = "-md" in sys.argv
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0 and body["n_predict"] in (1, 7), body
        if "--fail" in sys.argv: self.send_response(500); self.end_headers(); return
        timings = {"prompt_n": 10, "prompt_ms": 10, "predicted_n": 7, "predicted_ms": 7}
        if body["cache_prompt"]:
            assert body["prompt"][:len(held)] == held
            if "forgets" in sys.argv[0]: held.clear()
            timings |= {"prompt_n": len(body["prompt"]) - len(held), "prompt_ms": 50}
            if "--moe-cache-mib" in sys.argv:
                timings["prompt_ms"] = 20e3 / int(sys.argv[sys.argv.index("--moe-cache-mib") + 1])
            held[:] = body["prompt"]
        elif "--moe-cache-mib" in sys.argv: timings["predicted_ms"] = 3.5
        if drafts: timings |= {"draft_n": 4, "draft_n_accepted": 3}
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"timings": timings}).encode())
    def log_message(self, *_): pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def llama_server(tmp_path: Path) -> Path:
    return server_program(tmp_path / "llama-server")


def server_program(program: Path) -> Path:
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return program


def test_a_llama_server_is_started_asked_and_stopped(llama_server: Path) -> None:
    config = resolve(Options(), read_host(Environment()))
    tuned = TunedLlama(0, 0, 512, on_gpu=False)
    speed = measure_server(llama_server, config, tuned, (), ["a", "b"], 7)
    assert (speed.prefill_tps, speed.decode_tps, speed.acceptance_rate) == (1000, 1000, None)
    drafting = ("-md", "d.gguf", "--draft-max", "16")
    speed = measure_server(llama_server, config, tuned, drafting, ["a"], 7)
    assert speed.acceptance_rate == 0.75
    with pytest.raises(DeviceFailed, match="500"):
        measure_server(llama_server, config, tuned, ("--fail",), ["a"], 7)
    with pytest.raises(DeviceUnavailable, match="cannot be run"):
        measure_server(llama_server.with_name("none"), config, tuned, (), ["a"], 7)
    running = subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout
    assert str(llama_server) not in running


def header_of_eight_layers(folder: Path) -> ModelFacts:
    planned = plan_preset("qwen3-235b-a22b", size="full", n_layer=8, n_vocab=16384, quant="q4_K")
    return read_facts(write_header_only(planned, folder / "header.gguf"))


def test_the_expert_cache_is_swept_where_the_rivals_help_has_it(
    llama_server: Path, tmp_path: Path
) -> None:
    facts = header_of_eight_layers(tmp_path)
    layer_bytes = sum(e.size_bytes for e in facts.expert_weights) // 8
    tuned = TunedLlama(4, 0, 512, on_gpu=True)
    assert ways_of(llama_server, facts, tuned) == [tuned]
    ways = ways_of(server_program(tmp_path / "new-llama-server"), facts, tuned)
    assert ways[0] == tuned
    assert [way.n_cpu_moe for way in ways] == [4, 8, 6]
    for way, n_layers in zip(ways[1:], (4, 2), strict=True):
        assert 0 <= n_layers * layer_bytes - (way.moe_cache_mib << 20) < 1 << 20
        assert way.arguments()[-2:] == ["--moe-cache-mib", str(way.moe_cache_mib)]
    on_cpu = TunedLlama(0, 0, 512, on_gpu=False)
    assert ways_of(tmp_path / "new-llama-server", facts, on_cpu) == [on_cpu]


def test_direct_reads_are_tried_where_the_rivals_help_has_them(tmp_path: Path) -> None:
    facts, tuned = header_of_eight_layers(tmp_path), TunedLlama(4, 0, 512, on_gpu=True)
    program = server_program(tmp_path / "direct-llama-server")
    usual, direct = ways_of(program, facts, tuned)
    assert usual == tuned
    assert direct.arguments()[-2:] == ["--load-mode", "dio"]
    assert "--no-mmap" in usual.arguments()
    assert "--no-mmap" not in direct.arguments()
    resident = TunedLlama(0, 0, 512, on_gpu=True)
    assert ways_of(program, facts, resident) == [resident], "nothing is loaded for the CPU"
    assert load_settings("--load-mode {mmap,none}  how\n--other  dio") == []
    assert server_name((), 4, 0, (), direct.load_flags) == "llama-server --load-mode dio"


def test_a_rivals_decodes_of_a_given_text_are_timed_by_its_own_clock(
    llama_server: Path, tmp_path: Path
) -> None:
    tuned = TunedLlama(0, 0, 512, on_gpu=False)
    given = {"n_warm": 2, "n_ctx": 64, "n_threads": 1}
    seconds = followed_s(llama_server, Path("m.gguf"), tuned, [5, 6, 7, 8], **given)
    assert seconds == [0.05, 0.05]
    forgetful = server_program(tmp_path / "forgets")
    with pytest.raises(DeviceFailed, match="it evaluated 2 tokens"):
        followed_s(forgetful, Path("m.gguf"), tuned, [5, 6], n_warm=1, n_ctx=64, n_threads=1)


def test_gpu_check_takes_the_best_of_the_rivals_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu_check"))
    split = importlib.import_module("split")
    program = server_program(tmp_path / "new-llama-server")
    args = SimpleNamespace(small=True, threads=1, llama_server=program)
    facts, tuned = header_of_eight_layers(tmp_path), TunedLlama(4, 0, 512, on_gpu=True)
    rows = split.server_rows(SimpleNamespace(args=args), facts, tuned, list(range(32)))
    assert len(rows) == 3
    assert rows[0]["token_s"] == pytest.approx(0.05)
    assert rows[1]["token_s"] < rows[2]["token_s"] < 0.05
    ways = [{"way": "llama.cpp", "token_s": 0.04}, {"way": "on", "token_s": 0.001},
            {"way": "auto", "token_s": 0.002}]  # fmt: skip
    found = split.compared_with_best({"ways": ways, "llama_server": rows})
    assert found["best_rival"] == rows[1]["way"]
    assert "--moe-cache-mib" in found["best_rival"]
    assert found["vs_best_rival"]["on"] == pytest.approx(rows[1]["token_s"] / 0.001)
    found = split.compared_with_best({"ways": ways, "llama_server": []})
    assert (found["best_rival"], found["best_rival_s"]) == ("llama.cpp", 0.04)


NEWEST_HELP = """
--moe-cache-mib N                       GPU cache size in MiB
--moe-cache-policy {lru,class}          rule of eviction
--moe-cache-cpu-share N                 share of the misses computed on the CPU,
                                        in percent (default: 0)
--spec-type none,draft-simple,draft-mtp
"""


def test_the_rivals_cache_flags_and_own_draft_layers_are_read_from_its_help(
    tmp_path: Path,
) -> None:
    shares = [("--moe-cache-cpu-share", n) for n in ("25", "50", "100")]
    policies = [("--moe-cache-policy", name) for name in ("lru", "class")]
    assert cache_settings(NEWEST_HELP) == [*policies, *shares]
    assert cache_settings("--moe-cache-mib N\n--moe-cache-cpu-share F  0..1\n--other  in %") == [
        ("--moe-cache-cpu-share", n) for n in ("0.25", "0.5", "1.0")
    ]
    assert cache_settings("--moe-cache-mib N") == []
    assert mtp_sweep(1, NEWEST_HELP)[-1] == ("--spec-type", "draft-mtp", "--draft-max", "3")
    assert mtp_sweep(0, NEWEST_HELP) == mtp_sweep(1, "--spec-type draft-simple") == []
    program = tmp_path / "new-llama-server"
    source = SERVER.replace('print("--moe-cache-mib N")', f"print({NEWEST_HELP!r})")
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    ways = ways_of(program, header_of_eight_layers(tmp_path), TunedLlama(4, 0, 512, on_gpu=True))
    assert [way.cache_flags for way in ways[1:]] == [(), *policies, *shares] * 2
    assert ways[-1].arguments()[-2:] == ["--moe-cache-cpu-share", "100"]


def test_the_fastest_policy_of_the_rivals_cache_is_measured_with_each_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "new-llama-server"
    source = SERVER.replace('print("--moe-cache-mib N")', f"print({NEWEST_HELP!r})")
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    facts, tuned = header_of_eight_layers(tmp_path), TunedLlama(4, 0, 512, on_gpu=True)
    ways = ways_of(program, facts, tuned)
    speeds = {way: 2.0 if "class" in way.cache_flags else 1.0 for way in ways}
    found = combined_ways(speeds)
    assert [way.cache_flags for way in found] == [
        ("--moe-cache-policy", "class", "--moe-cache-cpu-share", n) for n in ("25", "50", "100")
    ]
    assert combined_ways({tuned: 1.0}) == []
    rows = measure_ways(program, config_of(model=facts.path), tuned, ["a"], 7)
    assert sum(len(row.cache_flags) == 4 for row in rows) == 3
    assert len(rows) == len(ways) + 3 == 16
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu_check"))
    split = importlib.import_module("split")
    args = SimpleNamespace(small=True, threads=1, llama_server=program)
    tries = split.server_rows(SimpleNamespace(args=args), facts, tuned, list(range(32)))
    assert len(tries) == 16


def test_policies_that_the_rivals_help_has_in_prose_are_told_to_the_user() -> None:
    assert "only its default policy" in unread_policy("--moe-cache-policy P   lru or class")
    assert unread_policy(NEWEST_HELP) == unread_policy("--moe-cache-mib N") == ""


def test_bench_measures_drafts_with_the_rivals_faster_cache(tmp_path: Path) -> None:
    facts = header_of_eight_layers(tmp_path)
    config = config_of(model=facts.path, draft=demo_file("draft.gguf"))
    program = server_program(tmp_path / "new-llama-server")
    rows = measure_ways(program, config, TunedLlama(4, 0, 512, on_gpu=True), ["a"], 7)
    assert [row.moe_cache_mib > 0 for row in rows[:3]] == [False, True, True]
    assert [row.decode_tps for row in rows[:3]] == [1000.0, 2000.0, 2000.0]
    assert all(row.moe_cache_mib == rows[1].moe_cache_mib for row in rows[3:])
    assert len(rows) == 3 + 9


def test_what_is_printed_where_nothing_streams_and_a_rival_is_measured(
    tiny_moe: Path, llama_server: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "bench", str(tiny_moe), "--device", "cpu",
         "--vs", f"llama-server={llama_server}", "-n", "7", "-r", "1", "-c", "256", "-ub", "32",
         "-t", "1"],
        capture_output=True, text=True, timeout=250, env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (rival,) = [line for line in done.stdout.splitlines() if "llama-server" in line]
    assert "1000.0" in rival
    assert "1000 " in rival
    assert "milliseconds of a decode of n tokens" in done.stdout
    assert "each path was measured once" in " ".join((done.stdout + done.stderr).split())


def test_bench_of_a_model_ten_times_the_devices_memory(models: Path) -> None:
    path = write_preset(
        "qwen3-30b-a3b", models / "ten.gguf", size="tiny", n_layer=8, n_expert=64, n_ff_exp=256
    )
    vram = path.stat().st_size // 10
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "bench", str(path), "--min-batch", "3",
         "--device", "sim", "--vram", str(vram), "-n", "4", "-r", "1", "-c", "256", "-ub", "32",
         "-t", "1", "--json"],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["counters"]["streamed_bytes"] > 0
    assert set(result["ways"]) >= {"in place", "streamed"}, "both sides of --min-batch"
    assert all(entry["seconds"] > 0 for entries in result["ways"].values() for entry in entries)
    assert len(result["profile"]) > 8
    assert result["vs"]["llama.cpp -ub 512"] == result["wrapped_tps"] / result["plain_tps"]
    found = result["equal_texts"]["plain in batches of 8"]
    assert found["n_texts"] == 8
    assert found["share"] == found["n_equal"] / 8
    assert (found["greatest_margin"] > 0) == (found["n_equal"] < 8)
    assert [(row["path"], row["n_gen"]) for row in result["rows"]] == [
        (path, n) for path in ("llama.cpp -ub 512", "wrapped") for n in (0, 4)
    ]


def test_texts_in_other_batches_and_with_drafts_are_plain_ones_in_f32(models: Path) -> None:
    path = write_preset("qwen3-30b-a3b", models / "f32.gguf", size="tiny", quant="f32")
    config = config_of(
        model=path, draft=path, device="cpu", threads=1, ctx_size=256, use_profile=False
    )
    with Session(config) as session:
        text = plain_text(session.target, [1, 2, 3], 20)
        assert len(text.tokens) == len(text.margins) == 20
        assert min(text.margins) >= 0
        assert split_text(session.target, text) == list(text.tokens)
        assert speculative_text(session, text.prompt, 20) == list(text.tokens)
        assert session.target.sequences.length(0) == 0
    wrong = PlainText(text.prompt, (*text.tokens[:5], 7, *text.tokens[6:]), text.margins)
    assert compared([wrong], [text.tokens]).n_equal == int(text.tokens[5] == 7)


def test_sequences_at_once_are_written_as_llama_batched_bench_does(models: Path) -> None:
    path = write_preset("qwen3-30b-a3b", models / "batched.gguf", size="tiny")
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "bench", str(path), "--device", "cpu", "-t", "1",
         "-npp", "16,32", "-ntg", "4", "-npl", "1,2", "-c", "72", "-o", "jsonl"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["pp"], row["pl"], row["n_kv"]) for row in rows] == [
        (16, 1, 20), (16, 2, 40), (32, 1, 36), (32, 2, 72),
    ]  # fmt: skip
    for row in rows:
        assert row["n_kv_max"] >= 72
        assert row["speed_tg"] == pytest.approx(row["pl"] * 4 / row["t_tg"])
        assert row["t"] == pytest.approx(row["t_pp"] + row["t_tg"])


def test_every_combination_of_lists_is_measured_and_is_a_row(models: Path) -> None:
    path = write_preset("qwen3-30b-a3b", models / "swept.gguf", size="tiny")
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "bench", str(path), "--device", "cpu", "-t", "1",
         "-p", "8,24", "-n", "0", "-pg", "8,4", "-ub", "8,16", "-fa", "0,1", "-d", "0,16", "-r",
         "2", "-o", "json"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    found = [
        (r["n_ubatch"], r["flash_attn"], r["n_depth"], r["n_prompt"], r["n_gen"]) for r in rows
    ]
    timed = [(8, 0), (24, 0), (8, 4)]
    assert found == [
        (ub, fa, d, *test) for ub in (8, 16) for fa in (0, 1) for d in (0, 16) for test in timed
    ]
    assert all(len(row["samples_ns"]) == 2 and min(row["samples_ns"]) > 0 for row in rows)


def test_bench_writes_llama_benchs_csv_and_nothing_else(models: Path) -> None:
    path = write_preset("qwen3-30b-a3b", models / "csv.gguf", size="tiny")
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "bench", str(path), "--device", "cpu", "-t", "1",
         "-n", "2", "-p", "24", "-r", "2", "-c", "256", "-o", "csv"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {(row["n_prompt"], row["n_gen"]) for row in rows} == {("24", "0"), ("0", "2")}
    for row in rows:
        assert row["model_filename"] == str(path)
        assert int(row["model_n_params"]) > 0
        assert int(row["avg_ns"]) > 0
