"""The screen of `specoffload demo` fits the terminal and shows what each way did."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from specoffload.commands.demo import NEXT, DemoWay, _costs, bars, screen
from specoffload.generation.statistics import GenerationStats

CODE = "def f(x):\n" + "\n".join(f"    return some_function({i}) + other_{i}" for i in range(30))
PLAIN = DemoWay(
    "plain", "copy, then compute", text=CODE, n_tokens=100, own_s=2.0, hidden=0.0,
    stats=GenerationStats(),
)  # fmt: skip
FAST = replace(PLAIN, title="fast", own_s=0.5, hidden=0.64, identical=True)
STEPS = tuple(0.02 + 0.0001 * n for n in range(33))


def drawn(columns: list[DemoWay], size: tuple[int, int]) -> str:
    console = Console(width=size[0], height=size[1], force_terminal=False)
    with console.capture() as seen:
        console.print(screen("what runs", columns, 160, STEPS, ": T(8) is 1.2", NEXT, size))
    return seen.get()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_it_fits_the_terminal_with_a_row_for_the_prompt(size: tuple[int, int]) -> None:
    lines = drawn([PLAIN, FAST, FAST], size).splitlines()
    assert len(lines) < size[1]
    assert max(map(len, lines)) <= size[0]
    assert any("some_fu" in line for line in lines)
    assert all(line in lines for line in NEXT), "the last lines are whole"


def test_rates_are_compared_with_the_first_column() -> None:
    seen = drawn([PLAIN, FAST], (80, 24))
    assert "50 tokens/s" in seen
    assert "200 tokens/s  4.0 ×" in seen
    assert "copies hidden 0%" in seen
    assert "copies hidden 64%" in seen
    assert "text identical" in seen
    differs = drawn([PLAIN, replace(FAST, identical=False)], (80, 24)).splitlines()
    assert any("text differs *" in line for line in differs)
    assert any(line.startswith("* a larger batch rounds") and "…" not in line for line in differs)
    assert len(differs) < 24


def test_before_the_end_nothing_is_claimed() -> None:
    running = replace(FAST, stats=None, hidden=None, identical=None)
    seen = drawn([running, running], (80, 24))
    assert "identical" not in seen
    assert "hidden" not in seen
    assert "▌" in seen


def test_bars_are_in_proportion() -> None:
    top, bottom = bars([1.0, 2.0, 4.0], 2)
    assert (top, bottom) == ("  █", "▄██")


@pytest.mark.parametrize(
    ("eight_s", "words"),
    [(0.09, "T(8) is about T(1)"), (0.1, "T(8) is about T(1)"), (0.2, "T(8) = 2.0 T(1)")],
)
def test_eight_tokens_never_seem_faster_than_one(eight_s: float, words: str) -> None:
    """Measured times are noisy: 0.9 would be read as a result."""
    costs = SimpleNamespace(step_s=[0.1] * 7 + [eight_s])
    session = SimpleNamespace(speculation=SimpleNamespace(costs=costs))
    way = replace(PLAIN, session=session, stats=None)  # type: ignore[arg-type]
    assert _costs(way)[1] == f": {words}"
