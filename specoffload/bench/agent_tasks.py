"""The 20 tasks of `bench --agent`, and when each of them is solved. Pure.

A task is judged by the state of its world alone. Code is compared as a syntax tree, so that blank
lines and comments do not matter. No code that a model writes is run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from specoffload.bench.agent_tools import (
    AddEvent,
    AgentTool,
    AgentWorld,
    Calculate,
    DeleteFile,
    FindProducts,
    PlaceOrder,
    ReadDay,
    ReadFile,
    ReadRoom,
    ReplaceInFile,
    SearchFiles,
    SetHeating,
    SetLight,
    SubmitAnswer,
    WriteFile,
)

_FILES = (SearchFiles, ReadFile, WriteFile, ReplaceInFile, DeleteFile, SubmitAnswer)
_HOME = (ReadRoom, SetLight, SetHeating, SubmitAnswer)
_SUMS = (Calculate, SubmitAnswer)
_CALENDAR = (ReadDay, AddEvent, SubmitAnswer)
_SHOP = (FindProducts, PlaceOrder, SubmitAnswer)

SYSTEM = (
    "You solve tasks by calling tools. Call submit_answer when the task is done: with the answer "
    "alone if there is a question, else with the word done."
)


@dataclass(frozen=True)
class AgentTask:
    """A task of one agent. `is_solved` looks at the world after the last call."""

    name: str
    question: str
    tools: tuple[type[AgentTool], ...]
    is_solved: Callable[[AgentWorld], bool]


def _answers(*words: str) -> Callable[[AgentWorld], bool]:
    """True if the submitted answer contains one of `words`, in any case of letters."""
    return lambda world: any(word in (world.answer or "").lower() for word in words)


def _number(value: float) -> Callable[[AgentWorld], bool]:
    """True if the submitted answer is this number."""

    def is_it(world: AgentWorld) -> bool:
        try:
            return float((world.answer or "").replace(",", "").strip(" .=$€")) == value
        except ValueError:
            return False

    return is_it


def _has_code(path: str, code: str) -> Callable[[AgentWorld], bool]:
    """True if the file at `path` has the syntax tree of `code`, and no other file has changed."""

    def has_it(world: AgentWorld) -> bool:
        before = AgentWorld().files
        others = {name: text for name, text in world.files.items() if name != path}
        before.pop(path, None)
        return others == before and _tree(world.files.get(path, "(")) == _tree(code)

    return has_it


def _tree(code: str) -> str | None:
    """The syntax tree of Python code without its comments; None if it is no Python."""
    try:
        return ast.dump(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _has_files(**changed: str | None) -> Callable[[AgentWorld], bool]:
    """True if the files are those of a new world with these changes. None: the file is deleted.

    A name's last `_` stands for the dot. Blanks at the ends of a file do not matter.
    """

    def has_them(world: AgentWorld) -> bool:
        wanted: dict[str, str | None] = dict(AgentWorld().files)
        for name, text in changed.items():
            wanted[".".join(name.rsplit("_", 1))] = text
        texts = {name: text.strip() for name, text in world.files.items()}
        return texts == {name: text.strip() for name, text in wanted.items() if text is not None}

    return has_them


def _lights(kitchen: bool, hall: bool, bedroom: bool) -> Callable[[AgentWorld], bool]:
    wanted = [kitchen, hall, bedroom]
    return lambda world: [room.has_light for room in world.rooms.values()] == wanted


_START = AgentWorld()
_CONFIG, _NOTES, _SHAPES = (_START.files[name] for name in ("config.ini", "notes.txt", "shapes.py"))

TASKS = (
    AgentTask("eggs", "How many eggs does notes.txt list?", _FILES, _number(12)),
    AgentTask("port", "Which port does the server in config.ini use?", _FILES, _number(8080)),
    AgentTask(
        "new port", "Change the port in config.ini to 9090, and nothing else.", _FILES,
        _has_files(config_ini=_CONFIG.replace("8080", "9090")),
    ),
    AgentTask(
        "wrong sum", "The function add in calc.py returns a wrong result. Mend it.", _FILES,
        _has_code("calc.py", "def add(a, b):\n    return a + b\n"),
    ),
    AgentTask(
        "hello", "Write a file hello.py with one line of Python, which prints the word hello.",
        _FILES, _has_code("hello.py", "print('hello')"),
    ),
    AgentTask("push", "Which file defines the function push?", _FILES, _answers("stack.py")),
    AgentTask(
        "backup", "Copy notes.txt to a new file backup.txt.", _FILES,
        _has_files(backup_txt=_NOTES),
    ),
    AgentTask(
        "rename", "Rename the function area in shapes.py to rectangle_area, where it is called, "
        "too.", _FILES, _has_code("shapes.py", _SHAPES.replace("area", "rectangle_area")),
    ),
    AgentTask("old log", "Delete the file old.log.", _FILES, _has_files(old_log=None)),
    AgentTask("count", "How many files are there?", _FILES, _number(6)),
    AgentTask("one light", "Switch the light in the kitchen on.", _HOME, _lights(True, True, True)),
    AgentTask("all lights", "Switch all lights off.", _HOME, _lights(False, False, False)),
    AgentTask(
        "colder", "Set the heating of the bedroom two degrees lower than it is now.", _HOME,
        lambda world: [room.celsius for room in world.rooms.values()] == [18, 18, 16],
    ),
    AgentTask("product", "What is 1234 times 5678?", _SUMS, _number(7006652)),
    AgentTask(
        "boxes", "A box holds 24 bottles of 1.25 euros each. What do 3 boxes cost, in euros?",
        _SUMS, _number(90),
    ),
    AgentTask("brackets", "What is (17 + 5) * 12 - 4?", _SUMS, _number(260)),
    AgentTask(
        "dentist", "Add the event dentist to Tuesday at 10:00.", _CALENDAR,
        lambda world: world.calendar.get("Tuesday") == {"10:00": "dentist"},
    ),
    AgentTask("Ana", "On which day do I have lunch with Ana?", _CALENDAR, _answers("thursday")),
    AgentTask(
        "pencils", "Order 3 pieces of the cheapest pencil.", _SHOP,
        lambda world: world.orders == {"p2": 3},
    ),
    AgentTask(
        "two orders", "Order one notebook and two red pencils.", _SHOP,
        lambda world: world.orders == {"n1": 1, "p1": 2},
    ),
)  # fmt: skip
