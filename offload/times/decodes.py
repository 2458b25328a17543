"""The time of a decode in each way: on the CPU in place, streamed, or shared by both. Pure.

A decode's time is that of its resident weights, of its layers whose experts stream, and of
attention over the KV cache, in device memory or in RAM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offload.decode import SMALL_BATCH
from offload.schedule.passes import AHEAD_OF_ROUTER, MOST_HOST_PAIRS, MOST_PAIRS
from offload.times.hits import (
    Sharing,
    copied_hits,
    expected_hits,
    missing_in_passes,
    pass_sizes,
    passing_hits,
    streams_in_passes,
)
from offload.times.machine import Machine, Real
from offload.times.work import ModelWork

# Share of a layer's experts in use, from which all are copied before the router runs.
AHEAD_SHARE = 0.5
# Shares of the rates for weights at which the KV cache is read, and attention over it is computed.
_CACHE_SHARE, ATTENTION_SHARE = 0.375, 0.7


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
    division = divided(machine, work, sharing, n_tokens, hits)
    device_s = work.expert.seconds(machine.vram_bytes_per_s, machine.gpu_flops, rows)
    layer_s = np.maximum(
        np.maximum(
            (division.in_slots + division.over_link) * device_s,
            beside_s(machine, work, division, rows),
        ),
        division.over_link * work.expert.size_bytes / machine.link_bytes_per_s,
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
    division = divided(machine, work, sharing, n_tokens, hits)
    layer_s = np.maximum(
        in_passes_s(machine, work, sharing, n_tokens, division.on_cpu),
        beside_s(machine, work, division, rows),
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
        + work.n_layers * work.kernels_per_layer * machine.per_kernel_s
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


# -- a layer whose experts stream --------------------------------------------------------------


@dataclass(frozen=True)
class LayerDivision:
    """Expected numbers of a layer's used experts, by where they are and who computes them."""

    in_slots: Real  # the device computes them without a copy
    over_link: Real  # copied, then computed by the device
    on_cpu: Real


def divided(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None = None
) -> LayerDivision:
    """Return how a batch of any size divides a layer, as offload/schedule/division.py does.

    All experts are assumed to have equally many pairs. Those in slots stay on the device. Of the
    others, the CPU computes as many as let it end together with the link's copies, or with the
    device's products if these take longer. `hits`: the share of the used experts that have a slot.
    None: `expected_hits` of small batches. Larger batches go through a ring of slots, and find
    their hits in the others.
    """
    pieces = work.union(n_tokens)
    rows = n_tokens * work.n_used / np.maximum(pieces, 1e-12)
    is_small = np.asarray(n_tokens) <= SMALL_BATCH
    share: Real = hits
    if hits is None:
        in_small, in_large = expected_hits(work, sharing, pieces), passing_hits(work, sharing)
        share = np.where(is_small, in_small, in_large)
    misses = (1.0 - share) * pieces
    host_s = work.expert.cpu_seconds(machine, rows)
    device_s = work.expert.seconds(machine.vram_bytes_per_s, machine.gpu_flops, rows)
    copy_s = work.expert.size_bytes / machine.link_bytes_per_s
    with_link = misses * copy_s / (host_s + copy_s)
    with_device = pieces * device_s / (host_s + device_s)
    most = np.where(is_small, np.inf, MOST_HOST_PAIRS / np.maximum(rows, 1e-12))
    on_cpu = np.minimum(np.minimum(np.maximum(with_link, with_device), misses), most)
    return LayerDivision(pieces - misses, misses - on_cpu, on_cpu)


def beside_s(machine: Machine, work: ModelWork, division: LayerDivision, rows: Real) -> Real:
    """Return the seconds of the CPU's part of a layer, or of reading all misses from RAM."""
    missing_bytes = (division.over_link + division.on_cpu) * work.expert.size_bytes
    return np.maximum(
        division.on_cpu * work.expert.cpu_seconds(machine, rows),
        missing_bytes / machine.most_ram_bytes_per_s,
    )


def expert_layer_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None
) -> Real:
    """Return the seconds of copying and computing one layer's streamed experts, less overlap."""
    seconds = layer_at_once_s(machine, work, sharing, n_tokens, hits)
    in_passes = streams_in_passes(work, sharing, n_tokens)
    if np.any(in_passes):
        seconds = np.where(in_passes, in_passes_s(machine, work, sharing, n_tokens), seconds)
    return seconds


def layer_at_once_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None = None
) -> Real:
    """Return the seconds of a layer whose experts are all in slots before they are computed.

    `hits`: the share of its used experts that have a slot; None: it is estimated.
    """
    pieces = work.union(n_tokens)
    if hits is None:
        hits = copied_hits(work, sharing.searched_by(n_tokens), pieces)
    copy_s, compute_s = copying_s(machine, work, hits, pieces), computing_s(machine, work, n_tokens)
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    spare = np.maximum(0.0, sharing.n_slots - pieces) * work.expert.size_bytes
    overlap_s = np.minimum(
        np.minimum(compute_s + dense_s, spare / machine.link_bytes_per_s), copy_s
    )
    # If a batch uses a smaller share of the experts, copies wait for the router's ids.
    is_ahead = pieces >= AHEAD_SHARE * work.n_experts
    n_uses = pieces * (work.n_expert_layers - sharing.n_resident)
    wait_s = _wait_s(machine, hits, n_uses, n_tokens)
    return copy_s + compute_s + np.where(is_ahead, -overlap_s, wait_s)


