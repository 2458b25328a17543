"""Idle conversations that leave the cells by their price change no text, and lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_restored_slots import SMALL, preset
from test_slots import SPECS, Answer, open_slots, together

from lab.synth.mtp import write_mtp
from offload.errors import DeviceFailed
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.idle_rents import MoveCosts
from specoffload.slots.slot import Slot

OPTIONS = GenerateOptions(n_predict=8, ignore_eos=True)
DRAFTS = {"--spec-policy": "fixed", "--spec-draft-n-max": 3}
MTP = {"--spec-type": "draft-mtp", **DRAFTS}
KINDS = {
    "mistral-large": SPECS["suffix"], "deepseek-v3": SPECS["suffix"], "mamba2": SPECS["suffix"],
    "gpt-oss-20b": SPECS["suffix"], "qwen3next": MTP, "mimo2": MTP,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cheap_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every idle slot leaves before the first decode of others."""
    monkeypatch.setattr(MoveCosts, "seconds", lambda self, n_bytes: 0.0)


def opened(kind: str, models: Path, **more: Any) -> Session:
    spec = KINDS[kind]
    path = write_mtp(models, kind) if spec is MTP else preset(kind, models)
    room = {"cache_ram_bytes": 1 << 28, **SMALL}
    return open_slots(path, spec, 4, **{**room, **more})


def prompt(n_vocab: int, seed: int, n: int) -> list[int]:
    return [(seed * i + i * i % 11 + seed) % min(n_vocab, 400) for i in range(n)]


def day(session: Session) -> list[Answer]:
    """Three conversations that go on by turns, two of them at the same time."""
    n_vocab = session.target.n_vocab
    talks = [prompt(n_vocab, seed, 90 + seed) for seed in (3, 5, 7)]
    answers: list[Answer] = []
    for turn, active in enumerate(((0,), (1,), (0, 2), (1, 2), (0,))):
        asked = [[*talks[i], *prompt(n_vocab, turn + 2, 9)] for i in active]
        for i, text, answer in zip(active, asked, together(session, asked, OPTIONS), strict=True):
            talks[i] = [*text, *answer.tokens]
            answers.append(answer)
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_that_move_write_what_they_write_in_their_cells(
    kind: str, models: Path
) -> None:
    with opened(kind, models, cache_idle_slots=False) as session:
        stayed = day(session)
        before = session.counters()
    assert before["idle_moves"] == before["idle_compactions"] == 0
    with opened(kind, models) as session:
        moved = day(session)
        counters = session.counters()
    assert [a.tokens for a in moved] == [a.tokens for a in stayed]
    assert [a.stats.n_cached_tokens for a in moved] == [a.stats.n_cached_tokens for a in stayed]
    if kind != "mamba2":  # it has no cells that others pass over
        assert counters["idle_moves"] > counters["idle_returns"] > 2
        assert counters["idle_cells_read"] < 0.2 * before["idle_cells_read"]


def test_the_bytes_of_checkpoints_and_of_moved_conversations_are_counted(models: Path) -> None:
    with opened("gpt-oss-20b", models) as session:
        n_vocab = session.target.n_vocab
        together(session, [prompt(n_vocab, 3, 90)], OPTIONS)
        counted = session.counters()
        assert counted["checkpoint_bytes"] > 0 == counted["stored_prompt_bytes"]
        together(session, [prompt(n_vocab, 5, 80)], OPTIONS)
        moved = session.counters()
        assert moved["stored_prompt_bytes"] > counted["checkpoint_bytes"]
        assert 0 < moved["checkpoint_bytes"] <= counted["checkpoint_bytes"]


def test_what_has_no_room_in_ram_stays_in_its_cells(models: Path) -> None:
    """Moving another one there would lose the one that has moved before."""
    with opened("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        together(session, [prompt(n_vocab, 3, 200)], OPTIONS)
        state_bytes = session.batcher.slots[0].saved_bytes
    with opened("mistral-large", models, cache_ram_bytes=int(1.5 * state_bytes)) as session:
        texts = [prompt(n_vocab, seed, 200) for seed in (3, 5, 7)]
        for text in texts:
            together(session, [text], OPTIONS)
        assert session.counters()["idle_moves"] == 1
        assert session.counters()["idle_cells_read"] > 0
        for text in texts:
            (answer,) = together(session, [text], OPTIONS)
            assert answer.stats.n_cached_tokens == 199


def test_a_running_request_above_a_gap_moves_down(models: Path) -> None:
    """A client leaves whose cells lie below those of a request that goes on."""
    long = GenerateOptions(n_predict=60, ignore_eos=True)
    with opened("mistral-large", models, cache_idle_slots=False) as session:
        (alone,) = together(session, [prompt(session.target.n_vocab, 5, 40)], long)
    with opened("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        first = session.start(prompt(n_vocab, 3, 300), long)
        session.step()
        second = session.start(prompt(n_vocab, 5, 40), long)
        for _ in range(12):
            session.step()
        session.cancel(first)
        while not session.is_idle:
            session.step()
        assert second.error is None
        assert [t for piece in second.pieces for t in piece.tokens] == alone.tokens
        assert session.counters()["idle_compactions"] > 0
        assert session.target.sequences.cells.end < 150


def test_a_conversation_that_cannot_be_saved_stays_in_its_cells(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Slot) -> StoredPrompt:
        raise DeviceFailed("no memory for a copy")

    with opened("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        text = prompt(n_vocab, 3, 200)
        together(session, [text], OPTIONS)
        monkeypatch.setattr(Slot, "saved", fails)
        together(session, [prompt(n_vocab, 5, 200)], OPTIONS)
        assert session.counters()["idle_moves"] == 0
        (answer,) = together(session, [text], OPTIONS)
        assert answer.stats.n_cached_tokens == 199
