"""The time of a decode in each way: on the CPU in place, streamed, or shared by both. Pure."""

from __future__ import annotations

import numpy as np

from offload.decode import SMALL_BATCH
from offload.times.attention import attention_s
from offload.times.hits import Sharing
from offload.times.layers import beside_s, divided, expert_layer_s, in_passes_s
from offload.times.machine import Machine, Real
from offload.times.work import ModelWork


def cpu_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of a decode whose streamed weights the CPU computes in place."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    streamed = work.used_cpu_seconds(machine, n_tokens)
    dense = work.dense.cpu_seconds(machine, n_tokens)
    return (
        resident_s(machine, work, sharing, n_tokens)
        + n_streamed * (streamed + machine.per_switch_s)
        + sharing.n_dense_streamed * (dense + machine.per_switch_s)
    )


def streamed_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None = None
) -> Real:
    """Return the seconds of a decode whose streamed weights are copied and run on the device.

    `hits` is the share of a layer's used experts that have a slot; None: it is estimated.
    """
    total = resident_s(machine, work, sharing, n_tokens)
    n_streamed = work.n_expert_layers - sharing.n_resident
    if np.any(n_streamed):
        layer_s = expert_layer_s(machine, work, sharing, n_tokens, hits)
        total = total + n_streamed * layer_s
    return total + dense_streamed_s(machine, work, sharing, n_tokens)


def hybrid_s(
    machine: Machine,
    work: ModelWork,
    sharing: Sharing,
    n_tokens: Real,
    hits: Real | None = None,
) -> Real:
    """Return the seconds of a batch of any size whose layers CPU and device share.

    `hits`: as for `divided`. Batches of up to `SMALL_BATCH` tokens are split by the player, and
    larger ones are computed in passes (offload/stream/prompt_side.py). Both sides read RAM: the
    CPU's kernels, and the copies to the device. A layer takes at least the time in which RAM gives
    all missing experts.
    """
    n = np.asarray(n_tokens)
    small = np.minimum(n, SMALL_BATCH)
    if np.all(n <= SMALL_BATCH):
        return _split_s(machine, work, sharing, n_tokens, hits)
    large = np.maximum(n, SMALL_BATCH + 1)
    in_passes_s = _shared_s(machine, work, sharing, large, hits)
    if np.all(n > SMALL_BATCH):
        return in_passes_s
    return np.where(n <= SMALL_BATCH, _split_s(machine, work, sharing, small, hits), in_passes_s)


def best_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, *, hybrid: bool = False
) -> Real:
    """Return the seconds of a decode in its fastest way. With `hybrid` layers may be split."""
    seconds = np.minimum(
        cpu_s(machine, work, sharing, n_tokens), streamed_s(machine, work, sharing, n_tokens)
    )
    if hybrid:
        seconds = np.minimum(seconds, hybrid_s(machine, work, sharing, n_tokens))
    return seconds


def _split_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None
) -> Real:
    """Return the seconds of a small batch whose streamed layers are split."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    total = resident_s(machine, work, sharing, n_tokens)
    dense = work.dense.cpu_seconds(machine, n_tokens)
    total += sharing.n_dense_streamed * (dense + machine.per_switch_s)
    if not np.any(n_streamed):
        return total
    pieces = work.union(n_tokens)
    rows = n_tokens * work.n_used / pieces
    its = divided(machine, work, sharing, n_tokens, hits)
    device_s = work.expert.seconds(machine.vram_bytes_per_s, machine.gpu_flops, rows)
    layer_s = np.maximum(
        np.maximum((its.in_slots + its.over_link) * device_s, beside_s(machine, work, its, rows)),
        its.over_link * work.expert.size_bytes / machine.link_bytes_per_s,
    )
    return total + n_streamed * (layer_s + machine.per_split_s)


def _shared_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None
) -> Real:
    """Return the seconds of a prompt's batch whose layers CPU and device share, in passes.

    Infinite without slots.
    """
    n_streamed = work.n_expert_layers - sharing.n_resident
    total = resident_s(machine, work, sharing, n_tokens)
    total = total + dense_streamed_s(machine, work, sharing, n_tokens)
    if not np.any(n_streamed):
        return total
    rows = n_tokens * work.n_used / work.union(n_tokens)
    its = divided(machine, work, sharing, n_tokens, hits)
    layer_s = np.maximum(
        in_passes_s(machine, work, sharing, n_tokens, its.on_cpu),
        beside_s(machine, work, its, rows),
    )
    shared_s = n_streamed * (layer_s + machine.per_split_s)
    return total + np.where((n_streamed > 0) & (sharing.n_slots == 0), np.inf, shared_s)


def resident_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of a decode's resident weights, which the device always computes."""
    gpu = machine.vram_bytes_per_s, machine.gpu_flops
    return (
        (work.n_layers - sharing.n_dense_streamed) * work.dense.seconds(*gpu, n_tokens)
        + sharing.n_resident * work.used(n_tokens).seconds(*gpu, n_tokens)
        + work.head.seconds(*gpu, np.minimum(n_tokens, SMALL_BATCH))
        + work.n_layers * machine.per_layer_s
        + _host_s(machine, work, n_tokens)
        + attention_s(machine, work, n_tokens)
    )


def _host_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    """Return the seconds in which the device waits for the host, outside of streamed layers.

    Batches of several tokens follow batches of other sizes, so their graphs are built anew. The
    time of a whole decode counts with the output, because the times of several devices are added.
    """
    built_anew_s = np.where(np.asarray(n_tokens) > 1, machine.per_new_layer_s, 0.0)
    has_output = np.asarray(work.head.size_bytes) > 0
    return (has_output * machine.per_decode_s + work.n_layers * built_anew_s)[()]


def dense_streamed_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of all layers whose dense weights are copied and run on the device."""
    copy_s = work.dense.size_bytes / machine.link_bytes_per_s
    compute_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    return sharing.n_dense_streamed * np.maximum(copy_s, compute_s)
