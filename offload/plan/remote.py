"""Divides layers between this machine and devices of others, which hold theirs resident. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from offload.errors import DeviceUnavailable, DoesNotFit
from offload.model import ModelFacts
from offload.plan.context import ContextOptions, context_memory
from offload.plan.ranges import LayerRange, by_shares
from offload.plan.sharing import device_bytes

MARGIN_BYTES = 1 << 30  # memory of a remote device that stays free, as llama.cpp's --fit-target


@dataclass(frozen=True)
class Division:
    """The layers of each local and each remote device.

    The output counts as the layer behind the last one, for the device that computes it.
    """

    local: tuple[LayerRange, ...]
    remote: tuple[LayerRange, ...]


def divide(
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
) -> Division:
    """Divide the layers between devices by `shares`, or by free memory if there are none.

    `local_bytes` and `rooms_bytes` are the free memory of the local and the remote devices. Without
    local devices this machine has only its CPU, which is no device to llama.cpp, and computes the
    layers that the remote devices do not. These take at most `most_remote` layers then, or all that
    fit. With `has_head` the last remote device computes the output. `shares` are in the order of
    the devices. Remote devices that stream (`streams`) may get more layers than fit them: their
    worker refuses what is too much. Raises DoesNotFit if a share is too large for its device, or
    if no layer fits any, and DeviceUnavailable for bad shares.
    """
    n_layers, n_local = facts.n_layers, len(local_bytes)
    n_divided = n_layers if n_local or not most_remote else min(n_layers, most_remote)
    frees = (*local_bytes, *rooms_bytes) if local_first else (*rooms_bytes, *local_bytes)
    if shares and len(shares) != len(frees):
        raise DeviceUnavailable(
            f"--tensor-split has {len(shares)} shares for {len(frees)} devices; give each device "
            "one, with remote devices in their place (the CPU has none)"
        )
    by_rule = by_shares(n_divided, shares or frees)
    n_before = n_local if local_first else 0
    ours = by_rule[n_before : n_before + len(rooms_bytes)]
    lengths = [max(0, min(one.end, n_divided) - one.first) for one in ours]
    first = n_layers - sum(lengths) if local_first else 0
    for i, (length, room) in enumerate(zip(lengths, rooms_bytes, strict=True)):
        if streams and streams[i]:
            continue
        start, heads = first + sum(lengths[:i]), int(has_head and i == len(lengths) - 1)
        lengths[i] = _most_fitting(facts, context, start, length, heads, room - MARGIN_BYTES)
        if shares and lengths[i] < length:
            raise DoesNotFit(
                f"--tensor-split gives remote device {i} {length} layers, but only {lengths[i]} "
                f"fit: it has {room / 2**30:.1f} GiB free, of which 1 GiB stays free"
            )
    if not sum(lengths):
        raise DoesNotFit(
            f"no layer fits the devices of --rpc, of which the largest has "
            f"{max(rooms_bytes) / 2**30:.1f} GiB free, and 1 GiB of it stays free; leave --rpc out"
        )
    start = n_layers - sum(lengths) if local_first else 0
    remote = [LayerRange(*pair) for pair in pairwise(accumulate(lengths, initial=start))]
    if has_head:
        remote[-1] = replace(remote[-1], end=remote[-1].end + 1)
    if not n_local:
        return Division((LayerRange(0, start),), tuple(remote))
    # Layers that do not fit the remote devices go to the local device beside them.
    if local_first:
        *others, beside = by_rule[:n_local]
        local = [*others, replace(beside, end=start)]
    else:
        beside, *others = by_rule[len(rooms_bytes) :]
        local = [replace(beside, first=sum(lengths)), *others]
    return Division(tuple(local), tuple(remote))


def _most_fitting(
    facts: ModelFacts, context: ContextOptions, first: int, most: int, heads: int, room_bytes: int
) -> int:
    """Return how many layers from `first` on fit, with their part of the context.

    `heads` is 1 if the device also computes the output.
    """
    for n in range(most, 0, -1):
        part = facts.part(first, first + n + heads)
        if device_bytes(part) + context_memory(part, context).total_bytes <= room_bytes:
            return n
    return 0
