"""Which of a user's texts are read, how they are cut into prompts, and which are held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from specoffload.draft_making.corpus import (
    LEAST_PROMPTS,
    MOST_BYTES,
    MOST_HELD_OUT,
    cut,
    pieces,
    shuffled,
    texts_of,
)
from specoffload.errors import UsageError


def test_files_and_folders_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (folder := tmp_path / "folder" / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("b")
    (folder.parent / "a.txt").write_text("a")
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "large").write_bytes(b" " * (MOST_BYTES + 1))
    (alone := tmp_path / "alone").write_text("alone")
    assert texts_of([alone, tmp_path / "folder"]) == ["alone", "a", "b"]
    with pytest.raises(UsageError, match="none: no such file or folder"):
        texts_of([alone, tmp_path / "none"])
    with pytest.raises(UsageError, match="no text in .*binary: files must be UTF-8"):
        texts_of([folder / "binary"])


def test_prompts_begin_with_the_same_tokens_and_do_not_overlap() -> None:
    assert pieces([range(10, 17), range(2)], [1], 4) == [[1, 10, 11, 12], [1, 13, 14, 15]]
    assert pieces([range(10, 14)], [], 4) == [[10, 11, 12, 13]]


def test_the_order_is_random_and_always_the_same() -> None:
    rows = [[i] for i in range(50)]
    assert shuffled(rows) == shuffled(rows)
    assert shuffled(rows) != rows
    assert sorted(shuffled(rows)) == rows


@pytest.mark.parametrize("n_rows", [LEAST_PROMPTS, 200, 5000])
def test_one_prompt_of_twenty_is_held_out_and_none_is_used_twice(n_rows: int) -> None:
    found = cut([range(4 * n_rows)], [], 4)
    numbers = [int(row[0]) // 4 for row in found.tokens]
    held_out, trained = numbers[: found.n_held_out], numbers[found.n_held_out :]
    assert found.n_held_out == min(n_rows // 20, MOST_HELD_OUT)
    assert min(found.n_checked, found.n_judged) >= 1
    assert all(number % 20 == 19 for number in held_out)
    assert sorted(trained) == [number for number in range(n_rows) if number % 20 != 19]
    assert len(set(held_out)) == found.n_held_out
    assert (cut([range(4 * n_rows)], [], 4).tokens == found.tokens).all()


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UsageError, match="the texts have 39 pieces of 4 tokens, and at least 40"):
        cut([range(4 * (LEAST_PROMPTS - 1))], [], 4)
