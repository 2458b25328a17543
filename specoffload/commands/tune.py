"""`specoffload tune`: measures a model thoroughly, or finds the fastest threads and placement.

`tune numa` measures one-token and eight-token decodes for every candidate worth measuring. It keeps
the best one with its times for later starts, and prints the reasons. A result measured while other
programs used the processors is printed but not kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from numa.errors import PlacementRefused
from numa.machine import read_topology
from numa.place import Candidate
from numa.threads import plan_threads
from numa.topology import Topology
from numa.tune import TuneResult, search
from offload.costs.measuring import decode_s
from offload.engine import Engine
from offload.errors import DoesNotFit
from offload.model_file import read_facts
from offload.numa_plan import make_numa_plan
from specoffload import report
from specoffload.bench.load import Load, Watch, warn_of_load
from specoffload.commands.profile import forget_imported, measuring_config, show_table
from specoffload.config.resolution import Config, demo_file
from specoffload.config.speculation import SpecConfig
from specoffload.kept_machine import save_tuned
from specoffload.session.costs import Thorough
from specoffload.session.session import SEQUENCE, Session

SIZES = (1, 8)
_REPEATS = 7
_N_LEAST = 4  # least timings of each batch size


def tune_all(config: Config, minutes: float) -> None:
    """Time every batch size several times in each way, for up to `minutes`, and print the table.

    An entry is kept as soon as it was timed twice, so the next run continues an interrupted one.
    Nothing is kept if other programs used the processors, or if repeated timings do not agree in
    the end. What was kept before then stays. Raises BadProfile.
    """
    forget_imported(config)
    warn_of_load()
    watch = Watch()

    def disturbed() -> str:
        load = watch.others()
        return load.words if load.is_busy else ""

    with report.steps(config.alias or config.model.name) as on_progress:
        thorough = Thorough(60.0 * minutes, _N_LEAST, disturbed)
        session = Session(
            measuring_config(config), on_progress, keeps_hits=False, prices=True, thorough=thorough
        )
    with session:
        for note in session.costs.notes:
            report.note(note)
        show_table(session.costs.run.table)
        if refused := session.costs.refused:
            report.paragraph(
                f"not kept: {refused}; run `specoffload tune` again when the machine is idle, or "
                "for longer (--minutes)"
            )
        kept_in = session.costs.kept_in
        report.data({"stored": kept_in and str(kept_in), "why_not_stored": refused})


def tune_numa(config: Config, folder: Path, *, time_limit_s: float) -> TuneResult:
    """Find the fastest threads and placement, print them, and keep them in `folder`.

    They are not kept if other programs used the processors. Raises UsageError if the folder is not
    writable, NumaError if no candidate could be measured.
    """
    loads: list[Load] = []
    warn_of_load()
    topology = read_topology()
    # Use all cores on a machine with one memory node, else all but the spare ones.
    threads = plan_threads(topology, n_spare_cores=None if topology.is_numa else 0)
    measure = measurer(config, topology)

    def watching(candidate: Candidate) -> Mapping[int, float]:
        watch = Watch()
        try:
            return measure(candidate)
        finally:
            loads.append(watch.others())

    size_bytes = read_facts(config.model).size_bytes
    with report.progress(f"tuning with {config.model.name}") as bar:
        result = search(
            topology,
            threads,
            size_bytes,
            watching,
            clock=time.monotonic,
            time_limit_s=time_limit_s,
            progress=lambda done, total, _: bar(done / total),
        )
    about = [f"measured with {config.model.name} on --device {config.device}"]
    if config.model == demo_file("target.gguf"):
        about.append(
            "the embedded model is small: name the MODEL.gguf that you run for a choice that counts"
        )
    result = replace(result, reasons=(*about, *result.reasons))
    busiest = max(loads, key=lambda load: load.others)
    path = None if busiest.is_busy else save_tuned(folder, result)
    for reason in result.reasons:
        report.line(reason)
    if path is None:
        report.paragraph(
            f"not kept: {busiest.words} during a trial; run `specoffload tune numa` again when the "
            "machine is idle, or choose --threads and --numa yourself"
        )
    else:
        report.line(f"kept in {path}; later starts use it")
    return result


def config_for(config: Config, topology: Topology, candidate: Candidate) -> Config:
    """`config` with the candidate's threads and placement, but no draft and no profile.

    Raises NoSuchNode.
    """
    config = replace(config, draft=None, spec=SpecConfig(use_profile=False), trace=None)
    if not topology.is_numa:
        n = candidate.n_threads
        return replace(config, threads=n, threads_batch=n, numa=None)
    plan = make_numa_plan(topology, candidate)
    n, n_batch = plan.decode.n_threads, plan.batch.n_threads
    return replace(config, threads=n, threads_batch=n_batch, numa=plan)


def measurer(config: Config, topology: Topology) -> Callable[[Candidate], Mapping[int, float]]:
    """A function that opens the model with a candidate's threads and placement.

    The function returns the seconds of a decode, by number of tokens.
    """

    def measure(candidate: Candidate) -> Mapping[int, float]:
        wanted = config_for(config, topology, candidate)
        try:
            with Session(wanted) as session:
                if session.target.store is not None:
                    session.target.store.huge_pages(wait=True)
                return {n: _decode_s(session.target, n) for n in SIZES}
        except DoesNotFit as error:
            raise PlacementRefused(str(error)) from error

    return measure


def _decode_s(engine: Engine, n: int) -> float:
    """Median seconds of a decode of `n` tokens. The sequence keeps the decoded tokens."""
    times = []
    for _ in range(1 + _REPEATS):
        first = engine.sequences.length(SEQUENCE)
        batch = [(997 * (first + i) + 11) % engine.n_vocab for i in range(n)]
        times.append(decode_s(engine.sequences, SEQUENCE, batch, n_logits=1))
    return median(times[1:])  # the first one warms up
