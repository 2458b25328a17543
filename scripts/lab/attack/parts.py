"""The parts by their names, and how many tries each makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lab.attack import ATTACK
from lab.attack.headers_part import headers_part
from lab.attack.http_part import SERVE, http_part
from lab.attack.kills_part import kills_part
from lab.attack.limits_part import CASES, limits_part
from lab.attack.outcome import Breach, Outcome
from lab.attack.overload import overload
from lab.attack.program import bad_lines, serving
from lab.attack.witness import N_TOKENS, decided_texts


class Scale(Enum):
    """`small` is for every change, `large` for an hour by hand."""

    SMALL = "small"
    LARGE = "large"


@dataclass(frozen=True)
class Part:
    """`run` gets a seed, the numbers of the tries and an empty folder."""

    run: Callable[[int, range, Path], Outcome]
    n_tries: Mapping[Scale, int]


def overload_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """64 clients, `numbers` seconds."""
    outcome = Outcome("overload", 1)
    command = f"{ATTACK} --part overload --only 0-{numbers.stop}"
    with serving(folder / "overload.log", SERVE) as server:
        texts = asyncio.run(decided_texts(server.port))
        load = overload(server.port, texts, N_TOKENS, n_clients=64, duration_s=float(len(numbers)))
        found = asyncio.run(load)
        server.end()
        wrong = [*found.wrong, *bad_lines(server.said())]
    outcome.figures |= found.said()
    outcome.tally["answered"] += sum(found.answers.values())
    outcome.tally["told when to come back"] += found.n_refused
    least, most = found.spread
    if most > 4 * max(1, least):
        wrong.append(f"clients got between {least} and {most} answers")
    outcome.breaches += [Breach(what, command) for what in wrong]
    return outcome


PARTS = {
    "http": Part(http_part, {Scale.SMALL: 300, Scale.LARGE: 10_000}),
    "headers": Part(headers_part, {Scale.SMALL: 60, Scale.LARGE: 1000}),
    "limits": Part(limits_part, {Scale.SMALL: len(CASES), Scale.LARGE: len(CASES)}),
    "kills": Part(kills_part, {Scale.SMALL: 5, Scale.LARGE: 30}),
    "overload": Part(overload_part, {Scale.SMALL: 10, Scale.LARGE: 60}),
}
