"""Compares a decode's time with the latest of its parts, for a disk held to a rate.

    scripts/lab/run held                    the 4.5 GB mixture of `disk`, memory for 40 % of it
    ... --model FILE --share 0.4 --tokens 24 --threads 1 --device sim|cpu

The disk is held to rates at which it takes half as long as the computation, as long, and twice as
long. `new` are tokens that were not decoded before, `known` the same tokens once more. One JSON
object is printed for each rate, with means over decodes of one token, times in ms:

    decode, disk, link, computation    the decode, and the times of its parts alone. The computation
                                       is a decode with all experts in memory, and in slots.
    ratio                              decode / max(disk, link, computation); the limit is 1.10
    bound                              the least ratio with these guesses: experts that no guess
                                       named are read while nothing of the token can be computed
    unguessed                          the ratio without guesses: (disk + computation) / max(...)
    read, read_ahead, unused           experts read, those read before their router chose, and those
                                       of them that it did not choose
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lab.disk import lab_model
from lab.synth.routing import drawn_text
from offload.engine import Engine, EngineOptions
from offload.model_file import read_facts
from offload.plan.min_batch import NEVER, MinBatch
from offload.store.store import StoreOptions
from offload.streaming.options import StreamingOptions

_WARM_TOKENS = 48  # tokens decoded before the first measured one, which fill memory
_BALANCES = (0.5, 1.0, 2.0)  # times of the disk, in times of the computation
_LINK = 4e9  # bytes/s of the simulated link
_FIRST_RATE = 1e9
_CONTEXT_BYTES = 400 << 20  # device memory for the context

Decodes = Sequence[Mapping[str, float]]  # increases of all counters, one mapping for each token
Phases = Mapping[str, Decodes]


def decode(engine: Engine, tokens: Sequence[int]) -> Decodes:
    """Decode tokens one by one. Returns the seconds and the increase of all counters by token."""
    found = []
    for token in tokens:
        before, start_s = counters(engine), time.perf_counter()
        engine.sequences.extend(0, [token])
        took_s, after = time.perf_counter() - start_s, counters(engine)
        found.append({"decode_s": took_s} | {name: after[name] - before[name] for name in after})
    return found


def counters(engine: Engine) -> dict[str, float]:
    link_bytes = engine.counters().streamed_bytes if engine.devices else 0
    return {**engine.disk_counters(), "link_bytes": float(link_bytes)}


def run(args: argparse.Namespace, rate: float | None, *, is_whole: bool = False) -> Phases:
    """Decode the warm text, new tokens, and these tokens again. Returns the last two's results."""
    text = drawn_text(args.n_vocab, _WARM_TOKENS + args.tokens)
    warm, new = text[:_WARM_TOKENS], dict.fromkeys(text[_WARM_TOKENS:])
    facts, share = args.facts, args.share
    streaming, device = StreamingOptions(), args.device
    if device == "sim" and not is_whole:
        dense_bytes = facts.size_bytes - facts.expert_bytes
        vram_bytes = int(dense_bytes + share / 2 * facts.expert_bytes) + _CONTEXT_BYTES
        streaming, device = StreamingOptions(vram_bytes=vram_bytes), f"sim:bw={_LINK / 1e9}GB/s"
    options = EngineOptions(
        device=device, streaming=streaming, n_ctx=1024, n_ubatch=64, most_ubatch=64,
        n_threads=args.threads, n_threads_batch=args.threads, min_batch=MinBatch(NEVER, NEVER),
        store=StoreOptions(
            ram_bytes=None if is_whole else int(share * facts.expert_bytes),
            disk_bytes_per_s=rate,
        ),
    )  # fmt: skip
    with Engine(args.model, options) as engine:
        decode(engine, warm)
        return {name: decode(engine, [*new.keys() - warm]) for name in ("new", "known")}


def compared(whole: Decodes, held: Decodes, rate: float) -> dict[str, float]:
    """Return the figures of one phase, times in ms."""
    parts = {
        "disk": _mean(held, "disk_bytes") / rate,
        "link": _mean(held, "link_bytes") / _LINK,
        "computation": _mean(whole, "decode_s"),
    }
    latest_s, decode_s = max(parts.values()), _mean(held, "decode_s")
    disk_s, computation_s = parts["disk"], parts["computation"]
    n_late = _mean(held, "experts_read")
    n_read = n_late + _mean(held, "experts_read_ahead")
    late_s = disk_s * n_late / n_read if n_read else 0.0
    return {
        "decode": round(1e3 * decode_s, 2),
        **{name: round(1e3 * s, 2) for name, s in parts.items()},
        "ratio": round(decode_s / latest_s, 3),
        "bound": round(max(1.0, (late_s + computation_s) / latest_s), 3),
        "unguessed": round((disk_s + computation_s) / latest_s, 3),
        "read": round(n_read, 2),
        "read_ahead": round(n_read - n_late, 2),
        "unused": round(_mean(held, "experts_unused"), 2),
    }


def _mean(found: Decodes, name: str) -> float:
    return float(np.mean([each.get(name, 0.0) for each in found]))


def main(words: list[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="sim", choices=["sim", "cpu"])
    args = parser.parse_args(words)
    args.model = args.model or lab_model()
    args.facts = read_facts(args.model)
    args.n_vocab = args.facts.header.lengths["tokenizer.ggml.tokens"] - 300
    whole = run(args, None, is_whole=True)
    read_bytes = _mean(run(args, _FIRST_RATE)["new"], "disk_bytes")
    for balance in _BALANCES:
        rate = read_bytes / _mean(whole["known"], "decode_s") / balance
        held = run(args, rate)
        found = {name: compared(whole["known"], held[name], rate) for name in held}
        print(json.dumps({"disk_bytes_per_s": round(rate), **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
