"""scripts/lab/run agents-day plays its day on a real server, and fills its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab import agents_day
from lab.agents_script import AskOnce, DaySize, Leaves, Turn, day_of

SMALL = [
    "--vs", "none", "--rounds", "1", "--turns", "3", "--words", "4", "12", "--system-words", "60",
    "--document-words", "80", "--tokens", "4", "--ctx-size", "4096", "--threads", "1",
]  # fmt: skip


def test_a_small_day_fills_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- agents day -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(agents_day, "PAGE", page)
    agents_day.main(SMALL)
    table = page.read_text()
    assert table.startswith("before\n")
    assert table.endswith("after\n")
    assert "old" not in table
    assert capsys.readouterr().out.strip() in table
    cells = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE))
    n_answers = 3 * 4 + 2
    assert cells["tokens written"] == str(4 * n_answers)
    assert int(cells["tokens read from cache"].replace(",", "")) > 500
    assert cells["cells read of others"] != "not told"
    equal, compared = cells["texts equal to those of `-np 1`, exact setting"].split(" of ")
    assert equal == compared == str(n_answers)


def test_a_day_has_what_agents_do() -> None:
    size = DaySize(n_system_words=20, n_document_words=30)
    day = day_of(size, [f"w{i}" for i in range(50)], 1)
    acts = [act for step in day.steps for act in step]
    turns = [act for act in acts if isinstance(act, Turn)]
    assert [sum(turn.talk == talk for turn in turns) for talk in range(4)] == [8] * 4
    assert all(40 <= len(turn.text.split()) <= 400 for turn in turns)
    assert [turn.talk for turn in turns if turn.edited] == [1]
    assert sum(isinstance(act, Leaves) for act in acts) == 1
    first, second = (act.text for act in acts if isinstance(act, AskOnce))
    assert first != second
    assert first.split("\n")[0] == second.split("\n")[0]
    together = [step for step in day.steps if sum(isinstance(act, Turn) for act in step) == 2]
    assert len(together) == 16
    assert day.n_answers == 34
    assert day == day_of(size, [f"w{i}" for i in range(50)], 1)
    assert day.system != day_of(size, [f"w{i}" for i in range(50)], 2).system


def test_quantiles_and_comparisons_are_those_of_the_definition() -> None:
    assert [agents_day.quantile([1.0, 2.0, 3.0, 4.0], q) for q in (0.5, 0.9, 1.0)] == [2, 4, 4]
    assert agents_day.quantile(sorted(range(1, 11)), 0.9) == 9
    one, other = agents_day.DayReport(), agents_day.DayReport()
    one.texts = {0: [(1,), (2,), (3,)], -1: [(1,), (2,)]}
    other.texts = {0: [(1,), (9,), (3,)], -1: [(8,), (2,)]}
    assert agents_day.n_equal(one, other) == (2, 4)


def test_llama_server_gets_the_same_context_and_its_best_cache(tmp_path: Path) -> None:
    options = agents_day.arguments(["--ctx-size", "65536"])
    theirs = agents_day.command_of(options, tmp_path / "llama-server")
    ours = agents_day.command_of(options)
    longer = ["--override-kv", "deepseek2.context_length=int:65536"]
    for words in (theirs, ours):
        at = words.index("--override-kv")
        assert words[at : at + 2] == longer
        assert words[words.index("-np") + 1] == "4"
    assert "-kvu" in theirs
    exact = agents_day.command_of(options, None, "-np", "1")
    assert exact.count("-np") == 1
