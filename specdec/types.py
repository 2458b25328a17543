"""The words of speculation as types: Target, Drafter, Policy, Chooser, Draft and Round.

The target and the draft model are seen only through `Target`, so nothing here knows a library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

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


class TreeTarget(Target, Protocol):
    """A target that can evaluate a tree of continuations in one decode."""

    def extend_tree(
        self, sequence: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> NDArray[np.float32]:
        """Rows [len(tokens), n_vocab]; `parents[i]` is an index in `tokens` or -1, and row i
        sees only its ancestors."""
        ...

    def keep_path(self, sequence: int, path: Sequence[int]) -> None:
        """After `extend_tree`: keep these nodes, root first, and drop the others."""
        ...


class Drawing(Protocol):
    """The drawing of a block's tokens: uniform numbers [n_steps, n_parts], at one temperature or
    at one for each part [n_parts]."""

    @property
    def temperature(self) -> float | NDArray[np.float64]: ...

    @property
    def uniforms(self) -> NDArray[np.float64]: ...


class Block(Protocol):
    """Drafted tokens and their numbers, [n_steps, n_parts] each.

    `p` is the probability of the likeliest token, which is the drafted one unless tokens were
    drawn; `gap` is by how much it exceeds the second's.
    """

    @property
    def tokens(self) -> NDArray[np.int64]: ...

    @property
    def p(self) -> NDArray[np.float32]: ...

    @property
    def gap(self) -> NDArray[np.float32]: ...

    def row(self, step: int, part: int) -> NDArray[np.float64]:
        """The distribution [n_vocab] that a token was drawn from."""
        ...


@runtime_checkable
class BlockModel(Target, Protocol):
    """A model that can go on drafting by itself."""

    @property
    def n_steps_max(self) -> int:
        """Tokens of one block at most."""
        ...

    def draft(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> Block:
        """Append each sequence's tokens and draft `n_steps` behind them; all drafted tokens but
        the last are then held. Probabilities of tokens that are not drawn are over the `top_k`
        likeliest, 0: over all."""
        ...

    def draft_more(
        self,
        sequences: Sequence[int],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> Block:
        """Go on behind the last drafted tokens of these sequences, which are held first."""
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
    """One draft being decided: fed each drafted token's probability as it comes."""

    @property
    def wants(self) -> bool:
        """True while a (further) token should be drafted."""
        ...

    def feed(self, p: float) -> bool:
        """Take the next drafted token's probability; True while another is wanted."""
        ...

    @property
    def n_best(self) -> int:
        """The number of tokens fed so far that are worth verifying."""
        ...

    @property
    def gain(self) -> float:
        """Expected value of verifying `n_best` tokens over verifying none; 0 if none."""
        ...

    @property
    def reason(self) -> str: ...

    @property
    def rest(self) -> int:
        """Where nothing is wanted: for how many further rounds that is already decided."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter's proposal, as far as the policy kept it.

    `dropped` are (token, p) drafted after the kept ones: not verified, but still evidence, since
    the first of them can be compared with what the target says. `rows` are the distributions
    [n_vocab] the kept tokens were sampled from, for rejection sampling.
    """

    tokens: tuple[int, ...]
    probs: tuple[float, ...]
    source: str
    decision: Decision
    dropped: tuple[tuple[int, float], ...] = ()
    rows: tuple[NDArray[np.float64], ...] = ()
    n_steps: int = 0  # decodes of a draft model spent on it
    parents: tuple[int, ...] = ()  # of a tree: the index of each token's parent, -1 at the root
    gaps: tuple[float, ...] = ()  # p of each token, dropped ones too, above the second best's
    catch_up_s: float = 0.0  # evaluating a prompt that the draft model had not seen: no step
    # The likeliest (token, p) at each position, dropped ones too; only where a log shows them.
    candidates: tuple[tuple[tuple[int, float], ...], ...] = ()
    others: tuple[Draft, ...] = ()  # of a chain's other drafters: evidence, though not verified

    def judged_by(self, emitted: Sequence[int]) -> tuple[tuple[float, bool], ...]:
        """(p, right) of the tokens, kept or dropped, that `emitted` answers for."""
        pairs = []
        drafted = (*zip(self.tokens, self.probs, strict=True), *self.dropped)
        for (token, p), answer in zip(drafted, emitted, strict=False):
            pairs.append((p, token == answer))
            if token != answer:
                break
        return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-verify-accept cycle. Times in seconds; `draft_s` is without the draft's
    `catch_up_s`, which comes once per prompt and is no price of a draft.

    `emitted` are the tokens gained, accepted drafts first; `end` says why no round follows:
    "end" (an end token, the last of `emitted`), "length" (n_predict), "context" (target full).
    """

    draft: Draft
    n_accepted: int
    emitted: tuple[int, ...]
    draft_s: float
    verify_s: float
    end: End = ""
    rollback_s: float = 0.0

    @property
    def n_drafted(self) -> int:
        return len(self.draft.tokens)

    @property
    def n_positions(self) -> int:
        """Tokens drafted ahead: all of a chain, the depth of a tree."""
        parents = self.draft.parents
        if not parents:
            return len(self.draft.tokens)
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths)

    @property
    def evidence(self) -> tuple[tuple[float, bool], ...]:
        """(draft p, accepted) of every drafted token whose prefix the target confirmed.

        Includes the first dropped token where the target's own next token answers for it. Empty
        for trees, whose siblings are judged together.
        """
        draft, n = self.draft, self.n_accepted
        if draft.parents:
            return ()
        pairs = [(p, True) for p in draft.probs[:n]]
        if n < len(draft.tokens):
            if len(self.emitted) > n:  # else an end token was accepted and the rest never judged
                pairs.append((draft.probs[n], False))
        elif draft.dropped and len(self.emitted) > n:
            token, p = draft.dropped[0]
            pairs.append((p, token == self.emitted[n]))
        return tuple(pairs)


class Policy(Protocol):
    """Decides draft lengths; `learn` is told every finished round.

    A draft model's probabilities are over its `p_top_k` likeliest tokens, 0: over all.
    """

    name: str
    n_max: int
    p_top_k: int

    def begin(self, limit: int, source: str) -> Walk:
        """A new draft of at most `limit` tokens from the drafter named `source`."""
        ...

    def learn(self, round_: Round) -> None: ...


class Drafter(Protocol):
    """Proposes tokens. One object serves any number of sequences."""

    name: str

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        """At most `limit` tokens to follow `history`, as many as the policy keeps."""
        ...

    def learn(self, sequence: int, round_: Round) -> None:
        """Told every round in which it was asked."""
        ...

    def forget(self, sequence: int) -> None:
        """The sequence starts anew; what is kept for it may be compared or dropped."""
        ...


class DraftRequest(NamedTuple):
    """The question that `Drafter.propose` answers, as one value."""

    sequence: int
    history: Sequence[int]
    policy: Policy
    limit: int


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """A drafter that can serve several sequences in one step."""

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The drafts that `propose` would give one after the other, each of its own sequence. The
        number of draft decodes is the largest `n_steps` of them."""
        ...
