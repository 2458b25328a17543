"""`specoffload profile`: shows the cost table of a model, which is measured if none is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from offload.times.steadiness import is_steady
from offload.times.table import CostTable, DecodeTime, Way
from specdec.costs.calibration import Calibration
from specdec.costs.plot import MOST_RUNS, plot_profiles, plot_reliability
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import export, format_batch_costs, load
from specdec.options import SpecOptions
from specoffload import report
from specoffload.bench.draft_quality import DraftQuality, measured_quality
from specoffload.bench.draft_quality import show as show_quality
from specoffload.bench.load import warn_of_load
from specoffload.config.options import ProfileOptions
from specoffload.config.resolution import Config
from specoffload.config.speculation import NO_DRAFTS, SpecConfig
from specoffload.errors import UsageError
from specoffload.kept import Kept, KeptFile, today
from specoffload.opening.header import target_facts
from specoffload.opening.translation import translation
from specoffload.output_file import check_output
from specoffload.session.session import Session
from specoffload.session.startup_lines import show_always_shown
from specoffload.speculation.draft_prices import curve_as_prices

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def measuring_config(config: Config) -> Config:
    """`config` for the same engines, without measurements of its own.

    What drafts from the target's hidden rows stays, so that its step is measured.
    """
    by_rows = config.spec.options.from_rows
    no_drafts = SpecOptions(
        drafters=NO_DRAFTS.drafters if by_rows is None else (by_rows,),
        replacements=config.spec.options.replacements,
    )
    spec = config.spec
    quiet = SpecConfig(
        no_drafts,
        spec.draft,
        profile_dir=spec.profile_dir,
        measure_s=spec.measure_s,
        of_draft=spec.of_draft,
    )
    return replace(config, spec=quiet)


def profile_config(config: Config, own: ProfileOptions) -> None:
    """Show the cost table of the model in `config`, or of a profile file.

    Raises UsageError or BadProfile.
    """
    if own.plot is not None:
        check_plot(own.plot, 1 + len(own.plot_with), own.labels)
    if own.export_to is not None:
        check_output("--export", own.export_to)
    # Files with errors are refused before long measurements.
    others = [load(other, "--plot-with") for other in own.plot_with]
    name, calibration = config.alias or config.model.stem, Calibration()
    table, kept_in, steps_s = CostTable(), "", dict[str, float]()
    quality: DraftQuality | None = None
    if own.import_from is not None:
        costs = load(own.import_from, "--import")
        how = f", {costs.title}" if costs.title else ""
        report.note(f"imported {own.import_from}: {costs.n_max} batch sizes{how}")
        facts = target_facts(config)
        for words in curve_as_prices(costs, facts.n_experts, facts.n_experts_used, "--import")[1]:
            report.note(words)
        report.note(_keep_imported(config, format_batch_costs(costs)))
    else:
        forget_imported(config)
        warn_of_load()
        with report.steps(name) as on_progress:
            session = Session(measuring_config(config), on_progress, keeps_hits=False, prices=True)
        with session:
            costs, calibration = session.costs.drafts.profile, session.costs.drafts.calibration
            table, kept_in = session.costs.run.table, str(session.costs.kept_in)
            steps_s = session.costs.drafts.steps_s
            show_always_shown(session.notes)
            for note in session.costs.notes:
                report.note(note)
            quality = quality_of(session, costs)
    show_costs(costs, table, steps_s)
    if quality is not None:
        show_quality(quality, costs)
    if own.export_to is not None:
        report.note(f"exported {own.export_to}: {export(own.export_to, costs)}")
    if own.plot is not None:
        names = [name, *(p.stem for p in own.plot_with)]
        _plot(own.plot, labelled(names, own.labels), [costs, *others])
        if calibration.sources:
            beside = own.plot.with_stem(f"{own.plot.stem}-reliability")
            plot_reliability(calibration, beside)
            report.note(f"plotted {beside}")
    report.data(
        {
            "profile": list(costs.step_s),
            "relative": costs.relative,
            "draft_step_s": costs.draft_step_s,
            "draft_steps_s": steps_s,
            "ways": ways_as_data(table),
            "stored": kept_in,
            "draft_quality": None if quality is None else quality.as_data(),
        }
    )


def quality_of(
    session: Session, costs: CostProfile, own_prompts: Sequence[Sequence[int]] = ()
) -> DraftQuality | None:
    """How good the session's draft model is, or None without one.

    The texts begin with `own_prompts`, or with the embedded ones if there are none.
    """
    draft, spec = session.draft, session.choices.spec
    if draft is None:
        return None
    target, pairs, translate = session.target, spec.options.replacements, None
    if pairs is not None:
        only_appends = not draft.sequences.can_rewind
        translate = translation(target, draft, pairs, only_appends=only_appends)
    return measured_quality(target, draft, costs, own_prompts, translate)


def _keep_imported(config: Config, costs: str) -> str:
    """Keep T(n) for the sessions of the model. Returns a sentence for the user."""
    folder = config.spec.kept_folder
    if folder is None:
        return "T(n) is not kept for later sessions (SPECOFFLOAD_WITHOUT=profile)"
    kept = KeptFile(folder, target_facts(config))

    def change(kept: Kept) -> None:
        kept.batch_costs, kept.batch_costs_date = costs, today()

    return kept.update(change) or (
        f"later sessions of {config.model.name} price drafts by it, until `specoffload profile` or "
        "`tune` measures T(n)"
    )


def forget_imported(config: Config) -> None:
    """Let later sessions of the model price drafts by measured times again."""
    folder = config.spec.kept_folder
    if folder is None or not KeptFile.may_exist(folder, config.model):
        return
    file = KeptFile(folder, target_facts(config))
    if not file.load()[0].batch_costs:
        return

    def change(kept: Kept) -> None:
        kept.batch_costs = kept.batch_costs_date = ""

    report.note(file.update(change) or "T(n) that was imported is no longer used")


def ways_as_data(table: CostTable) -> dict[str, list[dict[str, Any]]]:
    """The measured times by way, as data for scripts."""
    return {
        way: [{"n": n, **asdict(entry)} for n, entry in sorted(entries.items())]
        for way, entries in table.ways.items()
    }


def _time_words(entry: DecodeTime) -> str:
    """Milliseconds, their spread if the size was timed several times, and the number of timings."""
    if entry.n_timed > 1 and not is_steady(entry.spread):
        return f"no steady time ({entry.n_timed})"
    spread = f" ± {entry.spread:.0%}" if entry.n_timed > 1 else ""
    return f"{entry.seconds * 1e3:.2f}{spread} ({entry.n_timed})"


def show_table(table: CostTable) -> None:
    """Print the measured times of every way with their spread, and the experts that were used."""
    sizes = sorted({n for way in table.ways for n in table.measured(way)})
    ways = [way for way in Way if table.measured(way)]
    if not sizes:
        return
    rows = []
    for n in sizes:
        row = [str(n)]
        # Large batches are not split, so they have no time of that way.
        timed = [way for way in ways if n in table.measured(way) and way is not Way.DENSE]
        fastest = table.best(n, timed)[0] if len(timed) > 1 and Way.IN_PLACE in ways else None
        for way in ways:
            entry = table.measured(way).get(n)
            mark = " *" if way is fastest else ""
            row.append("" if entry is None else f"{_time_words(entry)}{mark}")
        if table.unions:
            used = table.experts(n)
            row.append("" if used is None else f"{used:.1f}")
        rows.append(tuple(row))
    title = "milliseconds of a decode of n tokens ± spread (times measured)"
    experts = ("experts",) if table.unions else ()
    report.table(title, ("n", *(str(way) for way in ways), *experts), rows)
    if experts:
        report.line(f"experts: different ones that a layer used for n tokens, of {table.n_experts}")
    if any(cell.endswith("*") for row in rows for cell in row):
        report.line("* fastest at this n")


def show_costs(costs: CostProfile, table: CostTable, steps_s: Mapping[str, float]) -> None:
    """Print T(n), and the time of a step of each drafter that is timed."""
    show_table(table)
    if not table.ways:
        unit = 1.0 if costs.relative else 1e3
        rows = [
            (str(n), f"{t * unit:.2f}", f"{costs.normalised[n - 1]:.3f}")
            for n, t in enumerate(costs.step_s, 1)
        ]
        columns = ("n", "T(1)" if costs.relative else "ms", "T(n)/nT(1)")
        report.table("T(n), the time of one decode of n tokens", columns, rows)
    for name, step_s in (steps_s or {"draft": costs.draft_step_s}).items():
        if step_s:
            share = step_s / costs.step_s[0]
            step = "" if costs.relative else f"{step_s * 1e3:.2f} ms, "
            report.line(f"one {name} step: {step}{share:.2f} of T(1)")


def plot_stored(files: Sequence[Path], plot: Path | None, labels: Sequence[str]) -> None:
    """Draw profiles of earlier runs side by side, without opening a model or measuring.

    Raises UsageError or BadProfile.
    """
    if plot is None:
        raise UsageError(f"{files[0]} is a profile, not a model: --plot FILE says where to draw it")
    check_plot(plot, len(files), labels)
    _plot(plot, labelled([f.stem for f in files], labels), [load(f) for f in files])


def check_plot(path: Path, n_runs: int, labels: Sequence[str]) -> None:
    """Check the picture's file, and that there are neither too many runs nor too many labels.

    Raises UsageError.
    """
    check_output("--plot", path)
    if path.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {path}: must end in {' or '.join(PLOT_SUFFIXES)}")
    if n_runs > MOST_RUNS:
        raise UsageError(f"--plot-with: a plot has room for {MOST_RUNS} profiles, not {n_runs}")
    if len(labels) > n_runs:
        raise UsageError(f"--label {labels[n_runs]}: there are only {n_runs} profiles to name")


def labelled(names: Sequence[str], labels: Sequence[str]) -> list[str]:
    """A label for each run: given labels first, then names. Equal labels get a number."""
    wanted = [*labels, *names[len(labels) :]]
    return [
        f"{label} ({wanted[: i + 1].count(label)})" if wanted.count(label) > 1 else label
        for i, label in enumerate(wanted)
    ]


def _plot(path: Path, labels: Sequence[str], runs: Sequence[CostProfile]) -> None:
    plot_profiles(dict(zip(labels, runs, strict=True)), path, is_steady)
    report.note(f"plotted {path}")
