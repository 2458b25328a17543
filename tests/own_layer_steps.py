"""Decodes texts with drafts from the target's rows, some of which are rejected."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from offload.engine import Engine
from offload.sequences.block_draft import BlockDraft
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.rows import BlockDrafter, RowDrafter
from specdec.drafters.synthetic import SyntheticAcceptance
from specdec.policies.rules import Fixed


def steps_of(engine: Engine) -> Iterator[tuple[int, list[int], list[int], int]]:
    """Decode a text in each sequence with drafts of 3 tokens, which are accepted at random.

    So rows of every length are kept and dropped. Yields for each draft its sequence, the text
    before it, its tokens, and how many were accepted.
    """
    n_sequences = engine.layout.context.n_sequences
    rng = np.random.default_rng(n_sequences)
    accept = SyntheticAcceptance([0.8, 0.6, 0.4], rng)
    assert engine.opened.row_draft is not None
    layers = engine.opened.row_draft
    drafter = (
        BlockDrafter(layers, name=layers.shape.kind)
        if isinstance(layers, BlockDraft)
        else RowDrafter(layers)
    )
    drafting = ChainDrafting(engine.sequences, drafter, Fixed(3))
    loop = DecodingLoop(engine.sequences, drafting)
    members = [
        BatchMember(s, rng.integers(4, 500, 80 + 30 * s).tolist(), accept, 24 + 5 * s,
                    lambda _: False)
        for s in range(n_sequences)
    ]  # fmt: skip
    for member in members:
        loop.add(member)
    while not loop.is_idle:
        before = {m.sequence: list(m.history) for m in members}
        for member, round_ in loop.step().rounds:
            if drafted := list(round_.draft.tokens):
                yield member.sequence, before[member.sequence], drafted, round_.n_accepted
    assert engine.opened.row_draft.n_unknown_rows == 0
