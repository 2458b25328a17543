"""An answer's tokens with log probabilities, and a sampler that ends reasoning in time. Pure.

llama.cpp's option for the latter is --reasoning-budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # every process of the server has these types, and few compute with them
    import numpy as np
    from numpy.typing import NDArray


_MOST_TOKENS_LEFT = 3  # tokens that the rest of a character may have


@dataclass(frozen=True)
class ReasoningLimit:
    """Allows `n_tokens` between the markers `opens` and `closes`, then writes `ending`.

    A character that the limit would cut is written to its end, with up to three more tokens.

    `is_open` is True if the prompt has opened the reasoning. Otherwise an answer reasons only if it
    begins with `opens`. After `ending`, one of `branches` is written, if there are any. The model
    chooses which. `reopens` is True for a format in which reasoning may follow reasoning, as
    messages do in gpt-oss's. All of it counts together.
    """

    n_tokens: int
    opens: str
    closes: str
    ending: str
    is_open: bool = False
    branches: tuple[str, ...] = ()
    reopens: bool = False

    def endings(self, tokenize: Callable[[str], Sequence[int]]) -> tuple[Sequence[int], ...]:
        """Return the tokens of `ending`, with each of `branches` behind it."""
        return tuple(tokenize(self.ending + branch) for branch in self.branches or ("",))


class AnswerSampler(Protocol):
    """Chooses the tokens of one answer."""

    @property
    def has_distribution(self) -> bool: ...

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int: ...

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]: ...

    def allows(self, token: int) -> bool:
        """True if a grammar, if there is one, allows `token` next."""
        ...

    def accepted(self, token: int) -> None: ...

    def take_logprobs(self) -> tuple[ChosenLogprob, ...]: ...

    def close(self) -> None: ...


class LimitedReasoning:
    """Follows an answer token by token. `due` has the tokens one of which must come next. Pure."""

    def __init__(self, limit: ReasoningLimit, *endings: Sequence[int]) -> None:
        """`endings` are the tokens that end the reasoning, as `ReasoningLimit.endings` returns."""
        self._opens, self._closes = limit.opens.strip().encode(), limit.closes.strip().encode()
        self._n_left = limit.n_tokens
        self._endings, self._reopens = endings, limit.reopens
        self._due: list[Sequence[int]] = []  # what is left of each ending that may come
        self._is_over = False
        self._is_open = False
        self._text = b""  # the answer's start; later, the last bytes in which a marker may begin
        if limit.is_open:
            self._open()

    @property
    def due(self) -> tuple[int, ...]:
        """The tokens one of which must come next; empty if the model is free."""
        return tuple(dict.fromkeys(ending[0] for ending in self._due))

    def drop(self) -> None:
        """Forget the tokens that must come next. The model is free again."""
        self._due = []

    def accepted(self, token: int, piece: bytes) -> None:
        """Take in the answer's next token, whose bytes are `piece`."""
        if self._due:
            left = [ending[1:] for ending in self._due if ending[0] == token]
            self._due = left if all(left) else []
            return
        if self._is_over and not self._reopens:
            return
        self._text += piece
        if self._is_open:
            self._n_left -= 1
            self._look_for_the_end()
        elif self._is_over:
            self._look_for_more()
        else:
            self._look_for_the_beginning()

    def _look_for_the_beginning(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._opens):
            self._open(text[len(self._opens) :])
        elif not self._opens.startswith(text):
            self._close(self._text)

    def _look_for_more(self) -> None:
        _, marker, after = self._text.rpartition(self._opens)
        if marker:
            self._open(after)
        else:
            self._text = self._text[-len(self._opens) :]

    def _look_for_the_end(self) -> None:
        _, marker, after = self._text.partition(self._closes)
        if marker:
            self._close(after)
        elif self._n_left <= -_MOST_TOKENS_LEFT or (
            self._n_left <= 0 and not _ends_inside_a_character(self._text)
        ):
            self._end()
        else:
            self._text = self._text[-len(self._closes) :]

    def _open(self, after: bytes = b"") -> None:
        self._is_open, self._text = True, after
        if self._closes in after:
            self._close(after.partition(self._closes)[2])
        elif self._n_left <= 0:
            self._end()

    def _close(self, after: bytes = b"") -> None:
        self._is_over, self._is_open, self._text = True, False, after

    def _end(self) -> None:
        self._close()
        self._due = [ending for ending in self._endings if ending]


def _ends_inside_a_character(text: bytes) -> bool:
    """True if the last character of UTF-8 text has bytes that are still to come."""
    for n, byte in enumerate(reversed(text[-3:]), 1):
        if byte < 0x80 or byte >= 0xC0:
            return n < (1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0))
    return False


class LimitedSampler:
    """A sampler whose choice is replaced while reasoning is being closed.

    A grammar has the last word: forced tokens are written as far as it allows them. So gpt-oss's
    forced end of the reasoning goes as far as the channel, which a forced call does not share.
    """

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
        due = self._due(logits)
        return chosen if due is None else due

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        probabilities = self._sampler.probabilities(logits, history)
        due = self._due(logits)
        if due is not None:
            probabilities[:] = 0.0
            probabilities[due] = 1.0
        return probabilities

    def allows(self, token: int) -> bool:
        due = self._limit.due
        return self._sampler.allows(token) and (not due or token in due)

    def accepted(self, token: int) -> None:
        self._sampler.accepted(token)
        self._limit.accepted(token, self._piece(token))

    def take_logprobs(self) -> tuple[ChosenLogprob, ...]:
        return self._sampler.take_logprobs()

    def close(self) -> None:
        self._sampler.close()

    def _due(self, logits: NDArray[np.float32]) -> int | None:
        """Return the token that must come next, or None. The likeliest of several is taken."""
        due = [token for token in self._limit.due if self._sampler.allows(token)]
        if not due:
            self._limit.drop()
            return None
        return max(due, key=lambda token: float(logits[token]))


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
