"""Plots of a profile and of calibration. matplotlib is an extra and loaded only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile
from specdec.errors import SpecDecError

_NOISE = 0.03
_FEW_OBSERVATIONS = 5.0


def _figure(n_axes: int) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as e:
        raise SpecDecError("plots need matplotlib: pip install 'specoffload[plot]'") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, n_axes, figsize=(6 * n_axes, 4.5), constrained_layout=True)
    return figure, axes


def plot_profile(profile: CostProfile, path: Path) -> None:
    """Normalised cost, as llama.cpp #17034 plots it, and T(n); sizes at which a token gets dearer
    are marked.

    Raises SpecDecError without matplotlib.
    """
    figure, (left, right) = _figure(2)
    n = range(1, profile.n_max + 1)
    # Published costs are rounded means; a measured one rises by noise alone every few sizes.
    tolerance = 1e-9 if profile.relative else _NOISE
    rises = profile.rises(tolerance)
    label = "rises" if profile.relative else f"rises by more than {_NOISE:.0%}"
    left.plot(n, profile.normalised, marker="o", markersize=3, label="measured")
    if rises:
        left.plot(rises, [profile.normalised[b - 1] for b in rises], "rx", label=label)
    left.set(
        title="Batch Cost Scaling",
        xlabel="batch size",
        ylabel="Normalized Cost (relative to batch size 1)",
        ylim=(0, None),
    )
    if profile.uncertain:
        doubtful = [profile.normalised[n - 1] for n in profile.uncertain]
        left.plot(profile.uncertain, doubtful, "o", color="white", mec="C0", label="uncertain")
    unit, scale = ("T(1)", 1.0) if profile.relative else ("ms", 1e3)
    right.plot(n, [t * scale for t in profile.step_s], marker="o", markersize=3, label="mean")
    if rises:
        dearer = [profile.step_s[b - 1] * scale for b in rises]
        right.plot(rises, dearer, "rx", label="a token is dearer")
    for depth, steps in profile.depths if len(profile.depths) > 1 else ():
        right.plot(n, [t * scale for t in steps], linewidth=0.8, label=f"depth {depth}")
    right.set(
        title="Time of one decode", xlabel="batch size n", ylabel=f"T(n) [{unit}]", ylim=(0, None)
    )
    for axes in (left, right):
        axes.set_xlim(1, max(2, profile.n_max))
        axes.set_xticks(range(2, profile.n_max + 1, 2))
        axes.tick_params(axis="x", labelsize=7)
        axes.grid(alpha=0.3)
        axes.legend()
    _write(figure, path)


def plot_reliability(calibration: Calibration, path: Path) -> None:
    """Accepted share against the drafter's probability, per drafter.

    The larger a point, the more observations it stands for; those of fewer than
    `_FEW_OBSERVATIONS` are faint and belong to no line. Raises SpecDecError without matplotlib.
    """
    figure, axes = _figure(1)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="calibrated")
    for i, source in enumerate(calibration.sources):
        points = calibration.reliability(source)
        firm = [x for x in points if x.weight >= _FEW_OBSERVATIONS]
        few = [x for x in points if x.weight < _FEW_OBSERVATIONS]
        color = f"C{i}"
        label = f"{source} ({sum(x.weight for x in points):.0f} recent tokens)"
        axes.plot([x.mean_p for x in firm], [x.rate for x in firm], color=color, label=label)
        for drawn, alpha in ((firm, 0.9), (few, 0.25)):
            sizes = [min(150.0, 8.0 + 2 * x.weight) for x in drawn]
            at, rates = [x.mean_p for x in drawn], [x.rate for x in drawn]
            axes.scatter(at, rates, s=sizes, color=color, alpha=alpha, linewidths=0)
    axes.set(
        title="Reliability",
        xlabel="the drafter's probability",
        ylabel="accepted share",
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as e:
        raise SpecDecError(f"the plot {path} cannot be written: {e}") from e
    finally:
        pyplot.close(figure)
