"""Prompts that a session keeps on the disk are found by the next one, and change no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_slots import KINDS, SPECS, Plain, draft_of, model, open_slots, texts_of, together

from offload.errors import NotWritten
from specoffload.config.options import DiskRoom
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

OPTIONS = GenerateOptions(n_predict=6, ignore_eos=True)


def with_disk(path: Path, folder: Path, n_slots: int = 1, **more: Any) -> Session:
    given: dict[str, Any] = {"cache_disk": DiskRoom(1 << 30, folder), "ctx_size": 2048, **more}
    return open_slots(path, SPECS["alone"], n_slots, **given)


def long_texts(session: Session) -> list[list[int]]:
    """Texts of 500 to 700 tokens that begin differently."""
    texts = [list(text) for text in texts_of(session)]
    return [(text * (700 // len(text) + 1))[: 500 + 60 * i] for i, text in enumerate(texts[2:5])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_after_a_restart(kind: str, models: Path, tmp_path: Path) -> None:
    path = model(kind, models)
    with with_disk(path, tmp_path, cache_ram_bytes=1 << 30) as session:
        texts = long_texts(session)
        for text in texts:
            (answer,) = together(session, [text], OPTIONS)
            text += answer.tokens
    assert len(list(tmp_path.glob("*.prompt"))) == len(texts)
    with (
        with_disk(path, tmp_path) as session,
        open_slots(path, SPECS["alone"], 1, ctx_size=2048) as fresh,
    ):
        assert any("3 prompts of this model found" in note for note in session.notes)
        for text in texts:
            n_held, longer = len(text), [*text, 3, 5, 7, 9, 11]
            (answer,) = together(session, [longer], OPTIONS)
            fresh.forget()
            (wanted,) = together(fresh, [longer], OPTIONS)
            Plain(path).check(longer, answer.tokens, wanted.tokens)
            assert answer.stats.n_from_disk == answer.stats.n_cached_tokens >= n_held - 1


@pytest.mark.parametrize("kind", ["mistral-large", "qwen3next"])
def test_a_text_that_changes_in_the_middle_keeps_what_comes_before(
    kind: str, models: Path, tmp_path: Path
) -> None:
    """A recurrent memory goes on from the end of the last prompt before the change."""
    path = model(kind, models)
    with with_disk(path, tmp_path, ctx_checkpoints=8) as session:
        (text, *_) = long_texts(session)
        for n in (300, 400, 500):
            together(session, [text[:n]], GenerateOptions(n_predict=1, ignore_eos=True))
    changed = [*text[:450], 9, 9, 8, *text[460:]]
    with (
        with_disk(path, tmp_path, ctx_checkpoints=8) as session,
        open_slots(path, SPECS["alone"], 1, ctx_size=2048) as fresh,
    ):
        (answer,) = together(session, [changed], OPTIONS)
        (wanted,) = together(fresh, [changed], OPTIONS)
        Plain(path).check(changed, answer.tokens, wanted.tokens)
        assert answer.stats.n_from_disk == (450 if kind == "mistral-large" else 399)


def test_the_folder_keeps_the_limit_of_the_flag(exact: Path, tmp_path: Path) -> None:
    with with_disk(exact, tmp_path / "free") as session:
        texts = long_texts(session)
        for text in texts:
            together(session, [text], OPTIONS)
    sizes = [file.stat().st_size for file in (tmp_path / "free").glob("*.prompt")]
    assert len(sizes) == len(texts) == 3
    limit = DiskRoom(sum(sizes) - 1, tmp_path / "limited")
    with with_disk(exact, tmp_path, cache_disk=limit) as session:
        for text in texts:
            together(session, [text], OPTIONS)
    left = [file.stat().st_size for file in (tmp_path / "limited").glob("*.prompt")]
    assert 0 < sum(left) <= limit.size_bytes


def test_what_leaves_the_memory_of_the_host_goes_to_the_disk(exact: Path, tmp_path: Path) -> None:
    with with_disk(exact, tmp_path, cache_ram_bytes=0) as session:
        texts = long_texts(session)
        for text in texts:
            together(session, [text], OPTIONS)
        (again,) = together(session, [texts[0]], OPTIONS)
        assert again.stats.n_from_disk == len(texts[0]) - 1
        (refused,) = together(
            session, [texts[1]], GenerateOptions(n_predict=2, ignore_eos=True, cache_prompt=False)
        )
        assert (refused.stats.n_from_disk, refused.stats.n_cached_tokens) == (0, 0)


def other_types(path: Path, _: Path) -> tuple[Path, dict[str, Any]]:
    return path, {"type_k": "f16"}


def other_model(_: Path, models: Path) -> tuple[Path, dict[str, Any]]:
    return model("mistral-large", models, 7), {}


@pytest.mark.parametrize("other", [other_types, other_model])
def test_prompts_of_another_model_or_other_types_are_evaluated_again(
    other: Any, exact: Path, models: Path, tmp_path: Path
) -> None:
    path = model("mistral-large", models)
    with with_disk(path, tmp_path) as session:
        (text, *_) = long_texts(session)
        together(session, [text], OPTIONS)
    second, more = other(path, models)
    with with_disk(second, tmp_path, **more) as session:
        (answer,) = together(session, [text], OPTIONS)
        assert answer.stats.n_cached_tokens == 0


def test_a_damaged_file_is_one_line_and_an_evaluation(
    exact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with with_disk(exact, tmp_path) as session:
        (text, *_) = long_texts(session)
        (first,) = together(session, [text], OPTIONS)
    (file,) = tmp_path.glob("*.prompt")
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 1
    file.write_bytes(raw)
    with with_disk(exact, tmp_path) as session:
        (again,) = together(session, [text], OPTIONS)
    assert (again.stats.n_from_disk, again.tokens) == (0, first.tokens)
    (line,) = [r.getMessage() for r in caplog.records if file.name in r.getMessage()]
    assert "its seal does not match" in line


def test_drafts_of_a_draft_model_go_on_after_a_restart(models: Path, tmp_path: Path) -> None:
    path = model("mistral-large", models)
    draft = draft_of("itself", "mistral-large", models)

    def opened() -> Session:
        given: dict[str, Any] = {"cache_disk": DiskRoom(1 << 30, tmp_path), "ctx_size": 2048}
        return open_slots(path, SPECS["itself"], 1, draft=draft, **given)

    with opened() as session:
        (text, *_) = long_texts(session)
        (first,) = together(session, [text], OPTIONS)
    with opened() as session:
        (again,) = together(session, [text], OPTIONS)
    assert again.tokens == first.tokens
    assert again.stats.n_from_disk == len(text) - 1


def test_a_folder_that_cannot_be_used_is_one_sentence(exact: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(NotWritten, match="--cache-disk"):
        with_disk(exact, file)


def tokens_of(session: Session, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [answer.tokens for answer in together(session, texts, OPTIONS)]


def test_requests_that_run_when_the_session_closes_are_kept(exact: Path, tmp_path: Path) -> None:
    with with_disk(exact, tmp_path, 2) as session:
        texts = long_texts(session)[:2]
        for text in texts:
            session.start(text, GenerateOptions(n_predict=100, ignore_eos=True))
        for _ in range(8):
            session.step()
    with with_disk(exact, tmp_path, 2) as session:
        for text in texts:
            (answer,) = together(session, [text], OPTIONS)
            assert answer.stats.n_from_disk == len(text) - 1
