"""Times decodes of one token with all, most and half of the experts in slots.

Beside each time stand the share of it that copies take, and the power and clocks of the card. A
card that waits takes little power.

The model has Qwen3-30B-A3B's shape, with all its layers. The resident model is timed in plain
llama.cpp and behind our device, and is what the other ways' logits are compared with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from logits import divergences, judged
from numpy.typing import NDArray
from setting import Setting, card_values
from timed_parts import LeftOut

from lab.options import Streaming, engine_options
from lab.synth.routing import drawn_text
from offload.engine import Engine, open_engine
from offload.errors import OffloadError
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.schedule.splitter import stay
from offload.stream import doorbell
from offload.times.min_batch import NEVER, MinBatch
from specoffload.bench.paths import Llama

SHARES = (1.0, 0.95, 0.5)  # of the experts, in slots
FULL: dict[str, Any] = {"size": "full", "n_vocab": 16384, "quant": "q4_K"}
SMALL: dict[str, Any] = {
    "size": "tiny", "quant": "q4_K", "n_embd": 256, "n_ff": 256, "n_ff_exp": 256, "n_expert": 32,
}  # fmt: skip
N_CTX, N_UBATCH = 512, 64
PLAIN = "llama.cpp, resident"
_LEAST_S = 60.0  # to write the model and measure one way
# Counters of a decode that are shown.
_COUNTED = ("streamed_bytes", "router_reads", "n_repairs", "n_pairs_host", "layers_rung")


def measure(setting: Setting) -> bool:
    """Fill `decode` of the report with a row per way. True if all ways' logits agree."""
    setting.least_s(_LEAST_S)
    args, rows = setting.args, setting.report["decode"]
    path = setting.model("decode-small" if args.small else "decode", "qwen3-30b-a3b", 3,
                         routing="drifting", **(SMALL if args.small else FULL))  # fmt: skip
    facts = read_facts(path)
    n_warm, n_round, n_rounds = (8, 4, 2) if args.small else (64, 16, 6)
    text = drawn_text(facts.number("vocab_size"), n_warm + n_round * n_rounds, seed=2)
    warm, rest = text[:n_warm], text[n_warm:]
    rounds = [rest[at : at + n_round] for at in range(0, len(rest), n_round)]
    expected: NDArray[np.float32] | None = None
    longest_s = 0.0
    try:
        for way, options in ways_of(facts).items():
            began_s = time.monotonic()
            if setting.left_s() < longest_s:
                rows.append({"way": way, "left_out": f"{setting.left_s():.0f} s are left"})
                continue
            try:
                row, logits = _way(setting, path, options, warm, rounds)
            except OffloadError as e:
                rows.append({"way": way, "left_out": str(e)})
                continue
            row = {"way": way, **row}
            if expected is None:
                expected = logits
            elif logits is not None:
                row |= judged(divergences(logits, expected))
            rows.append(row)
            setting.save()
            waiting = f", {1e3 * row['waiting_s']:.3f} if layers wait" if "waiting_s" in row else ""
            setting.say(f"{way}: {1e3 * row['token_s']:.3f} ms per token{waiting}")
            longest_s = max(longest_s, time.monotonic() - began_s)
    finally:
        if args.model_dir is None:
            path.unlink()  # the next part needs the disk
    setting.show("decodes of one token", rows)
    if setting.card.why_not:
        setting.say(setting.card.why_not)
    if not any("same" in row for row in rows):
        raise LeftOut("no way was compared: " + rows[-1].get("left_out", ""))
    return all(row.get("same", True) for row in rows)


def ways_of(facts: ModelFacts) -> dict[str, dict[str, Any] | None]:
    """The options of each way by its name, in order of importance. None: plain llama.cpp."""
    plan = make_plan(facts, PlanRequest(n_cpu_moe=999))

    def slots(share: float, **changes: Any) -> Streaming:
        vram_bytes = plan.resident_bytes + int(share * plan.slot_bytes)
        return Streaming(vram_bytes=vram_bytes, n_cpu_moe=999, **changes)

    streamed, split = MinBatch(1, 1), MinBatch(NEVER, NEVER)
    found: dict[str, dict[str, Any] | None] = {
        "resident": {"stream_experts": False, "min_batch": streamed},
    }
    for share in SHARES:
        found[f"{share:.0%} in slots"] = {"streaming": slots(share), "min_batch": streamed}
    found[PLAIN] = None
    for share in SHARES[1:]:
        streaming = slots(share, hybrid=True, splitter=stay)
        found[f"{share:.0%} in slots, rest on the CPU"] = {
            "streaming": streaming, "min_batch": split,
        }  # fmt: skip
    return found


