"""Reads a user's texts, and cuts them into prompts of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specoffload.errors import UsageError

MOST_BYTES = 4 << 20  # largest file of a corpus
BLOCK_PROMPTS = 20  # prompts in a row, the last of which is held out
MOST_HELD_OUT = 64  # prompts that are held out, for checks while training and for the result
LEAST_PROMPTS = 40  # fewer would leave nothing to compare with
_SEED = 20240


def texts_of(corpus: Iterable[Path]) -> list[str]:
    """The texts of files and folders, in the order of their paths.

    Files that are too large or not UTF-8 are skipped. Raises UsageError for a path that does not
    exist, or if there is no text.
    """
    corpus = list(corpus)
    if missing := [path for path in corpus if not path.exists()]:
        raise UsageError(f"{missing[0]}: no such file or folder")
    files = [f for path in corpus for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    texts = []
    for file in files:
        if file.is_file() and file.stat().st_size <= MOST_BYTES:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    if not any(texts):
        raise UsageError(
            f"no text in {', '.join(map(str, corpus))}: files must be UTF-8, and have at most "
            f"{MOST_BYTES >> 20} MiB each"
        )
    return texts


def pieces(texts: Iterable[Sequence[int]], begin: Sequence[int], n_prompt: int) -> list[list[int]]:
    """Cut the tokens of texts into prompts of `n_prompt` tokens, each after the tokens `begin`.

    Prompts do not overlap. A text's rest that is shorter than a prompt is left out.
    """
    n_own = n_prompt - len(begin)
    return [
        [*begin, *text[at : at + n_own]]
        for text in texts
        for at in range(0, len(text) - n_own + 1, n_own)
    ]


def shuffled(rows: Sequence[list[int]]) -> list[list[int]]:
    """The rows in a random order that is always the same."""
    return [rows[i] for i in np.random.default_rng(_SEED).permutation(len(rows))]


@dataclass(frozen=True)
class CutPrompts:
    """Prompts in the order in which a target continues them, tokens [n, n_prompt].

    The first `n_checked` are for checks while training, the next `n_judged` for the result. No
    draft is trained on either.
    """

    tokens: NDArray[np.uint32]
    n_checked: int
    n_judged: int

    @property
    def n_held_out(self) -> int:
        return self.n_checked + self.n_judged


def cut(texts: Iterable[Sequence[int]], begin: Sequence[int], n_prompt: int) -> CutPrompts:
    """Cut texts as `pieces` does, and hold out one of 20 prompts in a row.

    The others come in a random order that is always the same. Raises UsageError if there are too
    few prompts.
    """
    rows = pieces(texts, begin, n_prompt)
    if len(rows) < LEAST_PROMPTS:
        raise UsageError(
            f"the texts have {len(rows)} pieces of {n_prompt} tokens, and at least {LEAST_PROMPTS} "
            "are needed: give more texts"
        )
    rng = np.random.default_rng(_SEED)
    numbers = np.arange(len(rows))
    is_held_out = numbers % BLOCK_PROMPTS == BLOCK_PROMPTS - 1
    held_out = rng.permutation(numbers[is_held_out])[:MOST_HELD_OUT]
    trained = rng.permutation(numbers[~is_held_out])
    tokens = np.array(rows, np.uint32)[np.concatenate([held_out, trained])]
    n_checked = len(held_out) // 2
    return CutPrompts(tokens, n_checked, len(held_out) - n_checked)
