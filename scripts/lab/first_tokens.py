"""Counts the experts of first tokens beside those of running text, with the embedded pair's target.

llama-batched-bench with `-npp 0` lets each sequence write one token without context. Does such a
batch use fewer experts than a verification batch, whose tokens follow each other in a text? Fills
docs/background.md. The embedded target has few experts, so only the comparison says something.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import typer

from lab.options import Streaming, engine_options
from lab.tables import filled, page_of
from offload.engine import Engine, open_engine
from offload.routing.routing import counted_unions, expected_union
from offload.times.min_batch import MinBatch
from specoffload.config.resolution import demo_file
from specoffload.opening.draft_model import real_text

PAGE = page_of("first-tokens")
N_TOKENS = 512
_SIZES = (1, 2, 4, 8, 16)


def counted(engine: Engine, tokens: Iterable[int], *, first: bool) -> dict[int, float]:
    """Experts of a layer that n of these tokens use, each the first of a sequence or one text."""
    engine.opened.routing.forget()
    engine.sequences.rewind(0, 0)
    for token in tokens:
        engine.sequences.extend(0, [token], 1)
        if first:
            engine.sequences.rewind(0, 0)
    engine.sequences.rewind(0, 0)
    return counted_unions(engine.opened.routing.recorded(), engine.facts.n_experts)


def table() -> str:
    path = demo_file("target.gguf")
    options = engine_options(device="sim", min_batch=MinBatch(1, 1), n_ctx=N_TOKENS + 64)
    with open_engine(path, options) as whole:
        assert whole.opened.plan is not None
        vram = whole.opened.plan.resident_bytes + whole.opened.plan.slot_bytes // 2
    streaming = Streaming(vram_bytes=vram, record_routing=True)
    options = engine_options(
        device="sim", min_batch=MinBatch(1, 1), n_ctx=N_TOKENS + 64, streaming=streaming
    )
    rng = random.Random(1)
    with open_engine(path, options) as engine:
        engine.opened.routing.is_on = True
        text = real_text(engine)[:N_TOKENS]
        n_vocab, facts = engine.n_vocab, engine.facts
        drawn = [rng.randrange(n_vocab) for _ in range(N_TOKENS)]
        rows = {
            "running text": counted(engine, text, first=False),
            "different tokens of the vocabulary, each the first": counted(
                engine, drawn, first=True
            ),
            "different tokens of the text, each the first": counted(engine, text, first=True),
            "token 0, each time the first": counted(engine, [0] * N_TOKENS, first=True),
            "even routing": {
                n: float(expected_union(n, facts.n_experts_used, facts.n_experts)) for n in _SIZES
            },
        }
    heads = (f"experts of {facts.n_experts} that a layer uses", *(f"n = {n}" for n in _SIZES))
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, unions in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{unions[n]:.1f}' for n in _SIZES)} |")
    return "\n".join(lines)


def main() -> None:
    """Count, and fill the page."""
    found = table()
    PAGE.write_text(filled(PAGE, {"first tokens": found}), encoding="utf-8")
    typer.echo(found)


if __name__ == "__main__":
    typer.run(main)
