"""The regime that speculation is for, a decode bound by transfers, made on `sim`; and counters
that tell what each batch size really did."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from offload.engine import Engine, EngineOptions
from offload.errors import DoesNotFit
from offload.model import is_experts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import Plan, make_plan
from offload.streaming.counters import StreamCounters
from offload.streaming.options import StreamingOptions
from offload.timing import median_decode_s
from specdec.costs.measure import TextWalk
from specoffload import report
from specoffload.config.resolution import Config, HybridChoice
from specoffload.errors import UsageError
from specoffload.speculation.profiling import SEQUENCE, real_text

_COPY_SHARE = 16.0  # the time a single token's copies take, in units of its computation
_SLOT_SHARES = (0.35, 0.5, 0.75)  # of what streams
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 33, 64)  # tokens
_N_DECODES = 3  # decodes timed for each batch size
_DEPTH = 16  # tokens of context before the first


@dataclass(frozen=True)
class SizeWay:
    """Decodes of `n` tokens: their median time, and the way they went, in words."""

    n: int
    decode_s: float
    streams: bool  # every streamed weight was computed on the device
    words: str


def transfer_bound(config: Config) -> tuple[Config, str]:
    """The same run on a device whose link takes most of the time, and what was done to it.

    All sizes of batches stream, through the least of `_SLOT_SHARES` at which a layer's experts
    have slots all at once; where none has enough, larger batches go in chunks of tokens.
    Raises UsageError where no budget fits.
    """
    with Engine(config.model, EngineOptions(device="sim", stream_experts=False)) as engine:
        compute_s = _token_s(engine)[0]
        facts = engine.facts
    whole = make_plan(facts, budget_bytes=None, n_gpu_layers=0)
    found: tuple[float, StreamingOptions, float] | None = None
    for share in _SLOT_SHARES:
        vram = whole.resident_bytes + int(whole.slot_bytes * share)
        streaming = StreamingOptions(vram_bytes=vram, n_gpu_layers=0, chunks="on")
        options = EngineOptions(device="sim", streaming=streaming, min_batch=MinBatch(1, 1))
        try:
            with Engine(config.model, options) as engine:
                found = share, streaming, _token_s(engine)[1]
                assert engine.plan is not None
                if not engine.plan.chunk_tokens:
                    break
        except DoesNotFit:
            continue
    if found is None:
        raise UsageError("no budget of slots fits this model on sim; name a device with --device")
    share, streaming, copied = found
    bandwidth = copied / (_COPY_SHARE * compute_s)
    words = (
        f"no GPU here: sim with a link of {bandwidth / 1e6:.0f} MB/s, at which one token's copies "
        f"({report.bytes_text(copied)}) take {_COPY_SHARE:.0f} times its computation; batches of "
        f"every size stream all layers through slots for {share:.0%} of them"
    )
    changed = replace(
        config,
        device=f"sim:bw={bandwidth:.0f}B/s",
        streaming=streaming,
        min_batch=MinBatch(1, 1),
        hybrid=HybridChoice(),  # a split layer does not stream
    )
    return changed, words


def _token_s(engine: Engine, n: int = 24) -> tuple[float, float]:
    """Seconds (the median) and bytes copied (the mean) of one token behind real text."""
    text = real_text(engine)
    engine.sequences.extend(SEQUENCE, text[:32], n_logits=0)
    before = engine.counters().streamed_bytes
    batches = [[token] for token in text[32 : 32 + n]]
    one_s = median_decode_s(engine.sequences, SEQUENCE, batches, grow=True)
    return one_s, (engine.counters().streamed_bytes - before) / n


def ways(engine: Engine, sizes: Sequence[int] = SIZES) -> list[SizeWay]:
    """Measure one decode of each size, and tell its way by the counters of the copy path. The
    sequence is left empty."""
    most = min(engine.n_ctx - _DEPTH, engine.options.n_outputs)
    walk = TextWalk(engine.sequences, SEQUENCE, real_text(engine), _DEPTH, 2 * max(sizes))
    found = []
    for n in sizes:
        if n > most:
            break
        walk.time_s(n)  # builds the graph, and leaves the slots as this size leaves them
        before = engine.counters()
        seconds = statistics.median([walk.time_s(n) for _ in range(_N_DECODES)])
        after = engine.counters()
        found.append(_way(n, seconds, _each(before, after), engine.plan))
    engine.sequences.rewind(SEQUENCE, 0)
    return found


def _each(before: StreamCounters, after: StreamCounters) -> dict[str, float]:
    """The counters of one decode."""
    return {
        f.name: (getattr(after, f.name) - getattr(before, f.name)) / _N_DECODES
        for f in fields(StreamCounters)
    }


def _way(n: int, decode_s: float, each: dict[str, float], plan: Plan | None) -> SizeWay:
    """A matrix is one cut. A layer of experts in chunks is one cut for each chunk instead."""
    if plan is None or not plan.streamed:
        return SizeWay(n, decode_s, False, "nothing streams")
    n_experts = sum(map(is_experts, plan.streamed))
    n_dense = len(plan.streamed) - n_experts
    copied = f"{report.bytes_text(each['streamed_bytes'])} copied"
    if each["split_layers"]:
        words = f"CPU and device: {each['split_layers']:.0f} layers are split, {copied}"
        return SizeWay(n, decode_s, False, words)
    if each["chunks"]:
        whole = each["cuts"] - each["chunks"] >= n_dense
        words = f"streams, experts in {each['chunks']:.1f} chunks of tokens, {copied}"
        return SizeWay(n, decode_s, whole, words)
    n_left = len(plan.streamed) - round(each["cuts"])
    if n_left <= 0:
        return SizeWay(n, decode_s, True, f"streams, {copied}")
    return SizeWay(
        n, decode_s, False, f"the CPU computes {n_left} of {len(plan.streamed)} matrices, {copied}"
    )
