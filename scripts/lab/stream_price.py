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
from dataclasses import dataclass, replace
from pathlib import Path

from lab.plans import plan_of
from lab.synth.published import published_facts
from lab.tables import filled, page_of
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.times.decodes import attention_s, best_s
from offload.times.prompts import prefill_s, with_prompt
from offload.times.work import with_context
from specoffload.opening.planning import PlannedDevice

TITLES = ("DeepSeek-R1", "Qwen3-30B-A3B", "gpt-oss-120b")
STREAMS, DEPTHS = (2, 4, 8), (4096, 16384, 61440)
CARD_GIB, N_PROMPT = 24, 2048
COLUMNS = (
    "model", "conversations", "tokens of each", "a decode", "own cells only", "shorter by",
    "2,048 prompt tokens", "own cells only", "shorter by",
)  # fmt: skip


@dataclass(frozen=True)
class StreamPrice:
    """Seconds of a decode of all streams, and of a prompt's tokens in one: shared and own cells."""

    decode_s: float
    own_decode_s: float
    prompt_s: float
    own_prompt_s: float

    @property
    def cells(self) -> tuple[str, ...]:
        decode = f"{1e3 * self.decode_s:.1f} ms", f"{1e3 * self.own_decode_s:.1f} ms"
        prompt = f"{self.prompt_s:.2f} s", f"{self.own_prompt_s:.2f} s"
        return (
            *decode, f"{100 * (1 - self.own_decode_s / self.decode_s):.0f} %",
            *prompt, f"{100 * (1 - self.own_prompt_s / self.prompt_s):.0f} %",
        )  # fmt: skip


def price(facts: ModelFacts, n_streams: int, depth: int) -> StreamPrice:
    """Price streams of `depth` tokens each, on the default plan for them. Raises DoesNotFit."""
    planned = plan_of(facts, CARD_GIB, None, n_ctx=n_streams * depth)
    (part,) = planned.parts
    context, hybrid = part.context, part.request.plan_for_splits
    decode = with_context(part.work, facts, replace(context, n_ctx=n_streams * depth))
    decode_s = float(best_s(part.machine, decode, part.plan.sharing, n_streams, hybrid=hybrid))
    # All streams' cells are read once in either way. A token computes with those of one stream.
    spared_s = attention_s(part.machine, decode, n_streams) - attention_s(part.machine, decode, 1)
    prompts_s = [_prompt_s(part, depth + n * depth) for n in (n_streams - 1, 0)]
    return StreamPrice(decode_s, decode_s - float(spared_s), *prompts_s)


def _prompt_s(part: PlannedDevice, n_cells: int) -> float:
    """Return the seconds of a prompt's tokens that attend to `n_cells` cells."""
    work = with_prompt(part.work, part.facts, part.context, 0, n_cells)
    sharing, n_ubatch = part.plan.sharing, min(part.plan.n_ubatch, N_PROMPT)
    hybrid = part.request.plan_for_splits
    return float(prefill_s(part.machine, work, sharing, N_PROMPT, n_ubatch, hybrid=hybrid))


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
                    yield *head, *price(facts, n_streams, depth).cells
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
