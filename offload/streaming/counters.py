"""Proof that the copy path ran: one counter for each thing it can do."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class StreamCounters:
    """Counts of what streaming did since the engine was opened."""

    graphs: int = 0
    cuts: int = 0
    chunks: int = 0  # chunks of tokens whose experts fitted the slots
    bands: int = 0  # cuts whose nodes were shown some of the slots, not all
    copies: int = 0
    streamed_bytes: int = 0
    bounced_bytes: int = 0  # copied bytes that went through a ring of pinned memory
    streamed_experts: int = 0
    router_reads: int = 0
    hits: int = 0  # pieces that were there before they were needed
    misses: int = 0
    evictions: int = 0
    prefetched_used: int = 0
    prefetched_wasted: int = 0
    n_pairs_hit: int = (
        0  # pairs of token and expert in split layers, computed on the device without a copy
    )
    n_pairs_streamed: int = 0  # on the device, copied for it
    n_pairs_host: int = 0  # on the CPU
    n_promoted: int = 0  # experts of split layers that were copied for later
    n_filled: int = 0  # experts copied while nobody waited: a warm start
    n_recorded: int = 0  # tokens of a layer whose experts were recorded, for expected hits
    layers_out_of_order: int = 0  # whole layers that were read from wherever their experts lay
    n_nodes_ahead: int = 0  # computed while the CPU had rows of the layer under way
    host_s: float = 0.0  # the CPU's time for those
    split_layers: int = 0
    split_s: float = (
        0.0  # seconds of layers in which the CPU had experts, until its rows were handed over
    )

    def __add__(self, other: StreamCounters) -> StreamCounters:
        names = [field.name for field in fields(self)]
        return StreamCounters(**{n: getattr(self, n) + getattr(other, n) for n in names})
