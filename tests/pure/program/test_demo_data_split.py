"""The demo pair's held-out files are chosen by path alone, and none of their text is trained on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.train.corpus import (
    HELD_OUT_EVERY,
    MAX_BYTES,
    MAX_TOKENS,
    MIN_BYTES,
    MIN_TOKENS,
    is_held_out,
    is_wanted,
    load_split,
    pick_prompts,
    read_prompts,
)

REPOSITORY = Path(__file__).resolve().parents[3]


PROMPTS = REPOSITORY / "specoffload" / "demo" / "prompts.json"


def write(root: Path, relative: str, content: bytes) -> None:
    path = root / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def source(seed: str, n_bytes: int = 1000) -> bytes:
    line = f"value = {seed!r}\n"
    return (line * (n_bytes // len(line) + 1)).encode()


def held_out_name(prefix: str = "m") -> str:
    return next(f"{prefix}{i}.py" for i in range(10_000) if is_held_out(f"{prefix}{i}.py"))


def trained_name(prefix: str = "m") -> str:
    return next(f"{prefix}{i}.py" for i in range(10_000) if not is_held_out(f"{prefix}{i}.py"))


@given(st.text(max_size=60))
def test_the_rule_is_the_path_hash_modulo_twenty(path: str) -> None:
    digest = hashlib.sha256(path.encode("utf-8")).hexdigest()
    assert is_held_out(path) == (int(digest, 16) % HELD_OUT_EVERY == 0)


def test_about_one_path_in_twenty_is_held_out() -> None:
    held = sum(is_held_out(f"package/module_{i}.py") for i in range(20_000))
    assert 850 <= held <= 1150


@pytest.mark.parametrize(
    "path",
    ["site-packages/x/a.py", "lib/site-packages/a.py", "_sysconfigdata__linux_x86.py"],
)
def test_installed_packages_and_build_settings_are_left_out(path: str) -> None:
    assert not is_wanted(path)


def test_files_of_a_wrong_size_or_encoding_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "small.py", b"x = 1\n" * ((MIN_BYTES - 10) // 6))
    write(tmp_path, "large.py", source("large", MAX_BYTES + 100))
    write(tmp_path, "latin.py", "# é\n".encode("latin-1") * 100)
    write(tmp_path, "good.py", source("good"))
    split = load_split(tmp_path)
    assert [s.path for s in split.train + split.held_out] == ["good.py"]


def test_a_held_out_text_never_occurs_on_the_training_side(tmp_path: Path) -> None:
    write(tmp_path, held_out_name(), source("shared"))
    write(tmp_path, trained_name(), source("shared"))
    write(tmp_path, trained_name("other"), source("own"))
    write(tmp_path, trained_name("same"), source("own"))
    split = load_split(tmp_path)
    assert [s.path for s in split.held_out] == [held_out_name()]
    assert [s.path for s in split.train] == [trained_name("other")]


def test_prompts_are_picked_from_given_files_within_the_token_limits(tmp_path: Path) -> None:
    body = "def f(x):\n" + "".join(f"    a{i} = x + {i}\n" for i in range(60))
    write(tmp_path, held_out_name(), body.encode())
    split = load_split(tmp_path)
    prompts = pick_prompts(split.held_out, lambda text: len(text.split()))
    assert [p.file for p in prompts] == [held_out_name()]
    assert all(MIN_TOKENS <= len(p.text.split()) <= MAX_TOKENS for p in prompts)
    assert prompts == pick_prompts(split.held_out, lambda text: len(text.split()))


def test_the_shipped_prompts_come_from_held_out_files_only() -> None:
    prompts = read_prompts(PROMPTS)
    assert [p.kind for p in prompts].count("code") == 50
    assert [p.kind for p in prompts].count("prose") == 10
    assert all(is_held_out(p.file) for p in prompts)
    assert len({p.text for p in prompts}) == len(prompts)
