"""Records which experts the embedded pair's target uses on running text of several kinds.

Writes pair-routing.npz in this folder's data/: for each kind [n_tokens, n_layers, n_used], with
tokens decoded one at a time. `code` and `prose` are the held-out prompts of
specoffload/demo/prompts.json and the licence. `answers` are the target's greedy continuations.

Then it fits to each kind the process from which hybrid_model.py draws routing, and prints the
parameters: the time constant of the drift in tokens, the weight of the drift, and the weight of
lasting popularity. The noise has weight 1.

Usage: scripts/lab/run record-routing
"""

from __future__ import annotations

import itertools
import json

import numpy as np
from numpy.typing import NDArray

from lab import ROOT
from lab.hybrid_model import RECORDED, Parameters, draw, repeats
from offload.engine import Engine, EngineOptions
from offload.plan.min_batch import MinBatch
from offload.routing import N_KEPT
from offload.streaming.options import StreamingOptions
from specoffload.config.resolution import demo_file

ANSWER_TOKENS = 64  # tokens generated after each prompt
CONSTANTS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0)
FIT_TOKENS, FIT_LAYERS = 1500, 8


def recorded(engine: Engine, kind: str) -> NDArray[np.uint8]:
    """The experts used by N_KEPT tokens of that kind, [n_tokens, n_layers, n_used]."""
    rows = json.loads(demo_file("prompts.json").read_text(encoding="utf-8"))
    texts = [row["text"] for row in rows if row["kind"] == ("prose" if kind == "prose" else "code")]
    if kind == "prose":
        texts.append((ROOT / "LICENSE").read_text(encoding="utf-8"))
    recorder, sequences = engine.routing, engine.sequences
    recorder.forget()
    recorder.is_on = True
    sequences.rewind(0, 0)
    for text in itertools.cycle(texts):
        tokens = engine.tokenize(text, add_special=False, parse_special=False)
        if kind == "answers":
            sequences.rewind(0, 0)
            with recorder.paused():
                logits = sequences.extend(0, tokens, n_logits=1)
            for _ in range(ANSWER_TOKENS):
                logits = sequences.extend(0, [int(np.argmax(logits[-1]))], n_logits=1)
        else:
            for token in tokens:
                sequences.extend(0, [token], n_logits=1)
        if recorder.n_tokens >= N_KEPT:
            return np.stack([*recorder.recorded().values()], axis=1).astype(np.uint8)
    raise AssertionError("texts go on for ever")


def fitted(routing: NDArray[np.uint8], n_experts: int) -> Parameters:
    """The parameters whose drawn routing repeats experts most like the recorded routing."""
    wanted, n_used = repeats(routing), routing.shape[2]
    best, found = np.inf, (1.0, 0.0, 0.0)
    for constant, drift, lasting in itertools.product(CONSTANTS, WEIGHTS, WEIGHTS):
        drawn = draw(n_experts, n_used, (constant, drift, lasting), FIT_TOKENS, FIT_LAYERS)
        distance = float(np.square(repeats(drawn) - wanted).sum())
        if distance < best:
            best, found = distance, (constant, drift, lasting)
    return found


def main() -> None:
    streaming = StreamingOptions(record_routing=True)
    options = EngineOptions(device="sim", min_batch=MinBatch(1, 1), n_ctx=4096, streaming=streaming)
    with Engine(demo_file("target.gguf"), options) as engine:
        routing = {kind: recorded(engine, kind) for kind in ("code", "prose", "answers")}
        n_experts = engine.facts.n_experts
    np.savez_compressed(RECORDED, n_experts=n_experts, **routing)  # type: ignore[arg-type]
    print(f"{RECORDED.name}: {RECORDED.stat().st_size} bytes")
    for kind in routing:
        print(f"{kind}: time constant, drift, lasting = {fitted(routing[kind], n_experts)}")


if __name__ == "__main__":
    main()
