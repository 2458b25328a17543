"""The tracer of the lab counts files, and how often a reader comes back to one."""

from __future__ import annotations

from lab.entered import Call, only_declares, way_of


def call(caller: str, file: str, function: str = "f") -> Call:
    return Call(caller, "g", file, function)


def test_a_file_counts_again_only_after_another_one() -> None:
    calls = [call("a", "b"), call("b", "c"), call("b", "c", "h"), call("a", "b", "h")]
    way = way_of(calls)
    assert way.again == {"b": 1, "c": 0}
    assert way.n_again == 1


def test_the_same_call_counts_once() -> None:
    assert way_of([call("a", "b"), call("b", "c"), call("a", "b"), call("b", "c")]).n_again == 0


def test_files_that_only_declare_have_no_branch_in_a_function() -> None:
    assert only_declares("class A(Exception):\n    def words(self):\n        return str(self)\n")
    assert only_declares("X = 1\nif X:\n    Y = 2\n"), "a module's own branch is no function's"
    assert not only_declares("def f(x):\n    for y in x:\n        print(y)\n")
