"""Walks for some minutes, and a record of them from which a later run goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from combinations.truth import close_truths
from combinations.walk import STEPS_S, walk_once

N_STEPS = 30  # of each walk


@dataclass(frozen=True)
class Walked:
    """One walk. `fault` has its shortest form, and is empty if all held."""

    seed: str
    number: int
    took_s: float
    steps: dict[str, int]  # by the rule's name
    fault: str


def walk_for(
    minutes: float, seed: str, record: Path, *, n_steps: int = N_STEPS, setting: str = ""
) -> Iterator[Walked]:
    """Do the walks of a seed that the record lacks, until the time is over. At least one."""
    known = {walked.number for walked in recorded(record) if walked.seed == seed}
    end_s = time.monotonic() + 60 * minutes
    number = 0
    while True:
        if number not in known:
            walked = _walked(seed, number, n_steps, setting)
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(walked)) + "\n")
            yield walked
            if time.monotonic() > end_s:
                close_truths()
                return
        number += 1


def _walked(seed: str, number: int, n_steps: int, setting: str) -> Walked:
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    STEPS_S.clear()
    began = time.monotonic()
    fault = walk_once(int.from_bytes(digest[:6], "big"), n_steps, setting)
    steps = {name: len(times) for name, times in STEPS_S.items()}
    return Walked(seed, number, round(time.monotonic() - began, 1), steps, fault)


def recorded(record: Path) -> Iterator[Walked]:
    """The walks of a record."""
    if record.exists():
        for line in record.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # the last line of a run that was killed
                yield Walked(**json.loads(line))


def report(record: Path, seed: str) -> Iterator[str]:
    """How far the walks of a seed went, and the faults that they found."""
    walks = [walked for walked in recorded(record) if walked.seed == seed]
    steps = sum((Counter(walked.steps) for walked in walks), Counter[str]())
    minutes = sum(walked.took_s for walked in walks) / 60
    n_failed = sum(bool(walked.fault) for walked in walks)
    yield f"seed {seed}: {len(walks)} walks in {minutes:.1f} minutes, {n_failed} with a fault"
    yield f"{steps.total()} steps: " + ", ".join(f"{n} {name}" for name, n in steps.most_common())
    for walked in walks:
        if walked.fault:
            yield f"failed: walk {walked.number}:\n{walked.fault}"
