"""The options of a sampler, and the bounds of a grammar. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offload.errors import BadRequest

# libllama's grammar parser recurses and expands repetitions without limits of its own, and ends the
# process where memory does. Schemas, which become grammars, have the same bounds.
MOST_GRAMMAR_BYTES = 256 * 1024
DEEPEST_GRAMMAR = 64
MOST_REPEATED = 2000  # llama.cpp refuses more
# Strings, character classes and comments, in which brackets mean nothing.
_OPAQUE = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_REPEATED = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


@dataclass(frozen=True)
class SamplingOptions:
    """llama.cpp's sampling parameters and their defaults; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0xFFFFFFFF  # libllama draws one
    grammar: str | None = None  # GBNF, from its rule root

    @property
    def has_penalties(self) -> bool:
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return self.repeat_last_n != 0 and penalties != (1.0, 0.0, 0.0)


def check_grammar(text: str) -> None:
    """Raises BadRequest with the bound that a GBNF text exceeds."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise BadRequest(f"the grammar is no valid text: {e}") from e
    if size > MOST_GRAMMAR_BYTES:
        raise BadRequest(f"the grammar has {size} bytes; at most {MOST_GRAMMAR_BYTES} are read")
    if "\0" in text:
        raise BadRequest("the grammar holds a NUL character")
    rest = _OPAQUE.sub(" ", text)
    depth = deepest = 0
    for character in rest:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if deepest > DEEPEST_GRAMMAR:
        raise BadRequest(
            f"the grammar nests {deepest} brackets; at most {DEEPEST_GRAMMAR} are read"
        )
    for number in (n for found in _REPEATED.findall(rest) for n in found if n):
        if len(number) > 6 or int(number) > MOST_REPEATED:
            raise BadRequest(
                f"the grammar repeats {number} times; at most {MOST_REPEATED} can be followed"
            )
