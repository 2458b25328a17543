"""Compares decodes whose misses are all copied with split layers and with rivals' ways, by cards.

    scripts/lab/run copied-misses

Each row has the plan for answers of a model on a machine. *Copied*: every missing expert is copied,
and the CPU computes none. This program's host waits in each layer that misses something, and the
fork's card reads experts over the link without a wait. No model is opened, and nothing is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from lab.hybrid_model import HARDWARE, MACHINES, plan_of
from lab.synth.published import PublishedFacts
from offload.plan.llama_cpp import read_by_device_s
from offload.times.decodes import hybrid_s, streamed_s
from offload.times.hits import Sharing
from offload.times.machine import Machine
from offload.times.work import ModelWork, even, model_work

MODELS = (
    "Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "gpt-oss-120b", "Qwen3.8-Flash-Next", "Qwen3-235B-A22B",
    "GLM-5.3-Flash", "DeepSeek-V4-Flash", "DeepSeek-R1",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The seconds of a token by way, on one machine."""

    model: str
    hardware: str
    uses: str  # how texts use experts
    split_s: float
    copied_s: float
    read_s: float  # by a card that reads missing experts itself

    @property
    def line(self) -> str:
        speeds = (f"{1 / s:.1f}" for s in (self.split_s, self.copied_s, self.read_s))
        cells = self.model, self.hardware, self.uses, *speeds, f"{self.split_s / self.copied_s:.2f}"
        return f"| {' | '.join(cells)} |"


def _ways(machine: Machine, work: ModelWork, sharing: Sharing) -> tuple[float, float, float]:
    ways = (hybrid_s, streamed_s, read_by_device_s)
    split_s, copied_s, read_s = (float(way(machine, work, sharing, 1)) for way in ways)
    return split_s, copied_s, read_s


def rows() -> Iterator[Row]:
    """The rows of all models and machines in which experts stream."""
    with tempfile.TemporaryDirectory() as folder:
        headers = PublishedFacts(Path(folder))
        for model in MODELS:
            guessed = model_work(headers[model])
            for hardware in HARDWARE:
                gib, machine = MACHINES[hardware]
                sharing = plan_of(headers[model], gib, machine, hybrid=True).sharing
                if sharing.n_resident >= guessed.n_expert_layers:
                    continue
                for uses, work in (("guessed", guessed), ("equal", even(guessed))):
                    yield Row(model, hardware, uses, *_ways(machine, work, sharing))


def main() -> None:
    """Print a row for each model, machine and use of experts, and how often copying is faster.

    docs/log.md has their ratios.
    """
    found = list(rows())
    heads = ("model", "machine", "experts' use", "split", "copied", "read by the card",
             "copied ÷ split")  # fmt: skip
    typer.echo(f"| {' | '.join(heads)} |\n|" + "---|" * len(heads))
    for row in found:
        typer.echo(row.line)
    wins = sum(row.copied_s < row.split_s for row in found)
    typer.echo(f"copying every miss is faster in {wins} of {len(found)} rows")


if __name__ == "__main__":
    typer.run(main)
