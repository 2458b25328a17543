"""Rows of `bench --route-cached`, and a plot of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.costs.plot import new_figure, write_figure


@dataclass(frozen=True)
class RoutingRow:
    """One strength on the text. Divergences are those of next tokens, in nats."""

    strength: float
    kept: float | None  # share of the router's choices; None: the model's own routing
    hits: float | None  # share of chosen experts that were in slots before
    hits_without: float | None  # the same for the router's own choices
    tokens_per_s: float
    kl_mean: float
    kl_p99: float
    perplexity: float


def plot_routing(rows: Sequence[RoutingRow], title: str, path: Path) -> None:
    """Write a plot of the rows. Raises SpecDecError without matplotlib."""
    write_figure(routing_figure(rows, title), path)


def routing_figure(rows: Sequence[RoutingRow], title: str) -> Any:
    """The figure of `plot_routing`: by strength, what is kept, what it costs, what it brings.

    Speed and perplexity are relative to those of the row with strength 0.
    """
    figure, (shares, divergences, relative) = new_figure(3)
    rows = sorted(rows, key=lambda row: row.strength)
    own = next(row for row in rows if row.strength == 0.0)
    routed = [row for row in rows if row.kept is not None]
    _draw(shares, routed, ("kept", "hits", "hits_without"),
          ("choices kept", "chosen experts in slots", "the router's own in slots"))  # fmt: skip
    _draw(divergences, rows, ("kl_mean", "kl_p99"), ("mean", "99th percentile"))
    strengths = [row.strength for row in rows]
    relative.plot(strengths, [row.tokens_per_s / own.tokens_per_s for row in rows],
                  marker="o", label="tokens/s")  # fmt: skip
    relative.plot(strengths, [row.perplexity / own.perplexity for row in rows],
                  marker="s", linestyle="--", label="perplexity")  # fmt: skip
    words = "Share of choices", "Divergence from the model, nats", "Relative to the model's own"
    for axes, name in zip((shares, divergences, relative), words, strict=True):
        axes.set(title=name, xlabel="strength", xlim=(-0.02, max(0.1, *strengths) + 0.02))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    shares.set_ylim(0, 1.02)
    divergences.set_ylim(0, None)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw(
    axes: Any, rows: Sequence[RoutingRow], fields: Sequence[str], labels: Sequence[str]
) -> None:
    for field, label, marker in zip(fields, labels, "os^", strict=False):
        values = [getattr(row, field) for row in rows]
        axes.plot([row.strength for row in rows], values, marker=marker, label=label)
