"""The time of one layer whose experts stream, in each way to compute it. Pure."""

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


def beside_s(machine: Machine, work: ModelWork, its: LayerDivision, rows: Real) -> Real:
    """Return the seconds of the CPU's part of a layer, or of reading all misses from RAM."""
    missing_bytes = (its.over_link + its.on_cpu) * work.expert.size_bytes
    return np.maximum(
        its.on_cpu * work.expert.cpu_seconds(machine, rows),
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
