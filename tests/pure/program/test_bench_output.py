"""Output of bench under other tools' names; its words on speculation and on equal texts."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from resolved import line_of

from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import published_curves
from specoffload.bench.batched import Sweep, speeds
from specoffload.bench.batched import written as batched
from specoffload.bench.equal_texts import Equality, PlainText, compared, equality_words
from specoffload.bench.llama_bench import FIELDS, row_of, written
from specoffload.bench.why_off import length_words, pays_from, pays_up_to, why_off
from specoffload.config.options import BenchOptions
from specoffload.errors import UsageError
from specoffload.session.statistics import GenerationStats

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


def test_speculation_that_is_off_is_explained_with_its_figures() -> None:
    off = GenerationStats(n_rounds=10, draft_lengths=((0, 9), (3, 1)), decisions=(("off", 9),))
    costs = CostProfile((1.0, 1.86, 2.7), draft_step_s=0.21)
    assert why_off(off, costs) == (
        "nothing was drafted in 9 of 10 rounds: two tokens take 1.86 times as long as one, and "
        "drafting one takes 0.21, so not even drafts that are always accepted save time (the "
        "policy: off)"
    )
    cheap = why_off(off, CostProfile((1.0, 1.2), draft_step_s=0.1))
    assert "saves time if over 30% are accepted" in cheap
    assert "only one batch size" in why_off(off, CostProfile((1.0,)))
    counted = replace(off, decisions=(("off: T(#)/T(#) is #", 9),))
    assert "#" not in why_off(counted, costs)
    on = GenerationStats(n_rounds=10, draft_lengths=((0, 4), (3, 6)))
    assert why_off(on, costs) == ""


def test_equal_texts_are_counted_and_the_greatest_margin_is_of_a_first_difference() -> None:
    plain = [
        PlainText((1,), (5, 6, 7), (3.0, 0.25, 9.0)),
        PlainText((1,), (5, 6, 7), (3.0, 2.0, 1.0)),
        PlainText((1,), (5, 6, 7), (0.5, 2.0, 1.0)),
    ]
    found = compared(plain, [(5, 8, 8), (5, 6, 7), (4, 6, 7)])
    assert found == Equality(n_texts=3, n_tokens=3, n_equal=1, greatest_margin=0.5)
    assert found.share == pytest.approx(1 / 3)
    assert "1 of 3 greedy texts of 3 tokens equal plain" in equality_words("speculative", found)
    assert "at most 0.5 apart" in equality_words("speculative", found)
    assert "apart" not in equality_words("x", Equality(2, 3, 2, 0.0))


def test_the_lengths_that_pay_are_those_of_the_costs() -> None:
    curves = published_curves()
    # A batch of two takes more than twice as long as one there (llama.cpp #17034).
    glm = curves["glm-4.6-rpc"]
    assert (
        length_words(glm, None) == "drafts of 2 tokens or more save time if all of it is accepted"
    )
    linear = CostProfile((1.0, 1.6, 2.2, 2.8, 3.4, 4.0), 0.1)
    # 1 + 0.8 + 0.64 tokens take 2.4 s where one takes 1 s; with 0.512 more they take 3.1 s.
    assert (pays_from(linear), pays_up_to(linear, 0.8)) == (1, 2)
    assert length_words(linear, 0.8).endswith(
        "and those of up to 2 tokens with 80% accepted, as measured"
    )
    assert length_words(linear, 0.5).endswith("none does with 50% accepted, as measured")
    assert length_words(linear, 1.0).endswith(
        "and those of any length with 100% accepted, as measured"
    )
    assert length_words(CostProfile((1.0, 2.5)), 0.9) == "no draft saves time, whatever its length"
