"""`specoffload profile`: measure T(n), store it, show it, and turn it into other formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specdec.costs.calibration import Calibration
from specdec.costs.plot import MOST_RUNS, plot_profiles, plot_reliability
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import StoredProfile
from specoffload import report
from specoffload.bench.load import warn_of_load
from specoffload.config.resolution import Config
from specoffload.config.speculation import NO_DRAFTS, SpecConfig
from specoffload.errors import NotStored, UsageError
from specoffload.session.session import Session
from specoffload.speculation.profile_store import (
    export_profile,
    fuller,
    import_profile,
    key_of,
    load_stored,
    profile_path,
    read_any,
    store,
)
from specoffload.speculation.profiling import (
    N_MAX,
    draft_step_s,
    full_options,
    real_text,
    run_measure,
    streams_in_verification,
)

_REPETITIONS = 4
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 31, 32, 33, 40, 48, 56, 64)


def profile_config(
    config: Config,
    *,
    text: Path | None,
    n_max: int | None,
    repetitions: int | None,
    plot: Path | None,
    export_to: Path | None,
    import_from: Path | None,
    plot_with: Sequence[Path] = (),
    labels: Sequence[str] = (),
    force: bool = False,
) -> None:
    """Measure (or import) the profile of what `config` opens, and store it, unless a fuller one of
    the same run is stored; `force` stores it then, too.

    The plot shows the profiles `plot_with` beside it, all by their `labels`. Raises UsageError or
    BadProfile.
    """
    n_max = N_MAX if n_max is None else n_max
    repetitions = _REPETITIONS if repetitions is None else repetitions
    if plot is not None:
        check_plot(plot, 1 + len(plot_with), labels)
    others = [read_any("--plot-with", other) for other in plot_with]  # before anything takes long
    if import_from is None:
        warn_of_load()
    # Opened for its engines, with the thresholds that another start would have: no T(n) of its own.
    no_drafts = replace(NO_DRAFTS, replacements=config.spec.options.replacements)
    quiet = SpecConfig(
        no_drafts, profile_dir=config.spec.profile_dir, of_draft=config.spec.of_draft
    )
    quiet_config = replace(config, spec=quiet)
    with report.steps(config.alias or config.model.name) as on_progress:
        session = Session(quiet_config, on_progress)
    with session:
        key = key_of(session.target, session.draft)
        folder = config.spec.profile_dir
        assert folder is not None
        path = profile_path(folder, session.target, session.draft, key)
        before, why = load_stored(path, key)
        if path.exists() and before is None:
            report.note(why)
        if import_from is not None:
            found = import_profile(import_from, key)
            how = f", {found.costs.title}" if found.costs.title else ""
            report.note(f"imported {import_from}: {found.costs.n_max} batch sizes{how}")
            found = _with_draft_step(session, found, before)
        else:
            found = _measured(session, text, n_max, repetitions, before)
    kept = "" if force else fuller(path, found.costs)
    failed = None if kept else store(path, found.costs, found.calibration)
    if failed is None:
        report.note(f"{kept}; --force replaces it" if kept else f"stored: {path}")
    _show(found.costs)
    if export_to is not None:
        kind = export_profile(export_to, found.costs, found.calibration)
        report.note(f"exported {export_to}: {kind}")
    if plot is not None:
        name = config.alias or config.model.stem
        _plot(plot, labelled([name, *(p.stem for p in plot_with)], labels), [found.costs, *others])
        _plot_reliability(plot, found.calibration)
    report.data(_as_data(found.costs, path) | {"kept": kept})
    if failed is not None:
        raise NotStored(failed)


def _measured(
    session: Session, file: Path | None, n_max: int, repetitions: int, before: StoredProfile | None
) -> StoredProfile:
    target = session.target
    tokens = real_text(target, file)
    streams = streams_in_verification(target)
    options = full_options(n_max, repetitions, len(tokens), target.n_ctx, streams=streams)
    key = key_of(target, session.draft)
    with report.progress("measuring what batches take") as bar:
        costs = run_measure(target, session.draft, tokens, options, key, bar)
    depths = " and ".join(map(str, options.depths))
    report.note(
        f"T(n) for n = 1..{n_max} behind {depths} tokens of real text, {repetitions} times each "
        f"after a warm-up that is dropped, and up to {options.n_most} times until they agree"
    )
    # What was learnt of the drafters stays true when the machine is measured again.
    return StoredProfile(costs, Calibration() if before is None else before.calibration)


def _with_draft_step(
    session: Session, found: StoredProfile, before: StoredProfile | None
) -> StoredProfile:
    """Other tools' profiles know no draft: its step is what was stored, else measured now."""
    costs = found.costs
    if costs.draft_step_s or costs.relative or session.draft is None:
        return found
    if before is not None and before.costs.draft_step_s:
        step_s, how = before.costs.draft_step_s, "as stored before"
    else:
        step_s, how = draft_step_s(session.draft, real_text(session.draft)), "measured now"
    report.note(f"one draft step: {step_s * 1e3:.2f} ms, {how}")
    return replace(found, costs=replace(costs, draft_step_s=step_s))


