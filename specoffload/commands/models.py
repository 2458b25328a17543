"""`specoffload models`: lists the models in the caches, and how each would run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from gguf import LlamaFileType

from numa.errors import NumaError
from offload.errors import OffloadError
from offload.model_file import read_facts
from specoffload import report
from specoffload.config.environment import Environment
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.models.local import CachedModel, cached_models
from specoffload.planning import Planned, planned_for


def show_models(config_for: Callable[[Path], Config], environment: Environment) -> None:
    """Print each model's name and how it would run here.

    `config_for` returns the configuration to open a file with.
    """
    from huggingface_hub import constants

    hub = Path(constants.HF_HUB_CACHE)
    found = cached_models(hub, environment.llama_cache, environment.ollama_folders)
    rows = [describe(model, config_for) for model in found]
    report.data(rows)
    for row in rows:
        about = (report.bytes_text(row["size_bytes"]), row["architecture"], row["quantisation"])
        report.entry(row["name"], " · ".join(filter(None, (*about, row["here"]))))
    if not rows:
        folders = (hub, environment.llama_cache, *environment.ollama_folders)
        report.paragraph(f"no models in {', '.join(map(str, folders))}")
        report.line("fetch one: specoffload run -hf user/repo:Q4_K_M")


def describe(model: CachedModel, config_for: Callable[[Path], Config]) -> dict[str, Any]:
    """One model as data for scripts. `here` is its plan in one line, or the error."""
    row: dict[str, Any] = dataclasses.asdict(model) | {"path": str(model.path)}
    row |= {"size_bytes": 0, "architecture": "", "quantisation": "", "fits": False}
    if model.missing:
        return row | {"here": model.missing}
    try:
        facts = read_facts(model.path)
        row |= {
            "size_bytes": facts.size_bytes,
            "architecture": facts.architecture,
            "quantisation": type_name(facts.header.metadata),
        }
        planned = planned_for(config_for(model.path), PlanOptions())
    except (OffloadError, NumaError) as e:
        return row | {"here": str(e).removeprefix(f"{model.path}: ")}
    available = psutil.virtual_memory().available
    words, fits = in_one_line(planned, available)
    return row | {"here": words, "fits": fits}


def in_one_line(planned: Planned, ram_bytes: int) -> tuple[str, bool]:
    """A line on the memory that the plan needs, and True if the machine has it."""
    plan, of_host = planned.plan, planned.plan.streamed_bytes
    device = report.bytes_text(plan.resident_bytes + plan.reserve_bytes + plan.slot_bytes)
    if not of_host:
        return f"fits the GPU: {device}", True
    host = report.bytes_text(of_host)
    if of_host > ram_bytes:
        return f"needs {host} of RAM, {report.bytes_text(ram_bytes)} is free", False
    return f"{host} in RAM, {device} on the GPU", True


def type_name(metadata: Mapping[str, object]) -> str:
    """llama.cpp's name of a file's quantisation type, such as Q4_K_M."""
    file_type = metadata.get("general.file_type")
    if not isinstance(file_type, int):
        return ""
    try:
        name: str = LlamaFileType(file_type).name
    except ValueError:
        return str(file_type)
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
