"""Grammars over a vocabulary of single bytes, for tests that need no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from offload.errors import BadRequest
from offload.sampling.grammar import Grammar, GrammarTokens, grammar_of

END = 256


class Bytes:
    """A vocabulary of single bytes and an end token."""

    n_vocab = 257
    ends: Sequence[int] = (END,)
    controls: Sequence[int] = (END,)

    def piece(self, token: int, *, special: bool) -> bytes:
        return b"<end>" if token == END else bytes([token])

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())


@cache
def tokens() -> GrammarTokens:
    return GrammarTokens(Bytes())


def follows(grammar: Grammar | None, text: str, *, to_the_end: bool = True) -> bool:
    """True if the grammar allows `text`, and with `to_the_end` its end too."""
    assert grammar is not None
    try:
        for byte in text.encode():
            grammar.accept(byte)
        return not to_the_end or grammar.allows(END)
    except BadRequest:
        return False


def fits(schema: object, text: str) -> bool:
    """True if `text` is an answer that the JSON schema allows."""
    return follows(grammar_of(tokens, None, json.dumps(schema)), text)
