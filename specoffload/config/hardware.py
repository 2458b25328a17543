"""Machines for `specoffload plan --hardware`, as named presets or from files.

The presets' rates come from published measurements of such parts, not from data sheets
(docs/validation.md).
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from offload.times.machine import CORE_FLOPS, TYPICAL, Machine, ram_seen, vram_seen
from offload.units import parse_bytes, parse_rate
from specdec.user_path import user_path
from specdec.whole_file import read_text
from specoffload.config.hardware_parts import CARDS, HOSTS, MACHINES, UNIFIED
from specoffload.errors import UsageError

_MOST_BYTES = 1 << 16
_Size = Annotated[int, BeforeValidator(lambda v: parse_bytes(v) if isinstance(v, str) else v)]
_Rate = Annotated[float, BeforeValidator(lambda v: parse_rate(v) if isinstance(v, str) else v)]
_Tflops = Annotated[float, Field(gt=0, le=1e6)]


class Hardware(BaseModel):
    """A machine to plan for. Sizes are bytes and rates bytes/s, or either is text with a unit."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    vram: Annotated[_Size, Field(gt=0)]  # the GPU's memory; a plan leaves 1 GiB of it free
    ram: Annotated[_Size, Field(gt=0)]  # free RAM
    link_rate: Annotated[_Rate, Field(gt=0)]  # rate of copies from pinned RAM to the GPU
    # Rate at which computing cores read RAM. It is 0.5 to 0.7 of the data sheet's rate.
    ram_rate: Annotated[_Rate, Field(gt=0)]
    # Rate at which the cores and copies to the GPU read RAM together. None: `ram_rate`.
    shared_ram_rate: Annotated[_Rate, Field(gt=0)] | None = None
    vram_rate: Annotated[_Rate, Field(gt=0)]
    cpu_tflops: _Tflops = TYPICAL.cpu_flops / 1e12
    gpu_tflops: _Tflops = TYPICAL.gpu_flops / 1e12
    disk_rate: Annotated[_Rate, Field(gt=0)] = TYPICAL.disk_bytes_per_s  # large direct reads
    shares_ram: bool = False  # the GPU computes in the CPU's memory, so copies gain nothing

    @property
    def machine(self) -> Machine:
        """These rates as a `Machine`, which plans are made for."""
        return replace(
            TYPICAL,
            link_bytes_per_s=self.link_rate,
            ram_bytes_per_s=self.ram_rate,
            shared_ram_bytes_per_s=self.shared_ram_rate,
            vram_bytes_per_s=self.vram_rate,
            cpu_flops=self.cpu_tflops * 1e12,
            gpu_flops=self.gpu_tflops * 1e12,
            disk_bytes_per_s=self.disk_rate,
        )


def _preset(gpu: str, host: str) -> Hardware:
    """A machine with the rates that were seen on such parts (`offload.times.machine`)."""
    vram_gib, vram_gbs, gpu_tflops = CARDS[gpu]
    ram_gib, ram_gbs, n_channels, n_sockets, n_cores, link_gbs = HOSTS[host]
    ram_rate, shared_rate = ram_seen(ram_gbs * 1e9, n_channels, n_sockets)
    return Hardware(
        vram=vram_gib << 30, ram=ram_gib << 30, link_rate=link_gbs * 1e9, ram_rate=ram_rate,
        shared_ram_rate=shared_rate, vram_rate=vram_seen(vram_gbs * 1e9),
        cpu_tflops=n_cores * CORE_FLOPS / 1e12, gpu_tflops=gpu_tflops,
    )  # fmt: skip


PRESETS = {
    **{name: _preset(*parts) for name, parts in MACHINES.items()},
    UNIFIED: Hardware(
        vram=96 << 30, ram=24 << 30, link_rate=80e9, ram_rate=0.7 * 256e9,
        vram_rate=0.8 * 256e9, cpu_tflops=0.8, gpu_tflops=15,
        shares_ram=True,
    ),
}  # fmt: skip


def hardware_of(name: str) -> Hardware:
    """The preset of that name, or the machine in the JSON or TOML file of that name.

    Raises UsageError.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = user_path(name)
    try:
        text = read_text(path, _MOST_BYTES)
        read: Any = tomllib.loads(text) if path.suffix == ".toml" else from_json(text)
        return Hardware.model_validate(read)
    except OSError as e:
        begun = [known for known in PRESETS if known.startswith(name.lower())]
        near = " or ".join(begun or get_close_matches(name.lower(), PRESETS, 1))
        reason = (
            f"neither a machine that is known ({', '.join(PRESETS)}) nor a readable file"
            f" ({e.strerror}){f'; did you mean {near}?' if near else ''}"
        )
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        reason = f"{where}: {first['msg']:.200}"
    except (ValueError, RecursionError) as e:
        reason = f"neither JSON nor, with the ending .toml, TOML: {e}"
    raise UsageError(f"--hardware {name}: {reason}")
