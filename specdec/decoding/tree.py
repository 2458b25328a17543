"""Tree drafts: several continuations verified in one decode, on by flag.

The draft model offers its top k tokens at the nodes likeliest to be reached; the same rule as for
several sequences picks the nodes worth their rows. Verification walks down from the root
while the target's token is among a node's children, which keeps it lossless for any chooser.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from specdec.decoding.accept import MatchAcceptance
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember, check_start
from specdec.drafters.memory import DraftMemory
from specdec.errors import SpecDecError
from specdec.policies.joint import best_count
from specdec.policies.throughput import Throughput
from specdec.types import Chooser, Decision, Draft, IsEnd, Policy, Round, TreeTarget

SOURCE = "tree"
FIRST = "draft"  # the likeliest child of a node is what a chain would draft
_NO_TREE = Draft((), (), SOURCE, Decision(0, "no tree beside other work"))


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in order of drafting: parents come first, -1 is the root (the last token)."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()  # of the node given its parent, as the draft says
    reached: tuple[float, ...] = ()  # of the whole path, calibrated
    ranks: tuple[int, ...] = ()  # among the children of the node's parent, as the draft says
    n_steps: int = 0
    catch_up_s: float = 0.0  # as Draft's
    reason: str = "no room for a draft"
    rest: int = 0  # as Decision's

    def cut(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes, which must include their parents."""
        new = {old: i for i, old in enumerate(sorted(nodes))}
        new[-1] = -1
        kept = sorted(nodes)
        return DraftTree(
            tuple(self.tokens[i] for i in kept),
            tuple(new[self.parents[i]] for i in kept),
            tuple(self.probs[i] for i in kept),
            tuple(self.reached[i] for i in kept),
            tuple(self.ranks[i] for i in kept),
            self.n_steps,
            self.catch_up_s,
            f"{len(kept)} of {len(self.tokens)} nodes pay; along the likeliest: {self.reason}",
        )


class TreeDrafter:
    """Grows trees with a draft model that can evaluate them. `p_split` is the least probability
    of a second branch (llama.cpp's --spec-draft-p-split); `n_vocab` cuts off padding that the
    target's vocabulary does not have."""

    def __init__(
        self,
        model: TreeTarget,
        policy: Throughput,
        *,
        n_branches: int = 3,
        p_split: float = 0.1,
        n_max: int = 24,
        max_depth: int = 12,
        n_vocab: int | None = None,
    ) -> None:
        if not model.can_rewind:
            raise SpecDecError("tree drafts need a draft whose memory can be cut, not a recurrent")
        self._model, self._policy = model, policy
        self._n_branches, self._p_split = n_branches, p_split
        self._n_max, self._max_depth = n_max, max_depth
        self._n_vocab = min(n_vocab or model.n_vocab, model.n_vocab)
        self._memory = DraftMemory(model)

    def grow(self, sequence: int, history: Sequence[int], limit: int) -> DraftTree:
        """A tree of at most `limit` nodes worth verifying.

        How deep it goes is decided along the likeliest path, as for a chain; so is whether the
        draft is asked at all.
        """
        room = self._model.n_ctx - len(history)
        depth = min(limit, self._max_depth, room)
        walk = self._policy.begin(max(0, depth), FIRST)
        if not walk.wants:
            return DraftTree(reason=walk.reason, rest=walk.rest)
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[float] = []
        reached: list[float] = []
        rate, step_s = self._policy.rate, self._policy.costs.draft_step_s
        row = self._memory.catch_up(sequence, history)
        frontier = [(-1, row)]
        n_steps = 1
        while True:
            first = len(tokens)
            for parent, logits in frontier:
                self._branch(parent, logits, tokens, parents, probs, reached)
            # The first child of the first node grown is the end of the likeliest path.
            if not walk.feed(probs[first]):
                break
            grown = [i for i in range(first, len(tokens)) if reached[i] > rate * step_s]
            if (
                not grown
                or grown[0] != first
                or n_steps >= depth
                or len(tokens) > min(2 * self._n_max, room)
            ):
                break
            rows = self._model.extend_tree(sequence, tokens, parents)
            self._model.keep_path(sequence, ())
            n_steps += 1
            frontier = [(i, rows[i]) for i in grown]
        tree = DraftTree(
            tuple(tokens),
            tuple(parents),
            tuple(probs),
            tuple(reached),
            # Siblings are drafted in order of rank, one after the other.
            tuple(parents[:i].count(parent) for i, parent in enumerate(parents)),
            n_steps,
            self._memory.catch_up_s(sequence),
            walk.reason,
        )
        return self._worthwhile(tree, limit)

    def _branch(
        self,
        parent: int,
        logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
        tokens: list[int],
        parents: list[int],
        probs: list[float],
        reached: list[float],
    ) -> None:
        logits = logits[: self._n_vocab]
        p = np.exp(logits - logits.max(), dtype=np.float64)
        p /= p.sum()
        best = np.argsort(-p, kind="stable")[: self._n_branches]
        above = 1.0 if parent < 0 else reached[parent]
        for rank, token in enumerate(best.tolist()):
            if rank and p[token] < self._p_split:
                break
            tokens.append(token)
            parents.append(parent)
            probs.append(float(p[token]))
            q = self._policy.calibration.probability(source_of(rank), float(p[token]))
            reached.append(above * q)

    def _worthwhile(self, tree: DraftTree, limit: int) -> DraftTree:
        """The likeliest nodes; a child is never likelier than its parent, so parents stay."""
        order = sorted(range(len(tree.tokens)), key=lambda i: (-tree.reached[i], i))
        gains = [tree.reached[i] for i in order[: min(limit, self._n_max)]]
        n = best_count(gains, self._policy.costs.planned, 1, self._policy.rate)
        return tree.cut(order[:n])

    def forget(self, sequence: int) -> None:
        """The history may be another."""
        self._memory.forget(sequence)


