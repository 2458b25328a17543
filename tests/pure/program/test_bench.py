"""bench: llama.cpp's flags for a machine, what numbers mean, other tools' formats, machine load."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolved import line_of

from lab.simulation import published_curves
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace, is_experts, layer_of
from specdec.costs.profile import CostProfile
from specdec.options import DrafterName, SpecOptions
from specoffload.bench.batched import Sweep, speeds
from specoffload.bench.batched import written as batched
from specoffload.bench.comparison import (
    doubts,
    measured_words,
    side_by_side,
    speed_rows,
    vs_server,
)
from specoffload.bench.drafts import Equality, PlainText, compared, length_words, off_reason
from specoffload.bench.llama_bench import DEFAULTS, FIELDS, RowWriter, name_of_test, row_of, written
from specoffload.bench.llama_server import (
    DRAFT_MAX,
    DRAFT_P_MIN,
    TunedLlama,
    known_names,
    program_of,
    summed,
    sweep,
    tune_for,
)
from specoffload.bench.load import load_sentence
from specoffload.bench.paths import Measured
from specoffload.bench.sweep import TimedTest, settings_of, timed_tests
from specoffload.commands.bench import no_drafts_reason
from specoffload.config.options import BenchOptions, Options, SweepOptions, Toggle
from specoffload.cpu_load import Load, Watch
from specoffload.errors import UsageError
from specoffload.generation.statistics import GenerationStats

N_LAYERS = 6
EXPERTS_BYTES = 3 * 4 * 64 * 64 * 8  # bytes of one layer's experts
OUTPUT_BYTES = 4 * 64 * 640


def model(*, experts: bool = True) -> ModelFacts:
    """Layers of one attention weight and, with `experts`, three matrices of experts."""
    names = {"output.weight": (64, 640), "token_embd.weight": (64, 640)}
    for layer in range(N_LAYERS):
        names[f"blk.{layer}.attn_q.weight"] = (64, 64)
        if experts:
            for kind in ("gate", "up", "down"):
                names[f"blk.{layer}.ffn_{kind}_exps.weight"] = (64, 64, 8)
    entries = [_entry(name, shape) for name, shape in names.items()]
    metadata = {"general.architecture": "x", "x.block_count": N_LAYERS,
                "x.expert_count": 8 if experts else 0, "x.expert_used_count": 2}  # fmt: skip
    weights = {e.name: WeightPlace(Path("m.gguf"), e) for e in entries}
    header = Header(metadata, tuple(entries))
    return ModelFacts(Path("m.gguf"), "x", "x", header, weights)


def _entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    size = 4
    for n in shape:
        size *= n
    return TensorEntry(name, "f32", shape, 0, size)


def on_device_bytes(facts: ModelFacts, tuned: TunedLlama) -> int:
    pattern = tuned.cpu_weights()
    return sum(
        place.entry.size_bytes
        for name, place in facts.weights.items()
        if not name.startswith("token_embd.") and not (pattern and re.search(pattern, name))
    )


@given(vram=st.integers(OUTPUT_BYTES + 1000, 2_000_000), reserve=st.integers(0, 1000),
       experts=st.booleans())  # fmt: skip
def test_an_owners_llama_cpp_fills_the_memory_and_never_exceeds_it(
    vram: int, reserve: int, experts: bool
) -> None:
    facts = model(experts=experts)
    tuned = tune_for(facts, vram_bytes=vram, reserve_bytes=reserve, n_ubatch=512)
    used = on_device_bytes(facts, tuned) + reserve
    assert used <= vram
    if tuned.n_dense_layers_on_cpu == 0 and tuned.n_cpu_moe:
        assert used + EXPERTS_BYTES > vram, "one more layer of experts would have fitted"
    if tuned.n_dense_layers_on_cpu and experts:
        assert tuned.n_cpu_moe == N_LAYERS, "experts go before attention does"


def test_the_command_line_is_one_that_llama_server_takes() -> None:
    line = TunedLlama(3, 0, 4096, on_gpu=True).command_line("m.gguf")
    assert line == "llama-server -m m.gguf -ub 4096 -b 4096 -ngl 99 --n-cpu-moe 3 --no-mmap"


def test_the_pattern_takes_the_first_layers_experts_only() -> None:
    facts, pattern = model(), TunedLlama(2, 0, 512, on_gpu=True).cpu_weights()
    found = [n for n in facts.weights if re.search(pattern, n)]
    assert len(found) == 6
    assert {layer_of(n) for n in found} == {0, 1}
    assert all(is_experts(facts.weights[n].entry) for n in found)


def measured(tps: float, prefill_s: float) -> Measured:
    stats = GenerationStats(n_tokens=100, decode_s=100 / tps, n_rounds=100)
    return Measured((stats,), (prefill_s,))


def test_ratios_are_to_llama_cpp_at_its_best() -> None:
    found = {
        "llama.cpp -ub 512": measured(10, 4.0),
        "llama.cpp -ub 4096": measured(8, 1.0),
        "wrapped": measured(12, 0.5),
        "spec": measured(30, 0.5),
    }
    result = side_by_side(found, 1000)
    assert result["plain_tps"] == 10
    assert result["vs"]["llama.cpp -ub 512"] == 3
    assert result["vs"]["llama.cpp -ub 4096"] == 3.75
    assert result["vs"]["llama.cpp -ub 4096, prefill"] == 2
    assert result["prefill_tps"]["wrapped"] == 2000


def repeated(*decodes_s: float) -> Measured:
    written = tuple(GenerationStats(n_tokens=100, decode_s=s) for s in decodes_s)
    return Measured(written, (1.0,) * len(written))


def test_ratios_of_few_or_noisy_repetitions_are_marked() -> None:
    idle, busy = Load(0.05, 2), Load(0.4, 2)
    assert doubts({"wrapped": repeated(1.0, 1.1, 1.05)}, idle) == []
    (few,) = doubts({"wrapped": repeated(1.0)}, idle)
    assert few.startswith("each path was measured once, so the spread is unknown")
    (disturbed,) = doubts({"wrapped": repeated(1.0, 1.0, 1.0)}, busy)
    assert "other programs took 40% of the 2 processors" in disturbed
    (spread,) = doubts({"wrapped": repeated(1.0, 1.0, 1.5)}, idle)
    assert "without drafts: decoding varied by 50%" in spread
    noisy = {"wrapped": replace(repeated(1.0, 1.0, 1.0), prefills_s=(1.0, 1.0, 2.0))}
    (spread,) = doubts(noisy, idle)
    assert spread == ("without drafts: prefill took 1 to 2 s, so no ratio of it means anything")
    assert doubts(noisy, idle, of_prefill=False) == []
    result = side_by_side({"llama.cpp -ub 512": measured(10, 4.0), "wrapped": measured(15, 1)}, 9)
    assert [row[3] for row in speed_rows(result | {"unreliable": []})] == ["1.00", "1.50"]
    assert [row[3] for row in speed_rows(result | {"unreliable": ["why"]})] == [
        "1.00 ?", "1.50 ?"
    ]  # fmt: skip


PEER = "llama.cpp -ub 512"


def test_a_side_that_varies_as_much_as_its_speed_has_no_ratio() -> None:
    found = {PEER: repeated(1.0, 1.0, 1.1), "wrapped": repeated(0.2, 0.8, 2.0)}
    result = side_by_side(found, 100)
    assert result["vs"] == {PEER: None, f"{PEER}, prefill": 1.0}
    ours = dict((row[0], row[1:]) for row in speed_rows(result | {"unreliable": ["why"]}))
    assert ours["without drafts"] == ("50.0 to 500.0", "100", "-")
    assert ours[PEER] == ("100.0", "100", "1.00 ?")
    assert vs_server(result, 50.0) is None
    (words,) = doubts(found, Load(0.05, 2))
    assert words == "without drafts: decoding took 0.2 to 2 s, so no ratio of it means anything"


def test_the_spreads_of_both_sides_add_up() -> None:
    half, more = repeated(1.0, 1.0, 1.45), repeated(1.0, 1.0, 1.6)
    assert side_by_side({PEER: half, "wrapped": half}, 9)["vs"][PEER] == 1.0
    assert side_by_side({PEER: half, "wrapped": more}, 9)["vs"][PEER] is None
    assert vs_server(side_by_side({"wrapped": more}, 9), 50.0) == 2.0, "a server has no spread"


def test_sides_with_different_numbers_of_threads_have_no_ratio() -> None:
    steady = repeated(1.0, 1.0, 1.0)
    fell = replace(steady, n_threads_lost=(0, 1, 0))
    result = side_by_side({PEER: steady, "wrapped": fell, "unwrapped": fell}, 9)
    assert result["vs"] == {PEER: None, f"{PEER}, prefill": None}
    assert result["wrapped_ratio"] == 1.0, "both sides lost a thread"
    one, other = doubts({PEER: steady, "wrapped": fell, "unwrapped": fell}, Load(0.05, 2))
    assert one.startswith("without drafts: other programs took processors, so it computed with 1")
    assert other.startswith("plain CPU: ")


def test_a_sweep_shows_the_range_of_a_speed_that_is_not_steady() -> None:
    row = row_of({}, "wrapped", [0.01, 1.0, 1.0], n_prompt=100)
    assert RowWriter([row], None).row(row).split("|")[-2].strip() == "100.00 to 10000.00"
    assert "±" in RowWriter([row], "md").row(row), "llama-bench's format stays"


def test_the_draft_flags_of_a_llama_server_are_swept() -> None:
    assert sweep(None) == [()]
    tried = sweep(Path("d.gguf"))
    assert tried[0] == ()
    assert len(tried) == 1 + len(DRAFT_MAX) * len(DRAFT_P_MIN) == len(set(tried))


def test_renamed_flags_are_used_where_the_help_has_them() -> None:
    flags = ["-md", "d.gguf", "--draft-max", "16"]
    assert known_names(flags, "... --draft-max N ...") == flags
    assert known_names(flags, "--spec-draft-n-max N")[2:] == ["--spec-draft-n-max", "16"]


def test_speeds_are_over_all_answers() -> None:
    timings = [
        {"prompt_n": 100, "prompt_ms": 50.0, "predicted_n": 10, "predicted_ms": 100.0},
        {"prompt_n": 100, "prompt_ms": 150.0, "predicted_n": 30, "predicted_ms": 100.0,
         "draft_n": 20, "draft_n_accepted": 5},
    ]  # fmt: skip
    speed = summed(("-md", "d"), timings)
    assert (speed.prefill_tps, speed.decode_tps, speed.acceptance_rate) == (1000, 200, 0.25)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llama-server=", "must be llama-server=PATH"),
        ("vllm=/bin/true", "must be llama-server=PATH"),
        ("llama-server=/none", "there is no file /none"),
    ],
)
def test_another_peer_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        program_of(text)


# -- formats of other tools, and sentences about drafts

ROWS = [
    row_of({"model_filename": 'a "b".gguf', "n_threads": 4}, "wrapped", [0.5, 1.5], n_prompt=100),
    row_of({"model_size": 3 << 30, "model_n_params": 7_000_000_000}, "spec", [2.0], n_gen=8,
           n_depth=16),
]  # fmt: skip


def test_a_row_has_the_statistics_of_its_samples() -> None:
    row = ROWS[0]
    assert (row["avg_ns"], row["samples_ns"]) == (1e9, [500_000_000, 1_500_000_000])
    assert row["stddev_ns"] == pytest.approx(0.5e9 * 2**0.5)
    assert row["samples_ts"] == pytest.approx([200, 100 / 1.5])
    assert row["avg_ts"] == pytest.approx((200 + 100 / 1.5) / 2)
    assert (ROWS[1]["stddev_ns"], ROWS[1]["stddev_ts"]) == (0, 0)


def test_csv_is_read_back_by_its_header() -> None:
    read = list(csv.DictReader(io.StringIO(written(ROWS, "csv"))))
    assert tuple(read[0]) == FIELDS
    assert read[0]["model_filename"] == 'a "b".gguf'
    assert (read[0]["cpu_strict"], read[0]["repack"]) == ("0", "1")
    assert [int(row["n_prompt"]) for row in read] == [100, 0]
    assert float(read[1]["avg_ts"]) == 4.0


def test_json_and_its_lines_are_the_rows_with_their_samples() -> None:
    assert json.loads(written(ROWS, "json")) == ROWS
    assert [json.loads(line) for line in written(ROWS, "jsonl").splitlines()] == ROWS


def test_markdown_is_a_table_with_llama_benchs_names_of_tests() -> None:
    lines = written(ROWS, "md").splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [[cell.strip() for cell in line.split("|")[-3:-1]] for line in lines[2:]] == [
        ["pp100", "133.33 ± 94.28"],
        ["tg8 @ d16", "4.00 ± 0.00"],
    ]
    assert "3.00 GiB" in lines[3]


def test_batches_have_llama_batched_benchs_keys_and_sums() -> None:
    sweep = Sweep((8,), (4,), (1, 2))
    assert list(sweep.cases()) == [(8, 4, 1), (8, 4, 2)]
    row = speeds(sweep, 8, 4, 2, pp_s=2.0, tg_s=4.0)
    (read,) = [json.loads(line) for line in batched([row], "jsonl").splitlines()]
    assert read == {
        "pp": 8, "tg": 4, "pl": 2, "n_kv": 24, "t_pp": 2.0, "speed_pp": 8.0, "t_tg": 4.0,
        "speed_tg": 2.0, "t": 6.0, "speed": 4.0,
    }  # fmt: skip
    shared = speeds(Sweep((8,), (4,), (2,), is_pp_shared=True), 8, 4, 2, pp_s=2.0, tg_s=4.0)
    assert (shared["n_kv"], shared["speed_pp"]) == (16, 4.0)
    assert speeds(sweep, 8, 0, 1, pp_s=2.0, tg_s=0.0)["speed_tg"] == 0.0
    assert "| 8 " in batched([row], "md")
    with pytest.raises(UsageError, match="md and jsonl"):
        batched([row], "csv")


def test_the_published_flags_of_both_tools_are_read() -> None:
    words = ["-npp", "128,256", "-ntg", "0", "-npl", "1,2,4,8", "--output-format", "jsonl", "-pps"]
    own = line_of(*words, command="bench").of(BenchOptions)
    assert (own.n_pp, own.n_tg, own.n_pl) == ((128, 256), (0,), (1, 2, 4, 8))
    assert (own.output, own.is_pp_shared) == ("jsonl", True)
    words = ["-p", "64", "-n", "8", "-r", "2", "-o", "csv"]
    own = line_of(*words, command="bench").of(BenchOptions)
    assert (own.n_prompt, own.n_predict, own.repetitions, own.output) == (64, 8, 2, "csv")
    with pytest.raises(UsageError, match="-npl 1;2: must be whole numbers"):
        line_of("-npl", "1;2", command="bench")


def swept(*words: str) -> SweepOptions:
    return line_of(*words, command="bench").of(SweepOptions)


def test_lists_repeated_flags_and_ranges_are_read_as_llama_bench_reads_them() -> None:
    words = (
        "-p 32,64 -n 0-16+8 -ub 64-512*2 -fa 0,1 -ctk f16,q8_0 -pg 512,128 -pg 64,8 -d 0,1024 "
        "-d 5-7 -t 1 -t 2"
    )
    found = swept(*words.split())
    assert (found.n_prompt, found.n_predict) == ((32, 64), (0, 8, 16))
    assert found.ubatch_size == (64, 128, 256, 512)
    assert found.flash_attn == (Toggle.OFF, Toggle.ON)
    assert found.type_k == ("f16", "q8_0")
    assert found.n_pg == ((512, 128), (64, 8))
    assert found.n_depth == (0, 1024, 5, 6, 7)
    assert found.threads == (1, 2)
    assert found.is_asked


@pytest.mark.parametrize("words", [["-p", "64"], ["-n", "8"], ["-fa"], ["-fa", "1"], ["-ub", "64"],
                                   ["-t", "2", "-b", "64"], []])  # fmt: skip
def test_one_value_of_each_flag_is_still_the_comparison(words: list[str]) -> None:
    assert not swept(*words).is_asked


@pytest.mark.parametrize("words", [["-p", "0"], ["-n", "0"], ["-pg", "8,8"], ["-d", "0"]])
def test_values_that_only_a_sweep_has_begin_one(words: list[str]) -> None:
    assert swept(*words).is_asked


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-p", "8,x"), "-p 8,x: must be a whole number"),
        (("-p", "9-8"), "9-8 must be a range of 1 to 1000 numbers"),
        (("-ub", "8-64*1"), "8-64\\*1 never reaches 64"),
        (("-d", "0-8+0"), "0-8\\+0 never reaches 8"),
        (("-p", "1-100000"), "must be a range of 1 to 1000 numbers"),
        (("-ub", "0,8"), "must be at least 1"),
        (("-pg", "512"), "as in 512,128"),
    ],
)
def test_a_list_that_is_none_is_one_sentence(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        swept(*words)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("-mmp 0", "--no-mmap"),
        ("-mmp 1", "--mmap"),
        ("--mmap 0", "--no-mmap"),
        ("--mmap", "--mmap"),
        ("-mmp 0,0", "--no-mmap"),
        ("-nkvo 0", "--kv-offload"),
        ("-nkvo 1", "-nkvo"),
        ("-nkvo", "-nkvo"),
        ("--no-kv-offload 1", "-nkvo"),
        ("-nopo 0", ""),
        ("-nopo 1", "--min-batch off"),
        ("-nopo", "--min-batch off"),
        ("-dio 0", ""),
        ("-dio 1", "--no-mmap"),
        ("-embd 0", ""),
        ("--embeddings=0", ""),
        ("--no-host 0", ""),
        ("--repack 0", "--no-repack"),
        ("--repack", "--repack"),
        ("--progress", ""),
        ("-rpc h:1", "--rpc h:1"),
        ("-dev CUDA0/CUDA1", "-dev CUDA0,CUDA1"),
        ("-dev sim:bw=2GB/s", "-dev sim:bw=2GB/s"),
        ("-ts 3/1", "-ts 3,1"),
        ("-ot blk.3.ffn_.*_exps=CUDA0;exps=CPU", "-ot blk.3.ffn_.*_exps=CUDA0,exps=CPU"),
        ("-oe md --delay 3", ""),
        ("-ncmoe not:3,5", "--n-cpu-moe not:3,5"),
        ("-p 8 -- m.gguf", "-p 8 m.gguf"),
    ],
)
def test_llama_benchs_own_forms_mean_what_they_mean_there(words: str, same: str) -> None:
    read, expected = (line_of(*text.split(), command="bench") for text in (words, same))
    assert {place: g.value for place, g in read.given.items()} == {
        place: g.value for place, g in expected.given.items()
    }
    assert not read.of(SweepOptions).is_asked


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("-mmp 2", "-mmp 2: must be 0 or 1"),
        ("-mmp", "-mmp : must be 0 or 1"),
        ("-mmp 0,1", "-mmp 0,1: only -p, -n, .* take lists here: call bench once for each value"),
        ("-nkvo 0,1", "-nkvo 0,1: only -p"),
        ("-embd 1", "-embd 1: bench times answers, not embeddings; leave it out"),
        ("-m a.gguf -m b.gguf", "-m a.gguf and -m b.gguf: bench measures one model a call"),
        ("-hf u/a -m b.gguf", "-hf u/a and -m b.gguf: bench measures one model a call"),
        ("-sm row", "other modes divide single weights"),
        ("-o sql", "must be one of md, csv"),
    ],
)
def test_what_llama_bench_does_and_bench_does_not_is_refused_with_a_reason(
    words: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        line_of(*words.split(), command="bench")


def test_layers_are_swept_as_by_llama_bench() -> None:
    found = swept("-ngl", "0,99", "-ncmoe", "1-8*2", "-ncmoe", "9")
    assert found.is_asked
    assert (found.n_gpu_layers, found.n_cpu_moe) == ((0, 99), (1, 2, 4, 8, 9))
    opened = [(o.n_gpu_layers, o.n_cpu_moe) for o in settings_of(found, Options())]
    assert opened == [(ngl, moe) for ngl in (0, 99) for moe in (1, 2, 4, 8, 9)]
    planned = [{**DEFAULTS, "path": "", "n_gpu_layers": ngl, "n_cpu_moe": 1} for ngl, _ in opened]
    assert "ngl" in RowWriter(planned, None).head
    assert "n_cpu_moe" not in RowWriter(planned, None).head


def test_a_drafts_own_flags_are_not_swept() -> None:
    line = line_of("--draft-params", "-t 2 -ub 64", command="bench")
    assert line.of(SweepOptions) == SweepOptions()
    assert line.ignored == ()


def test_other_commands_take_no_lists() -> None:
    with pytest.raises(UsageError, match="must be a whole number"):
        line_of("-ub", "256,512", command="run")


def test_every_combination_is_a_test_of_a_setting() -> None:
    sweep = swept(
        "-p", "32,0", "-n", "8", "-pg", "4,2", "-d", "0,16", "-ub", "64,128", "-fa", "0,1"
    )
    assert timed_tests(sweep) == [
        TimedTest(32, 0), TimedTest(0, 8), TimedTest(4, 2),
        TimedTest(32, 0, 16), TimedTest(0, 8, 16), TimedTest(4, 2, 16),
    ]  # fmt: skip
    assert TimedTest(4, 2, 16).n_total == 22
    opened = [(o.ubatch_size, o.flash_attn) for o in settings_of(sweep, Options())]
    assert opened == [
        (64, Toggle.OFF), (64, Toggle.ON), (128, Toggle.OFF), (128, Toggle.ON),
    ]  # fmt: skip
    assert timed_tests(swept("-pg", "4,2")) == [
        TimedTest(512, 0),
        TimedTest(0, 128),
        TimedTest(4, 2),
    ]
    assert timed_tests(swept("-p", "0", "-n", "0")) == []
    assert list(settings_of(swept("-p", "1,2"), Options())) == [Options()]


def test_tests_have_llama_benchs_names() -> None:
    names = [
        name_of_test({"n_prompt": pp, "n_gen": tg, "n_depth": depth})
        for pp, tg, depth in ((512, 0, 0), (0, 128, 0), (512, 128, 0), (0, 128, 1024))
    ]
    assert names == ["pp512", "tg128", "pp512+tg128", "tg128 @ d1024"]


SWEPT = [
    row_of({"n_ubatch": ub, "flash_attn": 1}, "wrapped", [0.5, 1.5], n_prompt=pp, n_gen=2)
    for ub in (64, 2048)
    for pp in (0, 100)
]


@pytest.mark.parametrize("form", ["csv", "json", "jsonl"])
def test_rows_written_one_by_one_are_the_rows_written_at_once(form: str) -> None:
    writer = RowWriter(SWEPT, form)
    pieces = [writer.head, *map(writer.row, SWEPT), writer.foot]
    assert "".join(pieces) == written(SWEPT, form)


@pytest.mark.parametrize(
    ("form", "columns"),
    [
        (
            "md",
            ["model", "size", "params", "backend", "threads", "path", "n_ubatch", "test", "t/s"],
        ),
        (None, ["n_ubatch", "test", "t/s"]),
    ],
)
def test_a_row_has_a_column_for_what_is_varied(form: str | None, columns: list[str]) -> None:
    writer = RowWriter(SWEPT, form)
    lines = [*writer.head.splitlines(), *(writer.row(row).rstrip("\n") for row in SWEPT)]
    assert len({len(line) for line in lines}) == 1, "columns stand under each other"
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == columns
    last = [cell.strip() for cell in lines[-1].split("|")[-4:-1]]
    assert last == ["2048", "pp100+tg2", "136.00 ± 96.17"]


def test_speculation_that_is_off_is_explained_with_its_figures() -> None:
    off = GenerationStats(n_rounds=10, draft_lengths=((0, 9), (3, 1)), decisions=(("off", 9),))
    costs = CostProfile((1.0, 1.86, 2.7), draft_step_s=0.21)
    assert off_reason(off, costs) == (
        "nothing was drafted in 9 of 10 rounds: a decode of two tokens takes 1.86 times as long as "
        "one of one token, and drafting a token 0.21 times as long, so a draft of one token never "
        "saves time (the policy: off)"
    )
    cheap = off_reason(off, CostProfile((1.0, 1.2), draft_step_s=0.1))
    assert "saves time if over 30% are accepted" in cheap
    assert "only one batch size" in off_reason(off, CostProfile((1.0,)))
    counted = replace(off, decisions=(("off: T(#)/T(#) is #", 9),))
    assert "#" not in off_reason(counted, costs)
    on = GenerationStats(n_rounds=10, draft_lengths=((0, 4), (3, 6)))
    assert off_reason(on, costs) == ""


def test_equal_texts_are_counted_and_the_greatest_margin_is_of_a_first_difference() -> None:
    plain = [
        PlainText((1,), (5, 6, 7), (3.0, 0.25, 9.0)),
        PlainText((1,), (5, 6, 7), (3.0, 2.0, 1.0)),
        PlainText((1,), (5, 6, 7), (0.5, 2.0, 1.0)),
    ]
    found = compared(plain, [(5, 8, 8), (5, 6, 7), (4, 6, 7)])
    assert found == Equality(n_texts=3, n_tokens=3, n_equal=1, greatest_margin=0.5)
    assert found.share == pytest.approx(1 / 3)
    assert "1 of 3 greedy texts of 3 tokens equal those of plain decoding" in found.words(
        "speculative"
    )
    assert "at most 0.5 apart" in found.words("speculative")
    assert "apart" not in Equality(2, 3, 2, 0.0).words("x")


def test_the_shortest_draft_that_saves_time_is_that_of_the_costs() -> None:
    # On this curve a batch of two takes more than twice as long as one (llama.cpp #17034).
    glm = published_curves()["glm-4.6-rpc"]
    assert length_words(glm) == "drafts of 2 tokens or more save time if they are accepted whole"
    assert length_words(CostProfile((1.0, 2.5))) == "no draft saves time here, whatever its length"


# -- the load

_SPIN = """
import time
while time.process_time() < 1.0: pass
print(flush=True)
input()
"""


def test_a_busy_machine_is_named_with_its_figures_and_an_idle_one_is_no_news() -> None:
    assert load_sentence(Load(others=0.05, n_cpus=8)) == ""
    assert "other programs took 63% of the 2 processors" in load_sentence(Load(0.63, 2))
    assert "took 30% of the processor in" in load_sentence(Load(0.3, 1))


def test_work_of_a_child_is_not_the_load_of_others() -> None:
    """A child's time is our own while it runs and after it has ended. Processor times are
    rounded to 10 ms."""
    watch = Watch()
    spinning = subprocess.Popen(
        [sys.executable, "-c", _SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert spinning.stdout is not None
    spinning.stdout.readline()
    while_running = watch.spent_s()
    spinning.communicate(b"\n", timeout=30)
    ended = watch.spent_s()
    for own_s, busy_s, total_s in (while_running, ended):
        assert own_s >= 0.9
        assert own_s - 0.1 <= busy_s <= total_s + 1e-6  # rounding of floats
    load = watch.others()
    own_s, busy_s, total_s = watch.spent_s()
    assert 0 <= load.others <= (busy_s - own_s) / total_s + 0.1


def test_each_repetition_is_a_line_under_the_tables_names() -> None:
    stats = GenerationStats(n_tokens=64, decode_s=2.0, streamed_bytes=1)
    assert measured_words("wrapped", 2, stats, 4.0, 5, 2048) == (
        "streamed, 2 of 5: answer 32.0 tokens/s, prompt 512 tokens/s"
    )
    assert measured_words("llama.cpp -ub 512", 1, stats, 4.0, 5, 8).startswith("llama.cpp -ub 512,")


def test_a_path_is_named_streamed_only_if_weights_were_copied() -> None:
    still = GenerationStats(n_tokens=64, decode_s=2.0)
    copying = GenerationStats(n_tokens=64, decode_s=2.0, streamed_bytes=1)
    for stats, name in ((still, "without drafts"), (copying, "streamed")):
        result = side_by_side({"wrapped": Measured((stats,), (1.0,))}, 1000)
        assert [row[0] for row in speed_rows(result)] == [name]
        assert measured_words("wrapped", 1, stats, 4.0, 5, 8).startswith(f"{name}, 1 of 5")


def test_a_bench_without_drafts_says_which_cause_it_has(tiny_dense: Path) -> None:
    from resolved import config_of

    none = SpecOptions(drafters=(DrafterName.NONE,), given={"drafters": "--spec-type"})
    ngrams = replace(none, drafters=(DrafterName.NGRAM_MOD,))
    found = [
        no_drafts_reason(config_of(model=tiny_dense, spec=spec))
        for spec in (none, ngrams, SpecOptions())
    ]
    assert "--spec-type none" in found[0]
    assert "ngram-mod" in found[1]
    assert "--draft" in found[2]
