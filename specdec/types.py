"""The parts of speculation as types: Target, Drafter, Policy, Chooser, Draft and Round.

The target and the draft model are seen only through `Target`, so nothing here knows a library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from specdec.policies.tree import TreeGrowth

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
        """False for recurrent and hybrid memory, which needs checkpoints to remove tokens."""
        ...

    @property
    def needs_equal_lengths(self) -> bool:
        """True if parts of a batch share their costs only as far as they have equal lengths."""
        ...

    @property
    def n_batch(self) -> int:
        """Most tokens of one decode."""
        ...

    @property
    def n_outputs(self) -> int:
        """Most rows of logits that one decode gives."""
        ...

    def length(self, sequence: int) -> int: ...

    def extend(
        self, sequence: int, tokens: Sequence[int], n_logits: int | None = None
    ) -> NDArray[np.float32]:
        """Append tokens and return logits [n_logits or len(tokens), n_vocab].

        The rows are those after each of the last `n_logits` tokens. The caller owns the array.
        """
        ...

    def extend_batch(
        self, parts: Sequence[tuple[int, Sequence[int], int]]
    ) -> list[NDArray[np.float32]]:
        """Decode one batch for several sequences; `parts` are (sequence, tokens, n_logits).

        Returns the logits of each part, as `extend` does. A batch has at most `n_batch` tokens and
        `n_outputs` rows of logits.
        """
        ...

    def n_droppable(self, parts: Sequence[tuple[int, int]]) -> int:
        """The number of last tokens that `rewind` can remove from a sequence of a recurrent memory.

        `parts` are the (sequence, number of tokens) of a decode, which leaves snapshots. The number
        holds right after that decode. 0 means that only checkpoints can be restored.
        """
        ...

    def rewind(self, sequence: int, length: int) -> None:
        """Remove all tokens after the first `length`."""
        ...

    def checkpoint(self, sequence: int) -> object: ...

    def restore(self, sequence: int, checkpoint: object) -> None: ...


@runtime_checkable
class TreeTarget(Target, Protocol):
    """A target that can evaluate several continuations of a text in one decode."""

    @property
    def n_tree_leaves(self) -> int:
        """Most leaves of a tree; 0 if the memory cannot hold trees."""
        ...

    def extend_tree(
        self, sequence: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> NDArray[np.float32]:
        """Add nodes to the sequence's tree and return their logits [len(tokens), n_vocab].

        `parents` are indices of nodes, those of earlier calls included, or -1 for the last token.
        """
        ...

    def keep_path(self, sequence: int, path: Sequence[int]) -> None:
        """End the tree: append the nodes of `path`, root first, and drop the others.

        An empty path does nothing if there is no tree, as after a failed decode.
        """
        ...


def holds_trees(target: Target) -> bool:
    """True if the target can evaluate trees. The check takes some microseconds."""
    return isinstance(target, TreeTarget) and target.n_tree_leaves > 0


@dataclass(frozen=True)
class Drawing:
    """Temperatures [n_parts] and uniform numbers [n_steps, n_parts] to draw a block's tokens by."""

    temperature: NDArray[np.float64]
    uniforms: NDArray[np.float64]


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
        """Append each sequence's tokens and draft `n_steps` more.

        The memory then holds all of them except the last. Without `drawing`, probabilities are
        shares among the `top_k` likeliest tokens (0: among all).
        """
        ...

    def draft_more(
        self,
        sequences: Sequence[int],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> Block:
        """Append the last drafted token of each sequence, and draft `n_steps` more."""
        ...


class Chooser(Protocol):
    """The sampler of a request, stateful (penalties, grammar, random numbers)."""

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """The next token from logits [n_vocab]."""
        ...

    def accepted(self, token: int) -> None:
        """Called once for every token that is kept, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of drafted tokens that a policy verifies, and the reason.

    `rest` is the number of further rounds that draft nothing and ask neither drafter nor policy.
    """

    n_tokens: int
    reason: str
    rest: int = 0


class Walk(Protocol):
    """A policy's decision on one draft, token by token. It is fed each token's probability."""

    @property
    def wants(self) -> bool:
        """True while another token should be drafted."""
        ...

    def feed(self, p: float) -> bool:
        """Take the next drafted token's probability; returns `wants`."""
        ...

    @property
    def n_best(self) -> int:
        """Number of the fed tokens that are worth verifying, from the first on."""
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
    def price(self) -> float:
        """The price of verifying `n_best` tokens, in tokens; 0 if the policy does not price it."""
        ...

    @property
    def reason(self) -> str: ...

    @property
    def rest(self) -> int:
        """Number of further rounds in which no token is wanted; 0 if `wants`."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter's proposal: the tokens that the policy kept, and those that it dropped.

    `dropped` lists (token, p) of the tokens drafted after the kept ones. They are not verified, but
    the target's next token shows whether the first of them was right. `rows` are the distributions
    [n_vocab] that the kept tokens were drawn from, which rejection sampling needs.
    """

    tokens: tuple[int, ...]
    probs: tuple[float, ...]
    source: str
    decision: Decision
    dropped: tuple[tuple[int, float], ...] = ()
    rows: tuple[NDArray[np.float64], ...] = ()
    n_steps: int = 0  # steps of the draft model spent on this draft
    step_s: float = 0.0  # seconds of one step of this drafter alone; 0: not timed alone
    catch_up_s: float = 0.0  # seconds in which the draft model read a prompt, before any step
    others: tuple[Draft, ...] = ()  # unverified proposals of a chain's other drafters
    # A tree: the index of each token's parent, -1 for the text's last token. A chain has none.
    parents: tuple[int, ...] = ()
    # The likeliest (token, p) of each drafted position, dropped ones included; only for a log.
    candidates: tuple[tuple[tuple[int, float], ...], ...] = ()
    n_extra_rows: int = 0  # nodes of a tree's draft steps beyond the first of each step

    @property
    def resting(self) -> Draft:
        """The draft of the rounds that rest after this empty one: it has nothing to learn from."""
        if not (self.dropped or self.others or self.n_steps or self.catch_up_s):
            return self
        return Draft((), (), self.source, self.decision)

    def judged_by(self, emitted: Sequence[int]) -> tuple[tuple[float, bool], ...]:
        """Pairs (p, True if right) of the kept and then the dropped tokens.

        The pairs end with the first token that differs from `emitted`. Those of a tree are of the
        likeliest successors.
        """
        if self.parents:
            return tuple([(p, right) for rank, p, right in self.seen_in_tree(emitted) if not rank])
        pairs = []
        drafted = (*zip(self.tokens, self.probs, strict=True), *self.dropped)
        for (token, p), answer in zip(drafted, emitted, strict=False):
            pairs.append((p, token == answer))
            if token != answer:
                break
        return tuple(pairs)

    def seen_in_tree(self, emitted: Sequence[int]) -> list[tuple[int, float, bool]]:
        """(rank, p, True if right) of each node after the text's own tokens, from the root on.

        Siblings are in the order of their ranks.
        """
        children: dict[int, list[int]] = {}
        for i, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(i)
        seen, at = [], -1
        for token in emitted:
            nodes = children.get(at, ())
            seen += [(r, self.probs[i], self.tokens[i] == token) for r, i in enumerate(nodes)]
            at = next((i for i in nodes if self.tokens[i] == token), -2)
        return seen

    @property
    def n_deep(self) -> int:
        """Tokens drafted ahead: all of a chain, the depth of a tree."""
        if not self.parents:
            return len(self.tokens)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths)


