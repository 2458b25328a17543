"""Estimates the seconds that a device takes for every range of a model's layers at once. Pure.

Each range has the same ways as a whole model (`offload/plan/candidates.py`), and gets the times of
the best one by the same rule (`best_way`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from offload.model import ModelFacts
from offload.plan.candidates import candidates
from offload.plan.found import DeviceRoom
from offload.plan.placement import PlannedModel, PlanRequest
from offload.plan.row_draft import plan_mtp
from offload.plan.sharing import best_way
from offload.plan.weights import LayerSums, Parts
from offload.times.context_memory import (
    DEFAULT_UBATCH,
    ContextOptions,
    caching_layers,
    context_memory,
    layer_attention_work,
    layer_context_bytes,
)
from offload.times.decodes import cpu_s, streamed_s
from offload.times.hits import Sharing
from offload.times.prompts import prompt_context
from offload.times.work import WeightWork

_TIE = 1e-6  # share of the streamed bytes' link time, added to prefer less streaming in ties
_NO_LIMIT = 2.0**60  # bytes of device memory without a limit

Floats = NDArray[np.float64]


def ubatches(devices: Sequence[DeviceRoom], request: PlanRequest) -> tuple[int, ...]:
    """Return the sizes of ubatches to choose from. All devices use the same size."""
    if request.tuned_ubatch is None and not any(device.is_counted for device in devices):
        return (DEFAULT_UBATCH,)
    return request.ubatches


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

    prompt_s: Floats
    decode_s: Floats
    tie_s: Floats  # seconds that decide between equal times; 0 if no weights stream
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
        self._n, self._model = facts.n_layers, PlannedModel(facts, request)
        self._mtp_bytes = 0
        if request.context is not None and request.mtp:
            mtp = plan_mtp(facts, request.context, None)
            self._mtp_bytes = mtp.weight_bytes + mtp.context_bytes
        # The prompt's attention in all layers together.
        self._prompt_work = self._model.prompt_work(request)
        spec = prompt_context(request.context or ContextOptions(), request.workload.n_prompt)
        # Each layer's share of the bytes and of the multiplications of the prompt's attention.
        attention = np.array(layer_attention_work(facts, spec), float).T
        shares = attention / np.maximum(attention.sum(axis=1, keepdims=True), 1.0)
        self._attention = [LayerSums(of_layers) for of_layers in shares]
        in_ram = self._prompt_work.n_ram_caches > 0
        self._ram_caches = LayerSums(np.array(caching_layers(facts), float) * in_ram)
        self._contexts: dict[tuple[int, bool], tuple[LayerSums, int]] = {}
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
            estimate = partial(self._estimate, device, room, n_ubatch)
            if is_last:  # all layers are on this device alone if its range begins with layer 0
                whole = estimate(np.zeros(1, int), np.full(1, n), is_last=True, is_alone=True)
                others = estimate(np.arange(1, n), np.full(n - 1, n), is_last=True)
                squares = [np.concatenate(both) for both in zip(whole, others, strict=True)]
            else:
                first, end = np.triu_indices(n, 1)
                if is_first:
                    first, end = np.zeros(n - 1, int), np.arange(1, n)
                squares = [np.full((n + 1, n + 1), np.inf) for _ in range(4)]
                for square, values in zip(squares, estimate(first, end), strict=True):
                    square[first, end] = values
            prompt_s, decode_s, tie_s, overlaps = squares
            self._known[key] = Stages(prompt_s, decode_s, tie_s, overlaps > 0)
        return self._known[key]

    def _estimate(
        self, device: DeviceRoom, room: int | None, n_ubatch: int, first: NDArray[np.int64],
        end: NDArray[np.int64], *, is_last: bool = False, is_alone: bool = False,
    ) -> list[Floats]:  # fmt: skip
        """Return the fields of `Stages` for these ranges, each with its fastest plan.

        `is_alone`: no other device computes a prompt's ubatch at the same time.
        """
        if not len(first):
            return [np.zeros(0)] * 4
        request, weights = self._request, self._model.weights
        outside_bytes = weights.outside_bytes + self._mtp_bytes if is_last else 0
        parts = Parts(weights, first[:, None], end[:, None], outside_bytes)
        if device.is_remote:  # all weights are resident
            request = replace(request, n_cpu_moe=0, n_gpu_layers=self._n)
        limits, room_bytes = request.limits(parts), np.full(parts.first.shape, _NO_LIMIT)
        if room is None:
            limits = limits.fewest
        else:
            room_bytes = room - self._context_bytes(parts, n_ubatch, is_last) * device.is_counted
        works_bytes = 0
        if room is not None and device.is_counted:
            works_bytes = request.working_of(self._facts, n_ubatch).device_bytes
        lent_bytes = 0
        if is_alone and room is not None and not device.not_lent_reason:
            lent_bytes = request.lent_bytes(self._facts, n_ubatch)
        choices = candidates(parts, limits, room_bytes, works_bytes, lent_bytes)
        sharing, fits = choices.sharing, choices.fits
        work = self._model.layers_work.of(parts.first, parts.end, has_head=is_last)
        prompt_work = replace(
            work,
            context=self._attention_of(parts),
            n_ram_caches=parts.total(self._ram_caches),
            cache_reads=self._prompt_work.cache_reads,
            attends_on_cpu=self._prompt_work.attends_on_cpu,
        )
        objective = replace(request.objective, shares_prompts=is_alone)
        seconds_of = objective.seconds(
            device.machine, work, sharing, n_ubatch, prompt_work=prompt_work
        )
        which = best_way(choices, seconds_of, n_ubatch, fits)[:, None]
        tie_s = _TIE * choices.streamed_bytes / device.machine.link_bytes_per_s
        decode_s = seconds_of.n_decodes * seconds_of.mean_decode_s + seconds_of.refill_s
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

    def _attention_of(self, parts: Parts) -> WeightWork:
        """Return the prompt's attention in the layers of each range."""
        whole, (of_bytes, of_work) = self._prompt_work.context, map(parts.total, self._attention)
        return WeightWork(whole.size_bytes * of_bytes, whole.n_weights * of_work)

    def _context_bytes(self, parts: Parts, n_ubatch: int, is_last: bool) -> Floats:
        """Return the bytes of each range's caches and buffers."""
        if self._request.context is None:
            return np.zeros(parts.first.shape)
        if (n_ubatch, is_last) not in self._contexts:
            spec = replace(self._request.context, n_ubatch=n_ubatch)
            facts = self._facts if is_last else self._facts.part(0, self._n)
            memory = context_memory(facts, spec)
            cached = LayerSums(np.array(layer_context_bytes(self._facts, spec)))
            self._contexts[n_ubatch, is_last] = cached, memory.compute_bytes + memory.pool_bytes
        cached, buffer_bytes = self._contexts[n_ubatch, is_last]
        return parts.total(cached) + buffer_bytes
