"""Cases that cover all pairs of a table, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, product

import covertable

from combinations.axes import COMMAND, REQUEST, SESSION, Table, Value

Pair = frozenset[tuple[str, str]]  # two (axis, value), of different axes
TABLES: Mapping[str, Table] = {
    "session": SESSION,
    "request": REQUEST,
    "command": COMMAND,
}


@dataclass(frozen=True)
class Case:
    """One value of each axis of a table."""

    table: str
    values: tuple[tuple[str, str], ...]  # (axis, name), in the table's order

    @staticmethod
    def of(table: str, **names: str) -> Case:
        """A case with these values, and the first value of all other axes."""
        axes = TABLES[table].axes
        unknown = names.keys() - axes.keys()
        if unknown:
            raise KeyError(f"{table} has no axis {sorted(unknown)[0]!r}")
        values = {axis: names.get(axis, vs[0].name) for axis, vs in axes.items()}
        for axis, name in values.items():
            TABLES[table].value(axis, name)
        return Case(table, tuple(values.items()))

    def __getitem__(self, axis: str) -> str:
        return dict(self.values)[axis]

    def value(self, axis: str) -> Value:
        return TABLES[self.table].value(axis, self[axis])

    def replaced(self, axis: str, name: str) -> Case:
        """The case with another value of one axis."""
        return Case(self.table, tuple((a, name if a == axis else n) for a, n in self.values))

    @property
    def words(self) -> list[str]:
        """The flags of all values, with braces."""
        return [word for axis, _ in self.values for word in self.value(axis).words]

    @property
    def pairs(self) -> set[Pair]:
        return {frozenset(pair) for pair in combinations(self.values, 2)}

    @property
    def told(self) -> list[tuple[str, str]]:
        """(axis, value) of the axes whose value is not the first one."""
        axes = TABLES[self.table].axes
        return [(axis, name) for axis, name in self.values if name != axes[axis][0].name]

    def __str__(self) -> str:
        names = "".join(f", {axis}={name!r}" for axis, name in self.told)
        return f"Case.of({self.table!r}{names})"


def refused_pairs(table: str) -> set[Pair]:
    """The pairs of a table that are not run."""
    return {frozenset((r.first, r.second)) for r in TABLES[table].refused}


def all_pairs(table: str) -> set[Pair]:
    """Every pair of values of two axes."""
    return {
        frozenset(((a, x.name), (b, y.name)))
        for (a, xs), (b, ys) in combinations(TABLES[table].axes.items(), 2)
        for x, y in product(xs, ys)
    }


def covering(table: str, seed: str, strength: int = 2) -> list[Case]:
    """Cases in which every pair of values that is not refused occurs.

    With `strength` 3 every triple occurs. The seed chooses among equally good cases. Values with
    more weight fill what a case has free.
    """
    axes = TABLES[table].axes
    rows = covertable.make(
        {axis: [v.name for v in values] for axis, values in axes.items()},
        strength=strength,
        salt=seed,
        weights={axis: {i: v.weight for i, v in enumerate(vs)} for axis, vs in axes.items()},
        constraints=[_not_both(*pair) for pair in map(sorted, refused_pairs(table))],
    )
    return [Case.of(table, **row) for row in rows]


def _not_both(first: tuple[str, str], second: tuple[str, str]) -> Mapping[str, object]:
    """A condition of covertable: a case has at most one of two values."""
    return {
        "operator": "or",
        "conditions": [
            {"operator": "ne", "left": axis, "value": name} for axis, name in (first, second)
        ],
    }


def by_use(cases: Iterable[Case]) -> list[Case]:
    """The cases that people use most come first: by the product of their values' weights."""

    def use(case: Case) -> float:
        found = 1.0
        for axis, values in TABLES[case.table].axes.items():
            found *= case.value(axis).weight / sum(v.weight for v in values)
        return found

    return sorted(cases, key=use, reverse=True)


def by_new_pairs(cases: Iterable[Case], known: Iterable[Case]) -> list[Case]:
    """Each next case has the most pairs that neither an earlier one has, nor one of `known`."""
    left = {case: case.pairs for case in cases}
    done = set[Pair]().union(*(case.pairs for case in known))
    ordered = []
    while left:
        best = max(left, key=lambda case: len(left[case] - done))
        done |= left.pop(best)
        ordered.append(best)
    return ordered
