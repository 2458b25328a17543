"""Plots of profiles and of calibration. matplotlib is an optional dependency, loaded only here.

Colours are Okabe and Ito's, which colour-blind people can tell apart. Markers differ too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile
from specdec.errors import SpecDecError
from specdec.whole_file import named_file

_NOISE = 0.03
_FEW_OBSERVATIONS = 5.0
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MOST_RUNS = len(_COLOURS)
_WRAP = 150  # most characters per line of a caption


def new_figure(n_axes: int, height: float = 4.5) -> tuple[Any, Any]:
    """Return a figure and its axes, side by side. Raises SpecDecError without matplotlib."""
    try:
        import matplotlib
    except ImportError as e:
        raise SpecDecError("plots need matplotlib: pip install 'specoffload[plot]'") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, n_axes, figsize=(6 * n_axes, height), layout="constrained")
    return figure, axes


IsSteady = Callable[[float], bool]
"""Tells from a time's relative spread if the time means something."""


def plot_profiles(
    runs: Mapping[str, CostProfile], path: Path, is_steady: IsSteady = lambda spread: True
) -> None:
    """Runs side by side by their labels: normalised cost, as llama.cpp #17034 plots it, and T(n).

    A size without a steady time gets no point, and the caption counts it. Raises SpecDecError
    without matplotlib, or for more than MOST_RUNS.
    """
    write_figure(profile_figure(runs, is_steady), path)


def profile_figure(
    runs: Mapping[str, CostProfile], is_steady: IsSteady = lambda spread: True
) -> Any:
    """The figure of `plot_profiles`."""
    if not 0 < len(runs) <= MOST_RUNS:
        raise SpecDecError(f"a plot has room for 1 to {MOST_RUNS} profiles, not {len(runs)}")
    captions = [_caption(label, costs, is_steady) for label, costs in runs.items()]
    words = "\n".join(textwrap.fill(caption, _WRAP) for caption in captions)
    figure, (left, right) = new_figure(2, 5.0 + 0.16 * words.count("\n"))
    in_units = any(costs.relative for costs in runs.values())
    for i, (label, costs) in enumerate(runs.items()):
        scale = 1.0 / costs.step_s[0] if in_units else 1e3
        _draw(left, costs, [c / costs.step_s[0] / n for n, c in _steps(costs)], i, label, is_steady)
        _draw(right, costs, [t * scale for _, t in _steps(costs)], i, "", is_steady)
        if len(runs) == 1:
            _mark_rises(left, costs)
    left.set(
        title="Batch cost scaling: one token of a batch",
        xlabel="n, tokens decoded together",
        ylabel="T(n) / (n T(1))",
    )
    unit = "units of T(1)" if in_units else "ms"
    right.set(
        title="Time of one decode", xlabel="n, tokens decoded together", ylabel=f"T(n) [{unit}]"
    )
    for axes in (left, right):
        _dress(axes, max(costs.n_max for costs in runs.values()))
    handles = [h for axes in (left, right) for h in axes.get_legend_handles_labels()[0]]
    handles += _legend_of_points(runs.values())
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.supxlabel(words, x=0.01, ha="left", fontsize=7, color="#555555")
    return figure


def _steps(costs: CostProfile) -> list[tuple[int, float]]:
    return list(enumerate(costs.step_s, 1))


def _draw(
    axes: Any, costs: CostProfile, values: Sequence[float], i: int, label: str,
    is_steady: IsSteady,
) -> None:  # fmt: skip
    """Draw a run as a line through all sizes, with points and bars at sizes with steady times."""
    colour, marker = _COLOURS[i], _MARKERS[i]
    sizes = range(1, costs.n_max + 1)
    axes.plot(sizes, values, color=colour, linewidth=0.9, marker=marker, markevery=[0],
              markersize=4, label=label or "_nolegend_")  # fmt: skip
    steady = {t.n: t.spread for t in costs.timed if is_steady(t.spread)}
    spreads = steady if costs.timed else dict.fromkeys(sizes, 0.0)
    bars = [values[n - 1] * spread for n, spread in spreads.items()]
    axes.errorbar(
        [*spreads], [values[n - 1] for n in spreads], yerr=bars if any(bars) else None, fmt=marker,
        color=colour, markersize=4, elinewidth=0.8, capsize=1.5,
    )  # fmt: skip


