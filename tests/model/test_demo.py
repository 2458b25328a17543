"""`specoffload demo`: the three ways write the same text, and each does what its title says."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specoffload.cli import app
from specoffload.commands.demo import NEXT, DemoWay, frame, open_way, race, ways


@pytest.fixture(scope="module")
def ended() -> Iterator[list[DemoWay]]:
    """The demo's three ways, after they have ended."""
    with ExitStack() as closing:
        opened = [open_way(closing, *way) for way in ways(use_profile=False)]
        for _ in race(opened):
            pass
        yield opened


def test_the_three_texts_are_the_same(ended: list[DemoWay]) -> None:
    assert len({way.text for way in ended}) == 1


def test_the_text_does_not_turn_in_circles(ended: list[DemoWay]) -> None:
    lines = [line.strip() for line in ended[0].text.splitlines() if line.strip()]
    assert len(lines) >= 8
    assert len(set(lines)) / len(lines) > 0.8


def test_each_way_does_what_it_says(ended: list[DemoWay]) -> None:
    plain, streamed, speculative = (way.stats for way in ended)
    assert plain is not None
    assert streamed is not None
    assert speculative is not None
    assert plain.n_drafted == streamed.n_drafted == 0
    assert 0 < streamed.streamed_bytes < plain.streamed_bytes  # cached experts are not copied again
    assert speculative.n_accepted > 0
    assert speculative.n_rounds < streamed.n_rounds
    copies = [[e for e in way.trace.events() if e.lane == "copy"] for way in ended]
    assert all(copies)
    ahead = [any(copy.args.get("reason") == "ahead" for copy in of) for of in copies]
    assert ahead == [False, True, True]


def test_the_last_frame_compares_the_texts(ended: list[DemoWay]) -> None:
    console = Console(width=80, height=24)
    with console.capture() as seen:
        console.print(frame(ended)((80, 24)))
    assert seen.get().count("text identical") == 2
    assert "MiB of weights, " in seen.get()


def test_the_commands_it_names_exist() -> None:
    for line in NEXT:
        words = shlex.split(line.removeprefix("Go on:"))
        assert words[0] == "specoffload"
        done = CliRunner().invoke(app, [words[1], "--help-all"], env={"COLUMNS": "200"})
        assert done.exit_code == 0
        for flag in (word for word in words if word.startswith("-")):
            assert flag in done.stdout
