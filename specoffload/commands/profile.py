"""`specoffload profile`: measure T(n), store it, show it, and turn it into other formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specdec.costs.calibration import Calibration
from specdec.costs.plot import plot_profile, plot_reliability
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import StoredProfile
from specoffload import report
from specoffload.config.resolution import Config
from specoffload.config.speculation import NO_DRAFTS, SpecConfig
from specoffload.errors import NotStored, UsageError
from specoffload.session.session import Session
from specoffload.speculation.profile_store import (
    export_profile,
    import_profile,
    key_of,
    load_stored,
    profile_path,
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
) -> None:
    """Measure (or import) the profile of what `config` opens, and store it.

    Raises UsageError or BadProfile.
    """
    n_max = N_MAX if n_max is None else n_max
    repetitions = _REPETITIONS if repetitions is None else repetitions
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {plot}: must end in {' or '.join(PLOT_SUFFIXES)}")
    # The session measures nothing of its own: it is opened for its engines.
    no_drafts = replace(NO_DRAFTS, replacements=config.spec.options.replacements)
    quiet = SpecConfig(no_drafts, of_draft=config.spec.of_draft)
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
            report.note(f"imported {import_from}: {found.costs.n_max} batch sizes")
            found = _with_draft_step(session, found, before)
        else:
            found = _measured(session, text, n_max, repetitions, before)
    failed = store(path, found.costs, found.calibration)
    if failed is None:
        report.note(f"stored: {path}")
    _show(found.costs)
    if export_to is not None:
        kind = export_profile(export_to, found.costs, found.calibration)
        report.note(f"exported {export_to}: {kind}")
    if plot is not None:
        _plot(plot, found)
    report.data(_as_data(found.costs, path))
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
        report.line(f"one draft step: {step}{share:.2f} of T(1)")
    for warning in costs.warnings:
        report.note(warning)


def _remarks(costs: CostProfile, n: int) -> list[str]:
    rises = ["rises"] if n in costs.bumps else []
    return [*rises, "uncertain"] if n in costs.uncertain else rises


def _plot(path: Path, found: StoredProfile) -> None:
    plot_profile(found.costs, path)
    report.note(f"plotted {path}")
    if found.calibration.sources:
        beside = path.with_stem(f"{path.stem}-reliability")
        plot_reliability(found.calibration, beside)
        report.note(f"plotted {beside}")


def _as_data(costs: CostProfile, path: Path) -> dict[str, object]:
    return {
        "profile": list(costs.step_s),
        "relative": costs.relative,
        "draft_step_s": costs.draft_step_s,
        "depths": [{"depth": depth, "step_s": list(steps)} for depth, steps in costs.depths],
        "bumps": list(costs.bumps),
        "uncertain": list(costs.uncertain),
        "stored": str(path),
    }
