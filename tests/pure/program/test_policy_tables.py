"""bench --policies: its settings, summaries, texts, rows and the ways of batch sizes."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from resolved import line_of

from specdec.options import DrafterName, PolicyName, SpecOptions
from specoffload.bench.batch_sizes import way_of
from specoffload.bench.llama_bench import FIELDS, RowWriter, row_of
from specoffload.bench.policies import (
    DEFAULT,
    NO_DRAFTS,
    Seen,
    Setting,
    crossover,
    doubts,
    judge,
    rows_of,
    settings_for,
)
from specoffload.bench.workloads import judged_prompts, warm_up_prompts
from specoffload.commands.bench_policies import crossover_words
from specoffload.config.options import BenchOptions, WorkloadName
from specoffload.errors import UsageError
from specoffload.generation.statistics import GenerationStats

BASE = SpecOptions(drafters=(DrafterName.DRAFT,))


def run(tps: float, n_drafted: int = 0, n_accepted: int = 0) -> GenerationStats:
    return GenerationStats(
        n_tokens=100, decode_s=100 / tps, n_drafted=n_drafted, n_accepted=n_accepted,
        accepted_by_source=(("draft", n_accepted), ("ngram-mod", 0)),
    )  # fmt: skip


def test_all_policies_are_compared_blocks_at_each_length_and_the_default_last() -> None:
    settings = settings_for(BASE, (), (1, 4))
    names = [setting.name for setting in settings]
    assert names[:3] == [NO_DRAFTS, "fixed 1", "fixed 4"]
    assert names[-1] == DEFAULT == "throughput"
    rules = {setting.options.policy for setting in settings if setting.options}
    assert rules == set(PolicyName), "published rules included"
    assert [s.name for s in settings if s.is_fixed] == [
        NO_DRAFTS, "fixed 1", "fixed 4", "p-min 0.5", "p-min 0.75", "p-min 0.9",
    ]  # fmt: skip
    block = settings[2].options
    assert block is not None
    assert (block.policy, block.n_max, block.drafters) == (PolicyName.FIXED, 4, BASE.drafters)


def test_no_drafts_and_the_default_are_always_compared() -> None:
    settings = settings_for(BASE, (PolicyName.COSTS,), (1, 4))
    assert [setting.name for setting in settings] == [NO_DRAFTS, "costs", DEFAULT]
    given = settings_for(replace(BASE, p_min=0.6, n_max=3), (PolicyName.P_MIN,), ())
    assert [s.name for s in given] == [NO_DRAFTS, "p-min 0.5", "p-min 0.6", "p-min 0.9", DEFAULT]
    assert all(s.options.n_max == 3 for s in given if s.options), "--draft-max caps all others"


def settings(*names: str) -> list[Setting]:
    return [Setting(name, BASE, is_fixed=name != DEFAULT) for name in names]


def test_a_row_has_the_median_speed_and_the_counts_of_that_repetition() -> None:
    seen = Seen({"fixed 1": [run(10, 80, 20), run(30, 80, 60), run(20, 80, 40)]})
    (row,) = rows_of(settings("fixed 1", "fixed 2"), seen)
    assert (row.name, row.tps, row.n_repetitions) == ("fixed 1", pytest.approx(20), 3)
    assert (row.n_drafted, row.n_accepted, row.accepted_share) == (80, 40, 0.5)
    assert row.samples_tps == pytest.approx((10, 30, 20)), "in the order in which they ran"
    assert row.accepted_by_drafter == {"draft": 40}
    (plain,) = rows_of(settings(NO_DRAFTS), Seen({NO_DRAFTS: [run(5)]}))
    assert plain.accepted_share is None


def test_the_default_is_judged_by_the_fixed_setting_that_was_best_afterwards() -> None:
    seen = Seen(
        {
            NO_DRAFTS: [run(10), run(10), run(8)],
            "fixed 1": [run(20, 90, 60), run(16, 90, 60), run(18, 90, 60)],
            "fixed 4": [run(12, 90, 30), run(12, 90, 30), run(12, 90, 30)],
            DEFAULT: [run(21, 70, 60), run(20, 70, 60), run(22, 70, 60)],
        }
    )
    judged = judge(rows_of(settings(*seen.runs), seen))
    assert judged is not None
    assert judged.best_fixed == "fixed 1"
    assert judged.vs_best_fixed == pytest.approx(21 / 18)
    assert judged.vs_no_drafts == pytest.approx(2.1)
    assert judged.by_repetition[1] == pytest.approx((20 / 16, 2.0))


def test_settings_whose_speeds_mean_nothing_have_no_ratio() -> None:
    wild, calm = [run(4), run(10), run(20)], [run(10), run(10), run(10)]
    rows = rows_of(
        settings(NO_DRAFTS, "fixed 1", DEFAULT),
        Seen({NO_DRAFTS: wild, "fixed 1": [run(20, 9, 9)] * 3, DEFAULT: calm}),
    )
    judged = judge(rows)
    assert judged is not None
    assert judged.vs_best_fixed == pytest.approx(0.5)
    assert judged.vs_no_drafts is None
    assert crossover([replace(row, n_block=1 if row.name == "fixed 1" else None) for row in rows]
                     ) is None  # fmt: skip
    (words,) = doubts({"code": rows})
    assert (
        words == f"code: {NO_DRAFTS} wrote 4.0 to 20.0 tokens/s, so no ratio of it means anything"
    )


def test_an_adaptive_rule_is_no_fixed_setting_and_no_drafts_is_one() -> None:
    rows = rows_of(
        [*settings(NO_DRAFTS), Setting("bandit", BASE), *settings(DEFAULT)],
        Seen({NO_DRAFTS: [run(10)], "bandit": [run(40, 9, 9)], DEFAULT: [run(9, 5, 1)]}),
    )
    judged = judge(rows)
    assert judged is not None
    assert (judged.best_fixed, judged.vs_best_fixed) == (NO_DRAFTS, pytest.approx(0.9))
    assert judge(rows[:2]) is None, "an interrupted run has no verdict"


@pytest.mark.parametrize(
    ("blocks_tps", "n", "words"),
    [
        ({1: 12, 4: 10, 8: 9}, 4, "as fast as no drafts: 4 tokens"),
        ({1: 9, 4: 11, 8: 9}, 4, "as fast as no drafts: 4 tokens"),  # a bump of T(n) is crossed
        ({1: 12, 2: 8}, 1, "as fast as no drafts: 1 token"),
        ({1: 12, 8: 11}, 8, "8 tokens, the longest that was measured"),
        ({1: 9, 8: 3}, 0, "every measured block is slower than no drafts"),
    ],
)
def test_the_largest_block_that_is_no_slower_than_no_drafts(
    blocks_tps: dict[int, float], n: int, words: str
) -> None:
    blocks = [Setting(f"fixed {m}", BASE, is_fixed=True, n_block=m) for m in blocks_tps]
    seen = Seen({f"fixed {m}": [run(tps, 9, 5)] for m, tps in blocks_tps.items()})
    seen.runs[NO_DRAFTS] = [run(10)]
    seen.runs["p-min 0.5"] = [run(40, 9, 9)]  # no block
    plain = Setting(NO_DRAFTS, None, is_fixed=True, n_block=0)
    rows = rows_of([plain, *blocks, *settings("p-min 0.5")], seen)
    assert crossover(rows) == n
    assert crossover_words(rows).endswith(words)
    assert crossover(rows[1:]) is None, "no drafts were not measured"
    assert crossover_words([rows[0], rows[-1]]) == ""


def test_few_or_uneven_repetitions_are_doubted() -> None:
    def rows(*speeds: float) -> list:
        return rows_of(settings(DEFAULT), Seen({DEFAULT: [run(tps) for tps in speeds]}))

    assert doubts({"code": rows(10, 10.5, 11)}) == []
    assert "with 2 measured repetitions" in doubts({"code": rows(10, 10)})[0]
    assert doubts({"code": rows(10, 10, 13)}) == ["code: throughput varied by 30%"]


def test_no_judged_prompt_is_met_while_warming_up() -> None:
    kinds = [name for name in WorkloadName if name is not WorkloadName.MIXED]
    for name in WorkloadName:
        judged = judged_prompts(name)
        assert len(judged) == len(set(judged)) == (20 if name is WorkloadName.MIXED else 4)
        assert not set(judged) & set(warm_up_prompts(list(WorkloadName)))
    mixed = judged_prompts(WorkloadName.MIXED)
    assert mixed[:5] == [judged_prompts(kind)[0] for kind in kinds], "kinds take turns"
    assert set(mixed) == {text for kind in kinds for text in judged_prompts(kind)}
    warm = warm_up_prompts([WorkloadName.CODE, WorkloadName.MIXED])
    assert sorted(warm) == sorted(warm_up_prompts(kinds)), "each once"


@pytest.mark.parametrize(
    ("counts", "way", "words"),
    [
        ({}, "CPU", "the CPU computes 9 matrices"),
        ({"cuts": 9, "streamed_bytes": 1 << 20}, "streamed", "1.0 MiB copied"),
        ({"cuts": 6, "streamed_bytes": 0}, "streamed in part", "3 of 9 matrices"),
        ({"cuts": 7, "passes": 2.5}, "streamed", "2.5 passes over groups of them"),
        (
            {"split_layers": 3, "n_pairs_host": 6, "n_pairs_hit": 1, "n_pairs_streamed": 1},
            "split",
            "3 layers split, 75% of their experts by the CPU",
        ),
    ],
)
def test_counters_tell_which_way_a_batch_went(
    counts: dict[str, float], way: str, words: str
) -> None:
    found = way_of(counts, n_experts=9, n_dense=0)
    assert found[0] == way
    assert words in found[1]


def test_a_model_that_copies_nothing_is_computed_where_it_is() -> None:
    assert way_of({}, 0, 0, on_cpu=True)[0] == "CPU"
    assert way_of({}, 0, 0)[0] == "device"


def test_rows_with_further_keys_are_written_in_each_format() -> None:
    more = {"text": "workload", "DA/DN": "accepted_share"}
    row = row_of({"model_type": "x"}, "spec", [2.0, 4.0], n_gen=8)
    rows = [row | {"workload": "code", "accepted_share": share} for share in (0.25, None)]
    written = {}
    for form in ("json", "jsonl", "csv", "md"):
        writer = RowWriter(rows, form, more)
        written[form] = writer.head + "".join(map(writer.row, rows)) + writer.foot
    assert [r["accepted_share"] for r in json.loads(written["json"])] == [0.25, None]
    assert json.loads(written["jsonl"].splitlines()[0])["workload"] == "code"
    (first, second) = csv.DictReader(io.StringIO(written["csv"]))
    assert [*first] == [*FIELDS, "workload", "accepted_share"]
    assert (first["accepted_share"], second["accepted_share"]) == ("0.25", "")
    head, _, line, last = written["md"].splitlines()
    assert [cell.strip() for cell in head.split("|")][7:9] == ["text", "DA/DN"]
    assert [cell.strip() for cell in line.split("|")][7:9] == ["code", "0.25"]
    assert [cell.strip() for cell in last.split("|")][8] == ""


def test_the_flags_name_texts_and_policies() -> None:
    words = ["--policies", "--workloads", "mixed,code", "--only-policies", "fixed,costs",
             "--blocks", "2,9"]  # fmt: skip
    own = line_of(*words, command="bench").of(BenchOptions)
    assert own.by_policy
    assert own.workloads == (WorkloadName.MIXED, WorkloadName.CODE)
    assert own.only_policies == (PolicyName.FIXED, PolicyName.COSTS)
    assert own.blocks == (2, 9)
    with pytest.raises(UsageError, match="'poem' is unknown; there are code, prose"):
        line_of("--workloads", "poem", command="bench").of(BenchOptions)
