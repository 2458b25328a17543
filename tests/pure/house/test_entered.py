"""The tracer of the lab counts files, and how often a reader comes back to one."""

from __future__ import annotations

from lab.entered import Call, way_of


def call(caller: str, file: str, function: str = "f") -> Call:
    return Call(caller, "g", file, function)


def test_a_file_counts_again_only_after_another_one() -> None:
    calls = [call("a", "b"), call("b", "c"), call("b", "c", "h"), call("a", "b", "h")]
    way = way_of(calls)
    assert way.again == {"b": 1, "c": 0}
    assert way.n_again == 1


def test_the_same_call_counts_once() -> None:
    assert way_of([call("a", "b"), call("b", "c"), call("a", "b"), call("b", "c")]).n_again == 0
