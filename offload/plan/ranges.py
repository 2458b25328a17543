"""Ranges of layers, one per device, as llama.cpp's `--tensor-split` divides a model. Pure.

The output counts as one more layer after the last one, as in llama.cpp. So the ranges of a model
with `n_layers` layers cover 0 to `n_layers`, in the order of the devices and without gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from offload.errors import DeviceUnavailable, DoesNotFit
from offload.model import ModelFacts
from offload.plan.placement import MARGIN_BYTES
from offload.plan.weights import device_bytes
from offload.times.context_memory import ContextOptions, context_memory

# The place of remote devices: before the local ones, after them, alone, or nowhere. `auto` is
# `first`, so that the output is computed here. Beside the plain CPU, which libllama gives the first
# layers, `auto` is `last`, but the output is still computed here.
Order = Literal["auto", "first", "last", "only", "none"]


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
    # llama.cpp computes in single precision, which decides boundaries that fall on a layer.
    with np.errstate(over="ignore"):
        sums = np.fromiter(accumulate(np.float32(share) for share in shares), np.float32)
    if not all(share >= 0 for share in shares) or not 0 < sums[-1] < np.inf:
        raise DeviceUnavailable(
            f"--tensor-split {','.join(f'{share:g}' for share in shares)}: shares are numbers from "
            "0 up, and one of them has to be above 0"
            + " (in single precision, up to 3.4e+38)"
            * (min(shares) >= 0 and sum(shares) > 0)
        )
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


def by_memory(
    facts: ModelFacts,
    context: ContextOptions,
    local_bytes: Sequence[int],
    rooms_bytes: Sequence[int],
    *,
    local_first: bool,
    has_head: bool,
    streams: Sequence[bool] = (),
    shares: Sequence[float] = (),
    most_remote: int | None = None,
) -> tuple[tuple[LayerRange, ...], tuple[LayerRange, ...]]:
    """Return the layers of each local and of each remote device, if their speeds are not known.

    `local_bytes` and `rooms_bytes` are the free bytes of each local and each remote device. Layers
    are divided by `shares`, in the order of the layers, or by free memory if there are no shares.
    The output counts as one more layer after the last one, in the range of the device that computes
    it. With `has_head`, that is the last remote device. With `local_first`, the local layers come
    before the remote ones.

    `local_bytes` is empty if this machine has only its CPU, which is no device to llama.cpp. Then
    the CPU takes the layers that are left: the remote devices take at most `most_remote` layers, or
    all that fit if it is None.

    `streams` says for each remote device whether it streams weights. Such a device may get more
    layers than fit it, and its worker refuses too many. Raises DoesNotFit if a share is too large
    for its device or if no layer fits any remote device, and DeviceUnavailable for bad shares.
    """
    n_layers, n_local = facts.n_layers, len(local_bytes)
    n_divided = n_layers if n_local or not most_remote else min(n_layers, most_remote)
    frees = (*local_bytes, *rooms_bytes) if local_first else (*rooms_bytes, *local_bytes)
    by_rule = by_shares(n_divided, shares or frees)
    n_before = n_local if local_first else 0
    ours = by_rule[n_before : n_before + len(rooms_bytes)]
    lengths = [max(0, min(one.end, n_divided) - one.first) for one in ours]
    if n_local and not shares and sum(lengths) == n_layers:  # one layer stays local
        lengths[max(range(len(lengths)), key=lengths.__getitem__)] -= 1
    needs_head = has_head
    # Begin with the remote device at the end of the model, or at its start. If a later device of
    # this loop takes fewer layers, the ranges of the earlier ones stay the same.
    for i in reversed(range(len(lengths))) if local_first else range(len(lengths)):
        room, wanted = rooms_bytes[i], lengths[i]
        if not (streams and streams[i]):
            end = n_layers - sum(lengths[i + 1 :])
            start = end - wanted if local_first else sum(lengths[:i])
            lengths[i] = _most_fitting(
                facts, context, LayerRange(start, start + wanted), room - MARGIN_BYTES,
                at_end=local_first, heads=int(needs_head),
            )  # fmt: skip
        needs_head = needs_head and not lengths[i]
        if shares and lengths[i] < wanted:
            raise DoesNotFit(
                f"--tensor-split gives remote device {i} {wanted} layers, but only {lengths[i]} "
                f"fit: it has {room / 2**30:.1f} GiB free, of which 1 GiB stays free"
            )
    if not sum(lengths):
        raise DoesNotFit(
            f"no layer fits the devices of --rpc, of which the largest has "
            f"{max(rooms_bytes) / 2**30:.1f} GiB free, and 1 GiB of it stays free; leave --rpc out"
        )
    start = n_layers - sum(lengths) if local_first else 0
    remote = [LayerRange(*pair) for pair in pairwise(accumulate(lengths, initial=start))]
    if has_head:  # the last device with layers
        last = max(i for i, length in enumerate(lengths) if length)
        remote[last] = replace(remote[last], end=remote[last].end + 1)
    if not n_local:
        return (LayerRange(0, start),), tuple(remote)
    # Layers that do not fit the remote devices go to the local device beside them.
    if local_first:
        *others, beside = by_rule[:n_local]
        local = [*others, replace(beside, end=start)]
    else:
        beside, *others = by_rule[len(rooms_bytes) :]
        local = [replace(beside, first=sum(lengths)), *others]
    return tuple(local), tuple(remote)


def _most_fitting(
    facts: ModelFacts,
    context: ContextOptions,
    wanted: LayerRange,
    room_bytes: int,
    *,
    at_end: bool,
    heads: int,
) -> int:
    """Return how many `wanted` layers fit `room_bytes` together with their context.

    With `at_end`, the last of the wanted layers are taken, otherwise the first. `heads` is 1 if
    the device also computes the output, and otherwise 0.
    """
    for n in range(len(wanted), 0, -1):
        first = wanted.end - n if at_end else wanted.first
        part = facts.part(first, first + n + heads)
        if device_bytes(part) + context_memory(part, context).total_bytes <= room_bytes:
            return n
    return 0
