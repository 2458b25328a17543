"""Computes the tokens that a grammar or a JSON schema allows next, with `llguidance`.

Compiling and computing masks are limited. A request that exceeds a limit ends with an error.
docs/results.md compares the speed with that of llama.cpp's grammars.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from offload.errors import BadRequest
from offload.sampling.gbnf import lark_of_gbnf
from offload.sampling.json_schema import read_schema

_T = TypeVar("_T")
_MOST_WORDS = 300  # most characters of a reason in an error message
# Parser items per mask and per character: a hundred times what common grammars need. Ambiguous
# grammars need more the longer the text is. An answer that has begun goes on with higher limits:
# the last take half a second of one core for a mask, and its sampler limits the time of the answer.
_LIMITS = tuple(
    {
        "step_max_items": n * 100_000,
        "max_items_in_row": n * 4_000,
        "step_lexer_fuel": n * 200_000,
        "verbose_errors": False,
    }
    for n in (1, 10, 100)
)
_PAST_A_LIMIT = re.compile("too many|max is|fuel", re.IGNORECASE)


class GrammarVocabulary(Protocol):
    """The tokens of a model, as a grammar sees them."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def ends(self) -> Sequence[int]:
        """Tokens that end a text."""
        ...

    def piece(self, token: int, *, special: bool) -> bytes: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


class _GuidanceTokens:
    """A tokenizer in the form that llguidance's TokenizerWrapper expects."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        self.tokens = [vocabulary.piece(i, special=True) for i in range(vocabulary.n_vocab)]
        # As in llama.cpp, a control token matches its text: a grammar with <|channel|> matches that
        # token.
        self.special_token_ids = list(vocabulary.ends)
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        words = text.decode("utf-8", "replace")
        return self._vocabulary.tokenize(words, add_special=False, parse_special=False)


class GrammarTokens:
    """A vocabulary prepared for grammars. Preparing 150,000 tokens takes about a second."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        """Raises BadRequest for a vocabulary without a token that ends a text."""
        if not vocabulary.ends:
            raise BadRequest("this model has no token that ends a text, so grammars cannot end")
        self.n_vocab = vocabulary.n_vocab
        self.ends = frozenset(vocabulary.ends)
        self._vocabulary = vocabulary
        self.prepared = LLTokenizer(
            TokenizerWrapper(_GuidanceTokens(vocabulary)), eos_token=list(vocabulary.ends)
        )

    def token_of(self, words: str) -> int:
        """Return the token of a text, perhaps a special one. Raises BadRequest if not one token."""
        tokens = self._vocabulary.tokenize(words, add_special=False, parse_special=True)
        if len(tokens) != 1:
            raise BadRequest(
                f"the grammar names {words[:60]!r}, which is {len(tokens)} tokens of this model, "
                "not one"
            )
        return tokens[0]


class Grammar:
    """The position of a text in a grammar. `allowed` returns the next tokens, `accept` moves on."""

    def __init__(self, tokens: GrammarTokens, source: str, name: str = "grammar") -> None:
        """Compile `source`, a grammar in the form of llguidance. Errors call it `name`.

        Raises BadRequest for a grammar that cannot be followed.
        """
        self._tokens, self._name, self._source = tokens, name, source
        self._accepted: list[int] = []
        self._n_raised = 0  # how often the limits were raised
        self._matcher = self._begun()
        self._check()

    def copied(self) -> Grammar:
        """Return a copy that moves on by itself. Nothing is compiled for it."""
        other = copy.copy(self)
        other._accepted = list(self._accepted)
        other._matcher = self._matcher.deep_copy()
        return other

    def allows(self, token: int) -> bool:
        """True if `token` may follow. Raises BadRequest past the limits."""
        if self._is_over:
            return token in self._tokens.ends
        return self._within_limits(lambda matcher: bool(matcher.validate_tokens([token]) == 1))

    def allowed(self) -> NDArray[np.bool_]:
        """True for each token that may follow, [n_vocab]. Raises BadRequest past the limits."""
        if self._is_over:
            out = np.zeros(self._tokens.n_vocab, np.bool_)
            out[list(self._tokens.ends)] = True
            return out
        bits = np.frombuffer(self._within_limits(LLMatcher.compute_bitmask), np.uint8)
        mask = np.unpackbits(bits, count=self._tokens.n_vocab, bitorder="little")
        return mask.view(np.bool_)

    def accept(self, token: int) -> None:
        """Move past `token`. Raises BadRequest if it may not follow."""
        if not self.allows(token):
            raise BadRequest(f"token {token} was chosen, and the grammar refuses it")
        if not self._is_over:
            self._within_limits(lambda matcher: matcher.consume_token(token))
            self._accepted.append(token)

    def _begun(self) -> LLMatcher:
        """Return a matcher of the text so far, with the limits of now."""
        limits = LLParserLimits(**_LIMITS[self._n_raised])
        matcher = LLMatcher(self._tokens.prepared, self._source, log_level=0, limits=limits)
        if self._accepted:
            matcher.consume_tokens(self._accepted)
        return matcher

    def _within_limits(self, ask: Callable[[LLMatcher], _T]) -> _T:
        """Return the matcher's answer, with higher limits if a begun text exceeds those of now.

        A matcher that has exceeded its limits is of no more use, so another one takes its place.
        """
        answer = ask(self._matcher)
        while self._accepted and self._is_past_a_limit and self._n_raised + 1 < len(_LIMITS):
            self._n_raised += 1
            self._matcher = self._begun()
            if not self._matcher.is_error():
                answer = ask(self._matcher)
        self._check()
        return answer

    @property
    def _is_past_a_limit(self) -> bool:
        return self._matcher.is_error() and bool(_PAST_A_LIMIT.search(_reason(self._matcher)))

    @property
    def _is_over(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadRequest(f"the {self._name} cannot be followed: {_reason(self._matcher)}")


def _reason(matcher: LLMatcher) -> str:
    """Return the beginning of llguidance's message, without the state of its parser."""
    words = matcher.get_error().partition("<state>")[0].strip()
    return " ".join(words.split())[:_MOST_WORDS]


def grammar_of(
    tokens: Callable[[], GrammarTokens],
    gbnf: str | None,
    json_schema: str | None,
    root: str = "root",
) -> Grammar | None:
    """Return the grammar of `gbnf` from its rule `root`, or of `json_schema`; None without both.

    Raises BadRequest if both are given, or if one cannot be followed.
    """
    if gbnf is not None and json_schema is not None:
        raise BadRequest("a grammar and a JSON schema exclude each other: send one of them")
    if gbnf is not None:
        lark = lark_of_gbnf(gbnf, lambda words: tokens().token_of(words), root)
        return Grammar(tokens(), LLMatcher.grammar_from_lark(lark))
    if json_schema is not None:
        try:
            # The schema is passed as text: llguidance refuses integers over 64 bits in a dict.
            schema = json.dumps(read_schema(json_schema))
            source = LLMatcher.grammar_from_json_schema(schema)
        except ValueError as e:  # a number beyond a float's range, or half a character
            raise BadRequest(f"the JSON schema cannot be followed: {str(e)[:_MOST_WORDS]}") from e
        return Grammar(tokens(), source, "JSON schema")
    return None
