"""Checks that a draft's tokens can be read as the target's, by the rule of llama.cpp's server."""

from __future__ import annotations

from offload.engine import Engine
from specdec.errors import VocabularyMismatch
from specoffload.speculation.draft_model import DraftModel

_MAX_SIZE_DIFFERENCE = 128
_FIRST_COMPARED = 5  # the first ids are special tokens that families name differently


def check_same_vocabulary(target: Engine, draft: DraftModel) -> None:
    """Raises VocabularyMismatch naming the first difference."""
    difference = abs(target.n_vocab - draft.n_vocab)
    if difference > _MAX_SIZE_DIFFERENCE:
        raise VocabularyMismatch(
            f"{draft.facts.path.name} has {draft.n_vocab} tokens and the target {target.n_vocab}; "
            f"at most {_MAX_SIZE_DIFFERENCE} may differ: choose a draft of the same family"
        )
    for name in ("bos", "eos"):
        theirs, ours = getattr(draft.model, name), getattr(target.model, name)
        if theirs != ours:
            raise VocabularyMismatch(
                f"{draft.facts.path.name} has {name} token {theirs} and the target {ours}: "
                "choose a draft of the same family"
            )
    for token in range(_FIRST_COMPARED, min(target.n_vocab, draft.n_vocab)):
        theirs, ours = draft.token_text(token), target.token_text(token)
        if theirs != ours:
            raise VocabularyMismatch(
                f"token {token} is {theirs!r} in {draft.facts.path.name} and {ours!r} in the "
                "target: choose a draft of the same family"
            )
