"""Fits the published cost curves, and fills their table and plot in docs/background.md.

A curve of a mixture that was measured with the same token in each sequence is a straight line,
because all rows use the same experts. Rows with experts of their own would bend it. The third term
of the fit says how much of that is in the curve. No model is opened, and nothing is measured here.
"""

from __future__ import annotations

from pathlib import Path

import typer

from lab import ROOT
from lab.simulation import MIXTURES, published_curves, unions_of
from lab.tables import filled, page_of
from specdec.costs.profile import CostProfile
from specdec.costs.unions import fit_curve, with_unions

PAGE = page_of("curve-fits")
PLOT = ROOT / "docs" / "curve-fits.png"
_SIZES = (2, 8, 64)  # batch sizes of which the table has the correction


def table() -> str:
    heads = ("curve", "a + b n, in T(1)", "worst error", "weight of unions",
             *(f"T({n}), as published → with unions" for n in _SIZES))  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    curves = published_curves()
    for name in MIXTURES:
        curve, unions = curves[name], unions_of(name)
        line, bent, corrected = (
            fit_curve(curve),
            fit_curve(curve, unions),
            with_unions(curve, unions),
        )
        cells = (
            name, f"{line.fixed:.3f} + {line.per_row:.3f} n", f"{line.worst:.1%}",
            f"{bent.per_union:.3f}",
            *(f"{_at(curve, n):.2f} → {_at(corrected, n):.2f}" for n in _SIZES),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _at(curve: CostProfile, n: int) -> float:
    return curve.time(n) / curve.step_s[0]


def draw(path: Path = PLOT) -> None:
    """Draw the mixtures' curves, their straight lines, and the curves with unions."""
    import matplotlib  # noqa: PLC0415 (of the extra `plot`)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, len(MIXTURES), figsize=(12, 3.8))
    curves = published_curves()
    for axis, name in zip(axes, MIXTURES, strict=True):
        curve, unions = curves[name], unions_of(name)
        line, corrected = fit_curve(curve), with_unions(curve, unions)
        sizes = range(1, curve.n_max + 1)
        axis.plot(sizes, [_at(curve, n) for n in sizes], ".", markersize=4, label="published")
        axis.plot(sizes, [line.fixed + line.per_row * n for n in sizes], label="a + b n")
        axis.plot(sizes, [_at(corrected, n) for n in sizes], label="with unions")
        axis.set(title=name, xlabel="tokens in a batch", ylabel="T(n) / T(1)")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def page() -> str:
    """The text of docs/background.md with a new table."""
    return filled(PAGE, {"curve fits": table()})


def main() -> None:
    """Fit the published curves; write the table and the plot."""
    PAGE.write_text(page(), encoding="utf-8")
    draw()
    typer.echo(table())


if __name__ == "__main__":
    typer.run(main)
