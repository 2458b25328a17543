"""The embedded pair, end to end: speculative = plain, streamed or not, over held-out prompts.

With 8-bit weights ggml rounds the activations to 8 bits too, and the last bit of a product, which
depends on the batch, then decides a rounding: logits differ by up to 0.05 between a batch of one
and of two. The equality is therefore tested on a copy of the target in f32, where it is exact to
1e-3; on the shipped file the choice may differ no more than the batch sizes themselves do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from budgets import budget
from numpy.typing import NDArray
from resolved import config_of

from offload.plan.min_batch import MinBatch
from offload.streaming.options import StreamingOptions
from specoffload.config.options import Toggle
from specoffload.config.resolution import demo_file
from specoffload.config.speculation import NO_DRAFTS
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import SEQUENCE, Session

N_PREDICT = 32
NEAR_TIE = 1e-3  # kernels differ by batch size


def held_out() -> list[str]:
    rows = json.loads(demo_file("prompts.json").read_text(encoding="utf-8"))
    return [row["text"] for row in rows][:50]


def session(device: str, **changes: object) -> Session:
    # One thread: on a busy machine, threads that wait for each other spin.
    # Without a profile blocks are fixed; what the default drafts depends on what it measures.
    if changes.get("spec") is not NO_DRAFTS:
        changes = {"use_profile": False} | changes
    return Session(config_of(device=device, ctx_size=1024, threads=1, **changes))


def generate(opened: Session, prompt: str, **options: object) -> list[int]:
    wanted = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True, **options)  # type: ignore[arg-type]
    return [t for piece in opened.generate(prompt, wanted) for t in piece.tokens]


@pytest.fixture(scope="module")
def judge(exact: Path) -> Iterator[Session]:
    """The plain target, that says what the argmax of each prefix is."""
    with session("cpu", spec=NO_DRAFTS, model=exact) as opened:
        yield opened


def assert_each_token_is_the_targets_choice(
    judge: Session, prompt: list[int], tokens: list[int]
) -> None:
    """Plain decoding's logits, one token at a time, for each prefix of the answer."""
    engine = judge.target
    judge.forget()
    engine.sequences.extend(SEQUENCE, prompt[:-1], n_logits=0)
    for last, token in zip([prompt[-1], *tokens], tokens, strict=False):
        row = engine.sequences.extend(SEQUENCE, [last])[0]
        assert row.max() - row[token] <= NEAR_TIE, f"token {token}, argmax {int(np.argmax(row))}"
    judge.forget()


@pytest.mark.parametrize(
    ("device", "min_batch"), [("cpu", None), ("sim", "2"), ("sim", "1"), ("sim", "1000")]
)
def test_speculative_output_is_the_targets_own(
    exact: Path, judge: Session, device: str, min_batch: str | None
) -> None:
    texts = held_out()
    assert len(texts) == 50
    draft = demo_file("draft.gguf")
    with session(device, min_batch=min_batch, model=exact, draft=draft) as opened:
        for text in texts:
            # A cached beginning would be evaluated in other batches, by other kernels.
            opened.forget()
            tokens = generate(opened, text)
            assert len(tokens) == N_PREDICT
            prompt = opened.tokenize(text, add_special=True, parse_special=True)
            assert_each_token_is_the_targets_choice(judge, prompt, tokens)
        streamed = opened.target.counters().streamed_experts
    assert (streamed > 0) == (min_batch in ("1", "2"))


@pytest.mark.parametrize("hybrid", [Toggle.ON, Toggle.AUTO])
def test_speculative_output_is_the_targets_own_where_layers_are_split(
    exact: Path, judge: Session, hybrid: Toggle
) -> None:
    draft, half = demo_file("draft.gguf"), budget(exact, StreamingOptions(), "half")
    changes = {"vram_bytes": half, "n_cpu_moe": 99, "hybrid": hybrid, "min_batch": "1000"}
    with session("sim", model=exact, draft=draft, **changes) as opened:
        for text in held_out()[::5]:
            opened.forget()
            tokens = generate(opened, text)
            prompt = opened.tokenize(text, add_special=True, parse_special=True)
            assert_each_token_is_the_targets_choice(judge, prompt, tokens)
        counters = opened.target.counters()
        assert any(line.startswith(f"--hybrid {hybrid}: ") for line in opened.notes)
    assert counters.n_pairs_host > 0
    assert counters.n_pairs_hit > 0