def _way(
    setting: Setting, path: Path, options: dict[str, Any] | None, warm: list[int],
    rounds: list[list[int]],
) -> tuple[dict[str, Any], NDArray[np.float32] | None]:  # fmt: skip
    """Returns the row of one way, and its logits [n_tokens, n_vocab] if it tells them."""
    card = setting.card.sums()
    threads, flash_attn = setting.args.threads, "off" if setting.args.small else "auto"
    if options is None:
        with Llama({
            "path": str(path), "device": setting.choice.name if setting.choice.on_gpu else None,
            "cpu_weights": "", "repack": False, "flash_attn": 0 if setting.args.small else -1,
            "n_ctx": N_CTX, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH, "n_threads": threads,
            "n_threads_batch": threads,
        }) as llama:  # fmt: skip
            llama.follow(warm, 0)
            at, times = len(warm), []
            for tokens in rounds:
                with setting.card.watching(card):
                    times += llama.follow(tokens, at)[0]
                at += len(tokens)
        return {"token_s": statistics.median(times)} | card_values(card.use), None
    began_s = time.monotonic()
    with patch.object(doorbell, "FIRST_TRIAL", 1 << 30), open_engine(path, engine_options(
        device=setting.choice.name, n_ctx=N_CTX, n_ubatch=N_UBATCH, n_outputs=N_UBATCH,
        n_threads=threads, n_threads_batch=threads, flash_attn=flash_attn, **options,
    )) as engine:  # fmt: skip
        opening_s = time.monotonic() - began_s
        _use_all_experts(engine)
        list(_decoded(engine, warm))
        before, logits = engine.counters(), []
        times, waiting = list[float](), list[float]()
        rings = True
        for nth, tokens in enumerate(rounds):
            # Split layers with a doorbell, and with a wait of the host, take turns.
            if engine.opened.weights.hybrid is not None:
                rings = nth % 2 == 0
                engine.opened.weights.ways.change(rings=rings)
            with setting.card.watching(card):
                for taken_s, row in _decoded(engine, tokens):
                    (times if rings else waiting).append(taken_s)
                    logits.append(row)
        after = engine.counters()
    n = len(times) + len(waiting)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    counted = {name: (getattr(after, name) - getattr(before, name)) / n for name in _COUNTED}
    share = hits / (hits + misses) if hits + misses else None
    row = {"token_s": statistics.median(times), "opening_s": opening_s, "hit_share": share}
    if waiting:
        row |= {"waiting_s": statistics.median(waiting)}
    rate = setting.report["link"].get("pinned_bytes_per_s")
    if rate:  # of a token's time, as if each copy were as fast as a large one
        row |= {"copying_share": counted["streamed_bytes"] / rate / row["token_s"]}
    return row | counted | card_values(card.use), np.stack(logits)


def _use_all_experts(engine: Engine) -> None:
    """Decode tokens of all topics, so that no expert is missing where all have slots."""
    tokens = [int(t) for t in np.random.default_rng(5).integers(0, engine.n_vocab, N_CTX)]
    for at in range(0, N_CTX, N_UBATCH):
        # The last layer computes only tokens whose logits are wanted.
        engine.sequences.extend(0, tokens[at : at + N_UBATCH])
    engine.sequences.rewind(0, 0)


def _decoded(engine: Engine, tokens: list[int]) -> Iterator[tuple[float, NDArray[np.float32]]]:
    """Yields the seconds of each token's decode, and the logits after it."""
    for token in tokens:
        start_s = time.perf_counter()
        rows = engine.sequences.extend(0, [token], n_logits=1)
        yield time.perf_counter() - start_s, np.array(rows[0])
