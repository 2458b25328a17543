"""The request for a plan is pure data, made once. Switches of a run never reach a plan."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload import options
from offload.options import EngineOptions
from offload.plan import wanted
from offload.plan.layout import Layout
from offload.plan.placement import PlanRequest
from offload.plan.wanted import Wanted
from offload.stream.options import StreamingOptions
from offload.times.context_memory import ContextOptions

ROOT = Path(__file__).parents[3]
TYPES = (ContextOptions, EngineOptions, Layout, PlanRequest, StreamingOptions, Wanted)


@pytest.mark.parametrize("its", TYPES)
def test_no_options_inherit_others(its: type) -> None:
    assert its.__bases__ == (object,)
    assert its.__dataclass_params__.frozen  # type: ignore[attr-defined]


def kinds(its: object) -> Iterator[object]:
    """Yield a type, and the types that it is made of."""
    yield typing.get_origin(its) or its
    for part in typing.get_args(its):
        yield from kinds(part)
    if dataclasses.is_dataclass(its) and isinstance(its, type):
        for hint in typing.get_type_hints(its).values():
            yield from kinds(hint)


def test_what_is_wanted_has_no_path_and_no_function() -> None:
    found = list(kinds(Wanted))
    assert ContextOptions in found
    impure = (Path, Callable, EngineOptions, StreamingOptions)
    assert [its for its in impure if its in found] == []
    assert [its for its in impure if its in list(kinds(EngineOptions))] == [*impure], (
        "all are found"
    )


def test_no_switch_of_a_run_is_read_by_a_plan() -> None:
    for file in sorted((ROOT / "offload/plan").glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not names & {options.__name__, StreamingOptions.__module__}, file.name


def test_what_is_wanted_is_made_in_one_place() -> None:
    """Who opens a model does not change what it asked for."""
    made = []
    for folder in ("offload", "specoffload"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            calls = (n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))
            names = {call.id for call in calls if isinstance(call, ast.Name)}
            if f"from {wanted.__name__} import" in text and Wanted.__name__ in names:
                made.append(file.relative_to(ROOT).as_posix())
    # The first two have defaults: all of this machine, for experiments.
    assert made == [
        "offload/options.py",
        "offload/worker/serving.py",
        "specoffload/opening/target.py",
    ]


OPENING = ("offload/engine.py", "offload/opening", "offload/worker/serving.py")


@pytest.mark.parametrize("name", OPENING)
def test_who_opens_a_model_finishes_no_object_of_others(name: str) -> None:
    """An object is complete when its constructor returns, so only it assigns its attributes."""
    found = []
    for file in sorted((ROOT / name).rglob("*.py")) or [ROOT / name]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = ast.unparse(node.value)
                found += [f"{file.name}: {ast.unparse(node)}"] * (owner != "self")
    assert found == []
