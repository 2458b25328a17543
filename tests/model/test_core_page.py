"""A run enters the files of docs/core.md in its order."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from flow_page import CORE, ROOT, Item, items_of
from in_process import command

from specoffload.config.resolution import demo_file
from specoffload.slots.batcher import Batcher

TEXT = "def area(width, height): return width * height\n" * 80
STEADY = 12  # decodes until slots are full and graphs are known


def matches(item: Item, file: str, name: str) -> bool:
    if file != item.file:
        return False
    if item.symbol == "Copier.copy":  # abstract
        return name.endswith("Copier.copy")
    names = (item.symbol, f"{item.symbol}.__init__", f"{item.symbol}.__call__")
    return name in names or name.startswith(f"{item.symbol}.<locals>.")


@pytest.fixture(scope="module")
def entered() -> dict[str, list[tuple[str, str]]]:
    """The functions that the first step and a later one enter, in order: (file, name)."""
    found: dict[str, list[tuple[str, str]]] = {}
    step, n_steps = Batcher.step, 0

    def watched(self: Batcher) -> Any:
        nonlocal n_steps
        n_steps += 1
        way = {1: "A prompt of 1,000 tokens", STEADY: "A decode of one token"}.get(n_steps)
        if way is None:
            return step(self)
        calls: dict[tuple[str, str], None] = {}

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                code = frame.f_code
                calls[code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname] = None

        sys.setprofile(note)
        try:
            return step(self)
        finally:
            sys.setprofile(None)
            found[way] = list(calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batcher, "step", watched)
        done = command(
            "run", "-m", demo_file("target.gguf"), "--device", "sim:vram=4MiB", "--min-batch", "1",
            "-t", "1", "-c", "2048", "-n", "20", "-no-cnv", "--hybrid", "off",
            "--spec-type", "none", "-p", TEXT,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("way", ["A decode of one token", "A prompt of 1,000 tokens"])
def test_files_are_entered_in_the_order_of_the_page(
    way: str, entered: dict[str, list[tuple[str, str]]]
) -> None:
    items, calls = items_of(CORE, way), entered[way]
    places = [
        next((i for i, call in enumerate(calls) if matches(item, *call)), -1) for item in items
    ]
    assert [item.symbol for item, at in zip(items, places, strict=True) if at < 0] == []
    in_order = sorted(zip(places, (item.symbol for item in items), strict=True))
    assert [symbol for _, symbol in in_order] == [item.symbol for item in items]