def _wait_s(machine: Machine, hits: Real, n_uses: Real, n_tokens: Real) -> Real:
    """Return the seconds in which the device waits for a layer's ids and for the host.

    A decode that misses none of its `n_uses` experts waits once, at its end (docs/player.md).
    Other decodes wait in each layer.
    """
    misses_any = 1.0 - np.maximum(hits, 0.0) ** n_uses
    several = np.asarray(n_tokens) > 1
    return misses_any * np.where(several, machine.per_batch_wait_s, machine.per_wait_s)


def in_passes_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, n_on_cpu: Real = 0.0
) -> Real:
    """Return the seconds of one layer's streamed experts, computed in passes over groups of them.

    One group is copied while the group before it is computed. In large batches, the link fills the
    ring while the layer's dense weights are computed. `n_on_cpu`: missing experts that the CPU
    computes.
    """
    pieces, n_group, ring = work.union(n_tokens), *pass_sizes(work, sharing)
    missing = missing_in_passes(work, sharing, n_tokens) - n_on_cpu
    on_device = 1.0 - n_on_cpu / np.maximum(pieces, 1e-12)
    n_pairs = n_tokens * work.n_used * on_device
    n_passes = 1.0 + missing / n_group + n_pairs / MOST_PAIRS
    # Gathering rows and writing results each read and write a row.
    moved_bytes = 4.0 * n_pairs * work.row_bytes
    compute_s = (
        on_device * computing_s(machine, work, n_tokens)
        + moved_bytes / machine.vram_bytes_per_s
        + n_passes * machine.per_pass_s
    )
    one_s = work.expert.size_bytes / machine.link_bytes_per_s
    copy_s = missing * one_s
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    is_ahead = pieces >= AHEAD_OF_ROUTER * work.n_experts
    ahead_s = np.where(is_ahead, np.minimum(dense_s, ring * one_s), 0.0)
    last_s = compute_s / n_passes  # the last group is computed after all copies
    n_launches = n_pairs / MOST_PAIRS
    host_s = missing * machine.per_copied_expert_s + n_launches * machine.per_launch_s
    begin_s = machine.per_passes_begin_s + n_launches * machine.per_launch_begin_s
    busy_s = np.maximum(np.maximum(copy_s - ahead_s + last_s, compute_s), host_s)
    return busy_s + begin_s + machine.per_batch_wait_s


def copying_s(machine: Machine, work: ModelWork, hits: Real, pieces: Real) -> Real:
    """Return the seconds of copying a layer's missing experts, if it uses `pieces` experts."""
    return (1.0 - hits) * pieces * work.expert.size_bytes / machine.link_bytes_per_s


def computing_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    return work.used(n_tokens).seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)


# -- attention --------------------------------------------------------------------------------


def attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    """Return the seconds of attention over the KV cache, where it is fastest.

    A cache in RAM is read by the CPU, or copied to the device for each batch.
    """
    on_device_s = device_attention_s(machine, work, n_tokens)
    if not np.any(work.n_ram_caches):
        return on_device_s
    in_ram_s = np.minimum(*ram_attention_s(machine, work, n_tokens))
    fastest_s: Real = np.where(np.asarray(work.n_ram_caches) > 0, in_ram_s, on_device_s)
    return fastest_s[()]


def ram_attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> tuple[Real, Real]:
    """Return the seconds of attention over a cache in RAM: on the CPU, and on the device.

    The CPU writes the new tokens in both cases. The device's seconds are infinite if only the
    CPU can attend, and the CPU's if it cannot.
    """
    cpu = machine.ram_bytes_per_s * _CACHE_SHARE, machine.cpu_flops * ATTENTION_SHARE
    switches_s = work.n_ram_caches * machine.per_switch_s
    copy_s = _exposed_copy_s(machine, work, n_tokens)
    on_device_s = copy_s + device_attention_s(machine, work, n_tokens) + switches_s
    on_cpu_s = work.context.seconds(*cpu, n_tokens) + switches_s
    if work.attends_on_cpu:
        on_device_s = np.full_like(on_device_s, np.inf)
    elif not machine.attends_in_ram:
        on_cpu_s = np.full_like(on_cpu_s, np.inf)
    return on_cpu_s, on_device_s


def _exposed_copy_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    """Return the seconds in which the device waits for copies of a cache in RAM.

    Each layer's cache is copied while the device computes the layer before: its dense weights and
    its attention. The link may copy experts during the rest of a layer. Nothing hides the first
    layer's copy. A worker's device waits for each layer's.
    """
    size_bytes, n = work.context.size_bytes, np.maximum(work.n_ram_caches, 1)
    if not machine.attends_in_ram:
        return work.cache_reads * size_bytes / machine.link_bytes_per_s
    layer_s = size_bytes / n / machine.link_bytes_per_s
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    hidden_s = (work.n_layers * dense_s + device_attention_s(machine, work, n_tokens)) / n
    return work.cache_reads * layer_s + (n - 1) * np.maximum(0.0, layer_s - hidden_s)


def device_attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    bytes_per_s = machine.vram_bytes_per_s * _CACHE_SHARE
    return work.context.seconds(bytes_per_s, machine.gpu_flops * ATTENTION_SHARE, n_tokens)


def attention_crossover(machine: Machine, work: ModelWork, most: int = 8192) -> int | None:
    """Return the fewest tokens of a batch whose attention the device computes, or None.

    `work` has a cache in RAM. The CPU's time grows with the tokens, and the copy's does not.
    """
    sizes = np.arange(1, most + 1)
    on_cpu_s, on_device_s = ram_attention_s(machine, work, sizes)
    faster = np.flatnonzero(np.broadcast_to(on_device_s < on_cpu_s, sizes.shape))
    return int(sizes[faster[0]]) if len(faster) else None
