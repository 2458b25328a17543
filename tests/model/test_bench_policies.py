"""bench --policies on the embedded pair: tables that add up, partial results, and fair turns."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from in_process import command
from resolved import config_of

from specdec.drafters.chain import ChainDrafter
from specdec.drafters.ngrams import NgramMod
from specdec.options import PolicyName
from specdec.policies.throughput import Throughput
from specoffload.bench.batch_sizes import sizes_seen
from specoffload.bench.policies import DEFAULT, NO_DRAFTS, Seen, measure, settings_for
from specoffload.config.resolution import demo_file
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

SMALL = ["-n", "8", "-r", "1"]
STREAMED = ["--device", "sim", "--vram", "10MiB", "-ncmoe", "9999", "--min-batch", "1"]


def arguments(*words: str) -> list[str]:
    given = words if "-n" in words else (*SMALL, *words)
    return ["bench", "--policies", "-t", "1", "-c", "1024", *given]


def bench(*words: str, **variables: str) -> str:
    done = command(*arguments(*words), env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tables_add_up_and_counters_say_that_every_size_streams() -> None:
    words = ["--workloads", "code,random", "--only-policies", "fixed,costs", "--blocks", "1,3"]
    # The compute buffer would hold all experts of so small a model.
    shown = bench(*STREAMED, *words, "--json", SPECOFFLOAD_WITHOUT="lend")
    result: dict[str, Any] = json.loads(shown)
    assert "draft" in result["drafters"]
    assert [*result["workloads"]] == ["code", "random"]
    for of in result["workloads"].values():
        rows = {row["name"]: row for row in of["rows"]}
        assert [*rows] == [NO_DRAFTS, "fixed 1", "fixed 3", "costs", DEFAULT]
        for row in rows.values():
            n_drafted, n_accepted = row["n_drafted"], row["n_accepted"]
            assert 0 <= n_accepted <= min(n_drafted, row["n_tokens"])
            share = n_accepted / n_drafted if n_drafted else None
            assert row["accepted_share"] == share
            assert row["tps"] > 0
            assert row["n_tokens"] == 4 * 8, "8 tokens after each of 4 prompts"
            assert sum(row["accepted_by_drafter"].values()) == n_accepted
        assert rows[NO_DRAFTS]["n_drafted"] == 0
        assert 0 < rows["fixed 1"]["n_drafted"] < rows["fixed 3"]["n_drafted"]
        assert of["vs_no_drafts"] == rows[DEFAULT]["tps"] / rows[NO_DRAFTS]["tps"]
        fixed = [row["tps"] for row in rows.values() if row["is_fixed"]]
        assert of["vs_best_fixed"] == rows[DEFAULT]["tps"] / max(fixed)
        paying = [n for n in (1, 3) if rows[f"fixed {n}"]["tps"] >= rows[NO_DRAFTS]["tps"]]
        assert of["largest_paying_block"] == max(paying, default=0)
    ways = {size["n"]: size for size in result["sizes"]}
    assert of["rows"][0]["streamed_bytes"] > 0
    assert {size["way"] for size in ways.values()} == {"streamed"}
    assert all(size["counters"]["streamed_bytes"] > 0 for size in ways.values())
    assert len(result["priced_s"]) > 8
    assert not result["is_partial"]


def test_on_the_cpu_nothing_streams_and_rows_have_llama_benchs_keys() -> None:
    words = [
        "--device",
        "cpu",
        "--workloads",
        "random",
        "--only-policies",
        "fixed",
        "--blocks",
        "2",
    ]
    rows = list(csv.DictReader(io.StringIO(bench(*words, "-o", "csv"))))
    assert [row["policy"] for row in rows] == [NO_DRAFTS, "fixed 2", DEFAULT]
    assert {row["workload"] for row in rows} == {"random"}
    assert {row["n_gen"] for row in rows} == {"8"}
    for row in rows:
        assert float(row["avg_ts"]) == pytest.approx(float(row["median_ts"]))
        assert int(row["n_accepted"]) <= int(row["n_drafted"])


def test_ctrl_c_leaves_what_was_measured() -> None:
    words = ["--device", "cpu", "--workloads", "code,mixed", "--only-policies", "fixed"]
    running = subprocess.Popen(
        [sys.executable, "-m", "specoffload"]
        + arguments(*words, "-n", "16", "-r", "3", "-o", "jsonl", "--blocks", "1"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert running.stdout is not None
        # The first text is measured, and the second has begun.
        lines = [running.stdout.readline() for _ in range(3)]
        time.sleep(1.0)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    rows = [json.loads(line) for line in lines]
    assert [row["policy"] for row in rows] == [NO_DRAFTS, "fixed 1", DEFAULT]
    assert {(row["workload"], len(row["samples_ts"])) for row in rows} == {("code", 3)}
    assert all(len(json.loads(line)["samples_ts"]) <= 3 for line in out.splitlines())
    assert "interrupted" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--spec-type", "none"), "nothing drafts"),
        (("--spec-policy", "costs"), "leave out --spec-policy"),
        (("--drafters",), "two comparisons"),
        (("--blocks", "99"), "at most 63"),
        (("--vs", "llama-server=x"), "leave out --vs"),
    ],
)
def test_what_leaves_nothing_to_compare_is_refused(words: tuple[str, ...], why: str) -> None:
    done = command(*arguments(*words))
    assert done.returncode != 0
    assert why in " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = config_of(
        model=demo_file("target.gguf"), draft=demo_file("draft.gguf"), device="cpu", threads=1,
        ctx_size=1024, spec_given={"--spec-type": "draft,ngram-mod"},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("profiles")
    config = replace(config, spec=replace(config.spec, profile_dir=folder))
    with Session(config, keeps_hits=False) as opened:
        yield opened


def test_each_repetition_begins_with_drafters_and_a_policy_that_know_no_text(
    session: Session,
) -> None:
    speculation = session.speculation
    assert speculation is not None
    before = speculation.parts
    options = session.choices.spec.options
    first, second = speculation.begun(options), speculation.begun(options)
    assert isinstance(first.drafter, ChainDrafter)
    assert isinstance(second.drafter, ChainDrafter)
    (one,), (other,) = first.drafter.free, second.drafter.free
    assert isinstance(one, NgramMod)
    assert one is not other
    assert isinstance(first.policy, Throughput)
    assert isinstance(second.policy, Throughput)
    assert first.policy.calibration is not second.policy.calibration

    settings = settings_for(options, [PolicyName.FIXED], [3])
    seen = Seen()
    measure(session, settings, ["x = [1, 2, 3]\n"], seen, n_predict=40, repetitions=2)
    drafted = [[run.n_drafted for run in seen.runs[s.name]] for s in settings]
    assert drafted[0] == [0, 0]
    assert drafted[1][0] == drafted[1][1] > 0, "the second repetition remembers nothing"
    assert speculation.parts == before


def test_the_default_and_no_drafts_correct_the_times_that_it_plans_with(session: Session) -> None:
    learner, seen = session.costs.learner, []
    assert learner is not None
    settings = settings_for(session.choices.spec.options, [PolicyName.FIXED], [3])
    took = learner.took

    def spied(n: int, seconds: float) -> None:
        seen.append(n)
        took(n, seconds)

    learner.took = spied  # type: ignore[method-assign]
    try:
        measure(session, settings[1:2], ["def f("], Seen(), n_predict=12, repetitions=1)
        assert seen == []
        measure(session, settings[:1], ["def f("], Seen(), n_predict=12, repetitions=1)
        assert len(seen) > 3
        assert {*seen} == {1}
        seen.clear()
        measure(session, settings[2:], ["def f("], Seen(), n_predict=12, repetitions=1)
        assert len(seen) > 3
    finally:
        learner.took = took  # type: ignore[method-assign]


def test_an_interrupted_measurement_has_complete_repetitions_only(session: Session) -> None:
    settings = settings_for(session.choices.spec.options, [PolicyName.FIXED], [1])
    seen, n_turns = Seen(), 0

    def interrupt(name: str, nth: int, seen: Seen) -> None:
        nonlocal n_turns
        n_turns += 1
        if n_turns == 3 * 2 + 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(
            session, settings, ["def f(", "class A:"], seen,
            n_predict=4, repetitions=3, on_turn=interrupt,
        )  # fmt: skip
    assert sorted(len(runs) for runs in seen.runs.values()) == [1, 1, 2]
    *_, last = session.generate("def f(", GenerateOptions(n_predict=3, ignore_eos=True))
    assert last.stats is not None, "the session goes on"


def test_sizes_are_decoded_and_the_sequence_is_left_empty(session: Session) -> None:
    session.forget()
    sizes = list(sizes_seen(session.target, (1, 4)))
    assert [(size.n, size.way) for size in sizes] == [(1, "CPU"), (4, "CPU")]
    assert min(size.decode_s for size in sizes) > 0
    assert session.target.sequences.length(0) == 0