@dataclass(frozen=True, slots=True)
class Round:
    """One request's part of a step: draft, verify, accept. Times in seconds.

    `emitted` are the tokens gained, accepted drafts first. `end` says why no round follows:
    "end" (the last emitted token is an end token), "length" (n_predict tokens are emitted) or
    "context" (the target is full). `draft_s` excludes the draft's `catch_up_s`, which occurs once
    per prompt.
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
    def evidence(self) -> tuple[tuple[float, bool], ...]:
        """Pairs (p, True if right) of the drafted tokens. They end with the first wrong token."""
        return self.draft.judged_by(self.emitted)


class Policy(Protocol):
    """Decides draft lengths. `learn` is called with every finished round.

    The walks expect a draft model's probabilities as shares among its `p_top_k` likeliest tokens
    (0: among all).
    """

    name: str
    n_max: int
    p_top_k: int
    prices_reading: bool = False  # True: it wants to know what a drafter has not read yet

    def begin(self, limit: int, source: str) -> Walk:
        """A new draft of at most `limit` tokens from the drafter named `source`."""
        ...

    def learn(self, round_: Round) -> None: ...

    # What follows has defaults, of a policy that decides for each sequence alone.

    @property
    def times(self) -> Sequence[float]:
        """Seconds of a decode by number of tokens, from 1 on; empty: the policy reads no T(n)."""
        return ()

    @property
    def rest_of_looks(self) -> int:
        """Rounds in which drafters without a model are not asked, after they proposed nothing."""
        return 0

    def expect(self, sources: Sequence[str]) -> None:
        """Prepare for drafters with these names, so that their first drafts take no longer."""
        return

    def prompt_read(self) -> None:
        """Hear that a prompt was evaluated, or a part of it, since the last round."""
        return

    def may_ask(self, source: str) -> bool:
        """False if the drafter `source` is not expected to be asked for many rounds."""
        return True

    def postponed(self, walk: Walk, source: str, n_tokens: int) -> Walk | None:
        """The walk that replaces `walk` if reading `n_tokens` first costs the drafter too much.

        None: the drafter may read them.
        """
        return None

    @property
    def trees(self) -> Trees | None:
        """The policy as one that prices trees. None if it drafts chains only."""
        return None

    def share_batch(self, n_sequences: int) -> None:
        """Hear how many sequences share the next batches."""
        return

    def lengths(
        self,
        chains: Sequence[tuple[str, Sequence[float]]],
        n_rows: int,
        *,
        n_beside: int = 0,
        are_equal: bool = False,
    ) -> Sequence[int] | None:
        """How many drafted tokens of each chain a shared batch verifies; None: all of them.

        A chain is the name of its drafter and the probabilities of its tokens. The batch has at
        most `n_rows` rows: one of each sequence, `n_beside` others, and those of the chains.
        `are_equal`: all sequences need the same length.
        """
        return None

    def learn_together(
        self,
        rounds: Sequence[tuple[Round, Mapping[str, Walk]]],
        draft_s: float,
        *,
        is_priced: bool,
    ) -> None:
        """Learn from the rounds of a shared batch, each with its walks by name of drafter.

        Drafting took `draft_s` seconds for all of them. Without `is_priced`, the step included
        other work, so its times say nothing of these rows.
        """
        for round_, _ in rounds:
            self.learn(round_)


class Trees(Protocol):
    """A policy that prices trees (`specdec.policies.throughput`)."""

    def growth(self, walk: Walk, source: str, n_nodes: int, n_deep: int) -> TreeGrowth | None:
        """A tree for a walk just begun; None if a chain is as good.

        It has at most `n_nodes` nodes worth verifying, none of them deeper than `n_deep` tokens.
        """
        ...

    def grown(self, walk: Walk, growth: TreeGrowth, n_steps: int, n_rows: int) -> None:
        """Give the walk the tree's value, after its `n_steps` draft steps of `n_rows` nodes."""
        ...


