"""Ranges of layers, one per device, as llama.cpp's `--tensor-split` divides a model. Pure.

The output counts as one more layer after the last one, as in llama.cpp. So the ranges of a model
with `n_layers` layers cover 0 to `n_layers`, in the order of the devices and without gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from offload.errors import DeviceUnavailable


@dataclass(frozen=True)
class LayerRange:
    """The layers `first` to `end - 1`, which one device computes. Empty if both are equal."""

    first: int
    end: int

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.end

    def __len__(self) -> int:
        return self.end - self.first


def by_shares(n_layers: int, shares: Sequence[float]) -> tuple[LayerRange, ...]:
    """Return the range of each device by llama.cpp's rule for `--tensor-split`.

    The output is in the last range that is not empty. Raises DeviceUnavailable if the shares cannot
    divide a model.
    """
    if any(not 0 <= share < float("inf") for share in shares) or not sum(shares):
        raise DeviceUnavailable(
            f"--tensor-split {','.join(f'{share:g}' for share in shares)}: shares are numbers from "
            "0 up, and one of them has to be above 0"
        )
    # llama.cpp computes in single precision, which decides boundaries that fall on a layer.
    sums = np.fromiter(accumulate(np.float32(share) for share in shares), np.float32)
    ends = [float(end) for end in sums / sums[-1]]
    n = n_layers + 1
    owners = [bisect_right(ends, float(np.float32(i) / np.float32(n))) for i in range(n)]
    starts = [sum(owner < i for owner in owners) for i in range(len(ends) + 1)]
    return tuple(LayerRange(*pair) for pair in zip(starts, starts[1:], strict=False))


def shares_for(shares: Sequence[float], names: Sequence[str]) -> tuple[tuple[float, ...], str]:
    """Return a share for each of these devices as llama.cpp takes them, and what to tell the user.

    llama.cpp ignores shares beyond the devices. Devices beyond the shares get no layers.
    """
    n, words = len(names), f"--tensor-split {','.join(f'{share:g}' for share in shares)}: "
    missing = names[len(shares) :]
    if missing:
        words += f"{', '.join(missing)} without a share: no layers"
    elif len(shares) > n:
        devices = f"{n} devices" if n > 1 else "one device"
        words += (
            f"only the first {n} of {len(shares)} shares count, for {devices} ({', '.join(names)})"
        )
    else:
        words = ""
    return (*shares[:n], *[0.0] * len(missing)), words


def shares_of(ranges: Sequence[LayerRange]) -> tuple[float, ...]:
    """Return shares for which llama.cpp's rule gives these ranges. No range may be empty.

    Each boundary lies half a layer before the next range, so that rounding cannot move it.
    """
    ends = [r.end - 0.5 for r in ranges[:-1]] + [float(ranges[-1].end)]
    return tuple(end - start for start, end in zip([0.0, *ends], ends, strict=False))
