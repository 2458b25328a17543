"""Counts a draft's tokens over texts, and chooses those that are worth drafting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from offload.ggml.library.callback import Pending
from offload.ggml.library.log import opening
from offload.ggml.model import Model, ModelPlacement
from specoffload.errors import UsageError

_PIECE = 1 << 16  # characters per call of the tokenizer


def tokenizer_of(path: Path) -> Model:
    """The vocabulary of a GGUF file, without its weights. Raises OffloadError."""
    with opening(path):
        return Model(path, ModelPlacement(no_alloc=True, load_mode="none"), Pending())


def count_tokens(model: Model, texts: Iterable[str]) -> Counter[int]:
    """How often each token of the model occurs in the texts."""
    counts: Counter[int] = Counter()
    for text in texts:
        for at in range(0, len(text), _PIECE):
            piece = text[at : at + _PIECE]
            counts.update(model.tokenize(piece, add_special=False, parse_special=False))
    return counts


def always_kept(model: Model) -> set[int]:
    """The tokens that end a text, and single bytes, with which any text can be spelt."""
    return {
        token
        for token in range(model.n_vocab)
        if model.is_end(token) or len(model.piece(token, special=False)) == 1
    }


def choose_kept(
    counts: Counter[int], always: Collection[int], n: int, n_vocab: int
) -> tuple[int, ...]:
    """`n` token ids in rising order: those of `always`, and the most frequent others.

    If these are fewer than `n`, ids that were never counted are added. The lowest come first,
    because vocabularies begin with bytes and short words. Raises UsageError if `n` is not possible.
    """
    least = max(1, len(always))
    if not least <= n <= n_vocab:
        raise UsageError(
            f"--keep {n}: must be at least {least}, the number of tokens that are always kept, and "
            f"at most {n_vocab}, the whole vocabulary"
        )
    others = sorted(set(range(n_vocab)) - set(always), key=lambda token: (-counts[token], token))
    return tuple(sorted([*always, *others[: n - len(always)]]))