class DraftRequest:
    """A request to drafters for at most `limit` tokens after `history`.

    `policy` decides how many tokens are drafted. `walks` has the walks begun so far, by name of
    drafter. `trees` makes trees of at most `n_nodes` nodes for the walks, if the target can verify
    them in this step. Texts with different `salt`s do not draft for each other. The first `n_same`
    tokens are those of the sequence's last request; None: all that it had are the same.
    """

    __slots__ = (
        "history", "limit", "n_nodes", "n_same", "policy", "salt", "sequence", "trees", "walks",
    )  # fmt: skip

    def __init__(
        self,
        sequence: int,
        history: Sequence[int],
        policy: Policy,
        limit: int,
        trees: Trees | None = None,
        n_nodes: int = 0,
        salt: int = 0,
    ) -> None:
        self.sequence, self.history, self.salt = sequence, history, salt
        self.policy, self.limit = policy, limit
        self.trees, self.n_nodes = trees, n_nodes
        self.n_same: int | None = None
        self.walks: dict[str, Walk] = {}

    def begin(self, limit: int, source: str, n_unread: Callable[[], int] = int) -> Walk:
        """Begin the policy's walk for a draft of at most `limit` tokens by the drafter `source`.

        `n_unread` returns how many tokens the drafter must read before its first step.
        """
        walk = self.policy.begin(limit, source)
        if self.policy.prices_reading and walk.wants and (n := n_unread()):
            walk = self.policy.postponed(walk, source, n) or walk
        self.walks[source] = walk
        return walk

    def reading(self, history: Sequence[int], n_same: int) -> DraftRequest:
        """The same request for another text. Both requests share their walks."""
        other = DraftRequest(self.sequence, history, self.policy, self.limit, salt=self.salt)
        other.n_same, other.walks = n_same, self.walks
        return other


class Drafter(Protocol):
    """Proposes tokens for any number of sequences.

    In each step the loop calls `propose`, decodes the batch with the target, and calls `learn`.
    """

    name: str

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request. No two requests may have the same sequence.

        A draft model serves all of them in one decode per token.
        """
        ...

    def learn(self, sequence: int, round_: Round) -> None:
        """Learn from a finished round of the sequence."""
        ...

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        """Called when the target has evaluated a part of the sequence's prompt, `text`.

        The first `n_read` tokens of it may be indexed now, because that takes less time beside the
        prompt than in the first step of the answer. 0: nothing is drafted for this text.
        """
        ...

    def forget(self, sequence: int) -> None:
        """Called when another text begins in the sequence.

        The drafter may drop its state of the old text, or compare it with the new one.
        """
        ...
