"""Compares prompts in passes with prompts whose layers are copied as a whole, in virtual time.

Both ways compute the same batches with the same slots, for half of the layers. The stand-in's clock
(`scripts/lab/run virtual-gpu`) has the rates of each card of docs/gpu.md. It takes the host's time
from the processor time of the program's own threads. docs/log.md has the table.

    scripts/lab/run pass-price
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.options import Streaming, engine_options
from lab.timing import decode_s
from lab.virtual_gpu import CARDS, again_on_standin, has_clock, use_card, use_virtual_time

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
MODELS: dict[str, dict[str, Any]] = {
    "128 experts": {"n_layer": 8},
    "32 experts": {"n_layer": 8, "n_expert": 32},
}
_ENVIRONMENT = {"STANDIN_CLOCK": "1", "STANDIN_SKIP": "products"}


@dataclass(frozen=True)
class Priced:
    """The seconds of one batch in a way."""

    model: str
    card: str
    way: str
    n_tokens: int
    step_s: float


def measure(path: Path, model: str, sizes: Sequence[int], n_steps: int) -> Iterator[Priced]:
    """Time batches of all sizes on all cards, first as whole layers and then in passes."""
    from offload.device import devices
    from offload.engine import open_engine
    from offload.model_file import read_facts
    from offload.plan.placement import PlanRequest, make_plan
    from offload.plan.slot_layout import SlotPool
    from offload.stream import passes
    from offload.times.min_batch import MinBatch

    gpu = next(device.name for device in devices() if device.on_gpu)
    plan = make_plan(read_facts(path), PlanRequest(n_cpu_moe=999))
    n_bytes = plan.resident_bytes + plan.slot_bytes // 2
    n = max(sizes)
    options = engine_options(
        device=gpu, streaming=Streaming(vram_bytes=n_bytes, n_cpu_moe=999, passes="on"),
        stream_experts=True, min_batch=MinBatch(1, 1), n_ctx=n + 256, n_batch=n, n_ubatch=n,
        n_outputs=64, n_threads=1, n_threads_batch=1, flash_attn="auto",
    )  # fmt: skip

    def in_passes(pool: SlotPool, n_tokens: int, shares: Any) -> bool:
        return n_tokens > 64

    whole = passes._is_in_passes
    for way, rule in {"whole layers": whole, "passes": in_passes}.items():
        passes._is_in_passes = rule
        try:
            with open_engine(path, options) as engine:
                for card, preset in CARDS.items():
                    use_card(preset)
                    for n_tokens in sizes:
                        times = []
                        for i in range(n_steps + 2):  # two for warm-up
                            text = [(17 * k * k + 101 * i + 3) % engine.n_vocab
                                    for k in range(n_tokens)]  # fmt: skip
                            engine.sequences.rewind(0, 0)
                            times.append(decode_s(engine.sequences, text, 1))
                        yield Priced(model, card, way, n_tokens, statistics.median(times[2:]))
        finally:
            passes._is_in_passes = whole


def table(rows: Sequence[Priced]) -> str:
    """A row for each model and size: both ways in ms, and their ratio, by card."""
    cards = list(dict.fromkeys(row.card for row in rows))
    heads = [f"{card}: {x}" for card in cards for x in ("whole, ms", "passes, ms", "ratio")]
    lines = [f"| model | tokens | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    seconds = {(row.model, row.n_tokens, row.card, row.way): row.step_s for row in rows}
    for model, n_tokens in dict.fromkeys((row.model, row.n_tokens) for row in rows):
        cells = []
        for card in cards:
            whole_s, passes_s = (
                seconds[model, n_tokens, card, way] for way in ("whole layers", "passes")
            )
            cells += [f"{1e3 * whole_s:.1f}", f"{1e3 * passes_s:.1f}", f"{passes_s / whole_s:.2f}"]
        lines.append(f"| {model} | {n_tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="scripts/lab/run pass-price",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--most", type=int, default=max(SIZES), help="tokens of the largest batch")
    parser.add_argument("--steps", type=int, default=5, help="timed batches of each size")
    parser.add_argument("--model", choices=tuple(MODELS), help="only this model")
    args = parser.parse_args()
    if not has_clock():
        sys.exit(again_on_standin("lab.pass_price", _ENVIRONMENT))
    use_virtual_time()
    from lab.gpu_cases import write_model

    sizes, rows = [n for n in SIZES if n <= args.most], list[Priced]()
    for model, changes in MODELS.items():
        if args.model in (None, model):
            with tempfile.TemporaryDirectory() as folder:
                for row in measure(write_model(Path(folder), changes), model, sizes, args.steps):
                    print(row, file=sys.stderr, flush=True)
                    rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
