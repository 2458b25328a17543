"""The start-up lines for given engine facts, and a generation's statistics."""

from __future__ import annotations

from types import SimpleNamespace as Told
from typing import Any

import pytest

from offload.schedule.splitter import all_on_device, stay
from offload.times.min_batch import NEVER, MinBatch
from offload.times.ways import Ways
from specdec.types import Decision, Draft, Round
from specoffload.generation.statistics import EngineCounts, Tally
from specoffload.session.startup_lines import always_shown, startup_lines


def lines(
    *, wanted_ctx: int = 0, drafts: Any = None, speculation: Any = None, **changes: object
) -> tuple[str, ...]:
    opened = Told(
        notes=("no AMX",),
        plan=changes.pop("plan", None),
        remote=changes.pop("remote", None),
        weights=Told(
            store=None, hybrid=changes.pop("hybrid", None), ways=changes.pop("ways", None)
        ),
        row_draft=None,
        devices=(),
    )
    target: Any = Told(
        start=Told(
            choices=((Told(name="cpu", description="a processor", reason="no GPU"), None),),
            options=Told(row_file=None),
        ),
        opened=opened,
        n_ctx=4096,
        n_cells=4096,
        facts=Told(n_experts=changes.pop("n_experts", 0), architecture="mamba"),
        model=Told(size_bytes=20),
        min_batch=MinBatch(24, 8),
        numa_notes=(),
        **changes,
    )
    spec = Told(reasons=())
    choices: Any = Told(n_ctx=wanted_ctx, spec=spec)
    return startup_lines(choices, target, drafts, speculation, ("2 threads",))


def test_a_plain_start_says_device_draft_and_speculation() -> None:
    assert lines() == (
        "device cpu: a processor (no GPU)",
        "no AMX",
        "draft model: none",
        "every token is decoded alone",
        "2 threads",
    )


def test_a_context_rounded_to_at_least_twice_its_size_is_always_said() -> None:
    near, far = lines(wanted_ctx=2049), lines(wanted_ctx=2048)
    assert "--ctx-size 2049: llama.cpp rounds it to 4096 tokens" in near
    assert always_shown(near) == []
    assert always_shown(far) == ["--ctx-size 2048: llama.cpp rounds it to 4096 tokens"]
    assert always_shown(lines(wanted_ctx=4096)) == []


def test_a_draft_larger_than_its_target_is_suspected() -> None:
    model, facts = Told(n_params=2_000_000, size_bytes=21), Told(path=Told(name="draft.gguf"))
    said = lines(drafts=Told(model=model, facts=facts))
    assert "draft model: draft.gguf, 2.0M parameters" in said
    assert "swapped" in " ".join(said)


@pytest.mark.parametrize(
    ("n_rs_seq", "on_device", "words"),
    [
        (0, True, "checkpoints in GPU memory; llama.cpp has no snapshots for mamba"),
        (0, False, "checkpoints in RAM"),
        (4, True, "drafts of up to 4 tokens are undone by snapshots"),
    ],
)
def test_how_drafts_are_taken_back(n_rs_seq: int, on_device: bool, words: str) -> None:
    memory = Told(can_rewind=False, n_rs_seq=n_rs_seq, device_checkpoints=on_device)
    assert words in " ".join(lines(sequences=memory, speculation=Told(notes=())))
    assert "recurrent" not in " ".join(lines(sequences=memory))


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


def test_experts_are_said_to_run_where_they_are() -> None:
    assert any("experts run on the CPU: --device cpu" in line for line in lines(n_experts=8))
    remote = lines(n_experts=8, remote=Told())
    assert any("where their layers are" in line for line in remote)
    assert not any("--device cpu" in line for line in remote)
    resident = lines(n_experts=8, plan=Told(streamed=()))
    assert any("all weights are in GPU memory" in line for line in resident)


def said_of_ways(
    sizes: list[int], min_batch: MinBatch, *, shares_prompts: bool = False, n_experts: int = 8
) -> str:
    ways = Ways(
        min_batch, may_split=True, unsplit=frozenset(range(1, 65)) - {*sizes},
        splitter=all_on_device if shares_prompts else stay,
    )  # fmt: skip
    (said,) = [line for line in lines(
        n_experts=n_experts,
        plan=Told(
            streamed=(Told(name="blk.0.ffn_up_exps.weight"),), streamed_bytes=9, slot_bytes=9,
            reasons=(),
        ),
        ways=Told(now=ways),
        min_batch_words=lambda kinds: f"the GPU computes {min_batch.words(kinds)}",
    ) if "(--min-batch)" in line]  # fmt: skip
    return said


@pytest.mark.parametrize(
    ("sizes", "words"),
    [([1], "batches of 1 token with"), ([1, 2, 3, 8], "batches of 1 to 3 and 8 tokens with")],
)
def test_shared_batches_are_counted_in_singular_and_plural(sizes: list[int], words: str) -> None:
    assert words in said_of_ways(sizes, MinBatch(24, 8))


def test_who_computes_prompts_is_said() -> None:
    """Also if the CPU computes nothing alone, and then no batch is left to it."""
    rest = "the CPU computes all other batches"
    few = said_of_ways([1, 2], MinBatch(24, 8), shares_prompts=True)
    assert "shares batches of 1 to 2 tokens and prompts with the CPU (--hybrid)" in few
    assert few.endswith(rest)
    assert rest not in said_of_ways([*range(1, 65)], MinBatch(NEVER, NEVER), shares_prompts=True)
    assert rest in said_of_ways([*range(1, 65)], MinBatch(NEVER, NEVER))
    assert rest not in said_of_ways([1, 2], MinBatch(1, 1))
    assert rest in said_of_ways([], MinBatch(1, 1, prefill_experts=100))
