"""A run calls the functions that docs/flow.md lists, and in its order."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from types import CodeType, FrameType
from typing import Any

import pytest
from flow_page import ROOT, Item, way_of
from in_process import command

from specoffload.config.resolution import demo_file

WATCHED = ("a token", "a GGUF path", "a decode's time", "a flag")
# Declarations, of which Python enters no function.
DECLARED = {"specoffload/config/table.py", "specoffload/config/options.py"}


def is_of(item: Item, file: str, name: str) -> bool:
    """True if the function `name` of `file` is the item's: itself, its inner one or `__init__`."""
    if file != item.file:
        return False
    names = (item.symbol, f"{item.symbol}.__init__", f"{item.symbol}.__post_init__")
    if item.symbol == "Copier.copy":  # abstract
        return name.endswith("Copier.copy")
    return name in names or name.startswith(f"{item.symbol}.<locals>.")


class Calls:
    """The calls of a way's functions: indices of items, with that of the nearest caller."""

    def __init__(self, thing: str) -> None:
        self.items = way_of(thing)
        self.found: list[tuple[int | None, int]] = []
        self._of_code: dict[CodeType, int | None] = {}

    def index_of(self, code: CodeType) -> int | None:
        if code not in self._of_code:
            file = code.co_filename.removeprefix(f"{ROOT}/")
            its = (i for i, item in enumerate(self.items) if is_of(item, file, code.co_qualname))
            self._of_code[code] = next(its, None)
        return self._of_code[code]

    def note(self, frame: FrameType, index: int) -> None:
        caller = frame.f_back
        while caller is not None and self.index_of(caller.f_code) in (None, index):
            caller = caller.f_back
        self.found.append((caller and self.index_of(caller.f_code), index))


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Calls]:
    found = {thing: Calls(thing) for thing in WATCHED}
    ways_of_code: dict[CodeType, list[tuple[Calls, int]]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or ways_of_code.get(code) == []:
            return
        if code not in ways_of_code:
            pairs = ((its, its.index_of(code)) for its in found.values())
            ways_of_code[code] = [(its, index) for its, index in pairs if index is not None]
        for its, index in ways_of_code[code]:
            its.note(frame, index)

    with pytest.MonkeyPatch.context() as patch:
        # Nothing is kept there, so that the run measures.
        patch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        patch.setattr("offload.measuring.budget_s", lambda one_s, n_ways: 0.2)
        sys.setprofile(note)
        threading.setprofile(note)
        try:
            done = command(
                "run", "-m", demo_file("target.gguf"), "--device", "sim", "-t", "1", "-c", "512",
                "-n", "4", "-no-cnv", "-p", "def area(",
            )  # fmt: skip
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("thing", WATCHED)
def test_every_function_of_a_way_is_called(thing: str, calls: dict[str, Calls]) -> None:
    its = calls[thing]
    called = {index for _, index in its.found}
    missing = {item.symbol for i, item in enumerate(its.items)
               if i not in called and item.file not in DECLARED}  # fmt: skip
    assert missing == set()


@pytest.mark.parametrize("thing", ["a token", "a GGUF path"])
def test_each_function_is_called_by_earlier_ones_alone(thing: str, calls: dict[str, Calls]) -> None:
    its = calls[thing]
    by: dict[int, set[int]] = defaultdict(set)
    for caller, index in its.found:
        if caller is not None:
            by[index].add(caller)
    names = [item.symbol for item in its.items]
    for i in range(1, len(names)):
        assert by[i], f"nothing of the way calls {names[i]}"
        assert max(by[i]) < i, f"{[names[c] for c in by[i]]} call {names[i]}"


def test_opening_an_engine_calls_the_files_below_it_in_their_order(
    calls: dict[str, Calls],
) -> None:
    its = calls["a GGUF path"]
    names = [item.symbol for item in its.items]
    opening = names.index("Opening")
    of_opening = (index for caller, index in its.found if (caller or 0) >= opening)
    assert [names[i] for i in dict.fromkeys(of_opening)] == names[opening + 1 :]
