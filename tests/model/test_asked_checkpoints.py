"""Memories that cannot be cut keep checkpoints where a request asks for them, and find them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_slots import SPECS, Plain, model, open_slots, together

from lab.synth import write_preset
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

KINDS = ("mamba2", "qwen3next", "windowed", "mistral-large")
SMALL = {"ubatch_size": 64, "batch_size": 128}  # so that windows forget the beginning
OPTIONS = GenerateOptions(n_predict=6, ignore_eos=True)


def path_of(kind: str, models: Path) -> Path:
    if kind != "windowed":
        return model(kind, models)
    path = models / "asked-windowed.gguf"  # its windows are of 64 tokens
    more = {"size": "tiny", "seed": 6, "quant": "f32", "vocab": "bytes"}
    return write_preset("gpt-oss-20b", path, **more)  # type: ignore[arg-type]


def prompts(session: Session) -> list[list[int]]:
    """Three prompts with the same first 400 tokens."""
    n = session.target.n_vocab
    common = [(7 * i + i * i % 11) % min(n, 400) for i in range(400)]
    return [[*common, *((13 * i + k) % 300 for i in range(200))] for k in (1, 2, 3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_slots", [1, 3])
def test_another_end_is_read_from_the_asked_place_on(kind: str, n_slots: int, models: Path) -> None:
    path = path_of(kind, models)
    with (
        open_slots(path, SPECS["alone"], n_slots, cache_ram_bytes=1 << 30, **SMALL) as session,
        open_slots(path, SPECS["alone"], 1, **SMALL) as fresh,
    ):
        asked = GenerateOptions(n_predict=6, ignore_eos=True, keep_at=(150, 400))
        for at, prompt in enumerate(prompts(session)):
            (answer,) = together(session, [prompt], asked)
            fresh.forget()
            (wanted,) = together(fresh, [prompt], OPTIONS)
            Plain(path).check(prompt, answer.tokens, wanted.tokens)
            assert answer.stats.n_cached_tokens == (400 if at else 0)
            assert answer.stats.n_kept_tokens == 400


def test_without_the_hint_windows_are_read_again(models: Path) -> None:
    with open_slots(path_of("windowed", models), SPECS["alone"], 1, **SMALL) as session:
        for prompt in prompts(session)[:2]:
            (answer,) = together(session, [prompt], OPTIONS)
            assert answer.stats.n_cached_tokens == 0


def test_a_conversation_goes_on_from_the_end_of_its_last_prompt(models: Path) -> None:
    """The next prompt lacks the reasoning before the last answer, which windows have passed."""
    path = path_of("windowed", models)
    with open_slots(path, SPECS["alone"], 1, **SMALL) as session:
        first, *_ = prompts(session)
        (answer,) = together(session, [first], GenerateOptions(n_predict=300, ignore_eos=True))
        longer = [*first, *answer.tokens[280:], 5, 6, 7]
        (again,) = together(session, [longer], OPTIONS)
        assert again.stats.n_cached_tokens == len(first) - 1
        session.forget()
        (fresh,) = together(session, [longer], OPTIONS)
        Plain(path).check(longer, again.tokens, fresh.tokens)


def test_asked_checkpoints_outlast_others(models: Path) -> None:
    path = model("qwen3next", models)
    with open_slots(path, SPECS["alone"], 1, ctx_checkpoints=2) as session:
        first, second, _ = prompts(session)
        asked = GenerateOptions(n_predict=1, ignore_eos=True, keep_at=(400,))
        together(session, [first[:500]], asked)
        for n in (540, 580):  # each leaves a checkpoint at its end
            together(session, [first[:n]], GenerateOptions(n_predict=1, ignore_eos=True))
        (answer,) = together(session, [second], OPTIONS)
        assert answer.stats.n_cached_tokens == 400
