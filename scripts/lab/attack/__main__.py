"""Attacks the program on this machine, and checks that its other clients are served as before.

    scripts/lab/run attack                         every part, small
    scripts/lab/run attack --scale large           10,000 requests, 1,000 model files, ...
    scripts/lab/run attack --part http --seed 7 --only 1234       one try, to repeat a breach
    scripts/lab/run attack --part http --scale large --only 0-2500

Parts: http (malformed requests while a witness asks), steps (schemas, conversations and bodies
whose steps multiply, long lists and foreign names, beside a client that may not wait over 2 s),
headers (model files with one field of their header changed), types (model files with one tensor of
another type), plans (plans of all shapes with changed headers), graphs (changed graphs for a
worker, whose memory is guarded), images (files that take long, grow or are damaged), bodies (24
large bodies at once beside the queue), models (reloads, names and secrets of several models),
limits (descriptors, disk, memory), kills (kill -9, SIGTERM and SIGINT at random moments), peers
(strangers at a worker, hostile workers and hubs, workers that hang), overload (64 clients over a
queue of 16). Servers listen on loopback. They run in process groups of their own, which are killed
at the end.
The models are the embedded pair and tiny ones in a temporary folder. Try number i of a seed is
always the same.

The checks: no process that others use dies, no log has a traceback, every request has an answer in
30 s, the witness gets the same texts as when it is the only client, and memory is back to within
20 % afterwards. The exit status is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lab.attack import ATTACK
from lab.attack.bodies_part import bodies_part
from lab.attack.client import N_TOKENS, decided_texts, overload
from lab.attack.graphs_part import graphs_part
from lab.attack.headers import headers_part
from lab.attack.http_part import SERVE, http_part
from lab.attack.images_part import images_part
from lab.attack.kills_part import kills_part
from lab.attack.limits_part import CASES, limits_part
from lab.attack.models_part import models_part
from lab.attack.outcome import Breach, Outcome, show
from lab.attack.peers_part import peers_part
from lab.attack.plans_part import plans_part
from lab.attack.program import bad_lines, serving
from lab.attack.steps_part import steps_part
from lab.attack.types_part import types_part


@dataclass(frozen=True)
class Part:
    """One part. `run` takes a seed, the numbers of the tries and an empty folder."""

    run: Callable[[int, range, Path], Outcome]
    n_tries: Mapping[str, int]


def overload_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Ask with 64 clients for `len(numbers)` seconds."""
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
    "http": Part(http_part, {"small": 300, "large": 10_000}),
    "steps": Part(steps_part, {"small": 40, "large": 10_000}),
    "headers": Part(headers_part, {"small": 60, "large": 1000}),
    "types": Part(types_part, {"small": 40, "large": 1000}),
    "plans": Part(plans_part, {"small": 200, "large": 10_000}),
    "graphs": Part(graphs_part, {"small": 400, "large": 10_000}),
    "images": Part(images_part, {"small": 20, "large": 500}),
    "bodies": Part(bodies_part, {"small": 24, "large": 1000}),
    "models": Part(models_part, {"small": 60, "large": 1000}),
    "limits": Part(limits_part, {"small": len(CASES), "large": len(CASES)}),
    "kills": Part(kills_part, {"small": 5, "large": 30}),
    "peers": Part(peers_part, {"small": 12, "large": 300}),
    "overload": Part(overload_part, {"small": 10, "large": 60}),
}


def numbers_of(text: str | None, n: int) -> range:
    """The numbers that `text` names: `7`, or `100-200` (200 excluded). None: all `n`."""
    if text is None:
        return range(n)
    first, dash, end = text.partition("-")
    return range(int(first), int(end) if dash else int(first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="default: all")
    parser.add_argument("--scale", choices=("small", "large"), default="small")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="N or N-M", help="these tries of each part")
    options = parser.parse_args()
    outcomes = []
    for name in options.part or PARTS:
        part = PARTS[name]
        numbers = numbers_of(options.only, part.n_tries[options.scale])
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            outcome = part.run(options.seed, numbers, Path(folder))
        outcome.took_s = time.monotonic() - began_s
        outcomes.append(outcome)
    show(outcomes, Console())
    return 1 if any(outcome.breaches for outcome in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
