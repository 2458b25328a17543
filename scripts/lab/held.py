"""Compares a decode's time with the latest of its parts, for a disk held to a rate.

    scripts/lab/run held                    the 4.5 GB mixture of `disk`, memory for 40 % of it
    ... --model FILE --share 0.4 --tokens 24 --threads 1 --device sim|cpu
    ... --layer-ms 10                       each layer sleeps this long, so that figures of a small
                                            model hardly depend on what else the machine does

The disk is held to rates at which it takes half as long as the computation, as long, and twice as
long. `new` are tokens that were not decoded before, `known` the same tokens once more. One JSON
object is printed for each rate, with means over decodes of one token, times in ms:

    decode, disk, link, computation    the decode, and the times of its parts alone. The computation
                                       is a decode with all experts in memory, and in slots.
    ratio                              decode / max(disk, link, computation), the maximum being that
                                       of each decode. The limit is 1.10.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from lab.disk import lab_model
from lab.options import Streaming, engine_options
from lab.synth.routing import drawn_text
from lab.timing import decode_s
from offload.engine import Engine, open_engine
from offload.model_file import read_facts
from offload.store.expert_memory import ExpertMemory
from offload.store.store import StoreOptions
from offload.times.min_batch import NEVER, MinBatch

_WARM_TOKENS = 48  # tokens decoded before the first measured one, which fill memory
_BALANCES = (0.5, 1.0, 2.0)  # times of the disk, in times of the computation
_WHOLE = 0.999  # share of the experts in memory if all that are used shall be there
_LINK = 4e9  # bytes/s of the simulated link
_FIRST_RATE = 1e9
_CONTEXT_BYTES = 48 << 20  # device memory for the context

Decodes = Sequence[Mapping[str, float]]  # increases of all counters, one mapping for each token
Phases = Mapping[str, Decodes]


@contextmanager
def slow_layers(layer_s: float) -> Iterator[None]:
    """Let each layer sleep before its router's choice is known, as if the layer took so long."""
    decided = ExpertMemory.decided

    def decided_late(self: ExpertMemory, layer: int, experts: Iterable[int]) -> None:
        time.sleep(layer_s)
        decided(self, layer, experts)

    with patch.object(ExpertMemory, "decided", decided_late):
        yield


def decode(engine: Engine, tokens: Sequence[int]) -> Decodes:
    """Decode tokens one by one. Returns the seconds and the increase of all counters by token."""
    found = []
    for token in tokens:
        before = counters(engine)
        took_s, after = decode_s(engine.sequences, [token]), counters(engine)
        found.append({"decode_s": took_s} | {name: after[name] - before[name] for name in after})
    return found


def counters(engine: Engine) -> dict[str, float]:
    link_bytes = engine.counters().streamed_bytes if engine.opened.devices else 0
    return {**engine.disk_counters(), "link_bytes": float(link_bytes)}


def run(args: argparse.Namespace, rate: float | None, *, is_whole: bool = False) -> Phases:
    """Decode the warm text, new tokens, and these tokens again. Returns the last two's results."""
    text = drawn_text(args.n_vocab, _WARM_TOKENS + args.tokens)
    warm, new = text[:_WARM_TOKENS], dict.fromkeys(text[_WARM_TOKENS:])
    facts, share = args.facts, args.share
    streaming, device = Streaming(), args.device
    if device == "sim" and not is_whole:
        dense_bytes = facts.size_bytes - facts.expert_bytes
        vram_bytes = int(dense_bytes + share / 2 * facts.expert_bytes) + _CONTEXT_BYTES
        streaming, device = Streaming(vram_bytes=vram_bytes), f"sim:bw={_LINK / 1e9}GB/s"
    options = engine_options(
        device=device, streaming=streaming, n_ctx=1024, n_ubatch=64, most_ubatch=64,
        n_threads=args.threads, n_threads_batch=args.threads, min_batch=MinBatch(NEVER, NEVER),
        ram_bytes=int((_WHOLE if is_whole else share) * facts.expert_bytes),
        store=StoreOptions(disk_bytes_per_s=rate),
    )  # fmt: skip
    with open_engine(args.model, options) as engine:
        decode(engine, warm)
        with slow_layers(1e-3 * args.layer_ms) if args.layer_ms else nullcontext():
            return {name: decode(engine, [*new.keys() - warm]) for name in ("new", "known")}


def compared(whole: Decodes, held: Decodes, rate: float) -> dict[str, float]:
    """Return the figures of one phase, times in ms."""
    decode_s, computation_s = _values(held, "decode_s"), _values(whole, "decode_s")
    disk_s, link_s = _values(held, "disk_bytes") / rate, _values(held, "link_bytes") / _LINK
    n_late, n_ahead = _values(held, "experts_read"), _values(held, "experts_read_ahead")
    late_s = disk_s * n_late / np.maximum(1.0, n_late + n_ahead)
    latest_s = np.maximum.reduce((disk_s, link_s, computation_s))
    times_s = {"decode": decode_s, "disk": disk_s, "link": link_s, "computation": computation_s}
    ratios = {
        "ratio": decode_s, "bound": np.maximum(latest_s, late_s + computation_s),
        "unguessed": disk_s + computation_s,
    }  # fmt: skip
    counts = {
        "read": n_late + n_ahead, "read_ahead": n_ahead, "unused": _values(held, "experts_unused")
    }  # fmt: skip
    return {
        **{name: round(1e3 * float(values.mean()), 2) for name, values in times_s.items()},
        **{name: round(float(s.sum() / latest_s.sum()), 3) for name, s in ratios.items()},
        **{name: round(float(values.mean()), 2) for name, values in counts.items()},
    }


def _values(found: Decodes, name: str) -> NDArray[np.float64]:
    """Return one counter's increases, one for each decode. 0 if the engine does not have it."""
    return np.array([each.get(name, 0.0) for each in found])


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
    parser.add_argument("--layer-ms", type=float, default=0.0)
    args = parser.parse_args(words)
    args.model = args.model or lab_model()
    args.facts = read_facts(args.model)
    args.n_vocab = args.facts.header.lengths["tokenizer.ggml.tokens"] - 300
    whole = run(args, None, is_whole=True)
    read_bytes = _values(run(args, _FIRST_RATE)["new"], "disk_bytes").mean()
    for balance in _BALANCES:
        rate = float(read_bytes / _values(whole["known"], "decode_s").mean() / balance)
        held = run(args, rate)
        found = {name: compared(whole["known"], held[name], rate) for name in held}
        print(json.dumps({"disk_bytes_per_s": round(rate), **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
