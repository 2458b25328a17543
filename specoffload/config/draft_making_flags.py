"""Flags and words of `draft prune`, `draft judge` and `draft distil`."""

from __future__ import annotations

from functools import partial

from specoffload.config.flag import FLOAT, INT, PATH, Panel, Positional, flag
from specoffload.config.options import DistilOptions, JudgeOptions, PruneOptions

_PRUNE, _DISTIL = frozenset({"draft prune"}), frozenset({"draft distil"})
_prune = partial(flag, PruneOptions, panel=Panel.COMMAND, commands=_PRUNE)
_distil = partial(flag, DistilOptions, panel=Panel.COMMAND, commands=_DISTIL)

DRAFT_MAKING = (
    _prune(
        "n_kept", "--keep", INT, "Number of token ids to keep.", least=1,
        more="Tokens that end a text and single bytes are always among them.",
    ),
    _prune("output", "--output -o", PATH, "File to write, for --draft-vocab."),
    _distil(
        "output", "--output -o", PATH, "File to write, a new draft model.",
        more="Texts of the target and checkpoints go to a folder beside it, NAME.distil.",
    ),
    _distil(
        "time_limit_s", "--time-limit", FLOAT,
        "Seconds for continuing texts and for training, in all runs together.", above=0,
        more="A first part of two fifths is for continuing.",
    ),
    _distil(
        "learning_rate", "--learning-rate", FLOAT,
        "Largest change of a weight in a step, as a share of its matrix's mean size.", above=0,
        most=0.1,
    ),
)  # fmt: skip

DRAFT_MAKING_WORDS = (
    Positional(
        PruneOptions, "draft", PATH, "DRAFT.gguf", "GGUF file of the draft model.", _PRUNE,
    ),
    Positional(
        PruneOptions, "corpus", PATH, "CORPUS...", "Files and folders of text, to count tokens in.",
        _PRUNE, repeats=True,
    ),
    Positional(
        JudgeOptions, "texts", PATH, "TEXTS...",
        "Files and folders of text that the target continues.", frozenset({"draft judge"}),
        repeats=True,
    ),
    Positional(
        DistilOptions, "draft", PATH, "DRAFT.gguf", "GGUF file of the draft model.", _DISTIL,
    ),
    Positional(
        DistilOptions, "texts", PATH, "TEXTS...",
        "Files and folders of text that the target continues.", _DISTIL, repeats=True,
    ),
)  # fmt: skip
