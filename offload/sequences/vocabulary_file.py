"""Reads vocabularies of model files without their weights, and compares them."""

from __future__ import annotations

from pathlib import Path

from offload.ggml.gguf import read_tokens
from offload.ggml.library.callback import Pending
from offload.ggml.library.log import opening
from offload.ggml.model import Model, ModelPlacement
from offload.sequences.text import ModelText

_FIRST_COMPARED = 5  # the first ids are special tokens that families name differently


def vocabulary_difference(target: Path, draft: Path, most_apart: int | None = None) -> str:
    """Return the first difference between the vocabularies of two files, or "".

    Tokens are compared by their spellings, as in llama.cpp (`common_speculative_are_compatible`).
    `most_apart` is the largest difference in size; None: any, since one may be padded. Raises
    BadModel.
    """
    ours, theirs, name = read_tokens(target), read_tokens(draft), draft.name
    if bool(ours) != bool(theirs):
        return f"{name if ours else target.name} has no tokenizer"
    if most_apart is not None and abs(len(ours) - len(theirs)) > most_apart:
        return f"{name} has {len(theirs)} tokens and the target {len(ours)}"
    for token in range(_FIRST_COMPARED, min(len(ours), len(theirs))):
        if ours[token] != theirs[token]:
            said, wanted = (
                text.decode("utf-8", "replace") for text in (theirs[token], ours[token])
            )
            return f"token {token} is {said!r} in {name} and {wanted!r} in the target"
    return ""


def open_vocabulary(path: Path) -> Model:
    """Open a model file whose weights get no memory. Raises BadModel. The caller closes it."""
    with opening(path):
        return Model(path, ModelPlacement(no_alloc=True, load_mode="none"), Pending())


class VocabularyFile(ModelText):
    """The vocabulary of a model file. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        """Read the vocabulary. Raises BadModel for a file that libllama refuses."""
        self._model = open_vocabulary(path)

    @property
    def is_readable(self) -> bool:
        """True if the file has a tokenizer."""
        return self._model.has_tokenizer

    def __enter__(self) -> VocabularyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._model.close()
