"""Turns files of `specoffload report` into cases in the form of published.jsonl.

A report has llama-server's speeds if it was made with `--vs`. Those of plain settings, without a
cache of experts and without drafts, are runs that the machine model can predict. So they become
cases. A report knows neither the RAM's rate on the data sheet nor its channels, so these are given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.published import GIB
from lab.published_cases import NO_GPU, Case
from specoffload.bench.machine_report import FORM

_MAKERS = ("NVIDIA ", "GeForce ", "AMD ", "Radeon ")


def cases_of(
    report: Mapping[str, Any],
    *,
    name: str,
    source: str,
    ram_gbs: float,
    n_channels: int,
    pcie_gbs: float,
) -> list[Case]:
    """The cases of one report. Raises ValueError for a file that is none, or has no `--vs`."""
    if report.get("form") != FORM:
        raise ValueError(f"{name}: is no report of form {FORM}")
    if not report.get("llama_server"):
        raise ValueError(f"{name}: has no speeds of llama-server (--vs)")
    model, settings, machine = report["model"], report["settings"], report["machine"]
    gpus = [device["description"] for device in report["devices"] if device["on_gpu"]]
    found = []
    for row in report["llama_server"]:
        if row["flags"] or row["cache_flags"] or row["moe_cache_mib"]:
            continue
        n_on_cpu = min(row["n_cpu_moe"], model["n_layers"])
        found.append(
            Case(
                id=f"{name}-ncmoe{row['n_cpu_moe']}",
                model=model["name"] or model["architecture"],
                quant=model["type"],
                file_gib=round(model["size_bytes"] / GIB, 2),
                gpu=_short(gpus[0]) if gpus else NO_GPU,
                n_gpus=len(gpus),
                pcie_gbs=pcie_gbs,
                cpu=machine["cpu"],
                n_cores=machine["cores"],
                ram_gbs=ram_gbs,
                n_channels=n_channels,
                n_sockets=machine["n_nodes"],
                engine="llama.cpp",
                source=source,
                tg_tps=round(row["decode_tps"], 2),
                context=0,
                ubatch=512,
                n_prompt=settings["n_prompt"],
                flags=" ".join(["-ncmoe", str(row["n_cpu_moe"]), *row["load_flags"]]),
                n_resident_layers=model["n_layers"] - n_on_cpu if gpus else 0,
            )
        )
    return found


def _short(description: str) -> str:
    """A card's name as the tables of cards have it."""
    for maker in _MAKERS:
        description = description.removeprefix(maker)
    return description


def main(
    files: list[Path],
    ram_gbs: Annotated[float, typer.Option(help="The RAM's rate by its data sheet, GB/s.")],
    channels: Annotated[int, typer.Option(help="Channels of the RAM.")],
    source: Annotated[str, typer.Option(help="Where the reports can be read.")],
    pcie_gbs: Annotated[float, typer.Option(help="The link's rate by its data sheet, GB/s.")] = 32,
) -> None:
    """Print a line for each case, to be added to published.jsonl after it was read."""
    for path in files:
        try:
            report = json.loads(path.read_text("utf-8"))
            cases = cases_of(
                report,
                name=path.stem,
                source=source,
                ram_gbs=ram_gbs,
                n_channels=channels,
                pcie_gbs=pcie_gbs,
            )
        except ValueError as e:
            raise typer.BadParameter(str(e)) from e
        for case in cases:
            print(json.dumps(asdict(case)))


if __name__ == "__main__":
    typer.run(main)
