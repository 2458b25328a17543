"""`specoffload tune`: finds the fastest settings for a model, and measures it thoroughly.

`tune` searches threads and placement, then the ubatch, then times every batch size. `tune numa` is
its first part alone: it measures one-token and eight-token decodes for every candidate worth
measuring, keeps the best one with its times for later starts, and prints the reasons. A result
measured while other programs used the processors is printed but not kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from numa.errors import NumaError, PlacementRefused
from numa.machine import read_topology
from numa.place import Candidate
from numa.threads import EVERYWHERE, Processors, plan_threads, processors_for
from numa.topology import Topology
from numa.tune import TuneResult, search
from offload.engine import Engine
from offload.errors import DoesNotFit
from offload.measuring import decode_s, streamed_kinds
from offload.threads.numa_plan import make_numa_plan
from offload.times.steadiness import is_steady
from offload.times.table import entry_of, ranges
from specoffload import report
from specoffload.bench.load import warn_of_load
from specoffload.commands.profile import forget_imported, measuring_config, show_table
from specoffload.commands.tune_ubatch import UbatchRow, tuned_ubatch
from specoffload.config.processors import FIELDS
from specoffload.config.resolution import Config, demo_file
from specoffload.config.speculation import SpecConfig
from specoffload.cpu_load import Load, Watch
from specoffload.kept import KeptFile, KeptRun, today
from specoffload.kept_doubts import comparable
from specoffload.kept_machine import load_tuned, save_tuned
from specoffload.opening.header import target_facts
from specoffload.session.session import SEQUENCE, Session
from specoffload.session.startup_lines import show_always_shown
from specoffload.speculation.costs import Thorough

SIZES = (1, 8)
_REPEATS = 7
_MOST_ROUNDS = 3  # of _REPEATS decodes, until their times are steady
_N_LEAST = 4  # least timings of each batch size
_SEARCHES = 0.3  # share of the time that is left for a search before the batch costs
_THREAD_FLAGS = ("threads", "threads_batch", "numa", *FIELDS)


def tune_all(config: Config, minutes: float, *, asked: Collection[str] = ()) -> None:
    """Find the fastest threads, placement and ubatch, then time every batch size in each way.

    Takes up to `minutes`, prints what was chosen, and keeps it for later starts. Each part is kept
    as soon as it is known, so the next run of the same day continues an interrupted one. Nothing is
    kept of a part during which other programs used the processors. `asked` are the names of options
    that the user chose, which are not searched. Raises BadProfile.
    """
    ends_s = time.monotonic() + 60.0 * minutes
    forget_imported(config)
    warn_of_load()
    config, threads = _with_threads(config, asked, _SEARCHES * 60.0 * minutes)
    left_s = ends_s - time.monotonic()
    config, ubatch = tuned_ubatch(config, time_limit_s=_SEARCHES * left_s)
    watch = Watch()

    def disturbed() -> str:
        load = watch.others()
        return load.words if load.is_busy else ""

    with report.steps(config.alias or config.model.name) as on_progress:
        thorough = Thorough(max(1.0, ends_s - time.monotonic()), _N_LEAST, disturbed)
        session = Session(
            measuring_config(config), on_progress, keeps_hits=False, prices=True, thorough=thorough
        )
    with session:
        show_always_shown(session.notes)
        for note in session.costs.notes:
            report.note(note)
        show_table(session.costs.run.table)
        refused = session.costs.refused
        rows = (threads, ubatch, *chosen_rows(session))
        report.table("what `specoffload tune` found", ("", "chosen", "why"), rows)
        if refused:
            report.paragraph(
                f"not kept: {refused}; run `specoffload tune` again when the machine is idle, or "
                "for longer (--minutes)"
            )
        kept_in = session.costs.kept_in
        report.data(
            {
                "stored": kept_in and str(kept_in),
                "why_not_stored": refused,
                "found": {name: {"chosen": chosen, "why": reason} for name, chosen, reason in rows},
            }
        )


def _with_threads(
    config: Config, asked: Collection[str], time_limit_s: float
) -> tuple[Config, UbatchRow]:
    """Return the configuration with the fastest threads and placement, found or kept today."""
    name, folder, topology = "threads and placement", config.spec.kept_folder, read_topology()
    here = f"{config.threads} thread{'s' * (config.threads != 1)}"
    if named := [flag for flag in _THREAD_FLAGS if flag in asked]:
        return config, (name, here, f"not searched: --{named[0].replace('_', '-')} was given")
    if folder is None:
        return config, (name, here, "not searched: nothing is kept (SPECOFFLOAD_WITHOUT=profile)")
    kept = load_tuned(folder, topology).result
    if kept is None or (kept.model, kept.date) != (config.model.name, today()):
        try:
            searched = _search_threads(config, folder, topology, time_limit_s)
        except NumaError as error:
            return config, (name, here, f"not found: {error}")
        if searched.disturbed:
            return config, (name, here, f"not kept: {searched.disturbed}")
        kept = searched.result
        reason = "measured now" + (f" ({searched.not_written})" if searched.not_written else "")
    else:
        reason = "measured today"
    trial = next(trial for trial in kept.trials if trial.candidate == kept.best)
    chosen = config_for(config, topology, kept.best)
    config = replace(
        config,
        threads=chosen.threads,
        threads_batch=chosen.threads_batch,
        numa=chosen.numa,
        decode_on=chosen.decode_on,
        batch_on=chosen.batch_on,
    )
    return config, (name, str(kept.best), f"{reason}: {trial.times}, of {len(kept.trials)} tried")


def chosen_rows(session: Session) -> list[UbatchRow]:
    """What the session measured or chose at its start."""
    target = session.target
    rows = []
    kinds = streamed_kinds(target)
    if kinds:
        rows.append(("--min-batch", target.min_batch.words(kinds), "batch costs above"))
    if target.opened.weights.hybrid is not None:
        ways = target.opened.weights.ways.now
        sizes = ranges(ways.split_sizes)
        chosen = f"batches of {sizes} tokens" if sizes else "no batch"
        rows.append(("--hybrid", chosen, ways.declined or "batch costs above"))
    for device in target.opened.devices:
        if crossover := device.mla.crossover:
            gpu = device.inner.kind == "gpu"
            reason = "measured at each start" if gpu else "by kind of weight (docs/mla.md)"
            tokens = f"{crossover} token{'s' * (crossover > 1)}"
            rows.append(("MLA", f"broadcast form for up to {tokens}", reason))
    if (engine := session.engine_choice) is not None:
        rows.append(("draft engine", engine.name, engine.reason))
    return rows


def tune_numa(config: Config, folder: Path, *, time_limit_s: float) -> TuneResult:
    """Find the fastest threads and placement, print them, and keep them in `folder`.

    They are not kept if other programs used the processors or the folder is not writable. Raises
    NumaError if no candidate could be measured.
    """
    warn_of_load()
    topology = read_topology()
    searched = _search_threads(config, folder, topology, time_limit_s)
    for reason in searched.result.reasons:
        report.line(reason)
    if searched.disturbed:
        report.paragraph(
            f"not kept: {searched.disturbed}; run `specoffload tune numa` again when the machine "
            "is idle, or choose --threads and --numa yourself"
        )
    elif searched.not_written:
        report.paragraph(searched.not_written)
    else:
        report.line(f"kept in {KeptFile(folder).path}; later starts use it")
    return searched.result


@dataclass(frozen=True)
class _Searched:
    """The fastest threads and placement, and the reasons why later starts do not find them."""

    result: TuneResult
    disturbed: str = ""  # other programs ran, so the choice means nothing
    not_written: str = ""  # the choice holds, and the folder cannot be written


def _search_threads(
    config: Config, folder: Path, topology: Topology, time_limit_s: float
) -> _Searched:
    """Search the fastest threads and placement, and keep them in `folder`. Raises NumaError."""
    loads: list[Load] = []
    # Use all cores on a machine with one memory node, else all but the spare ones.
    threads = plan_threads(topology, n_spare_cores=None if topology.is_numa else 0)
    runs: dict[Candidate, KeptRun] = {}
    measure = measurer(config, topology, runs)

    def watching(candidate: Candidate) -> Mapping[int, Sequence[float]]:
        watch = Watch()
        try:
            return measure(candidate)
        finally:
            loads.append(watch.others())

    size_bytes = target_facts(config).size_bytes
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
    result = replace(
        result, reasons=(*about, *result.reasons), date=today(), model=config.model.name
    )
    result = _with_settings(result, runs.get(result.best))
    busiest = max(loads, key=lambda load: load.others)
    if busiest.is_busy:
        return _Searched(result, disturbed=f"{busiest.words} during a trial")
    return _Searched(result, not_written=save_tuned(folder, result))


def _with_settings(result: TuneResult, run: KeptRun | None) -> TuneResult:
    """`result` with what a later run has in common with the best candidate's."""
    if run is None:
        return result
    n_slots, n_resident = int(run.sharing.n_cached), int(run.sharing.n_resident)
    return replace(result, settings=comparable(run), n_slots=n_slots, n_resident=n_resident)


