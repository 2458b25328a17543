"""Long conversations move part by part, so that no answer waits for a whole copy."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lossless_parts import EXACT
from test_cells import finished
from test_idle_moves import MTP, OPTIONS, ROOM, _nothing, day, opened, prompt
from test_restored_slots import preset
from test_slots import SPECS, answer_of, open_slots, together

from lab.options import engine_options
from lab.synth import write_preset
from lab.synth.mtp import write_mtp
from offload.engine import open_engine
from offload.errors import DecodeStopped, DeviceFailed
from offload.ggml.context import Context
from offload.sequences.sequences import Sequences
from specoffload.config.options import DiskRoom
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.slots import batcher
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.idle_rents import MoveCosts
from specoffload.slots.moves import ComingPrompt, LeavingPrompt

LONG = GenerateOptions(n_predict=80, ignore_eos=True)
SLOW = replace(LONG, draft_max=1)  # one or two tokens each step
# Full attention, MLA, indexers, keys chosen by blocks, own layers that draft.
KINDS = ("mistral-large", "deepseek-v3", "deepseek-v3.2", "glm-5", "minimax-m3", "glm4moe")


@pytest.fixture(autouse=True)
def _one_part_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle slots leave at once, and each step copies one part."""
    monkeypatch.setattr(MoveCosts, "seconds", _nothing)
    monkeypatch.setattr(batcher.Batcher, "_copy_s", property(_no_time))


def _no_time(_: object) -> float:
    return 0.0


def _too_much(*_: object) -> float:
    return 1e9


def _a_minute(_: object) -> float:
    return 60.0


def in_parts(session: Session, n_parts: int = 5) -> Session:
    """Let a text of 100 tokens have about `n_parts` parts, in the draft model too."""
    drafts = [] if session.draft is None else [session.draft.sequences]
    for sequences in (session.target.sequences, *drafts):
        sequences.extend(0, [5] * 100, 0)
        sequences.part_bytes = sequences.state_bytes(0) // n_parts  # type: ignore[union-attr]
        sequences.rewind(0, 0)
    return session


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counts copied parts."""
    counts = {"part_of_state": 0, "add_state": 0}
    for name in counts:
        plain = getattr(Context, name)

        def counting(self: Context, *given: Any, plain: Any = plain, name: str = name) -> Any:
            counts[name] += 1
            return plain(self, *given)

        monkeypatch.setattr(Context, name, counting)
    return counts


def opened_kind(kind: str, models: Path, **more: Any) -> Session:
    if kind == "glm4moe":
        return in_parts(opened_mtp(kind, models, **more))
    spec, path = SPECS["suffix"], preset(kind, models)
    if kind in ("deepseek-v3.2", "glm-5"):
        path = many_heads(kind, models)
    room = {"cache_ram_bytes": 1 << 28, "ubatch_size": 64, "batch_size": 128, "ctx_size": 1024}
    return in_parts(open_slots(path, spec, 4, **{**room, **more}))


def many_heads(kind: str, models: Path) -> Path:
    """A model whose indexer has as many heads as trained ones, so that few scores are equal."""
    path = models / f"many-heads-{kind}.gguf"
    own = {"attention.indexer.head_count": 64}
    if not path.exists():
        write_preset(kind, path, size="tiny", seed=6, quant="f32", metadata=own)
    return path


def opened_mtp(kind: str, models: Path, **more: Any) -> Session:
    return open_slots(write_mtp(models, kind), MTP, 4, **{**ROOM, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_that_move_in_parts_write_the_same(
    kind: str, models: Path, counted: dict[str, int]
) -> None:
    with opened_kind(kind, models, cache_idle_slots=False, cache_ram_bytes=0) as session:
        stayed = day(session)
    assert counted == {"part_of_state": 0, "add_state": 0}
    with opened_kind(kind, models) as session:
        moved = day(session)
        counters = session.counters()
    assert [a.tokens for a in moved] == [a.tokens for a in stayed]
    assert [a.stats.n_cached_tokens for a in moved] == [a.stats.n_cached_tokens for a in stayed]
    assert counters["idle_moves"] > 2
    assert counters["idle_returns"] > 2
    assert counted["part_of_state"] > 3 * counters["idle_moves"]
    assert counted["add_state"] > 3 * counters["idle_returns"]


def test_a_draft_models_text_moves_in_parts_too(
    models: Path, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are right, so answers have few steps, and all parts are copied before one."""
    monkeypatch.setattr(batcher.Batcher, "_copy_s", property(_a_minute))
    found = []
    for clears in (False, True):
        counted.update(part_of_state=0, add_state=0)
        with in_parts(
            opened("mistral-large", models, drafts_itself=True, cache_idle_slots=clears)
        ) as session:
            found.append((day(session), session.counters()["idle_moves"]))
    (stayed, _), (moved, n_moves) = found
    assert [a.tokens for a in moved] == [a.tokens for a in stayed]
    assert n_moves > 2
    assert counted["part_of_state"] > 7 * n_moves, "those of the draft model, too"


