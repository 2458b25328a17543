"""Plots of a profile and of calibration. matplotlib is an extra and loaded only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.calibration import Calibration
from specdec.errors import SpecDecError
from specdec.profile import CostProfile


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
    """Normalised cost (A03) and T(n), points where the cost rises marked.

    Raises SpecDecError without matplotlib.
    """
    figure, (left, right) = _figure(2)
    n = range(1, profile.n_max + 1)
    bumps = profile.bumps
    unit = "T(1)" if profile.relative else "s"
    left.plot(n, profile.normalised, marker="o", markersize=3)
    left.plot(bumps, [profile.normalised[b - 1] for b in bumps], "rx", label="rises")
    left.set(
        title="Batch cost scaling",
        xlabel="batch size",
        ylabel="normalised cost (relative to batch size 1)",
    )
    right.plot(n, profile.step_s, marker="o", markersize=3, label="mean")
    right.plot(bumps, [profile.step_s[b - 1] for b in bumps], "rx", label="cost rises")
    for depth, steps in profile.depths:
        right.plot(n, steps, linewidth=0.8, label=f"depth {depth}")
    right.set(title="Time of one decode", xlabel="batch size n", ylabel=f"T(n) [{unit}]")
    right.legend()
    _write(figure, path)


def plot_reliability(calibration: Calibration, path: Path) -> None:
    """Accepted share against the drafter's probability, per drafter."""
    figure, axes = _figure(1)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="calibrated")
    for source in calibration.sources:
        points = calibration.reliability(source)
        axes.plot([x.mean_p for x in points], [x.rate for x in points], marker="o", label=source)
    axes.set(title="Reliability", xlabel="the drafter's probability", ylabel="accepted share")
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
