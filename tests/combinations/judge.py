"""What must hold of every answer, whatever is combined. One class checks all of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from combinations.opening import open_words
from offload.engine import Engine
from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.generation.statistics import GenerationStats

# Largest distance of logits between one batch and another of the same text, as a share of their
# standard deviation. In the exact setting only the order of sums differs. Weights in blocks round
# what they are multiplied with, which makes more of the cache's rounding: with types of four bits,
# a token's logits move by up to 0.09.
_EXACT_NOISE, _NOISE, _BLOCK_NOISE = 2e-4, 0.1, 0.25


@dataclass(frozen=True)
class Answer:
    """One finished answer."""

    prompt: tuple[int, ...]
    options: GenerateOptions
    tokens: tuple[int, ...]
    text: str
    stats: GenerationStats
    finish_reason: str


@dataclass
class Judge:
    """The target alone on the CPU, with the same types of keys and values: the plain way."""

    model: Path
    cache_words: tuple[str, ...]
    n_ctx: int
    is_exact: bool
    has_blocks: bool = False  # weights are quantised in blocks
    faults: list[str] = field(default_factory=list)
    took_s: float = 0.0  # processor time of plain answers

    def __post_init__(self) -> None:
        words = [
            str(self.model), "--device", "cpu", "--spec-type", "none", "--parallel", "1",
            "--ctx-size", str(self.n_ctx), "--threads", "1", *self.cache_words,
        ]  # fmt: skip
        # It measures nothing, which would take longer than its answers.
        self.session = open_words(words, SPECOFFLOAD_WITHOUT="profile")

    def close(self) -> None:
        self.session.close()

    def check(self, answer: Answer, what: str) -> None:
        """Add a fault for each property that does not hold of `answer`."""
        self._check_counts(answer, what)
        self._check_text(answer, what)
        wanted = self.plain(answer.prompt, answer.options)
        if answer.tokens != wanted.tokens:
            self._check_difference(answer, wanted, what)

    def plain(self, prompt: Sequence[int], options: GenerateOptions) -> Answer:
        """The answer of the plain way."""
        self.session.forget()
        began_s = time.process_time()
        pieces = [*self.session.generate(prompt, replace(options, id_slot=-1))]
        self.took_s += time.process_time() - began_s
        return answer_of(tuple(prompt), options, pieces)

    def _check_counts(self, answer: Answer, what: str) -> None:
        stats = answer.stats
        if stats.n_prompt_tokens != len(answer.prompt):
            self._add(what, f"{stats.n_prompt_tokens} prompt tokens of {len(answer.prompt)}")
        if not 0 <= stats.n_cached_tokens < len(answer.prompt):
            self._add(what, f"{stats.n_cached_tokens} cached tokens of {len(answer.prompt)}")
        room = self.n_ctx - len(answer.prompt)
        limit = min(answer.options.n_predict or room, room)
        if len(answer.tokens) > limit:
            self._add(what, f"{len(answer.tokens)} tokens where {limit} were allowed")
        if answer.finish_reason == "length" and len(answer.tokens) < limit:
            self._add(what, f"ends for its length after {len(answer.tokens)} of {limit} tokens")

    def _check_text(self, answer: Answer, what: str) -> None:
        """The text is that of the tokens, without a character lost or twice."""
        pieces = b"".join(self.session.target.model.piece(t, special=False) for t in answer.tokens)
        if pieces.decode("utf-8", "replace").rstrip("\ufffd") != answer.text.rstrip("\ufffd"):
            self._add(what, f"the text {answer.text!r} is not that of {answer.tokens}")

    def _check_difference(self, answer: Answer, wanted: Answer, what: str) -> None:
        """A difference is allowed where two tokens nearly tie."""
        at = next(
            (i for i, (a, b) in enumerate(zip(answer.tokens, wanted.tokens, strict=False))
             if a != b),
            min(len(answer.tokens), len(wanted.tokens)),
        )  # fmt: skip
        told = f"{list(answer.tokens)} instead of {list(wanted.tokens)} after {len(answer.prompt)}"
        if at >= min(len(answer.tokens), len(wanted.tokens)):
            self._add(what, f"the answer has another length: {told}")
            return
        row = self.row((*answer.prompt, *wanted.tokens[:at]))
        share = _BLOCK_NOISE if self.has_blocks else _NOISE
        noise = (_EXACT_NOISE if self.is_exact else share) * float(row.std())
        gap = abs(float(row[answer.tokens[at]] - row[wanted.tokens[at]]))
        if answer.options.temperature > 0 and not self.is_exact:
            return  # the draw itself moves by the noise of all tokens' probabilities
        if gap > noise:
            self._add(what, f"token {at} differs by {gap:.2g} where {noise:.1g} is noise: {told}")

    def row(self, text: tuple[int, ...]) -> NDArray[np.float32]:
        """Logits after `text`."""
        engine: Engine = self.session.target
        self.session.forget()
        engine.sequences.rewind(0, 0)
        row = engine.sequences.extend(0, list(text), 1)[0]
        engine.sequences.rewind(0, 0)
        return row

    def _add(self, what: str, fault: str) -> None:
        self.faults.append(f"{what}: {fault}")


def answer_of(
    prompt: tuple[int, ...], options: GenerateOptions, pieces: Sequence[TextPiece]
) -> Answer:
    """Join a request's pieces. Raises AssertionError if it is not over."""
    last = pieces[-1]
    assert last.stats is not None
    assert last.finish_reason is not None
    return Answer(
        prompt, options, tuple(t for p in pieces for t in p.tokens),
        "".join(p.text for p in pieces), last.stats, last.finish_reason,
    )  # fmt: skip
