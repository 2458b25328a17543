"""Attacks the program on this machine, and checks that nobody else notices.

    scripts/lab/run attack                         every part, small
    scripts/lab/run attack --scale large           10,000 requests, 1,000 model files, ...
    scripts/lab/run attack --part http --seed 7 --only 1234       one try, as a breach is printed
    scripts/lab/run attack --part http --scale large --only 0-2500

Parts: http (malformed requests while a witness asks), headers (model files with one field of their
header changed), limits (descriptors, disk, memory), kills (kill -9, SIGTERM and SIGINT at random
moments), overload (64 clients over a queue of 16). Everything is on loopback, in process groups of
its own that are ended, with the embedded pair and tiny models in a temporary folder; try number i
of a seed is always the same.

It checks that no process dies that others use, that no log has a traceback, that every request has
an answer in 30 s, that the witness's texts are those that it is given alone, and that memory is
back to within 20 % afterwards. The exit status is 1 where something of this was not so.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rich.console import Console

from lab.attack.outcome import show
from lab.attack.parts import PARTS, Scale


def numbers_of(text: str | None, n: int) -> range:
    """`7`, `100-200` (without 200), or all."""
    if text is None:
        return range(n)
    first, dash, end = text.partition("-")
    return range(int(first), int(end) if dash else int(first) + 1)


def main() -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="default: all")
    parser.add_argument("--scale", choices=[scale.value for scale in Scale], default="small")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="N or N-M", help="these tries of each part")
    options = parser.parse_args()
    outcomes = []
    for name in options.part or PARTS:
        part = PARTS[name]
        numbers = numbers_of(options.only, part.n_tries[Scale(options.scale)])
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            outcome = part.run(options.seed, numbers, Path(folder))
        outcome.took_s = time.monotonic() - began_s
        outcomes.append(outcome)
    show(outcomes, Console())
    return 1 if any(outcome.breaches for outcome in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
