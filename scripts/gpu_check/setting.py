"""Holds what all parts of scripts/gpu-check share: arguments, device, report and tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from timed_parts import LeftOut

from lab.synth import plan_preset, write_preset
from offload.device import DeviceChoice, choose_device
from specoffload.bench.card_power import CardUse, CardWatch, watch_of

_TO_FINISH_S = 3.0  # for a part to close what is open and to save its results
_UNITS = (("_bytes_per_s", 1e-9, "GB/s"), ("_per_s", 1, "1/s"), ("_bytes", 1e-6, "MB"),
          ("_s", 1e3, "ms"), ("_watts", 1, "W"), ("_hz", 1e-6, "MHz"))  # fmt: skip


@dataclass
class Setting:
    """The check's arguments, device, folder and report. Its parts fill `report`, which is saved
    after each of them and printed as JSON at the end."""

    args: argparse.Namespace
    folder: Path  # where models are written
    report: dict[str, Any]
    out: Console
    end_s: float  # time (of time.monotonic) at which the part is ended
    save: Callable[[], None] = lambda: None  # writes the report to its file

    @cached_property
    def choice(self) -> DeviceChoice:
        """The device. No device is touched before, since parts run in processes of their own."""
        return choose_device("sim:bw=1GB/s" if self.args.dry_run_sim else self.args.device)

    @cached_property
    def card(self) -> CardWatch:
        """Reads the power and the clocks of the device's card."""
        return watch_of(self.choice)

    def left_s(self) -> float:
        """Seconds until the part has to come to its end."""
        return self.end_s - _TO_FINISH_S - time.monotonic()

    def least_s(self, needed_s: float) -> None:
        """Raise LeftOut if less than `needed_s` seconds are left. Small models need no time."""
        if not self.args.small and self.left_s() < needed_s:
            raise LeftOut(f"{self.left_s():.0f} s are left, and it needs {needed_s:.0f} s")

    def say(self, line: str) -> None:
        self.out.print(line, soft_wrap=True, markup=False)

    def show(self, title: str, rows: Sequence[dict[str, Any]]) -> None:
        show(self.out, title, rows)

    def model(self, name: str, preset: str, seed: int, **changes: Any) -> Path:
        """The path of the random model in the file `name`. Writes the file if it does not exist."""
        path = self.folder / f"{name}.gguf"
        if not path.exists():
            size_bytes = plan_preset(preset, **changes).size_bytes
            self.say(f"writing {size_bytes / 1e9:.2f} GB: {path.name}")
            write_preset(preset, path, seed=seed, **changes)
        return path


def card_values(use: CardUse | None) -> dict[str, float | None]:
    """The columns of a row on what the card took while it was measured. {}: it was not read."""
    if use is None:
        return {}
    return {
        "card_power_watts": use.watts, "card_limit_watts": use.limit_watts,
        "core_clock_hz": use.core_hz, "memory_clock_hz": use.memory_hz,
    }  # fmt: skip


def show(out: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table, without lists and dicts. Keys name the columns and end in units.

    If there are more keys than rows, each row becomes a column.
    """
    if not rows:
        return
    keys = [k for k in dict.fromkeys(k for row in rows for k in row)
            if not any(isinstance(row.get(k), dict | list) for row in rows)]  # fmt: skip
    lines = [[_heading(key), *(_cell(key, row.get(key)) for row in rows)] for key in keys]
    if len(keys) <= len(rows):
        lines = [list(column) for column in zip(*lines, strict=True)]
    table = Table(*lines[0], title=title, title_justify="left")
    for line in lines[1:]:
        table.add_row(*line)
    out.print(table)


def _heading(key: str) -> str:
    unit = next((unit for ending, _, unit in _UNITS if key.endswith(ending)), None)
    words = key.replace("_", " ")
    for named in (" s", " watts", " hz"):  # units that the other one replaces
        words = words if unit is None else words.removesuffix(named)
    return words if unit is None else f"{words}, {unit}"


def _cell(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    scale = next((scale for ending, scale, _ in _UNITS if key.endswith(ending)), None)
    if scale is None and isinstance(value, int):
        return str(value)
    scaled = value * (scale or 1)
    return f"{scaled:.2f}" if scaled == 0 or abs(scaled) >= 0.1 else f"{scaled:.2g}"
