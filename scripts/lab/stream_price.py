"""Prices separate streams: each conversation has cells of its own, and attends to no others.

    scripts/lab/run stream-price

Conversations that decode at the same time share one KV cache (`kv_unified`). The attention of each
passes over the cells of all and masks those of others. With separate streams it would pass over its
own. The table has the seconds of one decode of all conversations, and those of a prompt's 2,048
tokens while the others decode. Nothing is measured. The experts of a decode are those of
neighbouring tokens of one text. Tokens of different texts use more of them, so the gain is an upper
bound.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.plans import plan_of
from lab.synth.published import published_facts
from lab.tables import filled, page_of
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from specoffload.opening.own_cells import OwnCellsPrice, own_cells_price

TITLES = ("DeepSeek-R1", "Qwen3-30B-A3B", "gpt-oss-120b")
STREAMS, DEPTHS = (2, 4, 8), (4096, 16384, 61440)
CARD_GIB = 24
COLUMNS = (
    "model", "conversations", "tokens of each", "a decode", "own cells only", "shorter by",
    "2,048 prompt tokens", "own cells only", "shorter by",
)  # fmt: skip


def price(facts: ModelFacts, n_streams: int, depth: int) -> OwnCellsPrice:
    """Price streams of `depth` tokens each, on the default plan for them. Raises DoesNotFit."""
    return own_cells_price(
        plan_of(facts, CARD_GIB, None, n_ctx=n_streams * depth), n_streams, depth
    )


def _cells(priced: OwnCellsPrice) -> tuple[str, ...]:
    """The last cells of a row: a decode, and a prompt, with the share that own cells spare."""
    decode = f"{1e3 * priced.decode_s:.1f} ms", f"{1e3 * priced.own_decode_s:.1f} ms"
    prompt = f"{priced.prompt_s:.2f} s", f"{priced.own_prompt_s:.2f} s"
    return (
        *decode, f"{100 * (1 - priced.own_decode_s / priced.decode_s):.0f} %",
        *prompt, f"{100 * (1 - priced.own_prompt_s / priced.prompt_s):.0f} %",
    )  # fmt: skip


def rows(
    folder: Path,
    titles: Sequence[str] = TITLES,
    streams: Sequence[int] = STREAMS,
    depths: Sequence[int] = DEPTHS,
) -> Iterator[tuple[str, ...]]:
    """The rows of the table, each with the cells of COLUMNS."""
    for title in titles:
        facts = published_facts(title, folder)
        for n_streams in streams:
            for depth in depths:
                head = title, str(n_streams), f"{depth:,}"
                try:
                    yield *head, *_cells(price(facts, n_streams, depth))
                except DoesNotFit:
                    yield *head, "does not fit", *[""] * (len(COLUMNS) - len(head) - 1)


def table(found: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join((*lines, *(f"| {' | '.join(row)} |" for row in found)))


def main() -> None:
    """Print the table, and write it into its page."""
    page = page_of("stream-price")
    with tempfile.TemporaryDirectory() as name:
        found = table([*rows(Path(name))])
    page.write_text(filled(page, {"streams": found}), encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
