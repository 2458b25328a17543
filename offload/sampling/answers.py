"""An answer's tokens with log probabilities, and a sampler that ends reasoning in time. Pure.

llama.cpp's option for the latter is --reasoning-budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # every process of the server has these types, and few compute with them
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class ReasoningLimit:
    """Allows at most `n_tokens` between the markers `opens` and `closes`, then writes `ending`.

    `is_open` is True if the prompt has opened the reasoning. Otherwise an answer reasons only if it
    begins with `opens`.
    """

    n_tokens: int
    opens: str
    closes: str
    ending: str
    is_open: bool = False


class AnswerSampler(Protocol):
    """Chooses the tokens of one answer."""

    @property
    def has_distribution(self) -> bool: ...

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int: ...

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]: ...

    def accepted(self, token: int) -> None: ...

    def take_logprobs(self) -> tuple[ChosenLogprob, ...]: ...

    def close(self) -> None: ...


class LimitedReasoning:
    """Follows an answer token by token; `due` is the token that must come next, if any. Pure."""

    def __init__(self, limit: ReasoningLimit, ending: Sequence[int]) -> None:
        self._opens, self._closes = limit.opens.strip().encode(), limit.closes.strip().encode()
        self._n_left = limit.n_tokens
        self._ending = ending
        self._due: deque[int] = deque()
        self._is_over = False
        self._is_open = False
        self._text = b""  # the answer's start; while reasoning, its last bytes
        if limit.is_open:
            self._open()

    @property
    def due(self) -> int | None:
        return self._due[0] if self._due else None

    def accepted(self, token: int, piece: bytes) -> None:
        """Take in the answer's next token, whose bytes are `piece`."""
        if self._due:
            self._due.popleft()
        elif not self._is_over:
            self._text += piece
            if self._is_open:
                self._n_left -= 1
                self._look_for_the_end()
            else:
                self._look_for_the_beginning()

    def _look_for_the_beginning(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._opens):
            self._text = text[len(self._opens) :]
            self._is_over = self._closes in self._text
            self._open()
        elif not self._opens.startswith(text):
            self._is_over = True

    def _look_for_the_end(self) -> None:
        if self._closes in self._text:
            self._is_over = True
        elif self._n_left <= 0:
            self._end()
        else:
            self._text = self._text[-len(self._closes) :]

    def _open(self) -> None:
        self._is_open = True
        if self._n_left <= 0 and not self._is_over:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._due.extend(self._ending)


class LimitedSampler:
    """A sampler whose choice is replaced while reasoning is being closed."""

    def __init__(
        self, sampler: AnswerSampler, limit: LimitedReasoning, piece: Callable[[int], bytes]
    ) -> None:
        self._sampler, self._limit, self._piece = sampler, limit, piece

    @property
    def has_distribution(self) -> bool:
        return self._sampler.has_distribution

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """Return the sampler's choice, or the token that must come next.

        The sampler chooses in both cases, because it reports probabilities.
        """
        chosen = self._sampler.choose(logits, history)
        due = self._limit.due
        return chosen if due is None else due

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        found = self._sampler.probabilities(logits, history)
        due = self._limit.due
        if due is not None:
            found[:] = 0.0
            found[due] = 1.0
        return found

    def accepted(self, token: int) -> None:
        self._sampler.accepted(token)
        self._limit.accepted(token, self._piece(token))

    def take_logprobs(self) -> tuple[ChosenLogprob, ...]:
        return self._sampler.take_logprobs()

    def close(self) -> None:
        self._sampler.close()


# -- probabilities of tokens -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its bytes, and the natural logarithm of its probability."""

    token: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ChosenLogprob:
    """A chosen token, and the likeliest tokens at its position, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
