"""`scripts/test-combinations`: tries combinations, or walks, and reports what failed."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from combinations.cases import (
    TABLES,
    Case,
    Pair,
    all_pairs,
    by_new_pairs,
    by_use,
    covering,
    refused_pairs,
)
from combinations.trying import Record, Trier, grouped
from combinations.walks import report as walks_report
from combinations.walks import walk_for


def plan(
    tables: list[str], seed: str, strength: int, known: Record, *, pairs_first: bool
) -> list[Case]:
    """The cases of all tables that are not known, in turns, so that a short run tries some of
    each."""
    held = [outcome.case for outcome in known.outcomes if not outcome.faults]
    left = [[c for c in covering(table, seed, strength) if not known.has(c)] for table in tables]
    ordered = [grouped(by_new_pairs(cs, held) if pairs_first else by_use(cs)) for cs in left]
    return [c for cs in itertools.zip_longest(*ordered) for c in cs if c is not None]


def main(
    minutes: Annotated[float, typer.Option(help="Minutes to try for.")] = 10.0,
    seed: Annotated[str, typer.Option(help="Chooses the cases. Default: today's date.")] = "",
    table: Annotated[list[str] | None, typer.Option(help="session, request or command.")] = None,
    strength: Annotated[int, typer.Option(help="2 covers pairs, 3 triples.")] = 2,
    walk: Annotated[
        bool, typer.Option("--walk", help="Walk through a server's life instead.")
    ] = False,
    pairs_first: Annotated[
        bool, typer.Option("--pairs-first", help="Begin with what has most untried pairs.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="File of what was tried; a later run goes on.")
    ] = None,
) -> None:
    """Try combinations of features, or walk. Ends with code 1 if something has a fault."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and workers end too
    seed = seed or datetime.date.today().isoformat()
    record = record or Path(f".work/{'walks' if walk else 'combinations'}.jsonl")
    record.parent.mkdir(parents=True, exist_ok=True)
    if walk:
        raise typer.Exit(_walk(minutes, seed, record))
    known = Record(record)
    cases = plan(table or [*TABLES], seed, strength, known, pairs_first=pairs_first)
    typer.echo(f"seed {seed}: {len(cases)} cases left, {len(known.outcomes)} tried before")
    failed, skipped = 0, Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        Trier(Path(folder)) as trier,
        Progress(
            TextColumn("{task.description}"), BarColumn(),
            TextColumn("{task.completed} of {task.total}"), TimeElapsedColumn(), transient=True,
        ) as progress,
    ):  # fmt: skip
        os.environ.setdefault("SPECOFFLOAD_PROFILE_DIR", str(Path(folder) / "profiles"))
        os.environ.setdefault("SPECOFFLOAD_MEASURE_S", "0.05")
        task = progress.add_task("combinations", total=len(cases))
        for case in _until(cases, time.monotonic() + 60 * minutes):
            if why := trier.why_not(case):
                skipped[why] += 1
                continue
            outcome = trier.outcome_of(case)
            known.add(outcome)
            progress.advance(task)
            if outcome.faults:
                failed += 1
                progress.console.print(f"{outcome.smallest}\n  " + "\n  ".join(outcome.faults))
    for why, n in skipped.items():
        typer.echo(f"skipped: {n} cases: {why}")
    for line in report(known):
        typer.echo(line)
    raise typer.Exit(1 if failed else 0)


def _walk(minutes: float, seed: str, record: Path) -> int:
    """Walk, and print each walk as it ends. Returns the exit code."""
    code = 0
    for walked in walk_for(minutes, seed, record):
        n_steps = sum(walked.steps.values())
        typer.echo(f"walk {walked.number}: {n_steps} steps in {walked.took_s} s {walked.fault}")
        code = 1 if walked.fault else code
    for line in walks_report(record, seed):
        typer.echo(line)
    return code


def _until(cases: list[Case], end_s: float) -> Iterator[Case]:
    for case in cases:
        if time.monotonic() > end_s:
            return
        yield case


def report(record: Record) -> Iterator[str]:
    """How many pairs of each table are run or refused, and the cases that failed."""
    held = [o.case for o in record.outcomes if not o.faults]
    for table in TABLES:
        pairs = set[Pair]().union(*(case.pairs for case in held if case.table == table))
        n, m = len(all_pairs(table)), len(refused_pairs(table))
        yield f"{table}: {len(pairs)} of {n} pairs held, {m} are refused"
    for outcome in record.outcomes:
        if outcome.faults:
            yield f"failed: {outcome.smallest}: {outcome.faults[0]}"


if __name__ == "__main__":
    typer.run(main)
