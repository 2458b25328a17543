"""Idle conversations that leave the cells by their price change no text, and lose nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from test_block import open_block
from test_block import pair as block_pair
from test_eagle import open_eagle
from test_eagle import pair as eagle_pair
from test_restored_slots import SMALL, preset
from test_slots import SPECS, Answer, open_slots, together

from lab.synth.mtp import write_mtp
from offload.errors import DeviceFailed
from specoffload.config.options import DiskRoom
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


ROOM: dict[str, Any] = {"cache_ram_bytes": 1 << 28, **SMALL}


@pytest.fixture(autouse=True)
def _cheap_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every idle slot leaves before the first decode of others."""
    monkeypatch.setattr(MoveCosts, "seconds", _nothing)


def opened(kind: str, models: Path, *, drafts_itself: bool = False, **more: Any) -> Session:
    spec = SPECS["itself"] if drafts_itself else KINDS[kind]
    path = write_mtp(models, kind) if spec is MTP else preset(kind, models)
    own = {"draft": path} if drafts_itself else {}
    return open_slots(path, spec, 4, **{**ROOM, **own, **more})


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


@pytest.mark.parametrize("kind", ["mistral-large", "gpt-oss-20b", "qwen3next"])
def test_what_a_draft_model_holds_moves_with_the_conversation(kind: str, models: Path) -> None:
    """It reads nothing again. Its memory has full attention, sliding windows, or is hybrid."""
    found = []
    for stays in (True, False):
        with opened(kind, models, drafts_itself=True, cache_idle_slots=not stays) as session:
            answers = day(session)
            assert session.speculation is not None
            assert session.speculation.draft_memory is not None
            found.append((answers, session.speculation.draft_memory.n_rows, session.counters()))
    (stayed, n_rows, before), (moved, n_rows_moved, counters) = found
    assert before["idle_moves"] == 0
    assert [a.tokens for a in moved] == [a.tokens for a in stayed]
    assert counters["idle_moves"] > counters["idle_returns"] > 2
    n_drafted = sum(a.stats.n_drafted for a in moved)
    assert sum(a.stats.n_accepted for a in moved) > 0.9 * n_drafted > 0
    assert n_rows_moved < 1.1 * n_rows


def test_a_draft_model_whose_state_cannot_be_loaded_reads_the_text_again(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened("mistral-large", models, drafts_itself=True, cache_idle_slots=False) as session:
        stayed = day(session)
    with opened("mistral-large", models, drafts_itself=True) as session:
        assert session.draft is not None
        draft = session.draft.sequences

        def fails(sequence: int, *_: object) -> None:
            draft.rewind(sequence, 0)
            raise DeviceFailed("no room")

        monkeypatch.setattr(draft, "loading", fails)
        moved = day(session)
    assert [a.tokens for a in moved] == [a.tokens for a in stayed]
    assert "the draft model reads" in caplog.text


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_files_that_draft_from_rows_move_with_the_conversation(kind: str, models: Path) -> None:
    pair, open_pair = {"eagle": (eagle_pair, open_eagle), "block": (block_pair, open_block)}[kind]
    target, draft = pair(models, "gpt-oss")
    found = []
    for clears in (False, True):
        more = {**ROOM, "cache_idle_slots": clears}
        with open_pair(target, draft, "resident", 4, **more) as session:
            answers = day(session)
            assert session.target.opened.row_draft is not None
            unknown = session.target.opened.row_draft.n_unknown_rows
            found.append((answers, unknown, session.counters()["idle_returns"]))
    (stayed, unknown, _), (moved, unknown_moved, n_returns) = found
    assert [a.tokens for a in moved] == [a.tokens for a in stayed]
    assert unknown_moved <= unknown
    assert n_returns > 2


def test_a_process_that_is_killed_during_a_move_leaves_whole_files(
    models: Path, tmp_path: Path
) -> None:
    """The prompt that moved before is read from the disk, and the other one is evaluated again."""
    path = preset("mistral-large", models)
    texts = [prompt(256, seed, 400) for seed in (3, 5)]
    with open_slots(path, SPECS["alone"], 1, **ROOM) as session:
        wanted = [a.tokens for text in texts for a in together(session, [text], OPTIONS)]
    disk = {**ROOM, "cache_ram_bytes": 0, "cache_disk": DiskRoom(1 << 30, tmp_path / "kept")}
    spawning = multiprocessing.get_context("spawn")
    child = spawning.Process(target=_killed_in_a_move, args=(path, disk, texts))
    child.start()
    try:
        child.join(300)
        assert child.exitcode == -signal.SIGKILL
    finally:
        if child.is_alive():
            child.kill()
    with open_slots(path, SPECS["alone"], 1, **disk) as session:
        found = [together(session, [text], OPTIONS)[0] for text in texts]
    assert [a.tokens for a in found] == wanted
    assert [a.stats.n_cached_tokens for a in found] == [399, 0]


def _killed_in_a_move(path: Path, disk: dict[str, Any], texts: list[list[int]]) -> None:
    """Move the first text to the disk, and end by SIGKILL when the second one has been copied."""
    MoveCosts.seconds = _nothing  # type: ignore[method-assign]
    copied = Slot.saved

    def killed(slot: Slot) -> StoredPrompt:
        copied(slot)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with open_slots(path, SPECS["alone"], 2, **disk) as session:
        for text in texts:
            together(session, [text], OPTIONS)
        folder, end_s = session._prompts.folder, time.monotonic() + 30
        assert folder is not None
        while not folder.n_written and time.monotonic() < end_s:
            time.sleep(0.05)
        assert folder.n_written
        Slot.saved = killed  # type: ignore[method-assign]
        together(session, [prompt(256, 7, 50)], OPTIONS)


def _nothing(_: MoveCosts, __: int) -> float:
    return 0.0


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


def test_an_edit_after_a_move_writes_the_same_with_all_keys_of_windows(models: Path) -> None:
    """The library saves only the last window's keys, also with --swa-full."""
    found = []
    for clears in (False, True):
        with opened("gpt-oss-20b", models, swa_full=True, cache_idle_slots=clears) as session:
            n_vocab = session.target.n_vocab
            text = prompt(n_vocab, 3, 300)
            together(session, [text], OPTIONS)
            together(session, [prompt(n_vocab, 5, 80)], OPTIONS)
            moves = session.counters()["idle_moves"]
            (edited,) = together(session, [[*text[:150], 9, 9, 9]], OPTIONS)
            found.append((edited.tokens, moves))
    (stayed, before), (moved, after) = found
    assert (before, after) == (0, 1)
    assert moved == stayed
