"""Models llama.cpp's own ways to run a mixture of experts on one GPU and the CPU. Pure.

All times come from the machine model that plans are made with, so that both are compared alike.
Each way has its best flags. No code of llama.cpp is run: docs/hybrid-model.md names what was read
of it, and what is assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from offload.model import ModelFacts
from offload.plan.sharing import SMALL_UBATCHES, UBATCHES
from offload.plan.weights import device_bytes
from offload.routing.routing import HitCurve
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.decodes import (
    computing_s,
    copying_s,
    cpu_s,
    dense_streamed_s,
    hybrid_s,
    layer_at_once_s,
    resident_s,
)
from offload.times.hits import Sharing, copied_hits
from offload.times.machine import Machine, Real
from offload.times.prompts import with_prompt
from offload.times.work import ModelWork, even, model_work

# The first builds with a cache of experts, and with a CPU share beside it (docs/hybrid-model.md).
CACHE_BUILD, CPU_SHARE_BUILD = "b11500", "b12569"
_ANY_BUILD = ""


@dataclass(frozen=True)
class LlamaSpeeds:
    """Modelled tokens/s of llama.cpp at its best flags, which differ between its ways.

    Each speed of answers is a pair: with experts that are used equally often, and with the hits
    that the plan assumes. Both are equal if hits were counted.
    """

    flags: str  # that place the experts of layers: "--n-cpu-moe 58"
    prefill_tps: float  # with `prompt_flags`
    decode_tps: float  # with `flags`
    cache_decode_tps: tuple[float, float] | None  # with its cache of experts; None: all are on it
    prompt_flags: str  # of the fastest prompts: "--n-cpu-moe 59 -ub 4096 -b 4096"
    # In forks whose card reads each missing expert over the link itself; None as above.
    read_decode_tps: tuple[float, float] | None
    cache_flags: str  # of `cache_decode_tps`, and perhaps a CPU share; "" without a cache
    build: str  # the first build with this cache; "" without a cache


class LlamaStart(NamedTuple):
    """A start of llama.cpp with one ubatch."""

    prompt_s: float
    left_bytes: int  # of the device memory, without the buffers of ubatches above the smallest
    n_ubatch: int
    resident: Sharing


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp with a model, `budget_bytes` of device memory, and a context."""

    facts: ModelFacts
    budget_bytes: int
    context: ContextOptions

    def expert_room_bytes(self, reserve_bytes: int = 0) -> int:
        """Return the device memory that llama.cpp has left for experts.

        All other weights, the context and `reserve_bytes` for a draft come first. The result is
        below 0 if these do not fit.
        """
        facts, context = self.facts, replace(self.context, n_ubatch=UBATCHES[0])
        others_bytes = device_bytes(facts) - facts.expert_bytes
        context_bytes = context_memory(facts, context).total_bytes
        return self.budget_bytes - context_bytes - others_bytes - reserve_bytes

    def n_cpu_moe(self, reserve_bytes: int = 0) -> Sharing:
        """Return `--n-cpu-moe`: as many layers' experts as fit are resident, without slots.

        If not even all other weights fit, the CPU computes those of some layers (`-ngl`).
        """
        work = model_work(self.facts)
        room_bytes = self.expert_room_bytes(reserve_bytes)
        n_layers = work.n_expert_layers
        if room_bytes < 0:
            n_dense = math.ceil(-room_bytes / max(1.0, work.dense.size_bytes))
            return Sharing(n_dense_streamed=min(n_dense, int(work.n_layers)))
        if not n_layers:
            return Sharing()
        return Sharing(0, min(n_layers, int(room_bytes // (self.facts.expert_bytes / n_layers))))

    def lru_cache(
        self, machine: Machine, work: ModelWork, n_tokens: int = 1, reserve_bytes: int = 0
    ) -> Sharing:
        """Return llama.cpp's cache of experts: some layers are resident, and slots take the rest.

        The number of resident layers is chosen for the fastest decode of `n_tokens`. `work` has the
        hits of an LRU cache.
        """
        return min(
            self._cache_ways(work, reserve_bytes),
            key=lambda sharing: copied_s(machine, work, sharing, n_tokens),
        )

    def cache_split(self, machine: Machine, work: ModelWork) -> Sharing:
        """Return the cache of experts with its share for the CPU, as its release note says.

        The device computes hits while the CPU computes misses or the link copies them. `work` has
        the hits of its cache. Its costs of submitting, waiting and merging are assumed to be those
        of split layers here. The number of resident layers is chosen for the fastest decode of a
        token.
        """
        ways = self._cache_ways(work, 0)
        return min(ways, key=lambda sharing: hybrid_s(machine, work, sharing, 1))

    def read_s(self, machine: Machine, work: ModelWork) -> float:
        """Return the seconds of a decode in forks whose card reads missing experts itself.

        Such a cache takes all experts, so no layers are resident (GenerelSchwerz/llama.cpp).
        """
        return float(read_by_device_s(machine, work, self._cache_ways(work, 0)[0], 1))

    def _cache_ways(self, work: ModelWork, reserve_bytes: int) -> list[Sharing]:
        """Return divisions of the room for experts between resident layers and slots."""
        all_that_fit = self.n_cpu_moe(reserve_bytes)
        n_pieces = int(max(0, self.expert_room_bytes(reserve_bytes)) // work.expert.size_bytes)
        return [
            Sharing(n_pieces - n * work.n_experts, n, all_that_fit.n_dense_streamed)
            for n in range(int(all_that_fit.n_resident) + 1)
        ]

    def cache_s(self, machine: Machine, work: ModelWork) -> float:
        """Return the seconds of a decode with llama.cpp's cache, with or without the CPU's share.

        The hits are those of `work`, and copies are as fast as from pinned memory.
        """
        lru, shared = self.lru_cache(machine, work), self.cache_split(machine, work)
        return float(
            min(
                copied_s(machine, work, lru, 1),
                hybrid_s(machine, work, shared, 1),
            )
        )

    def starts(self, machine: Machine, work: ModelWork, n_prompt: int) -> list[LlamaStart]:
        """Return a start with `--n-cpu-moe` for each ubatch.

        Copies are pinned, and `work` includes the prompt's attention. The buffers of 512 tokens
        count as part of the context. Those of larger ubatches take more of the budget.
        """
        starts = []
        sizes = [n for n in (*SMALL_UBATCHES, *UBATCHES) if n <= n_prompt] or [n_prompt]
        for n_ubatch in sizes:
            least_bytes, its_bytes = (
                context_memory(self.facts, replace(self.context, n_ubatch=n)).total_bytes
                for n in (UBATCHES[0], n_ubatch)
            )
            reserve_bytes = max(0, its_bytes - least_bytes)
            resident = self.n_cpu_moe(reserve_bytes)
            # Nothing is kept between ubatches, and copies hide behind nothing.
            ring = replace(resident, n_slots=work.n_experts)
            ubatch_s = min(
                float(copied_s(machine, work, ring, n_ubatch)),
                float(cpu_s(machine, work, resident, n_ubatch)),
            )
            seconds = n_prompt / n_ubatch * ubatch_s
            left_bytes = self.budget_bytes - reserve_bytes
            starts.append(LlamaStart(seconds, left_bytes, n_ubatch, resident))
        return starts


def copied_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of a decode whose missing experts are copied, and run on the device.

    A layer's experts are all copied before they are computed. Batches whose experts do not fit the
    slots are computed in chunks of tokens.
    """
    total = resident_s(machine, work, sharing, n_tokens)
    n_streamed = work.n_expert_layers - sharing.n_resident
    if np.any(n_streamed):
        layer_s = layer_at_once_s(machine, work, sharing, n_tokens)
        in_chunks = np.minimum(work.n_experts, n_tokens * work.n_used) > sharing.n_slots
        if np.any(in_chunks):
            chunks_s = _in_chunks_s(machine, work, sharing, n_tokens)
            layer_s = np.where(in_chunks, chunks_s, layer_s)
        total = total + n_streamed * layer_s
    return total + dense_streamed_s(machine, work, sharing, n_tokens)


def read_by_device_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None = None
) -> Real:
    """Return the seconds of a decode whose missing experts the device itself reads over the link.

    The experts are in pinned memory. No host waits for a router, so the decode is one captured
    graph. `hits`: share of the uses that have a slot; None: it is estimated.
    """
    pieces = work.union(n_tokens)
    if hits is None:
        hits = copied_hits(work, sharing, pieces)
    n_streamed = work.n_expert_layers - sharing.n_resident
    layer_s = copying_s(machine, work, hits, pieces) + computing_s(machine, work, n_tokens)
    return resident_s(machine, work, sharing, n_tokens) + n_streamed * layer_s


def _in_chunks_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of one layer's streamed experts in chunks of tokens.

    The experts of each chunk's tokens fit the slots at once, and are copied for each chunk.
    """
    n_chunk = np.maximum(1, sharing.n_slots // max(1, work.n_used))
    whole, rest = np.divmod(n_tokens, n_chunk)
    seconds = machine.per_wait_s
    for n_chunks, n in ((whole, n_chunk), (rest > 0, rest)):
        pieces = work.union(n)
        copy_s = copying_s(machine, work, copied_hits(work, sharing, pieces), pieces)
        seconds = seconds + n_chunks * (copy_s + computing_s(machine, work, n))
    return seconds


def llama_speeds(
    llama: LlamaCpp, machine: Machine, n_prompt: int, hits: HitCurve | None = None
) -> LlamaSpeeds:
    """Return the speeds of llama.cpp with this device memory and context, without drafts.

    Answers attend to nothing, and prompts of `n_prompt` tokens to themselves.
    """
    facts = llama.facts
    guessed = model_work(facts, hits)
    prompt_work = with_prompt(guessed, facts, llama.context, n_prompt)
    resident = llama.n_cpu_moe()
    works = (guessed if hits is not None else even(guessed), guessed)
    in_cache = read = None
    if resident.n_resident < guessed.n_expert_layers:
        least, most = (1 / llama.cache_s(machine, of_hits) for of_hits in works)
        in_cache = least, most
        read = 1 / llama.read_s(machine, works[0]), 1 / llama.read_s(machine, works[1])
    start = min(llama.starts(machine, prompt_work, n_prompt), key=lambda one: one.prompt_s)
    ubatch = f"-ub {start.n_ubatch} -b {start.n_ubatch}"
    cache_flags, build = "", _ANY_BUILD
    if in_cache is not None:
        cache_flags, build = _cache_flags(llama, machine, guessed)
    return LlamaSpeeds(
        _flags(facts, guessed, resident),
        n_prompt / start.prompt_s,
        1 / float(cpu_s(machine, guessed, resident, 1)),
        in_cache,
        f"{_flags(facts, guessed, start.resident)} {ubatch}",
        read,
        cache_flags,
        build,
    )


def _cache_flags(llama: LlamaCpp, machine: Machine, work: ModelWork) -> tuple[str, str]:
    """Return the flags of the faster cache, and the build: all misses copied, or a CPU share."""
    lru, shared = llama.lru_cache(machine, work), llama.cache_split(machine, work)
    splits = hybrid_s(machine, work, shared, 1) < copied_s(machine, work, lru, 1)
    chosen = shared if splits else lru
    mib = int(chosen.n_slots * work.expert.size_bytes) >> 20
    flags = f"{_flags(llama.facts, work, chosen)} --moe-cache-mib {mib}"
    return flags, CPU_SHARE_BUILD if splits else CACHE_BUILD


def _flags(facts: ModelFacts, work: ModelWork, resident: Sharing) -> str:
    n_in_ram = int(work.n_expert_layers - resident.n_resident)
    words = [f"--n-cpu-moe {n_in_ram}"] if n_in_ram else []
    if resident.n_dense_streamed:
        words.append(f"-ngl {max(0, facts.n_layers - int(resident.n_dense_streamed))}")
    return " ".join(words) or "-ngl 99"
