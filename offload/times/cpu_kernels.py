"""How fast the CPU's kernels are, by type of the weights. Pure.

A start measures its own machine. This table is for plans without measurements, such as those for
another machine. All numbers are ratios to kernels for 4-bit blocks with AVX2 or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

# One row of a product is bound by reading. Each further row adds a part of the time of one row,
# also while reading is the longer of both: published cost curves whose rows read the same weights
# are straight lines (docs/background.md, costs).
ROW_SHARE = 0.2


@dataclass(frozen=True)
class CpuKernel:
    """The speed of the kernels for a type."""

    cpu_cost: float = 1.0  # time of computing many rows, as a multiple of that of 4-bit blocks
    read_cost: float = 1.0  # time of reading from RAM, as a multiple of that of as many 4-bit bytes
    row_share: float = ROW_SHARE  # time that each further row adds, in units of the time of one row
    source: str = "assumed"


_V100 = "anyei/llamacpp-v100, docs/strata-port-plan.md: 40 threads, AVX2"
_LOOKED_UP = CpuKernel(cpu_cost=1.25, source="docs/validation.md, r2-iq2xs and b1: looked up")
PLAIN = CpuKernel()
# By prefix of the type's name.
_KERNELS = {
    "IQ1": _LOOKED_UP, "IQ2": _LOOKED_UP, "IQ3": _LOOKED_UP,
    # The same AVX2 instructions on all x86 processors, even with AVX-512: ggml_vec_dot_mxfp4_q8_0
    # shuffles a table, as for IQ4_NL. It was seen to draw less of RAM's rate.
    "MXFP4": CpuKernel(read_cost=1.4, source="docs/validation.md, eight machines with gpt-oss"),
    # Without an AVX2 kernel: 11 GB/s where others read 59. The pinned library has none for x86.
    "Q2_0": CpuKernel(read_cost=59 / 11, row_share=0.90, source=f"{_V100}, the scalar kernel"),
    "Q2_K": CpuKernel(row_share=0.20, source=_V100),
    "Q3_K": CpuKernel(row_share=0.34, source=_V100),
    "Q4_0": CpuKernel(row_share=0.27, source=_V100),
}  # fmt: skip


@cache
def cpu_kernel(type_name: str) -> CpuKernel:
    """Return the speed of the CPU's kernels for a type, as `q4_K`, or for a mixture's name."""
    name = type_name.upper()
    return next((kernel for prefix, kernel in _KERNELS.items() if name.startswith(prefix)), PLAIN)
