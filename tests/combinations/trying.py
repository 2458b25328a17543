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
import combinations.elsewhere as elsewhere
import combinations.play as play
from combinations.cases import TABLES, Case
from combinations.program_parts import serving_family
from combinations.requesting import Asker
from combinations.small_models import embedded_projector


@dataclass(frozen=True)
class Outcome:
    """The result of a case. `smallest` is the smallest case with a fault, if it has one."""

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
        self._served = ""  # the family and the eyes of the server
        self._asker: Asker | None = None
        self._server = ExitStack()
        self._others: dict[str, elsewhere.Elsewhere] = {}

    def __enter__(self) -> Trier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._server.close()
        for other in self._others.values():
            other.close()

    def faults_of(self, case: Case) -> list[str]:
        """A sentence for each property that did not hold."""
        match case.table:
            case "session":
                return self._played(case)
            case "command":
                return commanding.faults_of(case, self._models)
        return self._asked(case).faults_of(case)

    def why_not(self, case: Case) -> str:
        """Why this machine cannot play the case, or an empty text."""
        return elsewhere.why_not(case["device"]) if case.table == "session" else ""

    def _played(self, case: Case) -> list[str]:
        """Play a session here, or in the process that has its device."""
        device = case["device"]
        if device not in elsewhere.DEVICES:
            return play.faults_of(case, self._models)
        if device not in self._others:
            self._others[device] = elsewhere.Elsewhere(device, self._models)
        return self._others[device].faults_of(case)

    def _asked(self, case: Case) -> Asker:
        served = _server_of(case)
        if self._asker is None or served != self._served:
            self._server.close()
            self._server, self._asker = ExitStack(), None
            projector = {"{projector}": str(embedded_projector(self._models))}
            words = [projector.get(word, word) for word in case.value("eyes").words]
            url = self._server.enter_context(serving_family(case["family"], *words))
            self._asker = Asker(url)
            self._server.callback(self._asker.close)
            self._served = served
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
    """Cases in the order of their servers, so that each server starts once."""
    order = {name: i for i, name in enumerate(dict.fromkeys(_server_of(c) for c in cases))}
    return sorted(cases, key=lambda c: order[_server_of(c)])


def _server_of(case: Case) -> str:
    """What the case shares a server with."""
    return f"{case['family']}, {case['eyes']}" if case.table == "request" else ""
