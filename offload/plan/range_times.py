"""Estimates the seconds that a device takes for every range of a model's layers at once. Pure.

Each range gets the times of its best way (`best_way`), as a whole model does. Fewer numbers of
layers are tried than for a whole model (`choose_sharing`). Sizes are sums over the range's layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.model import ModelFacts, is_experts, layer_of
from offload.plan.candidates import Candidates, SlotSizes, candidates, ring_slots
from offload.plan.context import DEFAULT_UBATCH, context_memory, layer_context_bytes
from offload.plan.machine import (
    TYPICAL,
    Machine,
    ModelWork,
    Part,
    Sharing,
    cpu_s,
    model_work,
    streamed_s,
)
from offload.plan.objective import Objective
from offload.plan.placement import DENSE, PlanRequest
from offload.plan.row_draft import plan_mtp
from offload.plan.sharing import Weights, best_way, device_bytes, spread

_TIE = 1e-6  # share of the streamed bytes' link time, added to prefer less streaming in ties
_STEPS = 12  # even steps between the numbers of resident layers that are tried for a range
_DENSE_STEPS = 4  # even steps between the tried numbers of layers with streamed dense weights

Array = NDArray[np.float64]


@dataclass(frozen=True)
class DeviceRoom:
    """A device that may compute layers."""

    name: str
    budget_bytes: int | None = None  # memory that the plan may use; None: no limit
    machine: Machine = TYPICAL  # the device's rates; its link's rate while the other links copy too
    is_counted: bool = True  # False: the context and other models are not part of the budget
    is_remote: bool = False  # True: all its weights are resident, and activations cross its link


def ubatches(
    facts: ModelFacts, devices: Sequence[DeviceRoom], request: PlanRequest
) -> tuple[int, ...]:
    """Return the sizes of ubatches to choose from. All devices use the same size."""
    if request.tuned_ubatch is None and not any(device.is_counted for device in devices):
        return (DEFAULT_UBATCH,)
    return request.ubatches(has_experts=request.stream_experts and bool(facts.expert_weights))


def hand_over_s(
    facts: ModelFacts, device: DeviceRoom, request: PlanRequest, n_ubatch: int, *, is_first: bool
) -> tuple[float, float]:
    """Return the seconds to hand over activations: for the prompt, and for all generated tokens.

    Each device but the first gets activations from the device before it. For a remote device, even
    the first one, activations cross the link twice: to the device, and back.
    """
    n_times = 2 if device.is_remote else int(not is_first)
    work, machine = request.workload, device.machine
    row_s = 4 * facts.number("embedding_length") / machine.link_bytes_per_s
    n_decodes = work.n_generated / work.n_batch
    prompt_s = math.ceil(work.n_prompt / n_ubatch) * machine.per_switch_s + work.n_prompt * row_s
    decode_s = n_decodes * machine.per_switch_s + work.n_generated * row_s
    return n_times * prompt_s, n_times * decode_s


@dataclass(frozen=True)
class Stages:
    """Expected seconds of ranges of layers on a device, infinite if they do not fit.

    The last device's arrays are indexed by the range's first layer. The arrays of other devices are
    indexed by the range's first layer and its end.
    """

    prompt_s: Array
    decode_s: Array
    tie_s: Array  # seconds that decide between equal times; 0 if no weights stream
    overlaps: NDArray[np.bool_]  # True if the device, and not the CPU, computes whole ubatches

    def handed(self, prompt_s: float, decode_s: float, first: int) -> Stages:
        """Return the stages with hand-over seconds added to ranges from layer `first` on."""
        n = len(self.prompt_s)
        is_handed = (np.arange(n) >= first).reshape(n, *[1] * (self.prompt_s.ndim - 1))
        return replace(
            self,
            prompt_s=self.prompt_s + prompt_s * is_handed,
            decode_s=self.decode_s + decode_s * is_handed,
        )


class RangeTimes:
    """The expected seconds of the ranges of a model's layers."""

    def __init__(self, facts: ModelFacts, request: PlanRequest) -> None:
        self._facts, self._request = facts, request
        self._n = n = facts.n_layers
        experts = [e for e in facts.loaded if is_experts(e)] if request.stream_experts else []
        dense = [e for e in facts.loaded if DENSE.match(e.name)]
        self._weights = Weights(facts, experts, dense)
        self._objective = Objective(request.workload, request.plan_for_splits, shares_prompts=False)
        self._work = model_work(facts, request.hits if request.plan_for_splits else None)
        self._outside_bytes = device_bytes(facts)
        # For each layer, the arrays have the sum over all layers before it.
        held, expert, loose, other_n, expert_n = np.zeros((5, n + 1))
        for entry in facts.loaded:
            if (i := layer_of(entry.name) + 1) > 0:
                held[i] += entry.size_bytes
                n_weights = math.prod(entry.shape) if len(entry.shape) > 1 else 0
                (expert_n if is_experts(entry) else other_n)[i] += n_weights
        for entries, sizes in ((experts, expert), (dense, loose)):
            for entry in entries:
                sizes[layer_of(entry.name) + 1] += entry.size_bytes
        self._outside_bytes -= round(held.sum())
        has_experts = expert > 0
        n_cpu_moe = request.n_cpu_moe
        in_ram = has_experts
        if isinstance(n_cpu_moe, int):
            layers = np.flatnonzero(has_experts)
            in_ram = np.zeros(n + 1, bool)
            in_ram[layers[sorted(spread(n_cpu_moe, len(layers)))]] = True
        n_dense = 0 if request.n_gpu_layers is None else n - request.n_gpu_layers
        is_dense = np.isin(np.arange(n + 1) - 1, sorted(spread(n_dense, n)))
        self._held, self._expert, self._loose = map(np.cumsum, (held, expert, loose))
        self._expert_n, self._other_n = np.cumsum(expert_n), np.cumsum(other_n)
        self._n_expert, self._in_ram = np.cumsum(has_experts), np.cumsum(in_ram)
        self._n_dense = np.cumsum(is_dense)
        layout = self._weights.layout
        in_pool = np.zeros((len(layout.pools), n + 1))
        for group in layout.groups:
            in_pool[group.pool, group.layer + 1] += 1
        self._in_pool = np.cumsum(in_pool, axis=1)
        self._mtp_bytes = 0
        if request.context is not None and request.mtp:
            mtp = plan_mtp(facts, request.context, None)
            self._mtp_bytes = mtp.weight_bytes + mtp.context_bytes
        self._contexts: dict[tuple[int, bool], tuple[Array, int]] = {}
        self._known: dict[tuple[object, ...], Stages] = {}

    def stages(
        self, device: DeviceRoom, room: int | None, n_ubatch: int, *, is_last: bool, is_first: bool
    ) -> Stages:
        """Return the stages of all ranges that this device may have.

        `room`: bytes of device memory, None for no limit. Ranges of the first device begin with
        layer 0. Ranges of the last device end with the model.
        """
        n, is_first = self._n, is_first and not is_last
        key = (device.machine, device.is_counted, device.is_remote, room, n_ubatch, is_last,
               is_first)  # fmt: skip
        if key not in self._known:
            if is_last:
                first, end = np.arange(n), np.full(n, n)
            elif is_first:
                first, end = np.zeros(n - 1, int), np.arange(1, n)
            else:
                first, end = np.triu_indices(n, 1)
            its = self._estimate(device, room, n_ubatch, first, end, is_last=is_last)
            if not is_last:
                in_square = [np.full((n + 1, n + 1), np.inf) for _ in its]
                for square, values in zip(in_square, its, strict=True):
                    square[first, end] = values
                its = in_square
            prompt_s, decode_s, tie_s, overlaps = its
            self._known[key] = Stages(prompt_s, decode_s, tie_s, overlaps > 0)
        return self._known[key]

    def _estimate(
        self, device: DeviceRoom, room: int | None, n_ubatch: int, first: NDArray[np.int64],
        end: NDArray[np.int64], *, is_last: bool,
    ) -> list[Array]:  # fmt: skip
        """Return the fields of `Stages` for these ranges, each with its fastest plan."""
        work = self._work_of(first, end, is_last=is_last)
        found = self._ways(device, room, n_ubatch, work, first, end, is_last=is_last)
        sharing, fits = found.sharing, found.fits
        seconds_of = self._objective.seconds(device.machine, work, sharing, n_ubatch)
        which = best_way(found, seconds_of, n_ubatch, fits)[:, None]
        tie_s = _TIE * found.streamed_bytes / device.machine.link_bytes_per_s
        decode_s = seconds_of.n_decodes * seconds_of.mean_decode_s
        n_slots, resident, n_dense, its_fit, tie_s, prompt_s, decode_s = (
            np.take_along_axis(np.broadcast_to(values, fits.shape), which, 1)
            for values in (
                sharing.n_slots, sharing.n_resident, sharing.n_dense_streamed, fits, tie_s,
                seconds_of.prompt_s, decode_s,
            )
        )  # fmt: skip
        chosen = Sharing(n_slots, resident, n_dense)
        on_device_s, on_cpu_s = (
            seconds(device.machine, work, chosen, n_ubatch) for seconds in (streamed_s, cpu_s)
        )
        overlaps = (tie_s == 0) | (on_device_s <= on_cpu_s)
        return [
            np.where(its_fit, values, np.inf)[:, 0] for values in (prompt_s, decode_s, tie_s)
        ] + [overlaps[:, 0].astype(float)]

    def _work_of(
        self, first: NDArray[np.int64], end: NDArray[np.int64], *, is_last: bool
    ) -> ModelWork:
        """Return the work of all ranges, as arrays with a row for each range."""
        between = partial(_between, first, end)
        whole = self._work
        n_layers, n = between(np.arange(self._n + 1.0)), between(self._n_expert)
        expert_bytes = between(self._expert)
        dense = Part((between(self._held) - expert_bytes) / n_layers,
                     between(self._other_n) / n_layers)  # fmt: skip
        pieces = np.maximum(n * whole.n_experts, 1)
        expert = Part(
            np.where(n > 0, expert_bytes / pieces, whole.expert.size_bytes),
            np.where(n > 0, between(self._expert_n) / pieces, whole.expert.n_weights),
        )
        return replace(
            whole, n_layers=n_layers, n_expert_layers=n, dense=dense, expert=expert,
            head=whole.head if is_last else Part(),
        )  # fmt: skip

    def _ways(
        self, device: DeviceRoom, room: int | None, n_ubatch: int, work: ModelWork,
        first: NDArray[np.int64], end: NDArray[np.int64], *, is_last: bool,
    ) -> Candidates:  # fmt: skip
        """Return the ways to use the device's memory, with a row for each range of layers."""
        between = partial(_between, first, end)
        request, n, n_layers = self._request, work.n_expert_layers, work.n_layers
        expert_bytes, loose = between(self._expert), between(self._loose) / n_layers
        mean = expert_bytes / np.maximum(n, 1)
        may_choose = request.n_cpu_moe == "fit" and not device.is_remote
        n_dense_asked = between(self._n_dense)
        fewest = np.zeros_like(n) if may_choose else n - between(self._in_ram)
        if device.is_remote:
            fewest, n_dense_asked = n, np.zeros_like(n)
        if room is None:
            sharing = Sharing((n - fewest) * self._facts.n_experts, fewest, n_dense_asked)
            streamed_bytes = (n - fewest) * mean + n_dense_asked * loose
            return Candidates(sharing, np.ones(n.shape, bool), streamed_bytes)
        cached, buffers = self._context_of(n_ubatch, is_last=is_last)
        held_bytes = between(self._held) + (self._outside_bytes + self._mtp_bytes if is_last else 0)
        room_bytes = room - ((between(cached) + buffers) if device.is_counted else 0)
        left = room_bytes - held_bytes + expert_bytes  # if all experts and no dense weights stream
        sizes, ring_dense = self._slot_sizes(first, end), self._weights.dense_ring_bytes
        resident, n_dense = fewest, n_dense_asked
        if may_choose:  # 0 to the most that leave room for slots, then all but one, then all
            spare = left + n_dense * loose - np.where(n_dense > 0, ring_dense, 0) - sizes.least
            most = np.clip(spare // np.maximum(mean, 1.0), 0, n)
            steps = np.arange(_STEPS + 1) / _STEPS
            resident = np.concatenate([np.round(most * steps), np.maximum(n - 1, 0), n], axis=1)
        n_dense = np.broadcast_to(n_dense, resident.shape)
        if request.n_gpu_layers is None and not device.is_remote:
            held = left - fewest * mean - ring_dense  # bytes left beside a ring of dense weights
            least, with_ring = (
                np.clip(np.ceil((needed - held) / np.maximum(loose, 1.0)), 1, n_layers)
                for needed in (np.where(n > fewest, size, 0) for size in (sizes.least, sizes.ring))
            )
            steps = np.arange(1, _DENSE_STEPS + 1) / _DENSE_STEPS
            more = np.round(least + (n_layers - least) * steps)
            dense = np.concatenate([least, least + 1, with_ring, more], axis=1)
            dense = np.minimum(dense, n_layers)
            n_dense = np.concatenate([n_dense, dense], axis=1)
            resident = np.concatenate([resident, np.broadcast_to(fewest, dense.shape)], axis=1)
        return candidates(
            room_bytes, held_bytes, Sharing(0, resident, n_dense), n - resident,
            (n - resident) * mean, n_dense * loose, sizes, dense_ring_bytes=ring_dense,
        )  # fmt: skip

    def _slot_sizes(self, first: NDArray[np.int64], end: NDArray[np.int64]) -> SlotSizes:
        """Return the bytes of slots for all ranges, as arrays with a row for each range."""
        pools = self._weights.layout.pools
        least, ring, row, size, n_groups = np.zeros((5, len(first), 1))
        for pool, sums in zip(pools, self._in_pool, strict=True):
            n_here = (sums[end] - sums[first])[:, None]
            one = (n_here > 0) * pool.slot_bytes
            most = np.minimum(n_here * pool.n_experts, ring_slots(pool))
            least += one * max(1, pool.n_used)
            ring += most * pool.slot_bytes
            row += one
            size += n_here * pool.slot_bytes
            n_groups += n_here
        n_experts = max(1, pools[0].n_experts) if pools else 0
        return SlotSizes(least, ring, row, size / np.maximum(n_groups, 1), n_experts)

    def _context_of(self, n_ubatch: int, *, is_last: bool) -> tuple[Array, int]:
        """Return the cache bytes of all layers before each layer, and the bytes of buffers."""
        if self._request.context is None:
            return np.zeros(self._n + 1), 0
        if (n_ubatch, is_last) not in self._contexts:
            spec = replace(self._request.context, n_ubatch=n_ubatch)
            facts = self._facts if is_last else self._facts.part(0, self._n)
            cached = [0, *accumulate(layer_context_bytes(self._facts, spec))]
            memory = context_memory(facts, spec)
            self._contexts[n_ubatch, is_last] = (
                np.array(cached, float), memory.compute_bytes + memory.pool_bytes
            )  # fmt: skip
        return self._contexts[n_ubatch, is_last]


def _between(first: NDArray[np.int64], end: NDArray[np.int64], sums: NDArray[Any]) -> NDArray[Any]:
    """Return a column with each range's sum, from `sums` over all layers before a layer."""
    found: NDArray[Any] = (sums[end] - sums[first])[:, None]
    return found
