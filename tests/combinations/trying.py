"""Tries cases of every table, shrinks those that fail, and remembers what was tried."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import combinations.commanding as commanding
import combinations.play as play
from combinations.cases import TABLES, Case
from combinations.program_parts import serving_family
from combinations.requesting import Asker


@dataclass(frozen=True)
class Outcome:
    """What came of a case. `smallest` is the smallest case with a fault, if it has one."""

    case: Case
    took_s: float
    faults: tuple[str, ...] = ()
    smallest: Case | None = None

    @property
    def line(self) -> str:
        """This outcome as a line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(line: str) -> Outcome:
        """Read what `line` made. Raises ValueError for a line that was cut."""
        found = json.loads(line)
        smallest = found["smallest"]
        return Outcome(
            _case(found["case"]), found["took_s"], tuple(found["faults"]),
            None if smallest is None else _case(smallest),
        )  # fmt: skip


def _case(found: dict[str, Any]) -> Case:
    return Case(found["table"], tuple((axis, name) for axis, name in found["values"]))


class Trier:
    """Plays cases. A server is kept while cases of the same family follow. Use `with`."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._family = ""
        self._asker: Asker | None = None
        self._server = ExitStack()

    def __enter__(self) -> Trier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._server.close()

    def faults_of(self, case: Case) -> list[str]:
        """A sentence for each property that did not hold."""
        match case.table:
            case "session":
                return play.faults_of(case, self._models)
            case "command":
                return commanding.faults_of(case, self._models)
        return self._asked(case["family"]).faults_of(case)

    def _asked(self, family: str) -> Asker:
        if self._asker is None or family != self._family:
            self._server.close()
            self._server = ExitStack()
            url = self._server.enter_context(serving_family(family))
            self._asker = Asker(url)
            self._server.callback(self._asker.close)
            self._family = family
        return self._asker

    def outcome_of(self, case: Case) -> Outcome:
        """Play a case, and shrink it if it has a fault."""
        began = time.perf_counter()
        faults = self.faults_of(case)
        took_s = round(time.perf_counter() - began, 2)
        if not faults:
            return Outcome(case, took_s)
        smallest = shrunk(case, lambda c: bool(self.faults_of(c)))
        return Outcome(case, took_s, tuple(faults), smallest)


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with as many first values as possible that still fails."""
    axes = TABLES[case.table].axes
    for axis, _ in case.told:
        plain = case.replaced(axis, axes[axis][0].name)
        if fails(plain):
            case = plain
    return case


class Record:
    """A file with a line of JSON for each case that was tried, so that a night can go on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: list[Outcome] = [*_read(path)]
        self._known = {outcome.case for outcome in self.outcomes}

    def has(self, case: Case) -> bool:
        return case in self._known

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._known.add(outcome.case)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(outcome.line + "\n")


def _read(path: Path) -> Iterator[Outcome]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the last line of a run that was killed
            yield Outcome.read(line)


def grouped(cases: Sequence[Case]) -> list[Case]:
    """Cases of requests by their family, so that each family's server starts once."""
    order = {name: i for i, name in enumerate(dict.fromkeys(_family(c) for c in cases))}
    return sorted(cases, key=lambda c: order[_family(c)])


def _family(case: Case) -> str:
    return case["family"] if case.table == "request" else ""
