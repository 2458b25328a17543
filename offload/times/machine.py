"""The rates of a machine, by which a decode's time is computed before it is measured. Pure.

These are the rates that kernels were seen to reach, not those of a data sheet. The functions
`ram_seen` and `vram_seen` compute the former from the latter. Their shares, and the fixed times of
`Machine`, come from published measurements (docs/validation.md compares them).

On a GPU each part of a layer takes the time of moving its bytes or that of computing, whichever is
longer (the roofline model: Williams, Waterman and Patterson, 2009). On the CPU, the times of
reading and computing add up for few rows (work.py). The model ranks plans and gives a first
threshold, until measured times replace it.

The files beside this one compute a decode from the bottom up: the model's work (work.py), the
experts that it finds in slots (hits.py), a decode in each way (decodes.py), a prompt (prompts.py)
and the first table of times (first_table.py). Their functions also take arrays: as numbers of
tokens, and as fields of `Sharing` and `ModelWork`. They then return the seconds of many plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Real = Any  # a number, or an array of numbers
# Share of a data sheet's rate at which decodes were seen to read experts from RAM, by the largest
# number of memory channels (all sockets together). Many channels are not used in full, because the
# threads wait for each other at each of a layer's products.
_RAM_SHARES = ((2, 0.70), (4, 0.50), (math.inf, 0.48))
# Share of the rate of both sockets together. Half of the reads cross from one socket to the other.
_TWO_SOCKETS = 0.22
# Share of a data sheet's rate that the CPU's reads and the copies to a GPU draw together.
_RAM_SHARE_WITH_COPIES = 0.70
_VRAM_SHARE = 0.8  # share of a data sheet's rate at which kernels read a GPU's memory
CORE_FLOPS = 50e9  # operations per second of one core in prompts, with plain blocks
# Seconds that each kernel of a captured graph takes beside its bytes. It was fitted to half of the
# published decodes (docs/validation.md).
CAPTURED_KERNEL_S = 2.0e-6


@dataclass(frozen=True)
class Machine:
    """Rates that were seen on a machine, and its fixed costs. The defaults are typical values."""

    link_bytes_per_s: float = 25e9  # pinned host memory to the device: PCIe 4.0 x16
    ram_bytes_per_s: float = 63e9  # all cores together, computing: two channels of DDR5-5600
    vram_bytes_per_s: float = 800e9
    cpu_flops: float = 16 * CORE_FLOPS  # quantised products with many rows, all cores together
    gpu_flops: float = 40e12  # products of prompts
    per_kernel_s: float = CAPTURED_KERNEL_S  # kernels.py has the number of kernels
    per_switch_s: float = 75e-6  # one change from the device to the CPU and back
    # Submitting both parts of a split layer and adding them. On the virtual clock a layer with a
    # doorbell took 11 to 44 µs, and one that waits for the host 28 to 98 µs (docs/gpu.md).
    per_split_s: float = 60e-6
    # In these times the device waits for the host. They were seen with one host, a Xeon, on the
    # stand-in's virtual clock (docs/gpu.md). A faster processor may need less.
    per_decode_s: float = 200e-6  # before a decode's first kernel, and after its last one
    # libllama builds the graph of a layer anew if the batch size changes. A change takes 1.2 to
    # 2.4 ms for 48 layers (docs/results.md).
    per_new_layer_s: float = 40e-6
    # One layer of one token: reading its ids, starting copies of its experts, submitting it.
    per_wait_s: float = 90e-6
    # Launches of one pass over a group of experts: gathering, products and what lies between them,
    # and writing the results. Not measured on a GPU: eight kernels of 5 us each.
    per_pass_s: float = 40e-6
    # The host's time of a layer in passes, on the stand-in's virtual clock with one of two busy
    # cores of an AMD EPYC (docs/gpu.md). The device waits for the first two: until its first
    # launch after the router's ids. The other two bound the layer's time.
    per_passes_begin_s: float = 650e-6
    per_launch_begin_s: float = 22e-6  # added once for each launch that the layer has
    per_copied_expert_s: float = 65e-6
    per_launch_s: float = 200e-6  # tables and submitting of up to `MOST_PAIRS` pairs
    # The same for several tokens. Their graph is new, so kernels are launched one by one after the
    # wait, and Python guesses experts before each layer.
    per_batch_wait_s: float = 200e-6
    disk_bytes_per_s: float = 5e9  # large direct reads, several at once: NVMe of PCIe 4.0 x4
    # Reads of the CPU and of copies together. None: not more than `ram_bytes_per_s`.
    shared_ram_bytes_per_s: float | None = None
    # False for a worker's device: a cache in RAM is on the other side of its link.
    attends_in_ram: bool = True

    @property
    def most_ram_bytes_per_s(self) -> float:
        """The rate at which the CPU's reads and copies to a device together read RAM."""
        return max(self.ram_bytes_per_s, self.shared_ram_bytes_per_s or 0.0)


TYPICAL = Machine()


def ram_seen(bytes_per_s: float, n_channels: int, n_sockets: int = 1) -> tuple[float, float]:
    """Return the rates for `ram_bytes_per_s` and `shared_ram_bytes_per_s` of a `Machine`.

    `bytes_per_s` is the rate of the data sheet, of all channels of all sockets.
    """
    if n_sockets > 1:
        share = _TWO_SOCKETS
        return share * bytes_per_s, share * bytes_per_s
    share = next(share for most, share in _RAM_SHARES if n_channels <= most)
    return share * bytes_per_s, _RAM_SHARE_WITH_COPIES * bytes_per_s


def vram_seen(bytes_per_s: float) -> float:
    """Return the rate at which kernels read a GPU's memory, from the data sheet's rate."""
    return _VRAM_SHARE * bytes_per_s