class TreeDrafting:
    """Trees by `drafter`, one sequence at a time: the decoding loop's `Drafting`, and its `play`.

    Beside parts of prompts, and while the policy has decided so, a round is one plain token.
    """

    def __init__(self, target: TreeTarget, drafter: TreeDrafter, policy: Throughput) -> None:
        """Raises SpecDecError for a target whose memory cannot be cut."""
        if not target.can_rewind:
            raise SpecDecError(
                "tree drafts need a target whose memory can be cut, not a recurrent one"
            )
        self.policy: Policy = policy
        self._target, self._drafter, self._throughput = target, drafter, policy

    def propose(self, member: BatchMember) -> Draft:
        return _NO_TREE

    def propose_many(self, members: Sequence[BatchMember]) -> list[Draft]:
        return [_NO_TREE] * len(members)

    def learn(self, member: BatchMember, round_: Round) -> None:
        self.policy.learn(round_)

    def learn_many(
        self, rounds: Sequence[tuple[BatchMember, Round]], draft_s: float, *, is_priced: bool
    ) -> None:
        """Several plain rounds in one batch teach nothing about trees."""

    def forget(self, sequence: int) -> None:
        self._drafter.forget(sequence)

    def play(self, member: BatchMember) -> Round:
        """The round's draft is the path that was accepted and what the tree held beside it;
        `n_drafted` counts every node verified."""
        began = perf_counter()
        room = min(member.n_left - 1, self._target.n_ctx - len(member.history), self.policy.n_max)
        if member.bounds.n_max is not None:
            room = min(room, member.bounds.n_max)
        tree = self._drafter.grow(member.sequence, member.history, max(0, room))
        drafted = perf_counter()
        path = _verify(self._target, member, tree)
        verify_s = perf_counter() - drafted
        draft = Draft(
            tree.tokens,
            tree.probs,
            SOURCE,
            Decision(len(tree.tokens), tree.reason, tree.rest),
            n_steps=tree.n_steps,
            parents=tree.parents,
            catch_up_s=tree.catch_up_s,
        )
        emitted = tuple(member.history[len(member.history) - path.n_emitted :])
        draft_s = drafted - began - tree.catch_up_s
        round_ = Round(draft, path.n_accepted, emitted, draft_s, verify_s)
        _learn(self._throughput, round_, path)
        return round_


def decode_tree(
    target: TreeTarget,
    sequence: int,
    prompt: Sequence[int],
    *,
    drafter: TreeDrafter,
    policy: Throughput,
    chooser: Chooser,
    n_predict: int,
    is_end: IsEnd,
    n_cached: int = 0,
) -> Iterator[Round]:
    """As `decode`, with trees. Raises SpecDecError."""
    drafting = TreeDrafting(target, drafter, policy)
    check_start(target, sequence, prompt, n_cached)
    accept = MatchAcceptance(chooser)
    member = BatchMember(sequence, list(prompt), chooser, accept, n_predict, is_end, n_cached)
    return DecodingLoop(target, drafting, drafting.play).rounds_of(member)


def source_of(rank: int) -> str:
    """Under which name the calibration knows a node's child of this rank."""
    return f"{SOURCE}-{rank}" if rank else FIRST


def _learn(policy: Throughput, round_: Round, path: _Path) -> None:
    for source, p, accepted in path.evidence:
        policy.calibration.observe(source, p, accepted)
    policy.calibration.elapse_all(path.n_emitted)
    policy.settle(FIRST, round_, len(path.evidence))
    policy.account(
        1 + round_.n_drafted,
        round_.draft.n_steps,
        path.n_emitted,
        verify_s=round_.verify_s,
        draft_s=round_.draft_s,
    )


@dataclass(slots=True)
class _Path:
    n_accepted: int
    n_emitted: int
    evidence: list[tuple[str, float, bool]]


def _verify(target: TreeTarget, member: BatchMember, tree: DraftTree) -> _Path:
    """One decode of the last token and the tree; the target keeps the accepted path, or after an
    exception nothing of it."""
    history, sequence = member.history, member.sequence
    n_history = len(history)
    tokens = [history[-1], *tree.tokens]
    rows = target.extend_tree(sequence, tokens, [-1, *(p + 1 for p in tree.parents)])
    try:
        path, kept = _descend(rows, history, tree, member.chooser, member.is_end)
    except BaseException:
        del history[n_history:]
        target.keep_path(sequence, ())
        raise
    target.keep_path(sequence, kept)
    return path


def _descend(
    rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    history: list[int],
    tree: DraftTree,
    chooser: Chooser,
    is_end: IsEnd,
) -> tuple[_Path, list[int]]:
    """Follow the target's own tokens down the tree; what that gave, and the rows to keep."""
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(i)
    kept, node, n_emitted = [0], -1, 0
    evidence: list[tuple[str, float, bool]] = []
    while True:
        token = chooser.choose(rows[node + 1], history)
        chooser.accepted(token)
        history.append(token)
        n_emitted += 1
        found = -1
        for child in children.get(node, ()):
            hit = tree.tokens[child] == token
            evidence.append((source_of(tree.ranks[child]), tree.probs[child], hit))
            found = child if hit else found
        if found < 0:
            return _Path(n_emitted - 1, n_emitted, evidence), kept
        node = found
        if is_end(token):
            # The end token is the last of the history, which the target never holds.
            return _Path(n_emitted, n_emitted, evidence), kept
        kept.append(node + 1)
