"""Decides whether a model's experts fit host memory, and limits them if they do not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offload.errors import DoesNotFit
from offload.model import ModelFacts, is_experts
from offload.plan.found import Found, Kind
from offload.plan.placement import Plan
from offload.plan.store_layout import expert_matrices, largest_experts, plan_layout
from offload.plan.wanted import Wanted
from offload.plan.working import working_memory
from offload.times.context_memory import (
    DEFAULT_UBATCH,
    ContextOptions,
    context_memory,
    host_input_bytes,
    mtp_context_bytes,
)

# Purposes of memory that is taken after loading. Others have names of their own.
CONTEXT, LOGITS, SLOTS, PINNED = "the context and its buffers", "logits", "slots", "pinned memory"
DRIVER, DRAFT_MODEL, ROUTERS, PROMPTS = "the driver", "a draft model", "routers", "kept prompts"
PROJECTOR = "a projector of images"
INPUTS = "inputs in pinned memory"
CACHE, ATTENTION = "the KV cache", "attention on the CPU"
PROMPT_PAIRS, SMALL_PAIRS = "pairs of prompts on the CPU", "pairs of small batches on the CPU"
DRIVER_BYTES = 128 << 20  # a GPU driver's pages for kernels and page tables; estimated
BOUNCE_BYTES = 64 << 20  # pinned memory through which weights are copied that cannot be pinned
# Memory that stays free if experts are read from the disk: a part of what was free, within bounds.
_MARGIN_PART, _LEAST_MARGIN_BYTES, _MOST_MARGIN_BYTES = 16, 64 << 20, 2 << 30


@dataclass(frozen=True)
class LaterBytes:
    """The host memory that this process takes after loading, by purpose.

    Calling it with the tokens of the largest batch returns the bytes. A context takes host memory
    unless a GPU computes, and libllama's CPU backend sizes its buffers by the batch.
    """

    kind: Kind
    fixed: tuple[tuple[str, int], ...]  # bytes of purposes that do not depend on the batch
    context: ContextOptions | None = None  # None: its memory is among `fixed`, or on a GPU
    most_ubatch: int = 0
    loads_mtp: bool = False
    facts: ModelFacts | None = field(default=None, compare=False, repr=False)

    def __call__(self, n_tokens: int) -> dict[str, int]:
        n_bytes, facts = dict(self.fixed), self.facts
        if facts is None or self.context is None:
            return n_bytes
        is_cpu = self.kind is Kind.CPU
        n_ubatch = min(n_tokens, self.most_ubatch) if is_cpu else self.context.n_ubatch
        context = replace(self.context, n_ubatch=n_ubatch)
        mtp_bytes = mtp_context_bytes(facts, context) if self.loads_mtp else 0
        context_bytes = context_memory(facts, context).total_bytes + mtp_bytes
        return n_bytes | {CONTEXT: context_bytes}

    def without(self, *purposes: str) -> LaterBytes:
        """Return the memory for all other purposes."""
        kept = tuple((name, size) for name, size in self.fixed if name not in purposes)
        return replace(self, fixed=kept)


def later_bytes(
    facts: ModelFacts, found: Found, wanted: Wanted, context: ContextOptions, *, loads_mtp: bool
) -> LaterBytes:
    """Return what the engine takes after loading. `facts` has the layers of this machine."""
    kind = found.devices[0].kind
    n_vocab = facts.header.lengths.get("tokenizer.ggml.tokens", 0)
    on_gpu = kind is Kind.GPU
    in_ram = not on_gpu if wanted.draft_device is None else found.draft_in_ram
    memory = context_memory(facts, context)
    fixed = {
        CACHE: memory.host_kv_bytes,
        ATTENTION: memory.host_compute_bytes,
        DRAFT_MODEL: wanted.reserve_bytes - wanted.projector_bytes if in_ram else 0,
        PROJECTOR: wanted.host_projector_bytes + (0 if on_gpu else wanted.projector_bytes),
        ROUTERS: router_bytes(facts) if wanted.prefetch else 0,
        LOGITS: 2 * 4 * n_vocab * context.n_outputs,  # libllama's rows, and our copy of them
    }
    if on_gpu:
        fixed |= {PINNED: BOUNCE_BYTES, DRIVER: DRIVER_BYTES}
        fixed[INPUTS] = host_input_bytes(facts, context)
    if kind.streams and wanted.hybrid:
        working = working_memory(facts, context.n_ubatch, splits=True)
        fixed |= {PROMPT_PAIRS: working.host_prompt_bytes, SMALL_PAIRS: working.host_small_bytes}
    most = max(context.n_ubatch, wanted.most_ubatch or 0)
    return LaterBytes(
        kind, tuple(fixed.items()), None if on_gpu else context, most, loads_mtp, facts
    )


@dataclass(frozen=True)
class ExpertLimits:
    """The host memory for streamed weights, if some experts are on the disk.

    They take at most `most_bytes`, and `free_bytes` of the machine stay free.
    """

    most_bytes: int
    others_bytes: int  # streamed weights that are always in memory
    # Margin for other programs, and mapped weights. It depends on what was free at the time.
    free_bytes: int = field(compare=False)
    later_bytes: LaterBytes

    def start_bytes(self, available_bytes: int, n_tokens: int) -> int:
        """Return the bytes for experts if `available_bytes` are free before anything is loaded.

        `n_tokens`: tokens of the largest batch for which memory is left.
        """
        left = available_bytes - self.free_bytes - sum(self.later_bytes(n_tokens).values())
        return min(max(0, self.most_bytes - self.others_bytes), max(0, left))


def too_little_words(
    most_bytes: int,
    others_bytes: int,
    free_bytes: int,
    later: Mapping[str, int],
    available_bytes: int | None,
    least_bytes: int,
) -> str:
    """Return the sentence that says why experts cannot take `least_bytes` at the start."""
    if available_bytes is None or most_bytes - others_bytes < least_bytes:
        return (
            f"streamed weights may take {_gib(most_bytes)} of memory, but "
            f"{_gib(least_bytes + others_bytes)} are needed for the experts of one layer "
            "and the weights that never leave; raise --ram"
        )
    needed = {
        "the experts of one layer": least_bytes,
        **{name: n for name, n in later.items() if n},
        "other programs and mapped weights": free_bytes,
    }
    parts = ", ".join(f"{_gib(n)} for {name}" for name, n in needed.items())
    return (
        f"{_gib(sum(needed.values()))} of memory are needed ({parts}), but "
        f"{_gib(available_bytes)} are free; free memory, raise the control group's limit, or "
        "lower --ctx-size, --ubatch-size or --parallel"
    )


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"


def limits_of_experts(
    facts: ModelFacts, plan: Plan, found: Found, wanted: Wanted, later: LaterBytes
) -> ExpertLimits | None:
    """Return the limits for the plan's experts, None if they all fit or stay in the page cache.

    Raises DoesNotFit if there is not even room for one layer's experts.
    """
    if wanted.keep_page_cache or not any(map(is_experts, plan.streamed)):
        return None
    kind = found.devices[0].kind
    dense_bytes = sum(e.size_bytes for e in plan.streamed if not is_experts(e))
    later = with_slots(later, plan, kind)
    available_bytes, streamed_bytes = found.ram_bytes, plan.streamed_bytes
    context_bytes = sum(later(DEFAULT_UBATCH).values())
    fits = streamed_bytes + mapped_bytes(plan, kind) + context_bytes <= available_bytes
    if fits and (wanted.ram_bytes is None or streamed_bytes <= wanted.ram_bytes):
        return None
    part_bytes = available_bytes // _MARGIN_PART
    margin_bytes = min(_MOST_MARGIN_BYTES, max(_LEAST_MARGIN_BYTES, part_bytes))
    limits = ExpertLimits(
        streamed_bytes if wanted.ram_bytes is None else wanted.ram_bytes,
        dense_bytes,
        margin_bytes + mapped_bytes(plan, kind),
        later.without(PROMPT_PAIRS),  # the CPU computes none if experts are on the disk
    )
    _check_room(facts, plan, limits, available_bytes)
    return limits


def with_slots(later: LaterBytes, plan: Plan, kind: Kind) -> LaterBytes:
    """Return `later` with slots that are host memory, and without pairs if no experts stream.

    All devices are simulated if one is. The warm-up then takes all of the slots' memory.
    """
    if not any(map(is_experts, plan.streamed)):
        later = later.without(PROMPT_PAIRS, SMALL_PAIRS)
    slot_bytes = plan.slot_bytes if kind is Kind.SIM else 0
    return replace(later, fixed=(*later.fixed, (SLOTS, slot_bytes)))


def mapped_bytes(plan: Plan, kind: Kind) -> int:
    """Return the resident weights that are mapped from the file, because no GPU has them.

    Tables that are looked up are not among them (offload/plan/tables.py).
    """
    return 0 if kind is Kind.GPU else plan.resident_bytes


def _check_room(facts: ModelFacts, plan: Plan, limits: ExpertLimits, available_bytes: int) -> None:
    """Raise DoesNotFit if one layer's experts do not fit the memory that is free."""
    streamed = [entry for entry in plan.streamed if is_experts(entry)]
    places = plan_layout(facts.weights[entry.name] for entry in plan.streamed)
    sizes = largest_experts(expert_matrices(places, streamed), facts.n_experts)
    least_bytes = facts.n_experts * max(sizes.values())
    if limits.start_bytes(available_bytes, DEFAULT_UBATCH) >= least_bytes:
        return
    words = too_little_words(
        limits.most_bytes, limits.others_bytes, limits.free_bytes,
        limits.later_bytes(DEFAULT_UBATCH), available_bytes, least_bytes,
    )  # fmt: skip
    raise DoesNotFit(words, least_bytes=least_bytes + limits.others_bytes)


def router_bytes(facts: ModelFacts) -> int:
    """Return the memory that copies of the routers take, which guess the next layers' experts."""
    names = (f"blk.{layer}.ffn_gate_inp.weight" for layer in facts.layers)
    entries = [facts.weights[name].entry for name in names if name in facts.weights]
    return sum(entry.size_bytes for entry in entries if entry.type == "f32")
