"""Chooses whether the KV cache is in device memory or in RAM. Pure.

A cache in RAM leaves device memory to experts, but attention over it takes longer. Both plans are
compared by a request at the end of a full context, where attention takes longest. A cache in RAM
that wins there wins with every shorter text, too. Slots save as much time there, and attention
takes less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.model import ModelFacts
from offload.plan.devices import DevicePlan, Division
from offload.plan.placement import PlannedModel
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.disk import DiskUse
from offload.times.prompts import with_prompt
from offload.times.work import with_context
from offload.units import size_words


@dataclass(frozen=True)
class CachePlace:
    """A division with the context that it was made for, and why its cache is in RAM, or ""."""

    division: Division
    context: ContextOptions
    reason: str = ""


def full_context_s(division: Division, context: ContextOptions) -> float:
    """Return the expected seconds of the planned workload at the end of a full context."""
    streamed_bytes = sum(part.plan.streamed_bytes for part in division.parts)
    parts = tuple(_timed(part, context, streamed_bytes) for part in division.parts)
    return replace(division, parts=parts).expected_s


def _timed(part: DevicePlan, context: ContextOptions, streamed_bytes: int) -> DevicePlan:
    """Return the part with its seconds at the end of the context, without hand-overs.

    `streamed_bytes` are those of all parts, which share the RAM.
    """
    request, facts, plan = part.request, part.facts, part.plan
    n_prompt = request.workload.n_prompt
    work = PlannedModel(facts, request).work
    disk = None
    if request.host_bytes is not None and streamed_bytes > request.host_bytes:
        share_bytes = request.host_bytes * plan.streamed_bytes // streamed_bytes
        rate = request.machine.disk_bytes_per_s
        disk = DiskUse(work, plan.sharing, max(0, share_bytes), rate)
    before = max(0, context.n_ctx - n_prompt)
    seconds = request.objective.seconds(
        request.machine, with_context(work, facts, context), plan.sharing, plan.n_ubatch,
        prompt_work=with_prompt(work, facts, context, n_prompt, before), disk=disk,
    )  # fmt: skip
    decode_s = seconds.n_decodes * float(seconds.mean_decode_s)
    return replace(part, prompt_s=float(seconds.prompt_s), decode_s=decode_s)


def faster_place(facts: ModelFacts, on_device: CachePlace | None, in_ram: CachePlace) -> CachePlace:
    """Return the faster place of the cache. `on_device`: None if that does not fit the device.

    Returns `on_device` if both take equally long.
    """
    size = size_words(context_memory(facts, in_ram.context).host_kv_bytes)
    what = f"The KV cache ({size} for {in_ram.context.n_ctx:,} tokens) is in RAM"
    if on_device is None:
        return replace(in_ram, reason=f"{what}, because it does not fit the GPU (--kv-offload)")
    there_s = full_context_s(on_device.division, on_device.context)
    here_s = full_context_s(in_ram.division, in_ram.context)
    if here_s >= there_s:
        return on_device
    return replace(
        in_ram,
        reason=f"{what}: at the end of a full context, a prompt and an answer then take "
        f"{1 - here_s / there_s:.0%} less time (estimate; --kv-offload)",
    )