def _mark_rises(axes: Any, costs: CostProfile) -> None:
    # Measured costs rise by noise alone every few sizes. Published costs are rounded means.
    rises = costs.rises(1e-9 if costs.relative else _NOISE)
    label = "a token is dearer" + ("" if costs.relative else f", by more than {_NOISE:.0%}")
    if rises:
        axes.plot(rises, [costs.normalised[b - 1] for b in rises], "x", color="black",
                  markersize=7, label=label)  # fmt: skip


def _dress(axes: Any, n_max: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, None)
    axes.set_xlim(0.5, 1.02 * max(2, n_max))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _legend_of_points(runs: Sequence[CostProfile] | Any) -> list[Any]:
    """Entries for points and interpolated sizes, if there are any."""
    from matplotlib.lines import Line2D

    profiles = list(runs)
    grey: dict[str, Any] = {"color": "#555555", "linestyle": "", "marker": "o", "markersize": 4}
    handles = []
    if any(costs.timed for costs in profiles):
        words = "measured; bars: the middle half of its times"
        handles.append(Line2D([], [], **grey, label=words))
    if any(costs.timed and len(costs.timed) < costs.n_max for costs in profiles):
        handles.append(Line2D([], [], color="#555555", linewidth=0.9, label="interpolated"))
    return handles


def _caption(label: str, costs: CostProfile, is_steady: IsSteady) -> str:
    """A caption on what was measured, on which device, and how often."""
    said = [costs.title or "model and device unknown"]
    if not costs.relative:
        said.append(f"T(1) = {costs.step_s[0] * 1e3:.3g} ms")
    if costs.timed:
        counts = [t.n_repeats for t in costs.timed]
        least, most = min(counts), max(counts)
        often = f"{least}" if least == most else f"{least} to {most}"
        said.append(f"{len(counts)} of {costs.n_max} batch sizes measured {often} times each")
        if n_unsteady := sum(not is_steady(t.spread) for t in costs.timed):
            said.append(f"{n_unsteady} of them without a steady time, so without a point")
    else:
        said.append(f"{costs.n_max} batch sizes, repetitions unknown")
    return f"{label}: {', '.join(said)}"


def plot_reliability(calibration: Calibration, path: Path) -> None:
    """Plot the accepted share against the drafter's probability, with a line for each drafter.

    Points of more observations are larger. Points of fewer than `_FEW_OBSERVATIONS` are faint and
    not part of the line. Raises SpecDecError without matplotlib.
    """
    figure, axes = new_figure(1)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="calibrated")
    for i, source in enumerate(calibration.sources):
        points = calibration.reliability(source)
        firm = [x for x in points if x.weight >= _FEW_OBSERVATIONS]
        few = [x for x in points if x.weight < _FEW_OBSERVATIONS]
        color, marker = _COLOURS[i % MOST_RUNS], _MARKERS[i % MOST_RUNS]
        label = f"{source} ({sum(x.weight for x in points):.0f} recent tokens)"
        axes.plot([x.mean_p for x in firm], [x.rate for x in firm], color=color, label=label,
                  marker=marker, markersize=3)  # fmt: skip
        for drawn, alpha in ((firm, 0.9), (few, 0.25)):
            sizes = [min(150.0, 8.0 + 2 * x.weight) for x in drawn]
            at, rates = [x.mean_p for x in drawn], [x.rate for x in drawn]
            axes.scatter(at, rates, s=sizes, color=color, alpha=alpha, linewidths=0)
    axes.set(
        title="Reliability of the drafters' probabilities",
        xlabel="the drafter's probability",
        ylabel="share accepted by the target",
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", fontsize=8)
    words = (
        "The larger a point, the more observations; faint ones have fewer than "
        f"{_FEW_OBSERVATIONS:.0f}. Recent rounds count most."
    )
    figure.supxlabel(words, x=0.01, ha="left", fontsize=7, color="#555555")
    write_figure(figure, path)


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure and drop it. Raises SpecDecError if the file cannot be written."""
    from matplotlib import pyplot

    try:
        with named_file(path) as file:
            figure.savefig(file, format=path.suffix.removeprefix("."), dpi=110)
    except (OSError, ValueError) as e:
        raise SpecDecError(f"the plot {path} cannot be written: {e}") from e
    finally:
        pyplot.close(figure)
