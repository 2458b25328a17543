"""The parts of speculation as types: Target, Drafter, Policy, Chooser, Draft and Round.

The target and the draft model are seen only through `Target`, so nothing here knows a library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

End = Literal["", "end", "length", "context"]
IsEnd = Callable[[int], bool]


class Target(Protocol):
    """A model with memory of one or more sequences of tokens."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can hold."""
        ...

    @property
    def can_rewind(self) -> bool:
        """False for recurrent and hybrid memory: no partial removal, use checkpoints."""
        ...

    @property
    def n_batch(self) -> int:
        """Tokens that one decode takes."""
        ...

    @property
    def n_outputs(self) -> int:
        """Rows whose logits one decode gives."""
        ...

    def length(self, sequence: int) -> int: ...

    def extend(
        self, sequence: int, tokens: Sequence[int], n_logits: int | None = None
    ) -> NDArray[np.float32]:
        """Append tokens; logits [n_logits or len(tokens), n_vocab] after each of the last
        `n_logits` of them. The array is the caller's."""
        ...

    def extend_batch(
        self, parts: Sequence[tuple[int, Sequence[int], int]]
    ) -> list[NDArray[np.float32]]:
        """One decode for several sequences: (sequence, tokens, n_logits) of each, and as in
        `extend` the rows of each. `n_batch` tokens and `n_outputs` rows at most."""
        ...

    def n_droppable(self, parts: Sequence[tuple[int, int]]) -> int:
        """Tokens that `rewind` takes off each sequence of a recurrent memory right after a decode
        of these (sequence, number of tokens), by the snapshots that it leaves; 0: checkpoints only.
        """
        ...

    def rewind(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens."""
        ...

    def checkpoint(self, sequence: int) -> object: ...

    def restore(self, sequence: int, checkpoint: object) -> None: ...


class Drawing(Protocol):
    """How a block's tokens are drawn: uniform numbers [n_steps, n_parts], and temperatures
    [n_parts], or one temperature for all parts."""

    @property
    def temperature(self) -> float | NDArray[np.float64]: ...

    @property
    def uniforms(self) -> NDArray[np.float64]: ...


class Block(Protocol):
    """Drafted tokens [n_steps, n_parts], and the probability of the likeliest token at each place.

    The likeliest token is the drafted one, unless tokens were drawn.
    """

    @property
    def tokens(self) -> NDArray[np.int64]: ...

    @property
    def p(self) -> NDArray[np.float32] | NDArray[np.float64]: ...

    def row(self, step: int, part: int) -> NDArray[np.float64]:
        """The distribution [n_vocab] that a token was drawn from."""
        ...


@runtime_checkable
class BlockModel(Target, Protocol):
    """A draft model that feeds its own tokens back, so that it can draft several in one call."""

    @property
    def n_steps_max(self) -> int:
        """Most tokens of one block."""
        ...

    def draft(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> Block:
        """Append each sequence's tokens and draft `n_steps` more; the memory then holds all of
        them except the last. Probabilities of tokens that are not drawn are shares among the
        `top_k` likeliest tokens, 0: among all."""
        ...

    def draft_more(
        self,
        sequences: Sequence[int],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> Block:
        """Append the last drafted token of each sequence, and draft on."""
        ...


class Chooser(Protocol):
    """The sampler of a request, stateful (penalties, grammar, random numbers)."""

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """The next token from logits [n_vocab]."""
        ...

    def accepted(self, token: int) -> None:
        """Told once for every token that is kept, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of drafted tokens that a policy verifies, and the reason.

    `rest` is for how many further rounds it holds: they draft nothing and nobody is asked.
    """

    n_tokens: int
    reason: str
    rest: int = 0


class Walk(Protocol):
    """The decision on one draft: fed each drafted token's probability as it comes."""

    @property
    def wants(self) -> bool:
        """True while another token should be drafted."""
        ...

    def feed(self, p: float) -> bool:
        """Take the next drafted token's probability; returns `wants`."""
        ...

    @property
    def n_best(self) -> int:
        """How many of the tokens fed so far are worth verifying."""
        ...

    @property
    def gain(self) -> float:
        """Expected value of verifying `n_best` tokens, in tokens; 0 if none."""
        ...

    @property
    def spent(self) -> float:
        """The price of the draft steps so far, in tokens; 0 if the policy does not price them."""
        ...

    @property
    def reason(self) -> str: ...

    @property
    def rest(self) -> int:
        """Number of further rounds for which nothing is wanted; 0 if `wants`."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter's proposal, as far as the policy kept it.

    `dropped` are (token, p) drafted after the kept ones. They are not verified, but the target's
    next token says whether the first of them was right. `rows` are the distributions [n_vocab]
    that the kept tokens were drawn from, for rejection sampling.
    """

    tokens: tuple[int, ...]
    probs: tuple[float, ...]
    source: str
    decision: Decision
    dropped: tuple[tuple[int, float], ...] = ()
    rows: tuple[NDArray[np.float64], ...] = ()
    n_steps: int = 0  # decodes of a draft model spent on it
    catch_up_s: float = 0.0  # seconds in which the draft model read a prompt, before any step
    # The likeliest (token, p) at each position, dropped ones too; only where a log shows them.
    candidates: tuple[tuple[tuple[int, float], ...], ...] = ()
    others: tuple[Draft, ...] = ()  # what a chain's other drafters proposed; not verified

    def judged_by(self, emitted: Sequence[int]) -> tuple[tuple[float, bool], ...]:
        """(p, right) of the drafted tokens, up to the first that differs from `emitted`."""
        pairs = []
        drafted = (*zip(self.tokens, self.probs, strict=True), *self.dropped)
        for (token, p), answer in zip(drafted, emitted, strict=False):
            pairs.append((p, token == answer))
            if token != answer:
                break
        return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Round:
    """One request's part of a step: draft, verify, accept. Times in seconds.

    `emitted` are the tokens gained, accepted drafts first; `end` says why no round follows:
    "end" (an end token, the last of `emitted`), "length" (n_predict), "context" (target full).
    `draft_s` is without the draft's `catch_up_s`, which comes once per prompt.
    """

    draft: Draft
    n_accepted: int
    emitted: tuple[int, ...]
    draft_s: float
    verify_s: float
    end: End = ""
    rollback_s: float = 0.0
    first_row: int = 0  # row of the round's first token in the target's decode

    @property
    def n_drafted(self) -> int:
        return len(self.draft.tokens)

    @property
    def evidence(self) -> tuple[tuple[float, bool], ...]:
        """(draft p, right) of each drafted token up to the first that the target rejected."""
        return self.draft.judged_by(self.emitted)


class Policy(Protocol):
    """Decides draft lengths; `learn` is told every finished round.

    A draft model's probabilities are shares among its `p_top_k` likeliest tokens, 0: among all.
    """

    name: str
    n_max: int
    p_top_k: int

    def begin(self, limit: int, source: str) -> Walk:
        """A new draft of at most `limit` tokens from the drafter named `source`."""
        ...

    def learn(self, round_: Round) -> None: ...


class DraftRequest:
    """A question to drafters: at most `limit` tokens to follow `history`, as many as `policy`
    keeps. `walks` are those that `begin` began, by drafter."""

    __slots__ = ("history", "limit", "policy", "sequence", "walks")

    def __init__(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> None:
        self.sequence, self.history = sequence, history
        self.policy, self.limit = policy, limit
        self.walks: dict[str, Walk] = {}

    def begin(self, limit: int, source: str) -> Walk:
        """The policy's walk for a draft of at most `limit` tokens by the drafter `source`."""
        walk = self.walks[source] = self.policy.begin(limit, source)
        return walk

    def reading(self, history: Sequence[int]) -> DraftRequest:
        """The same question about another text, with the same walks."""
        other = DraftRequest(self.sequence, history, self.policy, self.limit)
        other.walks = self.walks
        return other


class Drafter(Protocol):
    """Proposes tokens for any number of sequences.

    In each step the loop calls `propose`, decodes the batch with the target, and calls `learn`,
    while the target still has the rows of that decode: those of a round begin at its `first_row`.
    """

    name: str

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request. No two requests are of the same sequence. A draft model
        serves all of them in one decode per token."""
        ...

    def learn(self, sequence: int, round_: Round) -> None:
        """Told every round in which it was asked."""
        ...

    def forget(self, sequence: int) -> None:
        """The sequence starts anew; what is kept for it may be compared or dropped."""
        ...
