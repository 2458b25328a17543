"""Makes the file of `specoffload report`: measured beside predicted figures, and no names. Pure.

The file is JSON. `FORM` is its version, and docs/validation.md describes its fields. Every text in
it is either one of the program's own words, or has gone through `PrivateNames.free`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

FORM = 1
LEFT_OUT = "left out"
MOST_SHOWN = 6  # most surprises that are printed
_PATH = re.compile(r"(^|[\s=:'\"(])(~|\.{0,2}/|[A-Za-z]:\\|\\\\)\S")
# Names that are on every machine, and tell nothing.
_USUAL = frozenset(
    {"", "/", "home", "root", "localhost", "tmp", "usr", "var", "mnt", "data", "models"}
)


@dataclass(frozen=True)
class PrivateNames:
    """Names that no report may contain: of folders, users and hosts."""

    names: frozenset[str]

    @staticmethod
    def of(paths: Iterable[Path], users: Iterable[str]) -> PrivateNames:
        """The folders of `paths`, and `users`, which are names of users and hosts."""
        folders = {part for path in paths for part in path.absolute().parent.parts}
        hosts = {name for user in users for name in (user, user.split(".")[0])}
        return PrivateNames(frozenset(name.lower() for name in folders | hosts) - _USUAL)

    def free(self, text: str) -> str:
        """`text` if it contains neither one of the names nor a path, else "left out"."""
        lower = text.lower()
        if _PATH.search(text) or any(_has_word(lower, name) for name in self.names):
            return LEFT_OUT
        return text

    def free_all(self, value: Any) -> Any:
        """`value` with each text in it freed. Keys of mappings are the program's own words."""
        if isinstance(value, str):
            return self.free(value)
        if isinstance(value, Mapping):
            return {key: self.free_all(part) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self.free_all(part) for part in value]
        return value


def _has_word(text: str, name: str) -> bool:
    """True if `name` is in `text`, and is not a part of a longer word."""
    begins = r"(?<!\w)" if name[0].isalnum() else ""
    ends = r"(?!\w)" if name[-1].isalnum() else ""
    return re.search(begins + re.escape(name) + ends, text) is not None


@dataclass(frozen=True)
class Term:
    """A predicted figure beside the measured one. Both are speeds, times or shares in `unit`.

    `tolerance` is the largest relative error that counts as expected (docs/validation.md).
    """

    what: str
    unit: str
    predicted: float
    measured: float
    tolerance: float

    @property
    def ratio(self) -> float | None:
        """The predicted figure divided by the measured one. None if one of them is 0."""
        return self.predicted / self.measured if self.predicted > 0 < self.measured else None

    @property
    def shown(self) -> tuple[str, str]:
        """The two figures with their unit, for people."""
        each = (self.predicted, self.measured)
        if self.unit == "s":
            return f"{each[0] * 1e3:.3g} ms", f"{each[1] * 1e3:.3g} ms"
        if self.unit == "share":
            return f"{each[0]:.0%}", f"{each[1]:.0%}"
        return f"{each[0]:.4g} {self.unit}", f"{each[1]:.4g} {self.unit}"

    @property
    def surprises(self) -> bool:
        ratio = self.ratio
        return ratio is None or abs(math.log(ratio)) > math.log1p(self.tolerance)

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "surprises": self.surprises}


# Largest relative errors of docs/validation.md.
_DECODE, _PROMPT, _BATCH, _HITS = 0.25, 0.40, 0.20, 0.20


def terms_of(data: Mapping[str, Any]) -> list[Term]:
    """The figures that were both predicted and measured, in the order of a report."""
    predicted, speeds = data.get("predicted", {}), data.get("speeds", {})
    terms = []
    for path, kind, what, tolerance in (
        ("wrapped", "answer_tps", "answers", _DECODE),
        ("spec", "answer_tps", "answers with drafts", _DECODE),
        ("wrapped", "prompt_tps", "prompts", _PROMPT),
    ):
        expected, measured = predicted.get(path, {}).get(kind), speeds.get(path, {}).get(kind)
        if expected and measured:
            terms.append(Term(what, "tokens/s", expected, median(measured), tolerance))
    times = data.get("batches", {})
    for way, expected_s in predicted.get("batches_s", {}).items():
        for row in times.get(way, ()):
            if row["n"] in expected_s:
                what = f"T({row['n']}) {way}"
                terms.append(Term(what, "s", expected_s[row["n"]], row["seconds"], _BATCH))
    hits, rate = data.get("hits", {}), predicted.get("hits")
    if rate is not None and hits.get("rate") is not None:
        terms.append(Term("hits of split layers", "share", rate, hits["rate"], _HITS))
    return terms


def surprise_words(terms: Sequence[Term]) -> list[str]:
    """A sentence for each term that surprised, the furthest off first."""

    def error(term: Term) -> float:
        return math.inf if term.ratio is None else abs(math.log(term.ratio))

    off = sorted((term for term in terms if term.surprises), key=error, reverse=True)
    words = []
    for term in off[:MOST_SHOWN]:
        if term.ratio is None:
            predicted, measured = term.shown
            words.append(f"{term.what}: {measured} measured, {predicted} predicted")
            continue
        faster = (term.ratio < 1) == (term.unit != "s")
        way = "more" if term.unit == "share" else "faster"
        less = "less" if term.unit == "share" else "slower"
        factor = max(term.ratio, 1 / term.ratio)
        words.append(f"{term.what}: {factor:.2f} × {way if faster else less} than predicted")
    if len(off) > MOST_SHOWN:
        words.append(f"and {len(off) - MOST_SHOWN} more, which the file has")
    return words


def split_use(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Hits and waits of split layers, from the counts of `StreamCounters`. {} if none was split."""
    pairs = sum(counters.get(f"n_pairs_{where}", 0) for where in ("hit", "streamed", "host"))
    n_layers = counters.get("split_layers", 0)
    if not pairs or not n_layers:
        return {}
    return {
        "rate": counters["n_pairs_hit"] / pairs,
        "n_pairs": pairs,
        "n_layers": n_layers,
        "layer_wait_s": counters["split_s"] / n_layers,
        "layer_cpu_s": counters["host_s"] / n_layers,
    }


def bell_use(counters: Mapping[str, Any], why_not: str) -> dict[str, Any]:
    """Counts of layers that ran behind a doorbell, and why none may (""), from `StreamCounters`."""
    names = ("layers_rung", "layers_ahead", "layers_repeated", "n_repairs")
    return {name: counters.get(name, 0) for name in names} | {"why_not": why_not}
