"""The pooling of embeddings: what is asked for, and what a model file says. Pure."""

from __future__ import annotations

from offload.model import ModelFacts

POOLINGS = ("none", "mean", "cls", "last")  # by llama.cpp's numbers
OWN = "own"  # the file's; no embeddings where it names none
OWN_OR_NONE = "own-or-none"  # the file's; a vector for each token where it names none


def pooling_of(facts: ModelFacts, wanted: str | None) -> str | None:
    """One of POOLINGS; None: no embeddings are to be made."""
    if wanted not in (OWN, OWN_OR_NONE):
        return wanted
    number = facts.number("pooling_type")
    if 0 < number < len(POOLINGS):
        return POOLINGS[number]
    return "none" if wanted == OWN_OR_NONE else None
