"""Plays answers without a model: random logits under a grammar, a reasoning limit and stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
from numpy.typing import NDArray

from offload.sampling.answers import (
    AnswerSampler,
    ChosenLogprob,
    LimitedReasoning,
    LimitedSampler,
)
from offload.sampling.grammar import Grammar, GrammarTokens, grammar_of
from offload.sequences.text import TextStream
from specoffload.chat.conversation import Conversation, Message, joined
from specoffload.chat.families import HARMONY_REASONING
from specoffload.chat.format import ChatFormat
from specoffload.chat.parser import AnswerForm
from specoffload.generation.generation import GenerateOptions
from specoffload.session.chat import answer_options, check_options
from specoffload.slots.stopping import StopScanner

END = 256
_N_TRIED = 50  # tokens for which it then tries each way to an end
_N_FREE = 150  # tokens after which the model wants to come to the end
# Markers that are one token, as in most vocabularies, and tokens that cross a marker's end.
_MARKERS = (
    *("<think>", "</think>", "[THINK]", "<seed:think>", "</seed:think>", "<tool_call>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "assistant", "final", "analysis"),
    *(">\n\n", ">{", '"}', "\n</", "k>\n<", "|>commentary to=", " to=functions.l", "l<|mes"),
)
_PIECES = (*(bytes([i]) for i in range(256)), b"<end>", *(text.encode() for text in _MARKERS))


class Vocabulary:
    """Single bytes, the end of a text, and longer tokens."""

    n_vocab = len(_PIECES)
    ends: Sequence[int] = (END,)

    def piece(self, token: int, *, special: bool) -> bytes:
        return _PIECES[token]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text, the longest that fits at each place."""
        data, found = text.encode(), []
        while data:
            fits = [i for i, piece in enumerate(_PIECES) if data.startswith(piece) and i != END]
            found.append(max(fits, key=lambda i: len(_PIECES[i])))
            data = data[len(_PIECES[found[-1]]) :]
        return found


@cache
def vocabulary() -> GrammarTokens:
    return GrammarTokens(Vocabulary())


class Likeliest:
    """Chooses the likeliest token that a grammar allows."""

    has_distribution = True

    def __init__(self, grammar: Grammar | None) -> None:
        self._grammar = grammar

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        if self._grammar is None:
            return int(logits.argmax())
        return int(np.where(self._grammar.allowed(), logits, -np.inf).argmax())

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        raise NotImplementedError

    def allows(self, token: int) -> bool:
        return self._grammar is None or self._grammar.allows(token)

    def accepted(self, token: int) -> None:
        if self._grammar is not None:
            self._grammar.accept(token)

    def take_logprobs(self) -> tuple[ChosenLogprob, ...]:
        return ()

    def close(self) -> None:
        pass


def _likes(form: AnswerForm) -> tuple[bytes, ...]:
    """Return texts that the model finishes once it has begun them."""
    layout = form.family.layout
    texts = [str(getattr(layout, field.name)) for field in fields(layout)]
    texts += [*(form.reasoning or ()), *(HARMONY_REASONING if layout.is_harmony else ()), '"', "}"]
    return tuple(text.encode() for text in texts if len(text) and text != "False")


def _ends(form: AnswerForm, written: bytes) -> tuple[bytes, ...]:
    """Return the texts that bring a model to the end of its answer."""
    opens, closes = (
        HARMONY_REASONING[:2] if form.family.layout.is_harmony else form.reasoning or ("", "")
    )
    is_open = form.thinking or (bool(opens) and opens.encode() in written)
    if is_open and closes.encode() not in written:
        return (closes.encode(),)
    layout = form.family.layout
    ends = (*layout.closers[::-1], layout.after_value, '"', "}")
    return tuple(text.encode() for text in ends if text)


def _logits(
    written: bytes, likes: Sequence[bytes], rng: np.random.Generator, to_the_end: float
) -> NDArray[np.float32]:
    logits = rng.normal(size=len(_PIECES)).astype(np.float32) * (1 + to_the_end / 10)
    logits[128:256] -= 3
    logits[END] += 4 + 3 * to_the_end
    for rank, text in enumerate(likes):
        begun = next(n for n in range(len(text) - 1, -1, -1) if written.endswith(text[:n]))
        for i in _next_tokens(text[begun:]):
            logits[i] += 4 + 2 * min(begun, 5) if begun else 1 + to_the_end / 2
            logits[i] += to_the_end / (rank + 1)
    return logits


@cache
def _next_tokens(text: bytes) -> tuple[int, ...]:
    return tuple(i for i, piece in enumerate(_PIECES) if text.startswith(piece))


@dataclass(frozen=True)
class Played:
    """An answer as clients get it. `is_whole` is False if the token limit ended it."""

    message: Message
    raw: str
    is_whole: bool


def play(
    form: ChatFormat,
    asked: Conversation,
    options: GenerateOptions,
    rng: np.random.Generator,
    n_most: int = 2500,
) -> Played:
    """Return an answer of a model that writes noise, but likes to finish markers and values."""
    check_options(asked, options)
    prompt = form.prepare(asked)
    given = answer_options(prompt, options)
    grammar = grammar_of(vocabulary, given.grammar, given.json_schema, given.grammar_root)
    sampler: AnswerSampler = Likeliest(grammar)
    limit = given.reasoning_limit
    if limit is not None:
        endings = limit.endings(
            lambda text: Vocabulary().tokenize(text, add_special=False, parse_special=True)
        )
        limited = LimitedReasoning(limit, *endings)
        sampler = LimitedSampler(sampler, limited, _PIECES.__getitem__)
    stops = StopScanner(given.stop, given.reasoning_span, given.end_texts, given.call_span)
    text = TextStream(_PIECES.__getitem__)
    parser = prompt.parser()
    likes = _likes(prompt.form)
    raw, written, deltas, is_whole = b"", "", [], False
    for n in range(n_most):
        is_late = n > _N_FREE
        ends = _ends(prompt.form, raw)
        wanted = ends[n // _N_TRIED % len(ends) :][:1] if is_late else likes
        token = sampler.choose(_logits(raw, wanted, rng, 20.0 * is_late), ())
        sampler.accepted(token)
        if token == END:
            is_whole = True
            break
        raw += _PIECES[token]
        piece = text.feed(token)
        written += piece
        deltas += parser.feed(stops.feed(piece))
        if stops.stopped:
            is_whole = True
            break
    if not stops.stopped:
        deltas += parser.feed(stops.feed(text.finish()) + stops.finish())
    deltas += parser.finish(cut=not is_whole)
    return Played(joined(deltas), written, is_whole)
