"""Several conversations in one batch, on a real engine: each writes what the target alone would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from budgets import budget
from lossless_parts import BATCH_NOISE, N_CTX, NEAR_TIE, Judge, cheap_batches

from offload.engine import Engine, EngineOptions
from offload.plan.min_batch import MinBatch
from offload.streaming.options import StreamingOptions
from specdec.decoding.acceptance import Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import BatchMember, DecodingLoop
from specdec.drafters.model import ModelDrafter
from specdec.policies.throughput import Throughput
from specoffload.bench.workloads import prompts
from specoffload.config.resolution import demo_file

LENGTHS = (30, 12, 21)  # they end one after the other


@pytest.mark.parametrize("way", ["resident", "streamed", "split"])
def test_sequences_decoded_together_write_the_targets_own_texts(
    exact: Path, judge: Judge, way: str
) -> None:
    n, greedy = len(LENGTHS), Greedy()
    is_split, least = way == "split", 1000 if way == "split" else 1
    vram = budget(exact, StreamingOptions(), "half") if is_split else None
    options = EngineOptions(
        device="cpu" if way == "resident" else "sim",
        min_batch=MinBatch(least, least),
        streaming=StreamingOptions(hybrid=is_split, vram_bytes=vram),
        n_ctx=N_CTX * n,
        n_sequences=n,
        n_outputs=64,
    )
    alone = EngineOptions(device="cpu", n_ctx=N_CTX * n, n_sequences=n)
    with Engine(exact, options) as target, Engine(demo_file("draft.gguf"), alone) as draft:
        texts = [target.tokenize(text) for text in (*prompts("code")[:2], prompts("prose")[0])]
        policy = Throughput(cheap_batches(), n_max=15)
        drafting = ChainDrafting(target.sequences, ModelDrafter(draft.sequences), policy)
        loop = DecodingLoop(target.sequences, drafting)
        members = [
            BatchMember(s, list(text), greedy, MatchAcceptance(greedy), LENGTHS[s], lambda _: False)
            for s, text in enumerate(texts)
        ]
        for member in members:
            loop.add(member)
        n_rounds = n_drafted = n_accepted = 0
        while not loop.is_idle:
            rounds = loop.step().rounds
            n_rounds += bool(rounds)
            n_drafted += sum(r.n_drafted for _, r in rounds)
            n_accepted += sum(r.n_accepted for _, r in rounds)
            for member, _ in rounds:
                assert target.sequences.length(member.sequence) == len(member.history) - 1
        kept = [target.sequences.extend(m.sequence, m.history[-1:])[0] for m in members]
        counters = target.counters()
    assert 0 < n_accepted < n_drafted, "drafts were made, kept and rejected"
    assert n_rounds < max(LENGTHS), "one decode served several tokens"
    assert (counters.streamed_bytes > 0) == (way != "resident")
    assert (counters.n_pairs_host > 0) == is_split
    assert counters.split_layers >= n_rounds * is_split
    for prompt, member, length, row in zip(texts, members, LENGTHS, kept, strict=True):
        assert len(member.history) == len(prompt) + length
        tokens = member.history[len(prompt) :]
        rows = judge.rows(prompt, [*tokens, 0])  # the last: what follows the text
        for token, judged in zip(tokens, rows, strict=False):
            assert judged.max() - judged[token] <= NEAR_TIE
        assert np.abs(row - rows[-1]).max() < BATCH_NOISE
