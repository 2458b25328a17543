"""Slots with cells of their own (--no-kv-unified) write what one slot alone writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from budgets import ON_GPU, budget
from image_parts import model_with_projector
from lossless_parts import EXACT
from mtp_parts import LONGEST, check_each_draft, open_mtp
from resolved import config_of
from test_block import open_block
from test_block import pair as block_pair
from test_eagle import open_eagle
from test_eagle import pair as eagle_pair
from test_mtp_matrix import N_CTX, Case, Plainly, Player
from test_restored_slots import PARTS, SMALL, check_all_ways, preset
from test_slots import SPECS, Answer, Plain, open_slots, together

from lab.options import Streaming, engine_options
from lab.synth.mtp import write_mtp
from offload.engine import open_engine
from offload.errors import BadRequest, DeviceFailed, DoesNotFit
from offload.times.min_batch import MinBatch
from specoffload.config.options import Toggle
from specoffload.generation.generation import GenerateOptions
from specoffload.opening.draft import draft_bytes
from specoffload.session.session import Session

OPTIONS = GenerateOptions(n_predict=8, ignore_eos=True)
MTP_KINDS = ("qwen3next", "deepseek4", "glm4moe", "mimo2")
N_SLOTS, N_EACH = 3, 512
OWN: dict[str, Any] = {
    **SMALL, "ctx_size": N_SLOTS * N_EACH, "kv_unified": False, "cache_ram_bytes": 1 << 28,
}  # fmt: skip
ALONE: dict[str, Any] = {**SMALL, "ctx_size": N_EACH}
# Full attention, MLA, an indexer, sliding windows, recurrent and hybrid states, compressed keys.
PRESETS = (
    *("mistral-large", "deepseek-v3", "deepseek-v3.2", "gpt-oss-20b", "mamba2", "qwen3next"),
    *("qwen35moe", "kimi-k3", "minimax-m3", "deepseek-v4-flash"),
)


def place_of(name: str, path: Path) -> dict[str, Any]:
    """Options of an engine whose experts are resident, streamed, or divided with the CPU."""
    if name == "resident":
        return {"device": "cpu"}
    if name == "streamed":
        return {"device": "sim", "min_batch": "1", "hybrid": Toggle.OFF}
    return {
        "device": "sim", "vram_bytes": budget(path, Streaming(), "half"), "n_gpu_layers": ON_GPU,
        "n_cpu_moe": 99, "min_batch": "1000", "hybrid": Toggle.ON,
    }  # fmt: skip


def prompt(n_vocab: int, seed: int, n: int) -> list[int]:
    return [(seed * i + i * i % 11 + seed) % min(n_vocab, 400) for i in range(n)]


def texts_of(session: Session) -> list[list[int]]:
    """Five prompts, two of which begin alike. The longest one has several ubatches."""
    n_vocab = session.target.n_vocab
    found = [prompt(n_vocab, seed, n) for seed, n in ((3, 90), (5, 200), (7, 1), (11, 60))]
    return [*found, [*found[1][:150], *prompt(n_vocab, 13, 20)]]


def alone(path: Path, **more: Any) -> list[Answer]:
    """The answer of each text in a session of one slot, which forgets it before the next."""
    answers = []
    with open_slots(path, SPECS["alone"], 1, **{**ALONE, **more}) as session:
        for text in texts_of(session):
            answers += together(session, [text], OPTIONS)
            session.forget()
    return answers


def check(path: Path, session: Session, wanted: Sequence[Answer]) -> list[Answer]:
    """Check all texts at once, twice. The second time, slots hold prompts."""
    texts = texts_of(session)
    assert (session.target.n_ctx, session.target.n_cells) == (N_EACH, N_SLOTS * N_EACH)
    for _ in range(2):
        got = together(session, texts, OPTIONS)
        for text, answer, other in zip(texts, got, wanted, strict=True):
            Plain(path).check(text, answer.tokens, other.tokens)
    counters = session.counters()
    assert counters["idle_cells_read"] == counters["idle_moves"] == 0
    return got


@pytest.mark.parametrize("place", ["resident", "streamed"])
@pytest.mark.parametrize("kind", PRESETS)
def test_texts_among_others_are_those_of_one_slot(kind: str, place: str, models: Path) -> None:
    path = preset(kind, models)
    more = place_of(place, path)
    wanted = alone(path, **more)
    with open_slots(path, SPECS["alone"], N_SLOTS, **OWN, **more) as session:
        check(path, session, wanted)


@pytest.mark.parametrize("kind", ["deepseek-v3", "gpt-oss-20b", "qwen35moe"])
def test_split_layers(kind: str, models: Path) -> None:
    path = preset(kind, models)
    more = place_of("split", path)
    with open_slots(path, SPECS["alone"], N_SLOTS, **OWN, **more) as session:
        check(path, session, alone(path, **more))
        assert session.target.counters().n_pairs_host > 0


@pytest.mark.parametrize("place", ["resident", "streamed"])
@pytest.mark.parametrize("kind", ["mistral-large", "gpt-oss-20b", "qwen3next"])
def test_a_draft_model_keeps_cells_that_all_share(kind: str, place: str, models: Path) -> None:
    path = preset(kind, models)
    more = place_of(place, path)
    with open_slots(path, SPECS["itself"], N_SLOTS, draft=path, **OWN, **more) as session:
        got = check(path, session, alone(path, **more))
        assert session.draft is not None
        assert not session.draft.sequences.has_own_cells  # type: ignore[union-attr]
    assert sum(answer.stats.n_accepted for answer in got) > 0


def test_a_draft_model_is_planned_for_the_cells_that_the_slots_are_rounded_up_to(
    models: Path,
) -> None:
    path = preset("mistral-large", models)
    given = config_of(spec_given=dict(SPECS["itself"]), model=path, draft=path, device="cpu")
    own = replace(given, parallel=64, kv_unified=False)
    shared = replace(own, kv_unified=True)
    assert draft_bytes(own, own.spec, 4096) == draft_bytes(shared, shared.spec, 64 * 256) > 0


@pytest.mark.parametrize("place", ["resident", "streamed"])
@pytest.mark.parametrize("kind", MTP_KINDS)
def test_layers_that_draft_get_the_rows_of_their_own_text(
    kind: str, place: str, models: Path
) -> None:
    """Each draft is that of the same text alone, whatever was accepted of the drafts before it."""
    path = write_mtp(models, kind)
    more = {"device": "cpu"} if place == "resident" else {"device": "sim"}
    own = engine_options(
        n_ctx=N_SLOTS * N_EACH, n_sequences=N_SLOTS, kv_unified=False, mtp=True, n_threads=1,
        min_batch=MinBatch(1, 1), **more, **EXACT,
    )  # fmt: skip
    one = engine_options(own, n_ctx=N_EACH, n_sequences=1, kv_unified=True)
    with open_engine(path, own) as engine, open_engine(path, one) as fresh:
        assert engine.sequences.has_own_cells
        check_each_draft(engine, fresh)


@pytest.mark.parametrize("place", ["resident", "streamed"])
@pytest.mark.parametrize("kind", MTP_KINDS)
def test_accepted_drafts_of_own_layers_change_no_text(kind: str, place: str, models: Path) -> None:
    """Random layers are rarely right. So the test replaces many of their tokens by right ones."""
    path, plainly = write_mtp(models, kind), Plainly(write_mtp(models, kind))
    own = {**OWN, "ctx_size": N_SLOTS * N_CTX}
    with open_mtp(path, place, N_SLOTS, **own) as session:
        assert session.target.sequences.has_own_cells
        player = Player(session, plainly, N_SLOTS)
        for n_drafted, event in ((3, "fresh"), (LONGEST, "cancelled"), (2, "kept")):
            player.play(Case(n_drafted, event, (3, 5, 7)))
        layers = session.target.opened.row_draft
        assert layers is not None
        assert not layers.n_unknown_rows
    plainly.close()
    assert not player.wrong
    assert not player.ties
    assert player.n_accepted > player.n_texts
    assert player.n_cached


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_files_that_draft_from_rows(kind: str, models: Path) -> None:
    pair, open_pair = {"eagle": (eagle_pair, open_eagle), "block": (block_pair, open_block)}[kind]
    target, draft = pair(models, "gpt-oss")
    with open_pair(target, draft, "resident", N_SLOTS, **OWN) as session:
        check(target, session, alone(target))
        assert session.speculation is not None


def test_several_devices_and_small_ubatches(models: Path) -> None:
    """The last device computes an ubatch while the others compute the next one."""
    path = preset("deepseek-v3", models)
    more = {"device": "sim,sim", "tensor_split": (1.0, 1.0), "min_batch": "1", "hybrid": Toggle.OFF}
    small = {**OWN, **more, "ubatch_size": 16}
    with open_slots(path, SPECS["alone"], N_SLOTS, **small) as session:
        check(path, session, alone(path))


def test_slots_that_are_no_neighbours(models: Path) -> None:
    """They are computed in two ubatches."""
    for kind in ("deepseek-v3", "qwen3next", "gpt-oss-20b"):
        path = preset(kind, models)
        with open_slots(path, SPECS["suffix"], N_SLOTS, **OWN) as session:
            texts = texts_of(session)[:2]
            requests = [
                session.start(text, replace(OPTIONS, id_slot=slot))
                for text, slot in zip(texts, (2, 0), strict=True)
            ]
            while not session.is_idle:
                session.step()
        for text, request, other in zip(texts, requests, alone(path), strict=False):
            got = [token for piece in request.pieces for token in piece.tokens]
            Plain(path).check(text, got, other.tokens)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5-35b-a3b"])
def test_prompts_with_images(kind: str, models: Path) -> None:
    path, projector = model_with_projector(kind, models)

    def opened(n_slots: int) -> Session:
        more = {"mmproj": projector, "ubatch_size": 512, "ctx_size": n_slots * 1024}
        return open_slots(path, SPECS["alone"], n_slots, kv_unified=False, **more)

    def asked(session: Session) -> list[list[int]]:
        image = session.image_prompt(PARTS, add_special=True)
        return [prompt(session.target.n_vocab, 3, 70), image]

    wanted = []
    for i in range(2):
        with opened(1) as session:
            wanted += together(session, [asked(session)[i]], OPTIONS)
    with opened(2) as session:
        got = together(session, asked(session), OPTIONS)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in wanted]


# -- the limit of each slot -----------------------------------------------------------------------


def test_every_slot_may_be_full_at_once_and_none_holds_more(models: Path) -> None:
    path = preset("mistral-large", models)
    most = GenerateOptions(n_predict=N_EACH, ignore_eos=True)
    with open_slots(path, SPECS["suffix"], N_SLOTS, **OWN) as session:
        n_vocab = session.target.n_vocab
        texts = [prompt(n_vocab, seed, N_EACH - 20) for seed in (3, 5, 7)]
        got = together(session, texts, most)
        assert [len(answer.tokens) for answer in got] == [20] * N_SLOTS
        for slot in range(N_SLOTS):
            session.target.sequences.extend(slot, [1])
            assert session.target.sequences.length(slot) == N_EACH
        with pytest.raises(DoesNotFit, match=f"{N_EACH + 1} tokens exceed the context of {N_EACH}"):
            session.target.sequences.extend(0, [1])


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_limit_for_each_slot(is_shared: bool, models: Path) -> None:
    path = preset("mistral-large", models)
    more = {**OWN, "kv_unified": is_shared, "most_each": 100}
    with open_slots(path, SPECS["alone"], N_SLOTS, **more) as session:
        assert (session.target.n_ctx, session.target.n_cells) == (100, N_SLOTS * N_EACH)
        text = prompt(session.target.n_vocab, 3, 90)
        answer = together(session, [text], GenerateOptions(n_predict=50, ignore_eos=True))[0]
        assert len(answer.tokens) == 10


def test_the_start_says_what_is_separate(models: Path) -> None:
    with open_slots(preset("deepseek-v3", models), SPECS["alone"], N_SLOTS, **OWN) as session:
        said = "\n".join(session.notes)
        assert f"context: each of {N_SLOTS} slots has {N_EACH} tokens of its own" in said
        assert "--cache-idle-slots has no effect" in said
        assert "(MLA)" not in said, "no device replaces them"
        assert "rounds it" not in said
    more = {**OWN, **place_of("streamed", Path())}
    with open_slots(preset("deepseek-v3", models), SPECS["alone"], N_SLOTS, **more) as session:
        assert "value projections (MLA) of several slots in one batch" in "\n".join(session.notes)


def test_trees_are_left_out_with_a_line(models: Path) -> None:
    path = preset("mistral-large", models)
    spec = {"--spec-type": "draft", "--spec-policy": "throughput"}
    with open_slots(path, spec, N_SLOTS, draft=path, **OWN) as session:
        assert session.target.sequences.n_tree_leaves == 0
        assert "drafts are chains, not trees" in "\n".join(session.notes)
        assert len(together(session, texts_of(session), OPTIONS)) == 5


# -- texts that move ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "n_cached"), [("mistral-large", 150), ("deepseek-v3", 150), ("gpt-oss-20b", 0)]
)
def test_a_common_beginning_is_copied_where_a_copy_can_be_cut(
    kind: str, n_cached: int, models: Path
) -> None:
    """A copy of sliding windows lacks old keys, so its text is read again."""
    path = preset(kind, models)
    with open_slots(path, SPECS["alone"], N_SLOTS, **OWN) as session:
        texts = texts_of(session)
        first = session.start(texts[1], GenerateOptions(n_predict=30, ignore_eos=True))
        while len(first.pieces) < 3:
            session.step()
        other = session.start(texts[4], OPTIONS)
        while not session.is_idle:
            session.step()
        assert other.slot is None
        stats = other.pieces[-1].stats
        assert stats is not None
        assert stats.n_cached_tokens == n_cached
        Plain(path).check(
            texts[4], [t for piece in other.pieces for t in piece.tokens], alone(path)[4].tokens
        )


def test_a_short_beginning_of_a_long_text_is_not_copied(models: Path) -> None:
    with open_slots(preset("mistral-large", models), SPECS["alone"], N_SLOTS, **OWN) as session:
        sequences, text = session.target.sequences, prompt(session.target.n_vocab, 3, 200)
        sequences.extend(0, text, 0)
        assert not sequences.can_share(0, 24)
        assert sequences.can_share(0, 25)
        sequences.share(0, 2, 25)
        assert sequences.length(2) == 25


def test_a_copy_that_fails_is_read_again(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = preset("mistral-large", models)
    with open_slots(path, SPECS["alone"], N_SLOTS, **OWN) as session:
        texts = texts_of(session)
        together(session, [texts[1]], OPTIONS)

        def fails(*_: object) -> None:
            raise DeviceFailed("no room")

        monkeypatch.setattr(session.target.opened.context, "set_state", fails)
        (answer,) = together(session, [texts[4]], replace(OPTIONS, id_slot=2))
    assert answer.stats.n_cached_tokens == 0
    assert answer.tokens == alone(path)[4].tokens
    assert "150 tokens of another slot are evaluated again: no room" in caplog.text


@pytest.mark.parametrize("kind", PRESETS)
def test_texts_come_back_from_files_and_ram(kind: str, models: Path, tmp_path: Path) -> None:
    path = preset(kind, models)
    n_own = {"ctx_size": 2 * N_EACH, "kv_unified": False}

    def opened(**more: Any) -> Session:
        return open_slots(path, SPECS["alone"], 2, **{**SMALL, **n_own, **more})

    # The text that takes RAM's place needs the slot, so the other slot is filled before.
    assert check_all_ways(opened, tmp_path, partial(_ask_in_slot, 0)) == 400


def _ask_in_slot(number: int, session: Session) -> Answer:
    n_vocab = session.target.n_vocab
    text = [(7 * i + i * i % 11) % min(n_vocab, 400) for i in range(401)]
    for slot in session.batcher.slots:
        if slot.number != number and not slot.n_held:
            other = GenerateOptions(n_predict=1, ignore_eos=True, id_slot=slot.number)
            together(session, [prompt(n_vocab, 17, 40)], other)
    options = GenerateOptions(n_predict=8, ignore_eos=True)
    return together(session, [text], options)[0]


def test_a_file_of_shared_cells_is_refused(models: Path, tmp_path: Path) -> None:
    path = preset("mistral-large", models)

    def opened(**more: Any) -> Session:
        return open_slots(path, SPECS["alone"], 2, **{**SMALL, "slot_save_path": tmp_path, **more})

    with opened() as session:
        together(session, [prompt(session.target.n_vocab, 3, 50)], OPTIONS)
        session.change_slot(0, "save", "x")
    with opened(kv_unified=False) as session, pytest.raises(BadRequest, match="--no-kv-unified"):
        session.change_slot(0, "restore", "x")
