"""Times of decodes and prompts in ways of other programs that this program does not have. Pure.

`offload.plan.llama_cpp` has the ways with which `plan` compares itself.
"""

from __future__ import annotations

import numpy as np

from offload.times.decodes import computing_s, copying_s, resident_s
from offload.times.hits import Sharing, expected_hits
from offload.times.machine import Machine, Real
from offload.times.work import ModelWork


def misses_on_cpu_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None = None
) -> Real:
    """Return the seconds of a decode whose missing experts the CPU computes.

    The device computes the others before or after that, and never at the same time. `hits`:
    share of the uses that have a slot; None: it is estimated.
    """
    pieces = work.union(n_tokens)
    if hits is None:
        hits = expected_hits(work, sharing, pieces)
    rows = n_tokens * work.n_used / pieces
    missed_s = (1.0 - hits) * pieces * work.expert.cpu_seconds(machine, rows)
    layer_s = missed_s + hits * computing_s(machine, work, n_tokens) + machine.per_switch_s
    n_streamed = work.n_expert_layers - sharing.n_resident
    return resident_s(machine, work, sharing, n_tokens) + n_streamed * layer_s


def copied_ahead_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of a prompt's ubatch whose experts are copied during the layer before."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    copy_s = copying_s(machine, work, 0.0, work.union(n_tokens))
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    compute_s = computing_s(machine, work, n_tokens)
    layer_s = np.maximum(copy_s - dense_s, compute_s)
    return resident_s(machine, work, sharing, n_tokens) + n_streamed * layer_s
