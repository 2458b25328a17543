"""Times a KV cache in RAM in virtual time: copied before each layer, or during the one before.

    scripts/lab/run cache-overlap    prints a table and JSON

The model is as wide as Qwen3-235B-A22B. It has few experts, which are all in slots, so that nothing
but the cache is copied. It has sixteen times as many heads with keys, so its context is as large as
that of 57,344 tokens. docs/plans.md states the result.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.options import engine_options
from lab.timing import decode_s
from lab.virtual_gpu import CARDS, again_on_standin, has_clock, use_card, use_virtual_time

N_TOKENS, N_UBATCH = 3584, 512
_ENVIRONMENT = {"STANDIN_CLOCK": "1", "STANDIN_SKIP": "products"}
_SHAPE: dict[str, Any] = {
    "n_layer": 6, "n_embd": 4096, "n_head": 64, "n_head_kv": 64, "n_expert": 8,
    "n_expert_used": 2, "n_ff_exp": 256,
    "metadata": {
        "attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One batch at the end of a context of `N_TOKENS` tokens, with a cache in RAM."""

    card: str
    n_tokens: int
    on_gpu_s: float  # with the cache on the GPU
    waiting_s: float  # nothing is copied ahead
    ahead_s: float
    copy_s: float  # bytes of all layers' caches ÷ the link's rate


def measured(card: str, folder: Path) -> list[Row]:
    import offload.plan.devices
    from lab.options import Streaming
    from lab.synth import write_preset
    from offload.engine import open_engine
    from offload.times.min_batch import MinBatch

    setattr(offload.plan.devices, "attention_crossover", lambda *_: 1)  # noqa: B010
    path = folder / "cache-overlap.gguf"
    if not path.exists():
        write_preset("qwen3-235b-a22b", path, seed=1, quant="q4_K", **_SHAPE)
    machine = use_card(CARDS[card])
    found: dict[str, dict[int, float]] = {}
    cache_bytes = 0
    for name, depth, kv_offload in (("gpu", 2, True), ("waiting", 0, False), ("ahead", 2, False)):
        options = engine_options(
            device="CUDA0", streaming=Streaming(depth=depth), min_batch=MinBatch(1, 1),
            n_ctx=N_TOKENS + 1024, n_batch=N_UBATCH, n_ubatch=N_UBATCH, n_outputs=64, n_threads=1,
            n_threads_batch=1, flash_attn="on", kv_offload=kv_offload,
        )  # fmt: skip
        with open_engine(path, options) as engine:
            sequences = engine.sequences
            sequences.extend(0, [7] * N_TOKENS, n_logits=0)
            if engine.opened.ram_cache is not None:
                cache_bytes = engine.opened.ram_cache.cache_bytes * N_TOKENS // engine.n_ctx
            for n_tokens in (1, N_UBATCH):
                times = []
                for i in range(7):
                    times.append(decode_s(sequences, [3 + i] * n_tokens, 1))
                    sequences.rewind(0, N_TOKENS)
                found.setdefault(name, {})[n_tokens] = statistics.median(times[2:])
    return [
        Row(card, n, found["gpu"][n], found["waiting"][n], found["ahead"][n],
            cache_bytes / machine.link_bytes_per_s)
        for n in found["gpu"]
    ]  # fmt: skip


def main() -> None:
    if not has_clock():
        sys.exit(again_on_standin("lab.cache_overlap", _ENVIRONMENT))
    use_virtual_time()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for card in ("RTX 4090", "H100") for row in measured(card, Path(folder))]
    print("| card | tokens | cache on the GPU | in RAM, waiting | copied ahead | copies alone |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        times = (row.on_gpu_s, row.waiting_s, row.ahead_s, row.copy_s)
        cells = " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in times)
        print(f"| {row.card} | {row.n_tokens} | {cells} |")
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