def _show(costs: CostProfile) -> None:
    unit = 1.0 if costs.relative else 1e3
    rows = [
        (
            str(n),
            f"{costs.step_s[n - 1] * unit:.2f}",
            f"{costs.step_s[n - 1] / costs.step_s[0]:.2f}",
            f"{costs.normalised[n - 1]:.3f}",
            ", ".join(_remarks(costs, n)),
        )
        for n in _SHOWN
        if n <= costs.n_max
    ]
    title = "T(n), the time of one decode of n tokens"
    columns = ("n", "T(1)" if costs.relative else "ms", "T(n)/T(1)", "T(n)/nT(1)", "")
    report.table(title, columns, rows)
    if costs.draft_step_s:
        share = costs.draft_step_s / costs.step_s[0]
        step = "" if costs.relative else f"{costs.draft_step_s * 1e3:.2f} ms, "
        report.line(f"one draft step: {step}{share:.2f} of T(1){_by_depth(costs)}")
    for warning in costs.warnings:
        report.note(warning)


def _by_depth(costs: CostProfile) -> str:
    """The draft's step behind each depth that was measured, where they are more than one."""
    if len(costs.draft_depths) < 2:
        return ""
    unit = "" if costs.relative else " ms"
    times = (
        f"{step * (1.0 if costs.relative else 1e3):.2f}{unit} behind {depth} tokens"
        for depth, step in costs.draft_depths
    )
    return f" ({', '.join(times)})"


def _remarks(costs: CostProfile, n: int) -> list[str]:
    rises = ["rises"] if n in costs.bumps else []
    return [*rises, "uncertain"] if n in costs.uncertain else rises


def plot_stored(files: Sequence[Path], plot: Path | None, labels: Sequence[str]) -> None:
    """Draw profiles of earlier runs side by side; opens no model and measures nothing.

    Raises UsageError or BadProfile.
    """
    if plot is None:
        raise UsageError(f"{files[0]} is a profile, not a model: --plot FILE says where to draw it")
    check_plot(plot, len(files), labels)
    _plot(plot, labelled([f.stem for f in files], labels), [read_any("", f) for f in files])


def check_plot(path: Path, n_runs: int, labels: Sequence[str]) -> None:
    """Raises UsageError for a file that is no picture, and for more runs than can be told apart."""
    if path.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {path}: must end in {' or '.join(PLOT_SUFFIXES)}")
    if n_runs > MOST_RUNS:
        raise UsageError(f"--plot-with: a plot has room for {MOST_RUNS} profiles, not {n_runs}")
    if len(labels) > n_runs:
        raise UsageError(f"--label {labels[n_runs]}: there are only {n_runs} profiles to name")


def labelled(names: Sequence[str], labels: Sequence[str]) -> list[str]:
    """A label for each run: what was said, then the names; a number tells equal ones apart."""
    wanted = [*labels, *names[len(labels) :]]
    return [
        f"{label} ({wanted[: i + 1].count(label)})" if wanted.count(label) > 1 else label
        for i, label in enumerate(wanted)
    ]


def _plot(path: Path, labels: Sequence[str], runs: Sequence[CostProfile]) -> None:
    plot_profiles(dict(zip(labels, runs, strict=True)), path)
    report.note(f"plotted {path}")


def _plot_reliability(path: Path, calibration: Calibration) -> None:
    if calibration.sources:
        beside = path.with_stem(f"{path.stem}-reliability")
        plot_reliability(calibration, beside)
        report.note(f"plotted {beside}")


def _as_data(costs: CostProfile, path: Path) -> dict[str, object]:
    return {
        "profile": list(costs.step_s),
        "relative": costs.relative,
        "draft_step_s": costs.draft_step_s,
        "draft_depths": [{"depth": depth, "step_s": step} for depth, step in costs.draft_depths],
        "depths": [{"depth": depth, "step_s": list(steps)} for depth, steps in costs.depths],
        "bumps": list(costs.bumps),
        "uncertain": list(costs.uncertain),
        "timed": [{"n": t.n, "n_repeats": t.n_repeats, "spread": t.spread} for t in costs.timed],
        "stored": str(path),
    }
