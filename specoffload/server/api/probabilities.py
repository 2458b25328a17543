"""Writes probabilities of chosen tokens in OpenAI's and in llama-server's form."""

from __future__ import annotations

import codecs
import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from offload.sampling.answer_start import AnswerStart, ReasoningSpan
from offload.sampling.answers import ChosenLogprob, TokenLogprob
from specoffload.generation.generation import TextPiece

_LEAST_LOGPROB = -9999.0  # OpenAI's value for an impossible token: JSON has no infinity

Placed = tuple[int, ChosenLogprob]
"""A token with the number of characters before it."""


class TokenPlaces:
    """Holds back the chosen tokens of one answer until their text is shown.

    Tokens of a stop sequence are therefore left out, because their text is never shown.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_read = self._n_told = 0  # characters of the tokens, and of the text
        self._waiting: deque[Placed] = deque()

    def take(self, piece: TextPiece) -> list[Placed]:
        """Return the held-back tokens whose text begins in this piece's text or in earlier text."""
        for token in piece.logprobs:
            self._waiting.append((self._n_read, token))
            self._n_read += len(self._decoder.decode(token.chosen.piece))
        self._n_told += len(piece.text)
        is_whole = piece.finish_reason is not None and piece.stopping_word is None
        placed: list[Placed] = []
        while self._waiting and (is_whole or self._waiting[0][0] < self._n_told):
            placed.append(self._waiting.popleft())
        return placed


class ContentTokens:
    """Chooses the tokens of a chat's answer whose probabilities are reported.

    Tokens of the reasoning and of a stop sequence are left out, because OpenAI's `logprobs.content`
    belongs to the message's content.
    """

    def __init__(self, span: ReasoningSpan | None) -> None:
        self._places = TokenPlaces()
        self._start = AnswerStart(span)
        self._at_start = span is not None  # True while white space after the reasoning is left out
        self._waiting: list[Placed] = []

    def take(self, piece: TextPiece) -> list[ChosenLogprob]:
        """Return the tokens of the answer that this piece shows, in order."""
        self._waiting += self._places.take(piece)
        start = self._start
        start.feed(piece.text)
        if piece.finish_reason is not None:
            start.finish()
        if start.at is None:
            if start.is_reasoning:
                self._waiting = []
            return []
        waiting, self._waiting = self._waiting, []
        tokens = []
        for place, token in waiting:
            if place < start.at or (self._at_start and start.at and not token.chosen.piece.strip()):
                continue
            self._at_start = False
            tokens.append(token)
        return tokens


def placed_in(text: str, tokens: Sequence[ChosenLogprob]) -> list[Placed]:
    """Return the tokens of `text` with their places.

    A token that the text does not show, such as one that the tokenizer puts first, takes no
    characters.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    placed, at = [], 0
    for token in tokens:
        placed.append((at, token))
        shown = decoder.decode(token.chosen.piece)
        # Some tokenizers put a space before the first word.
        for letters in (shown, shown.removeprefix(" ")):
            if text.startswith(letters, at):
                at += len(letters)
                break
    return placed


def completion_logprobs(tokens: Sequence[Placed], n_top: int) -> dict[str, Any]:
    """Return the `logprobs` of a choice of /v1/completions, with `n_top` likely tokens for each.

    The first token of a prompt has no logprob.

    https://platform.openai.com/docs/api-reference/completions/object
    """
    tops = [
        {_named(other): _finite(other) for other in token.top[:n_top]} if token.top else None
        for _, token in tokens
    ]
    return {
        "tokens": [_named(token.chosen) for _, token in tokens],
        "token_logprobs": [_finite(token.chosen) for _, token in tokens],
        "top_logprobs": tops if n_top else None,
        "text_offset": [at for at, _ in tokens],
    }


def chat_logprobs(tokens: Sequence[ChosenLogprob], n_top: int) -> dict[str, Any]:
    """Return a chat choice's `logprobs`, with the `n_top` likeliest tokens for each token."""
    return {
        "content": [_for_chat(token.chosen, token.top[:n_top]) for token in tokens],
        "refusal": None,
    }


def _for_chat(token: TokenLogprob, top: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    return {
        "token": token.piece.decode(errors="replace"),
        "logprob": max(token.logprob, _LEAST_LOGPROB),
        "bytes": list(token.piece),  # shows parts of characters, which `token` does not
        "top_logprobs": [_for_chat(other) for other in top],
    }


def _named(token: TokenLogprob) -> str:
    """Return the token's text. A part of a character is written as bytes, in OpenAI's form."""
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.piece)


def _finite(token: TokenLogprob) -> float | None:
    return None if math.isnan(token.logprob) else max(token.logprob, _LEAST_LOGPROB)


def native_probabilities(tokens: Sequence[Placed], *, post_sampling: bool) -> list[dict[str, Any]]:
    """Return llama-server's `completion_probabilities`.

    The entries have log probabilities from the model's logits. With `post_sampling`, they have the
    probabilities after the samplers.

    llama.cpp tools/server/README.md, "POST /completion".
    """
    others = "top_probs" if post_sampling else "top_logprobs"
    return [
        _native(token.chosen, post_sampling)
        | {others: [_native(other, post_sampling) for other in token.top]}
        for _, token in tokens
    ]


def _native(token: TokenLogprob, post_sampling: bool) -> dict[str, Any]:
    told = {
        "id": token.token,
        "token": token.piece.decode(errors="ignore"),
        "bytes": list(token.piece),
    }
    if post_sampling:
        return told | {"prob": math.exp(token.logprob)}
    return told | {"logprob": max(token.logprob, -sys.float_info.max)}