def test_an_answer_goes_on_between_the_parts_of_another_conversation(
    models: Path, counted: dict[str, int]
) -> None:
    """One part is copied before each of its tokens, out of the cells and back into them."""
    with opened_kind("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        text = prompt(n_vocab, 3, 200)
        (first,) = together(session, [text], OPTIONS)
        running = session.start(prompt(n_vocab, 5, 20), LONG)
        n_tokens = []
        while not session.counters()["idle_moves"]:
            before = counted["part_of_state"]
            session.step()
            assert counted["part_of_state"] <= before + 1
            n_tokens.append(len(running.history))
        assert counted["part_of_state"] >= 8
        assert n_tokens[-1] - n_tokens[0] >= 6
        again = session.start([*text, *first.tokens, 9], OPTIONS)
        while not again.pieces:
            n_before, n_parts = len(running.history), counted["add_state"]
            session.step()
            assert counted["add_state"] <= n_parts + 1
            assert len(running.history) > n_before
        assert counted["add_state"] >= 8
        while not session.is_idle:
            session.step()
        answer, alone = answer_of(again), answer_of(running)
    assert answer.stats.n_cached_tokens == 207
    assert answer.stats.copied_back_s > 0
    with opened_kind("mistral-large", models) as session:
        expected = together(session, [[*text, *first.tokens, 9]], OPTIONS)
        assert [answer.tokens] == [a.tokens for a in expected]
        expected = together(session, [prompt(n_vocab, 5, 20)], LONG)
        assert [alone.tokens] == [a.tokens for a in expected]


def moved_away(session: Session, n: int = 200) -> tuple[list[int], Any]:
    """Let a conversation move to RAM beside a request that goes on. Returns it and the request."""
    n_vocab = session.target.n_vocab
    text = prompt(n_vocab, 3, n)
    together(session, [text], OPTIONS)
    running = session.start(prompt(n_vocab, 5, 20), LONG)
    while not session.counters()["idle_moves"]:
        session.step()
    return text, running


@pytest.mark.parametrize("n_steps", [1, 3, 7])
def test_a_client_that_leaves_while_its_text_comes_back_loses_nothing(
    n_steps: int, models: Path
) -> None:
    with opened_kind("mistral-large", models) as session:
        text, _ = moved_away(session)
        asked = session.start([*text, 7, 8], OPTIONS)
        for _ in range(n_steps):
            session.step()
        assert not asked.pieces
        assert not session.is_worth_stopping(asked), "the step is another answer's"
        session.cancel(asked)
        assert len(session.batcher.store) == 1, "the whole text is there again"
        again = session.start([*text, 7, 8], OPTIONS)
        while not session.is_idle:
            session.step()
        answer = answer_of(again)
        assert answer.stats.n_cached_tokens == 200
    with opened_kind("mistral-large", models) as session:
        (expected,) = together(session, [[*text, 7, 8]], OPTIONS)
    assert answer.tokens == expected.tokens


def test_a_client_that_leaves_puts_its_text_back_in_the_place_of_an_older_one(models: Path) -> None:
    """Another text has filled the RAM in the meantime."""
    with opened_kind("mistral-large", models) as session:
        text, _ = moved_away(session)
        store = session.batcher.store
        store._limit_bytes = store.size_bytes + 100
        asked = session.start([*text, 7, 8], OPTIONS)
        session.step()
        assert len(store) == 0
        older = StoredPrompt((1, 2, 3), bytes(200))
        store.add(older.tokens, lambda: older)
        session.cancel(asked)
        assert [len(kept.tokens) for kept in store.prompts] == [207]
        again = session.start([*text, 7, 8], OPTIONS)
        while not session.is_idle:
            session.step()
        assert answer_of(again).stats.n_cached_tokens == 200


def moved_away_alone(session: Session, n: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a conversation move to RAM, which then holds all that there is. No other one will."""
    text, _ = moved_away(session, n)
    while not session.is_idle:
        session.step()
    for slot in session.slots():
        session.change_slot(slot.id, "erase", "")
    monkeypatch.setattr(MoveCosts, "seconds", _too_much)
    return text


def n_free(session: Session) -> int:
    return session.target.n_cells - sum(slot.n_tokens for slot in session.slots())


def test_an_idle_conversation_makes_room_for_one_that_comes_back_beside_an_answer(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While parts are copied, the answer takes the cells that were free at first."""
    with opened_kind("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        text = moved_away_alone(session, 300, monkeypatch)
        together(session, [prompt(n_vocab, 9, 686)], OPTIONS)
        running = session.start(prompt(n_vocab, 11, 20), SLOW)
        while len(running.history) == running.n_prompt:
            session.step()
        n_moves = session.counters()["idle_moves"]
        again = session.start([*text, 7], OPTIONS)
        assert 307 < n_free(session) < 316, "the answer takes these before all is copied"
        session.step()
        assert session.counters()["idle_moves"] == n_moves, "at first there is room"
        while not session.is_idle:
            session.step()
        answer = answer_of(again)
        assert session.counters()["idle_moves"] == n_moves + 1
    assert answer.stats.n_cached_tokens == 300
    assert "is not loaded" not in caplog.text
    with opened_kind("mistral-large", models) as session:
        (expected,) = together(session, [[*text, 7]], OPTIONS)
    assert answer.tokens == expected.tokens


def test_a_conversation_waits_for_room_that_an_answer_has_taken_while_it_came_back(
    models: Path,
    counted: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened_kind("mistral-large", models) as session:
        text = moved_away_alone(session, 300, monkeypatch)
        running = session.start(prompt(session.target.n_vocab, 11, 712), SLOW)
        while len(running.history) == running.n_prompt:
            session.step()
        again = session.start([*text, 7], OPTIONS)
        assert 307 < n_free(session) < 316
        session.step()
        assert again.slot is not None
        for _ in range(20):
            session.step()
        assert again.slot is None, "it has lost its slot"
        assert 3 < counted["add_state"] < 15
        assert 307 in [len(kept.tokens) for kept in session.batcher.store.prompts]
        assert not running.is_over
        while not session.is_idle:
            session.step()
        assert answer_of(again).stats.n_cached_tokens == 300
        assert running.error is None
    assert "is not loaded" not in caplog.text


def test_a_move_out_whose_decode_is_stopped_begins_again(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part asks a follower for its data, which may decode."""
    plain, n_asked = Sequences._followers_data, 0

    def is_stopped(self: Sequences, sequence: int) -> bytes:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 1:
            raise DecodeStopped("the decode was stopped")
        return plain(self, sequence)

    monkeypatch.setattr(Sequences, "_followers_data", is_stopped)
    with opened_kind("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        text = prompt(n_vocab, 3, 200)
        together(session, [text], OPTIONS)
        running = session.start(prompt(n_vocab, 5, 20), LONG)
        while not session.is_idle:
            session.step()
        assert n_asked >= 2
        assert 207 in [len(kept.tokens) for kept in session.batcher.store.prompts]
        assert running.error is None


def test_a_copy_that_has_failed_says_so_again() -> None:
    def fails() -> Generator[None, None, StoredPrompt]:
        raise DecodeStopped("the decode was stopped")
        yield

    slot = SimpleNamespace(tokens=[1], is_busy=False, saving=fails)
    leaving = LeavingPrompt(slot)  # type: ignore[arg-type]
    with pytest.raises(DecodeStopped):
        leaving.advance()
    with pytest.raises(DeviceFailed, match="an earlier part"):
        leaving.advance()


def test_a_return_that_has_failed_is_not_taken_for_one_that_has_ended() -> None:
    def fails(_: StoredPrompt) -> Iterator[None]:
        yield
        raise DecodeStopped("the decode was stopped")

    slot = SimpleNamespace(loading=fails)
    coming = ComingPrompt(slot, StoredPrompt((1,), b""), is_from_disk=False)  # type: ignore[arg-type]
    assert not coming.advance()
    with pytest.raises(DecodeStopped):
        coming.advance()
    with pytest.raises(DeviceFailed, match="an earlier part"):
        coming.advance()


@pytest.mark.parametrize("error", [DeviceFailed("no room"), MemoryError()])
def test_a_text_whose_part_cannot_be_loaded_is_evaluated_again(
    error: Exception,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened_kind("mistral-large", models) as session:
        text, running = moved_away(session)
        add, n_added = Context.add_state, 0

        def fails(self: Context, *given: Any) -> None:
            nonlocal n_added
            n_added += 1
            if n_added == 3:
                raise error
            add(self, *given)

        monkeypatch.setattr(Context, "add_state", fails)
        asked = session.start([*text, 7, 8], OPTIONS)
        while not session.is_idle:
            session.step()
        answer = answer_of(asked)
        assert answer.stats.n_cached_tokens == 0
        assert running.error is None
    why = str(error) or "the memory is full"
    assert f"is not loaded, but evaluated again: {why}" in caplog.text
    with opened_kind("mistral-large", models) as session:
        (expected,) = together(session, [[*text, 7, 8]], OPTIONS)
    assert answer.tokens == expected.tokens


def copy_three_parts(session: Session, counted: dict[str, int]) -> None:
    """Answer another conversation until three parts of the idle one are copied."""
    session.start(prompt(session.target.n_vocab, 5, 20), LONG)
    while counted["part_of_state"] < 3:
        session.step()


def test_a_conversation_that_is_used_again_during_its_move_stays(
    models: Path, counted: dict[str, int]
) -> None:
    with opened_kind("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        text = prompt(n_vocab, 3, 200)
        together(session, [text], OPTIONS)
        copy_three_parts(session, counted)
        again = session.start([*text, 7], OPTIONS)
        while not again.is_over:
            session.step()
        assert answer_of(again).stats.n_cached_tokens == 200
        assert session.counters()["idle_moves"] == session.counters()["idle_returns"] == 0


def test_a_conversation_that_is_erased_during_its_move_is_not_kept(
    models: Path, counted: dict[str, int]
) -> None:
    with opened_kind("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        together(session, [prompt(n_vocab, 3, 200)], OPTIONS)
        copy_three_parts(session, counted)
        session.change_slot(0, "erase", "")
        while not session.is_idle:
            session.step()
        assert counted["part_of_state"] == 3
        assert len(session.batcher.store) == 0


def test_a_conversation_that_is_forgotten_during_its_move_takes_no_memory(
    models: Path, counted: dict[str, int]
) -> None:
    with opened_kind("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        together(session, [prompt(n_vocab, 3, 200)], OPTIONS)
        copy_three_parts(session, counted)
        assert len(session.batcher._pool._leaving) == 1
        session.forget()
        assert not session.batcher._pool._leaving


def test_a_move_that_lacks_room_at_its_end_leaves_the_text_in_its_cells(
    models: Path, counted: dict[str, int]
) -> None:
    """Another text has taken the room in the meantime."""
    with opened_kind("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        text = prompt(n_vocab, 3, 200)
        together(session, [text], OPTIONS)
        copy_three_parts(session, counted)
        session.batcher.store._limit_bytes = 100
        for _ in range(20):
            session.step()
        assert session.counters()["idle_moves"] == 0
        again = session.start([*text, 7], OPTIONS)
        while not again.is_over:
            session.step()
        assert answer_of(again).stats.n_cached_tokens == 200


def test_two_clients_of_one_moved_text_get_equal_answers(models: Path) -> None:
    with opened_kind("mistral-large", models) as session:
        text, _ = moved_away(session)
        asked = [session.start([*text, 7, end], OPTIONS) for end in (8, 8, 9)]
        while not session.is_idle:
            session.step()
        answers = [answer_of(request).tokens for request in asked]
        assert all(answer_of(r).stats.n_cached_tokens >= 200 for r in asked), "one is copied once"
    with opened_kind("mistral-large", models) as session:
        expected = [together(session, [[*text, 7, end]], OPTIONS)[0].tokens for end in (8, 8, 9)]
    assert answers == expected


def test_a_salt_is_not_lost_while_a_text_comes_back(models: Path) -> None:
    """Another client's request in the meantime must not find it."""
    theirs = GenerateOptions(n_predict=8, ignore_eos=True, cache_salt="ab12")
    with opened_kind("mistral-large", models) as session:
        n_vocab = session.target.n_vocab
        text = prompt(n_vocab, 3, 200)
        together(session, [text], theirs)
        session.start(prompt(n_vocab, 5, 20), LONG)
        while not session.counters()["idle_moves"]:
            session.step()
        first = session.start([*text, 7], theirs)
        session.step()
        session.step()
        other = session.start([*text, 7], OPTIONS)
        while not session.is_idle:
            session.step()
        assert answer_of(first).stats.n_cached_tokens == 200
        assert answer_of(other).stats.n_cached_tokens == 0
        assert answer_of(other).tokens == answer_of(first).tokens


def test_a_text_in_parts_goes_to_the_disk_and_comes_back(
    models: Path, tmp_path: Path, counted: dict[str, int]
) -> None:
    disk = {"cache_ram_bytes": 0, "cache_disk": DiskRoom(1 << 30, tmp_path)}
    with opened_kind("mistral-large", models, **disk) as session:
        text, _ = moved_away(session, 300)
        assert counted["part_of_state"] >= 8
    with opened_kind("mistral-large", models, **disk) as session:
        running = session.start(prompt(256, 5, 20), LONG)
        session.step()
        session.step()
        asked = session.start([*text, 7], OPTIONS)
        while not session.is_idle:
            session.step()
        answer = answer_of(asked)
        assert running.error is None
        assert answer.stats.n_cached_tokens == answer.stats.n_from_disk == 300
        assert counted["add_state"] >= 8
    with opened_kind("mistral-large", models) as session:
        (expected,) = together(session, [[*text, 7]], OPTIONS)
    assert answer.tokens == expected.tokens


@pytest.mark.parametrize("kind", ["gpt-oss-20b", "mamba2", "qwen3next"])
def test_windows_and_recurrent_states_move_at_once(
    kind: str, models: Path, counted: dict[str, int]
) -> None:
    with in_parts(opened(kind, models)) as session:
        day(session)
        assert session.target.sequences.n_parts(0) == 1
    assert counted == {"part_of_state": 0, "add_state": 0}


def test_parts_are_whole_and_as_large_as_said(models: Path) -> None:
    with opened_kind("deepseek-v3", models) as session:
        sequences = session.target.sequences
        sequences.extend(1, [5] * 230, 0)
        assert sequences.n_parts(1) == 12
        state, parts = finished(sequences.saving(1))
        assert len(parts) == 12
        most_bytes = sequences.saved_bytes(1)
        assert sum(map(len, parts)) + len(state) <= most_bytes
        assert max(map(len, parts)) < 1.3 * sequences.part_bytes
        for tokens in ([5] * 229, [5] * 231):
            with pytest.raises(DeviceFailed):
                sequences.load(2, state, tokens, parts)
            assert sequences.length(2) == 0
        before = sequences.save(1)
        sequences.load(1, state, [5] * 230, parts)
        assert sequences.save(1) == before, "cells are in the same order"


@pytest.mark.parametrize("kind", ["deepseek-v3.2", "glm-5", "deepseek-v3"])
def test_logits_after_a_move_differ_by_rounding_only(kind: str, models: Path) -> None:
    """In the same cells they are equal. Beside another conversation, sums are grouped otherwise."""
    options = engine_options(
        device="cpu", n_ctx=1024, n_batch=128, n_ubatch=64, n_sequences=2, n_threads=1, **EXACT
    )
    path = preset(kind, models) if kind == "deepseek-v3" else many_heads(kind, models)
    with open_engine(path, options) as engine:
        sequences = engine.sequences
        text, other = prompt(engine.n_vocab, 3, 300), prompt(engine.n_vocab, 5, 200)

        def row() -> Any:
            return sequences.extend(0, [7])[0]

        sequences.extend(0, text, 0)
        expected = row()
        sequences.rewind(0, 300)
        sequences.part_bytes = sequences.state_bytes(0) // 4
        state, parts = finished(sequences.saving(0))
        sequences.load(0, state, text, parts)
        assert np.array_equal(row(), expected)
        sequences.rewind(0, 0)
        sequences.extend(1, other, 0)
        sequences.load(0, state, text, parts)
        assert np.abs(row() - expected).max() < 1e-4
