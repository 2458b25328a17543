"""Flags of the draft's engines: flags that an engine does not read are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from resolved import config_of, line_of
from speculation_parts import proposed

from specdec.build import build_drafter
from specdec.policies.rules import Fixed
from specoffload.config.environment import Environment, read_host
from specoffload.config.options import DraftEngine, DraftOptions
from specoffload.config.resolution import Config, resolve
from specoffload.errors import UsageError
from specoffload.opening.draft_model import read_kept


def resolved(*words: str) -> Config:
    return resolve(line_of(*words).options, read_host(Environment()))


def test_the_engine_is_chosen_unless_it_is_named() -> None:
    assert config_of().spec.of_draft == DraftOptions()
    assert DraftOptions().engine is DraftEngine.AUTO
    of_draft = resolved("--draft-engine", "torch").spec.of_draft
    assert of_draft == DraftOptions(engine=DraftEngine.TORCH)


def test_a_flag_that_torch_does_not_read_is_said() -> None:
    config = resolved("--draft-engine", "torch", "--cache-type-k-draft", "q8_0")
    line = "--cache-type-k-draft ignored: torch computes the draft (--draft-engine torch)"
    assert line in config.spec.reasons
    assert config.spec.of_draft == DraftOptions(engine=DraftEngine.TORCH)
    both = resolved("--draft-params", "-ub 8 -ctk q8_0").spec
    assert not [line for line in both.reasons if "ignored" in line]
    assert both.draft_options == {"n_ubatch": 8, "type_k": "q8_0"}


def test_a_pruned_vocabulary_is_for_torch(tmp_path: Path) -> None:
    file = str(tmp_path / "kept.txt")
    assert resolved("--draft-vocab", file).spec.of_draft == DraftOptions(vocab=Path(file))
    config = resolved("--draft-engine", "llama", "--draft-vocab", file)
    line = "--draft-vocab ignored: libllama computes the draft (--draft-engine llama)"
    assert line in config.spec.reasons
    assert config.spec.of_draft == DraftOptions(engine=DraftEngine.LLAMA)


def test_kept_tokens_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    path.write_text("# of a corpus\n3\n7\n3\n11\n")
    assert path.read_text().splitlines()[0] == "# of a corpus"
    assert read_kept(path) == (3, 7, 11)


@pytest.mark.parametrize(
    ("text", "words"), [("# nothing\n", "holds no token id"), ("3\n-1\n", "line 2 is '-1'")]
)
def test_a_bad_file_of_kept_tokens_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "kept.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_kept(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_kept(tmp_path / "none.txt")


@pytest.mark.parametrize("n_most", [1, 4, 9])
@pytest.mark.parametrize("name", ["ngram-simple", "ngram-map-k", "ngram-map-k4v"])
@pytest.mark.parametrize("is_old_name", [False, True])
def test_a_flag_limits_the_tokens_of_a_drafters_draft(
    name: str, n_most: int, is_old_name: bool
) -> None:
    """llama.cpp's older flag sets the size of all three."""
    flag = "--spec-ngram-size-m" if is_old_name else f"--spec-{name}-size-m"
    sizes = ("--spec-type", name, f"--spec-{name}-size-n", "3", flag, str(n_most))
    drafter = build_drafter(resolved(*sizes).spec.options)
    pattern = list(range(1, 14))
    history = [0, *(4 * pattern), *pattern[:3]]
    draft = proposed(drafter, 0, history, Fixed(64), 64)
    assert draft.tokens == tuple([*pattern[3:], *pattern][:n_most])
    shorter = proposed(drafter, 1, history, Fixed(2), 2)
    assert shorter.tokens == draft.tokens[:2]
