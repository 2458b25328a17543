"""Names that flags accept for a context: cache types and the pooling of embeddings. Pure."""

from __future__ import annotations

from offload.model import ModelFacts

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # -ctk, -ctv
POOLINGS = ("none", "mean", "cls", "last")  # in the order of llama.cpp's numbers
OWN = "own"  # the file's; no embeddings if it names none
OWN_OR_NONE = "own-or-none"  # the file's; a vector for each token if it names none


def pooling_of(facts: ModelFacts, wanted: str | None) -> str | None:
    """Return one of POOLINGS, or None if no embeddings are to be made."""
    if wanted not in (OWN, OWN_OR_NONE):
        return wanted
    number = facts.number("pooling_type")
    if 0 < number < len(POOLINGS):
        return POOLINGS[number]
    return "none" if wanted == OWN_OR_NONE else None
