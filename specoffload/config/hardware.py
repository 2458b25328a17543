"""Machines for `specoffload plan --hardware`, as named presets or from files.

The presets' rates come from data sheets; none was measured.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from offload.plan.machine import TYPICAL, Machine
from offload.units import parse_bytes, parse_rate
from specdec.whole_file import read_text
from specoffload.errors import UsageError

_MOST_BYTES = 1 << 16
_Size = Annotated[int, BeforeValidator(lambda v: parse_bytes(v) if isinstance(v, str) else v)]
_Rate = Annotated[float, BeforeValidator(lambda v: parse_rate(v) if isinstance(v, str) else v)]
_Tflops = Annotated[float, Field(gt=0, le=1e6)]


class Hardware(BaseModel):
    """A machine to plan for. Sizes are in bytes, rates in bytes/s, or both are text with units."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    vram: Annotated[_Size, Field(gt=0)]  # the GPU's memory; a plan leaves 1 GiB of it free
    ram: Annotated[_Size, Field(gt=0)]  # free RAM
    link_rate: Annotated[_Rate, Field(gt=0)]  # rate of copies from pinned RAM to the GPU
    ram_rate: Annotated[_Rate, Field(gt=0)]  # rate at which all cores together read RAM
    vram_rate: Annotated[_Rate, Field(gt=0)]
    cpu_tflops: _Tflops = TYPICAL.cpu_flops / 1e12
    gpu_tflops: _Tflops = TYPICAL.gpu_flops / 1e12
    disk_rate: Annotated[_Rate, Field(gt=0)] = TYPICAL.disk_bytes_per_s  # large direct reads

    @property
    def machine(self) -> Machine:
        """These rates as a `Machine`, which plans are made for."""
        return replace(
            TYPICAL,
            link_bytes_per_s=self.link_rate,
            ram_bytes_per_s=self.ram_rate,
            vram_bytes_per_s=self.vram_rate,
            cpu_flops=self.cpu_tflops * 1e12,
            gpu_flops=self.gpu_tflops * 1e12,
            disk_bytes_per_s=self.disk_rate,
        )


def _preset(
    vram_gib: int, ram_gib: int, link: float, ram: float, vram: float, cpu: float, gpu: float
) -> Hardware:
    """A machine from numbers in GiB, GB/s and TFLOPS."""
    return Hardware(
        vram=vram_gib << 30, ram=ram_gib << 30, link_rate=link * 1e9, ram_rate=ram * 1e9,
        vram_rate=vram * 1e9, cpu_tflops=cpu, gpu_tflops=gpu,
    )  # fmt: skip


PRESETS = {
    "rtx-3060-ddr4": _preset(12, 56, 12, 40, 360, 0.4, 25),
    "rtx-3090-ddr4": _preset(24, 120, 25, 45, 936, 0.5, 60),
    "rtx-4090-ddr5": _preset(24, 120, 25, 70, 1008, 0.8, 80),
    "rtx-5090-ddr5": _preset(32, 184, 50, 80, 1790, 1.0, 100),
    "h100": _preset(80, 1000, 50, 300, 3350, 3.0, 300),
}


def hardware_of(name: str) -> Hardware:
    """The preset of that name, or the machine in the JSON or TOML file of that name.

    Raises UsageError.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    try:
        text = read_text(path, _MOST_BYTES)
        read: Any = tomllib.loads(text) if path.suffix == ".toml" else from_json(text)
        return Hardware.model_validate(read)
    except OSError as e:
        why = (
            f"neither a machine that is known ({', '.join(PRESETS)}) nor a readable file"
            f" ({e.strerror})"
        )
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        why = f"{where}: {first['msg']:.200}"
    except (ValueError, RecursionError) as e:
        why = f"neither JSON nor, with the ending .toml, TOML: {e}"
    raise UsageError(f"--hardware {name}: {why}")
