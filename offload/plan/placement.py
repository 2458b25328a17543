"""Placement of weights: pure, from the model's header and a budget, before anything is loaded.

The routed experts lie in host memory and stream through slots; everything else is resident on the
device while it fits. What does not fit of the rest is streamed too, whole layers spread evenly over
the model: the dense path. Every choice carries its reason.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload.errors import DoesNotFit
from offload.model import ModelFacts, TensorEntry, is_experts, layer_of

_RING_LAYERS = 2  # layers of experts that the slots hold at least: one computes, one is copied
MARGIN_BYTES = 1 << 30  # llama.cpp's --fit-target
# Products whose weights may stream: read by MUL_MAT alone, at most once a graph.
_DENSE = re.compile(
    r"^blk\.\d+\.(attn_(q|k|v|qkv|output|q_a|q_b|kv_a_mqa|kv_b|k_b|v_b|gate)"
    r"|ffn_(up|down|gate|up_shexp|down_shexp|gate_shexp))\.weight$"
)

NCpuMoe = int | Literal["fit"] | None
Shape = tuple[str, int, int, int]  # type, row length, rows, matrices (0: experts, a slot is one)


@dataclass(frozen=True)
class ArenaPlan:
    """Slots for the weights of one shape and type."""

    shape: Shape
    slot_bytes: int
    n_slots: int
    n_pieces: int  # all that could ever be cached
    n_experts: int  # 0 for dense weights
    n_used: int  # experts a token uses

    @property
    def size_bytes(self) -> int:
        return self.n_slots * self.slot_bytes


@dataclass(frozen=True)
class Plan:
    """Which weights stream, and the slots they stream through."""

    streamed: tuple[TensorEntry, ...]
    resident_bytes: int
    arenas: tuple[ArenaPlan, ...]
    reasons: tuple[str, ...]

    @property
    def streamed_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.streamed)

    @property
    def slot_bytes(self) -> int:
        return sum(arena.size_bytes for arena in self.arenas)

    def patterns(self) -> tuple[str, ...]:
        """Regular expressions for libllama that match the streamed weights and nothing else."""
        return tuple(_patterns(self.streamed))


def shape_of(entry: TensorEntry) -> Shape:
    """The arena an entry streams through."""
    dims = (*entry.shape, 1, 1, 1)
    matrices = 0 if is_experts(entry) else dims[2]
    return entry.type, dims[0], dims[1], matrices


def make_plan(
    facts: ModelFacts,
    *,
    budget_bytes: int | None,
    reserve_bytes: int = 0,
    n_gpu_layers: int | None = None,
    n_cpu_moe: NCpuMoe = None,
    stream_experts: bool = True,
) -> Plan:
    """Decide for a device with `budget_bytes` for weights and slots (None: no limit).

    `reserve_bytes` of it go to the KV cache, compute buffers and a draft. `n_gpu_layers` keeps
    that many layers' dense weights resident and streams the rest. `n_cpu_moe` streams the experts
    of that many layers only; "fit" of as few as the budget makes necessary, so that below the
    min-batch threshold the device computes all others. Raises DoesNotFit when
    not even the smallest working set fits.
    """
    reasons: list[str] = []
    entries = [place.entry for place in facts.weights.values()]
    all_experts = [e for e in entries if is_experts(e)] if stream_experts else []
    experts, why_experts = _streamed_experts(
        facts, entries, all_experts, budget_bytes, reserve_bytes, n_cpu_moe
    )
    rest = sum(e.size_bytes for e in entries) - sum(e.size_bytes for e in experts)
    dense = _streamed_dense(facts, entries, experts, budget_bytes, reserve_bytes, n_gpu_layers)
    resident = rest - sum(e.size_bytes for e in dense)
    if why_experts:
        reasons.append(why_experts)
    if dense and n_gpu_layers is not None:
        n = len({layer_of(e.name) for e in dense})
        reasons.append(f"dense weights of {n} of {facts.n_layers} layers stream: --n-gpu-layers")
    elif dense:
        n = len({layer_of(e.name) for e in dense})
        reasons.append(
            f"dense weights of {n} of {facts.n_layers} layers stream: they exceed --vram"
        )
    streamed = (*dense, *experts)
    left = None if budget_bytes is None else budget_bytes - reserve_bytes - resident
    arenas, why = _arenas(streamed, facts, left)
    if why:
        reasons.append(why)
    return Plan(streamed, resident, arenas, tuple(reasons))


def _streamed_experts(
    facts: ModelFacts,
    entries: Sequence[TensorEntry],
    experts: list[TensorEntry],
    budget_bytes: int | None,
    reserve_bytes: int,
    n_cpu_moe: NCpuMoe,
) -> tuple[list[TensorEntry], str]:
    """The experts that stream, and why."""
    all_stream = f"{len(experts)} expert matrices stream: few of them serve each token"
    layers = sorted({layer_of(e.name) for e in experts})
    if not experts or n_cpu_moe is None or (n_cpu_moe == "fit" and budget_bytes is None):
        return experts, all_stream if experts else ""
    if n_cpu_moe != "fit":
        chosen = {layers[i] for i in spread(n_cpu_moe, len(layers))}
        streamed = [e for e in experts if layer_of(e.name) in chosen]
        return streamed, f"experts of {len(chosen)} of {len(layers)} layers stream: --n-cpu-moe"
    assert budget_bytes is not None
    total = sum(e.size_bytes for e in entries)
    per_layer = {i: sum(e.size_bytes for e in experts if layer_of(e.name) == i) for i in layers}
    for n in range(len(layers)):
        chosen = {layers[i] for i in spread(n, len(layers))}
        ring = _RING_LAYERS * max((per_layer[i] for i in chosen), default=0)
        if total - sum(per_layer[i] for i in chosen) + ring + reserve_bytes <= budget_bytes:
            streamed = [e for e in experts if layer_of(e.name) in chosen]
            if not streamed:
                return [], "nothing streams: the whole model fits the device"
            return streamed, (
                f"experts of {n} of {len(layers)} layers stream: the others fit the device"
            )
    return experts, all_stream


def _streamed_dense(
    facts: ModelFacts,
    entries: Sequence[TensorEntry],
    experts: Sequence[TensorEntry],
    budget_bytes: int | None,
    reserve_bytes: int,
    n_gpu_layers: int | None,
) -> list[TensorEntry]:
    candidates = [e for e in entries if _DENSE.match(e.name)]
    if n_gpu_layers is not None:
        asked = spread(facts.n_layers - n_gpu_layers, facts.n_layers)
        return [e for e in candidates if layer_of(e.name) in asked]
    if budget_bytes is None:
        return []
    rest = sum(e.size_bytes for e in entries) - sum(e.size_bytes for e in experts)
    least = _least_bytes(experts, facts)
    per_layer: dict[int, int] = defaultdict(int)
    for e in candidates:
        per_layer[layer_of(e.name)] += e.size_bytes
    streaming: frozenset[int] = frozenset()
    for n in range(facts.n_layers + 1):
        streaming = spread(n, facts.n_layers)
        resident = rest - sum(per_layer[layer] for layer in streaming)
        ring = 2 * max((per_layer[layer] for layer in streaming), default=0)
        if resident + reserve_bytes + least + ring <= budget_bytes:
            break
    return [e for e in candidates if layer_of(e.name) in streaming]


def spread(n: int, n_layers: int) -> frozenset[int]:
    """`n` of the layers, evenly over the model: the link then works while the others compute."""
    n = max(0, min(n, n_layers))
    return frozenset(i for i in range(n_layers) if (i + 1) * n // n_layers > i * n // n_layers)


def _least_bytes(experts: Sequence[TensorEntry], facts: ModelFacts) -> int:
    """The smallest working set of the experts: what one token uses of one layer."""
    slot = {shape_of(e): e.size_bytes // max(1, facts.n_experts) for e in experts}
    return sum(size * max(1, facts.n_experts_used) for size in slot.values())


def _arenas(
    streamed: Sequence[TensorEntry], facts: ModelFacts, budget_bytes: int | None
) -> tuple[tuple[ArenaPlan, ...], str]:
    by_shape: dict[Shape, list[TensorEntry]] = defaultdict(list)
    for entry in streamed:
        by_shape[shape_of(entry)].append(entry)
    full = [_full_arena(shape, entries, facts) for shape, entries in by_shape.items()]
    wanted = sum(arena.size_bytes for arena in full)
    if budget_bytes is None or wanted <= budget_bytes or not full:
        return tuple(full), ""
    least = {a.shape: _least_slots(a, by_shape[a.shape]) for a in full}
    floor = sum(least[a.shape] * a.slot_bytes for a in full)
    if floor > budget_bytes:
        raise DoesNotFit(
            f"{max(0, budget_bytes) / 2**20:.0f} MiB are left for slots, but the smallest working "
            f"set needs {floor / 2**20:.0f} MiB; raise --vram or lower --ctx-size"
        )
    # Everyone gets the least; what is left goes to the arenas by the bytes that stream through.
    share = (budget_bytes - floor) / max(1, wanted - floor)
    shrunk = []
    for a in full:
        n = least[a.shape] + int((a.n_slots - least[a.shape]) * share)
        shrunk.append(ArenaPlan(a.shape, a.slot_bytes, n, a.n_pieces, a.n_experts, a.n_used))
    held = sum(a.n_slots * a.slot_bytes for a in shrunk) / max(1, wanted)
    return tuple(shrunk), f"slots hold {held:.0%} of what streams: limited by --vram"


def _full_arena(shape: Shape, entries: Sequence[TensorEntry], facts: ModelFacts) -> ArenaPlan:
    n_experts = facts.n_experts if is_experts(entries[0]) else 0
    per_entry = max(1, n_experts)
    slot_bytes = entries[0].size_bytes // per_entry
    n = len(entries) * per_entry
    return ArenaPlan(shape, slot_bytes, n, n, n_experts, facts.n_experts_used)


def _least_slots(arena: ArenaPlan, entries: Sequence[TensorEntry]) -> int:
    """One cut's worth: a dense weight; or the experts that one token uses."""
    if not arena.n_experts:
        return min(arena.n_slots, 2 * max(Counter(layer_of(e.name) for e in entries).values()))
    return min(arena.n_slots, max(1, arena.n_used))


def _patterns(streamed: Sequence[TensorEntry]) -> list[str]:
    """One alternation per kind of weight, over the layers that stream."""
    layers: dict[str, list[int]] = defaultdict(list)
    for entry in streamed:
        layers[entry.name.split(".", 2)[2]].append(layer_of(entry.name))
    return [
        rf"^blk\.({'|'.join(map(str, sorted(numbers)))})\.{re.escape(kind)}$"
        for kind, numbers in layers.items()
    ]