def config_for(config: Config, topology: Topology, candidate: Candidate) -> Config:
    """`config` with the candidate's threads and placement, but no draft and no profile.

    Raises NoSuchNode.
    """
    config = replace(config, spec=SpecConfig(use_profile=False), trace=None)
    if not topology.is_numa:
        n = candidate.n_threads
        on = Processors(processors_for(topology, n))
        return replace(config, threads=n, threads_batch=n, numa=None, decode_on=on, batch_on=on)
    plan = make_numa_plan(topology, candidate)
    n, n_batch = plan.decode.n_threads, plan.batch.n_threads
    return replace(
        config,
        threads=n,
        threads_batch=n_batch,
        numa=plan,
        decode_on=EVERYWHERE,
        batch_on=EVERYWHERE,
    )


def measurer(
    config: Config, topology: Topology, runs: dict[Candidate, KeptRun]
) -> Callable[[Candidate], Mapping[int, Sequence[float]]]:
    """A function that opens the model with a candidate's threads and placement.

    The function returns the seconds of repeated decodes, by number of tokens, and puts the settings
    of the candidate's run into `runs`.
    """

    def measure(candidate: Candidate) -> Mapping[int, Sequence[float]]:
        wanted = config_for(config, topology, candidate)
        try:
            with Session(wanted) as session:
                if session.target.opened.weights.store is not None:
                    session.target.opened.weights.store.huge_pages(wait=True)
                runs[candidate] = session.costs.run
                return {n: _decodes_s(session.target, n) for n in SIZES}
        except DoesNotFit as error:
            raise PlacementRefused(str(error)) from error

    return measure


def _decodes_s(engine: Engine, n: int) -> list[float]:
    """Seconds of repeated decodes of `n` tokens. The sequence keeps the decoded tokens.

    Raises PlacementRefused if the times are too different for a median that means something.
    """
    times: list[float] = []
    for _ in range(_MOST_ROUNDS):
        for _ in range(1 + _REPEATS):
            first = engine.sequences.length(SEQUENCE)
            batch = [(997 * (first + i) + 11) % engine.n_vocab for i in range(n)]
            times.append(decode_s(engine.sequences, SEQUENCE, batch, n_logits=1))
        entry = entry_of(times[1:])  # the first one warms up
        if is_steady(entry.spread):
            return times[1:]
    tokens = report.plural(n, "token")
    low_s, high_s = min(times[1:]), max(times[1:])
    raise PlacementRefused(
        f"{len(times) - 1} decodes of {tokens} took {low_s * 1e3:.1f} to {high_s * 1e3:.1f} ms, "
        "which is no steady time; try again when the machine is idle"
    )
