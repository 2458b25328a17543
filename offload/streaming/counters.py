"""Counts what the copy path does, to prove that it ran."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class StreamCounters:
    """Counts of what streaming did since the engine was opened."""

    graphs: int = 0
    cuts: int = 0
    chunks: int = 0  # chunks of tokens whose experts fitted the slots
    bands: int = 0  # cuts whose nodes saw a range of the slots, not all of them
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
    n_pairs_streamed: int = 0  # pairs in split layers, computed on the device after a copy
    n_pairs_host: int = 0  # pairs in split layers, computed by the CPU
    n_promoted: int = 0  # experts of split layers that were copied for later batches
    n_filled: int = 0  # experts copied between two graphs, for a warm start
    n_recorded: int = 0  # tokens whose experts were recorded, for each layer, for expected hits
    layers_out_of_order: int = 0  # whole layers that were read from any slots
    n_nodes_ahead: int = 0  # nodes computed while the CPU had rows of the layer under way
    host_s: float = 0.0  # seconds in which the CPU computed pairs of split layers
    split_layers: int = 0
    split_s: float = (
        0.0  # seconds of layers in which the CPU had experts, until its rows were handed over
    )

    def __add__(self, other: StreamCounters) -> StreamCounters:
        names = [field.name for field in fields(self)]
        return StreamCounters(**{n: getattr(self, n) + getattr(other, n) for n in names})
