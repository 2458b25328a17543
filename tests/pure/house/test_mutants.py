"""Mutants that `scripts/lab/run mutants` makes, and the tests that it runs for a module."""

from __future__ import annotations

import ast

import pytest

from lab.mutants import (
    FOLDERS,
    KILLED,
    PASSED,
    ROOT,
    STOPPED,
    Mutant,
    Result,
    files_of,
    mutants_of,
    sample,
    spread,
    table,
)

SOURCE = '''def f(n: int = 2) -> int:
    """é is two bytes, and the 3 in this text is no number."""
    if n < 4 and not f"{5}":
        return max(n, 1)
    g(n)
    return n + 1
'''


def test_each_mutant_changes_one_place_and_is_python() -> None:
    found = mutants_of("m.py", SOURCE)
    texts = [m.apply(SOURCE.encode()).decode() for m in found]
    assert len(set(texts)) == len(texts)
    assert SOURCE not in texts
    for text in texts:
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))
    said = {(m.line, m.before, m.after) for m in found}
    assert {
        (1, "2", "(3)"),
        (3, "n < 4", "(n <= 4)"),
        (4, "max(n, 1)", "(min(n, 1))"),
        (5, "g(n)", "pass"),
        (6, "n + 1", "(n - 1)"),
    } <= said
    assert not [m for m in found if m.before in ("5", "3")]


@pytest.mark.parametrize("n", [1, 7, 9])
def test_a_seed_draws_the_same_sample_and_each_folder_in_turn(n: int) -> None:
    folders = FOLDERS[:1] + FOLDERS[4:5]
    drawn = sample(folders, ROOT, n, seed=3)
    assert drawn == sample(folders, ROOT, n, seed=3)
    assert [m.path.startswith(folders[i % 2]) for i, m in enumerate(drawn)] == [True] * n


def test_a_modules_own_tests_are_those_that_name_it_or_else_its_importers() -> None:
    path = "offload/times/search.py"
    own = files_of(path, "own", ROOT, {})
    others = files_of(path, "pure", ROOT, {})
    assert "tests/pure/times/test_search.py" in own
    assert not {*own} & {*others}
    assert not [name for name in others if "/house/" in name]
    by_importers = files_of("offload/schedule/placing.py", "own", ROOT, {})
    assert "tests/pure/stream/test_weights_schedule.py" in by_importers
    first = others[-1]
    assert files_of(path, "pure", ROOT, {first: 0.1})[0] == first


def test_stopped_tests_do_not_count_as_a_kill() -> None:
    mutant = Mutant("a/m.py", 1, 0, 1, "1", "(2)")
    results = [
        Result(mutant, {"own": STOPPED, "pure": PASSED}),
        Result(mutant, {"own": STOPPED, "pure": KILLED}),
        Result(mutant, {"own": KILLED}),
        Result(mutant, {"own": PASSED}),
    ]
    assert table(results, ["a"]).splitlines()[-1] == "| all | 4 | 1 | 0 | 1 | 1 | 1 |"


def test_tests_are_spread_over_as_many_files_as_possible() -> None:
    tests = ["a.py::x", "a.py::y", "a.py::z", "b.py::x", "c.py::x", "c.py::y"]
    assert spread(tests, 4) == ["a.py::x", "b.py::x", "c.py::x", "a.py::y"]
    assert spread(tests, 9) == ["a.py::x", "b.py::x", "c.py::x", "a.py::y", "c.py::y", "a.py::z"]
