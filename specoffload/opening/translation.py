"""Decides whether drafts of a draft model are translated through text, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from offload.model_file import FileStamps, read_facts, stamps_of
from offload.notes import Note, NoteKind
from offload.sequences.text import ModelText
from offload.sequences.vocabulary_file import VocabularyFile, vocabulary_difference
from specdec.drafters.translate import TranslatedDrafter
from specdec.drafters.vocabulary import Survival, Vocabulary, survival
from specdec.errors import VocabularyMismatch
from specdec.types import Drafter
from specoffload.config.resolution import demo_prompts
from specoffload.config.speculation import SpecConfig

MOST_APART = 128  # tokens by which the sizes of equal vocabularies differ, as in llama.cpp
_SAMPLE_CHARS = 8192  # length of the text on which translation is measured


def with_translation(model: Path, spec: SpecConfig) -> SpecConfig:
    """Return `spec` with translation of drafts if the draft model has another vocabulary.

    `model` is the target's file. What translation costs is measured on a sample, and becomes a
    reason. Vocabularies are compared by the headers of the files. Raises BadModel, or
    VocabularyMismatch if nothing can be translated.
    """
    if spec.draft_model is None:
        return spec
    is_asked = bool(spec.options.replacements) or "replacements" in spec.options.given
    target, draft = read_facts(model).path, read_facts(spec.draft_model).path
    reason = vocabulary_difference(target, draft, MOST_APART)
    if not is_asked:
        pairs = () if reason else None
        spec = replace(spec, options=replace(spec.options, replacements=pairs))
    if not (is_asked or reason):
        return spec
    kept = _measured(target, stamps_of(target), draft, stamps_of(draft))
    if kept is None or not kept.kept:
        raise VocabularyMismatch(_refusal(draft, reason, has_tokenizers=kept is not None))
    note = Note(NoteKind.FLAGS, _cost_words(draft, reason, kept))
    return replace(spec, reasons=tuple(dict.fromkeys((*spec.reasons, note))))


def _cost_words(draft: Path, reason: str, kept: Survival) -> str:
    because = f", because {reason}" if reason else ""
    return (
        f"drafts of {draft.name} are translated through text{because}. In a sample, "
        f"{100 * kept.kept:.0f} % of the target's tokens survive translation and back, "
        f"{100 * kept.whole:.0f} % are one token of the draft, and a token takes "
        f"{kept.draft_tokens:.2f} of the draft's (--spec-replace TARGET=DRAFT exchanges texts, too)"
    )


def _refusal(draft: Path, difference: str, *, has_tokenizers: bool) -> str:
    reason = "no text of the target survives in its vocabulary"
    if not has_tokenizers:
        reason = "that needs a tokenizer in both files"
    return (
        f"--draft {draft}: {difference or 'the vocabularies agree'}. Its drafts cannot be "
        f"translated through text (--spec-replace), because {reason}. Name another file with "
        "--draft, or leave the flag out"
    )


@lru_cache(8)
def _measured(
    target: Path, target_stamps: FileStamps, draft: Path, draft_stamps: FileStamps
) -> Survival | None:
    """What translation keeps of a sample text; None if a file has no tokenizer. Raises BadModel.

    The stamps are part of the cache's key.
    """
    del target_stamps, draft_stamps
    text = "\n".join(demo_prompts())[:_SAMPLE_CHARS]
    with VocabularyFile(target) as ours, VocabularyFile(draft) as theirs:
        if not (ours.is_readable and theirs.is_readable):
            return None
        return survival(vocabulary_of(ours), vocabulary_of(theirs), text)


# -- what translation needs of two models ----------------------------------------------------------


def vocabulary_of(text: ModelText) -> Vocabulary:
    """The tokenizer of a model, for translation."""
    bos = text.model.bos
    begins = bos >= 0 and text.tokenize("", add_special=True)[:1] == [bos]
    return Vocabulary.probed(
        lambda words: text.tokenize(words, add_special=False, parse_special=True),
        lambda tokens: text.detokenize(tokens, special=True),
        (bos,) if begins else (),
    )


def translation(
    target: ModelText,
    draft: ModelText,
    pairs: tuple[tuple[str, str], ...],
    *,
    only_appends: bool,
) -> Callable[[Drafter], Drafter]:
    """Return a function that makes a drafter with `draft` draft in the target's tokens.

    `pairs` are texts to exchange. `only_appends`: the draft model cannot rewind.
    """
    marks = marks_between(target, draft, pairs)
    ours, theirs = vocabulary_of(target), vocabulary_of(draft)
    return lambda drafter: TranslatedDrafter(
        drafter,
        ours,
        theirs,
        pairs,
        marks=marks.to_draft,
        marks_back=marks.to_target,
        only_appends=only_appends,
    )


class Marks(NamedTuple):
    """Special tokens of one meaning, from the target to the draft, and back."""

    to_draft: Mapping[int, int]
    to_target: Mapping[int, int]


def marks_between(target: ModelText, draft: ModelText, pairs: tuple[tuple[str, str], ...]) -> Marks:
    """The special tokens that are spelled alike in both, or that begin or end texts or turns.

    Those that occur in `pairs` are left to the pairs.
    """
    ours = _by_meaning(target, [old for old, _ in pairs])
    theirs = _by_meaning(draft, [new for _, new in pairs])
    return Marks(_paired(ours, theirs), _paired(theirs, ours))


def _by_meaning(text: ModelText, named: list[str]) -> dict[str, int]:
    """Special tokens by spelling, and by their part in a text. `named` ones are left out."""
    model = text.model
    control = model.control_tokens
    tokens = {model.token_text(token): token for token in control}
    parts = {"bos": model.bos, "eot": model.eot, "eos": model.eos}
    # Spellings contain no NUL.
    tokens |= {f"\0{part}": token for part, token in parts.items() if token in control}
    return {
        meaning: token
        for meaning, token in tokens.items()
        if not any(model.token_text(token) in pair for pair in named)
    }


def _paired(ours: Mapping[str, int], theirs: Mapping[str, int]) -> dict[int, int]:
    pairs: dict[int, int] = {}
    for meaning, token in ours.items():
        if meaning in theirs:
            pairs.setdefault(token, theirs[meaning])
    ends = [theirs[part] for part in ("\0eot", "\0eos") if part in theirs]
    for part in ("\0eot", "\0eos"):
        if part in ours and ends:
            pairs.setdefault(ours[part], ends[0])
    return pairs