def test_on_the_shipped_file_the_choice_differs_no_more_than_batch_sizes_do() -> None:
    with (
        session("sim", min_batch="2", spec=NO_DRAFTS) as plain,
        session("sim", min_batch="2") as spec,
    ):
        for text in held_out()[:20]:
            spec.forget()
            tokens = generate(spec, text)
            prompt = spec.tokenize(text, add_special=True, parse_special=True)
            fed = [prompt[-1], *tokens[:-1]]
            one = logits_in_batches(plain, prompt, fed, 1)
            two = logits_in_batches(plain, prompt, fed, 2)
            noise = float(np.abs(one - two).max())
            for row, token in zip(one, tokens, strict=True):
                assert row.max() - row[token] <= 2 * noise + NEAR_TIE


def logits_in_batches(
    opened: Session, prompt: list[int], fed: list[int], size: int
) -> NDArray[np.float32]:
    opened.forget()
    engine = opened.target
    engine.sequences.extend(SEQUENCE, prompt[:-1], n_logits=0)
    rows = [engine.sequences.extend(SEQUENCE, fed[i : i + size]) for i in range(0, len(fed), size)]
    return np.concatenate(rows)


def test_drafts_are_accepted_and_counted() -> None:
    with session("sim", min_batch="2") as opened:
        stats = None
        for piece in opened.generate(held_out()[0], GenerateOptions(n_predict=N_PREDICT)):
            stats = piece.stats
    assert stats is not None
    assert stats.n_tokens <= N_PREDICT
    assert 0 < stats.n_accepted <= stats.n_drafted
    assert stats.tokens_per_round > 1
    assert stats.streamed_bytes > 0


def test_a_conversation_goes_on_from_what_it_shares() -> None:
    first, second = held_out()[:2]
    with session("sim", min_batch="2") as opened:
        one = generate(opened, first)
        prompt = opened.tokenize(first, add_special=True, parse_special=True) + one
        longer = [*prompt, *opened.tokenize(second, add_special=False, parse_special=True)]
        wanted = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
        again = [t for piece in opened.generate(longer, wanted) for t in piece.tokens]
        reused = opened.target.sequences.length(SEQUENCE)
        opened.forget()
        assert generate(opened, first) == one
    assert reused > len(prompt)
    assert len(again) == N_PREDICT


def test_closing_a_generation_early_leaves_the_session_usable() -> None:
    prompt = held_out()[0]
    with session("sim", min_batch="2") as opened:
        whole = generate(opened, prompt)
        pieces = opened.generate(prompt, GenerateOptions(n_predict=N_PREDICT, ignore_eos=True))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        assert generate(opened, prompt) == whole


def test_text_stops_before_a_stop_sequence() -> None:
    with session("cpu") as opened:
        options = GenerateOptions(n_predict=64, stop=("\n",), ignore_eos=True)
        pieces = list(opened.generate("def fibonacci(n):\n    if", options))
    text = "".join(piece.text for piece in pieces)
    assert "\n" not in text
    assert pieces[-1].finish_reason == "stop"


def test_sampling_with_a_seed_repeats_itself() -> None:
    with session("cpu") as opened:
        runs = [generate(opened, "import os\n", temperature=1.0, seed=s) for s in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_resident_and_the_streamed_model_give_equal_logits(judge: Session) -> None:
    tokens = judge.tokenize(held_out()[3], add_special=True, parse_special=True)[:40]
    with session("sim", min_batch="1", spec=NO_DRAFTS) as opened:
        assert opened.config.min_batch == MinBatch(1, 1)
        streamed = opened.target.sequences.extend(SEQUENCE, tokens)
    with session("cpu", spec=NO_DRAFTS) as opened:
        plain = opened.target.sequences.extend(SEQUENCE, tokens)
    assert np.array_equal(streamed, plain)


def test_the_pair_ships_with_the_package() -> None:
    for name in ("target.gguf", "draft.gguf", "CARD.md"):
        assert Path(demo_file(name)).is_file()
