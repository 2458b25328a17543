"""The start-up lines and a generation's statistics, from plain data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload.plan.min_batch import MinBatch
from specdec.types import Decision, Draft, Round
from specoffload.session.startup_lines import (
    DraftFacts,
    MemoryFacts,
    StartUp,
    StreamedFacts,
    startup_lines,
)
from specoffload.session.statistics import EngineCounts, Tally

MEMORY = MemoryFacts("llama", True, 0, True, True)
PLAIN = StartUp(
    device="cpu",
    device_description="a processor",
    device_reason="no GPU",
    device_notes=("no AMX",),
    wanted_ctx=0,
    n_ctx=4096,
    has_experts=False,
    streamed=None,
    draft=None,
    speculation=("every token is decoded alone",),
    memory=MEMORY,
    declined=(),
    others=("2 threads",),
)
RECURRENT = MemoryFacts("mamba", False, 0, True, True)


def text(**changes: object) -> str:
    return "\n".join(startup_lines(replace(PLAIN, **changes)))  # type: ignore[arg-type]


def test_a_plain_start_says_device_draft_and_speculation() -> None:
    assert startup_lines(PLAIN) == (
        "device cpu: a processor (no GPU)",
        "no AMX",
        "draft model: none",
        "every token is decoded alone",
        "2 threads",
    )


def test_a_context_that_the_library_rounds_is_told_and_one_that_fits_is_not() -> None:
    assert "--ctx-size 300: llama.cpp rounds it to 512" in text(wanted_ctx=300, n_ctx=512)
    assert "--ctx-size" not in text(wanted_ctx=512, n_ctx=512)


def test_sizes_of_batches_that_both_sides_compute_are_told() -> None:
    streamed = StreamedFacts(3 << 20, 1 << 20, "experts from 24 tokens on", (), None, "1 to 8")
    assert text(streamed=streamed).splitlines()[2] == (
        "weights: 3 MiB in RAM, cached in 1 MiB of GPU memory. On the GPU: experts from 24 tokens "
        "on (--min-batch). On GPU and CPU at once: batches of 1 to 8 tokens (--hybrid); other "
        "batches run on the CPU"
    )
    none = replace(streamed, split="")
    assert "(--min-batch); other batches run on the CPU" in text(streamed=none)


def test_streamed_weights_come_with_their_thresholds_and_reasons() -> None:
    when = MinBatch(24, 8).words()
    streamed = StreamedFacts(3 << 20, 1 << 20, when, ("few serve each token",), "read at once")
    said = text(streamed=streamed)
    for words in (
        "3 MiB",
        "1 MiB of GPU memory",
        "from 24 tokens on",
        "dense from 8",
        "few serve",
        "read",
    ):
        assert words in said
    assert "experts run on the CPU" in text(has_experts=True)
    assert "experts run on the CPU" not in said


def test_a_draft_larger_than_its_target_is_suspected() -> None:
    draft = DraftFacts("draft.gguf", 2_000_000, 10, 20)
    assert "draft.gguf, 2.0M parameters" in text(draft=draft)
    assert "swapped" not in text(draft=draft)
    assert "swapped" in text(draft=replace(draft, size_bytes=21))


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (RECURRENT, "checkpoints in GPU memory; llama.cpp has no snapshots for mamba"),
        (replace(RECURRENT, device_checkpoints=False), "checkpoints in RAM"),
        (replace(RECURRENT, n_rs_seq=4), "drafts of up to 4 tokens are undone by snapshots"),
    ],
)
def test_how_drafts_are_taken_back(memory: MemoryFacts, words: str) -> None:
    assert words in text(memory=memory)


def test_a_recurrent_memory_that_drafts_nothing_needs_no_words() -> None:
    assert "recurrent" not in text(memory=replace(RECURRENT, speculates=False))


def test_a_tally_counts_what_the_engine_did_meanwhile() -> None:
    tally = Tally(EngineCounts(100, 1, 0), now_s=10.0)
    tally.evaluated(n_prompt_tokens=7, n_cached_tokens=3, now_s=12.0)
    draft = Draft((1, 2), (0.9, 0.8), "draft", Decision(2, "2 pay"), n_steps=3)
    tally.count(Round(draft, 1, (1, 5), draft_s=0.25, verify_s=0.5), n_kept=2)
    tally.count(Round(draft, 2, (1, 2, 3), draft_s=0.25, verify_s=0.5), n_kept=1)
    stats = tally.stats(EngineCounts(150, 4, 2), now_s=13.0)
    assert (stats.n_prompt_tokens, stats.n_cached_tokens, stats.n_tokens) == (7, 3, 3)
    assert (stats.prefill_s, stats.decode_s, stats.tokens_per_s) == (2.0, 1.0, 3.0)
    assert (stats.streamed_bytes, stats.n_checkpoints, stats.n_restores) == (50, 3, 2)
    assert (stats.n_rounds, stats.n_drafted, stats.n_accepted) == (2, 4, 3)
    assert (stats.draft_s, stats.verify_s, stats.n_draft_steps) == (0.5, 1.0, 6)
    assert stats.acceptance_per_position == (1.0, 0.5)
    assert stats.draft_lengths == ((2, 2),)
    assert stats.accepted_by_source == (("draft", 3),)
