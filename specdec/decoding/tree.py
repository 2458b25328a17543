"""Tree drafts: several continuations verified in one decode.

The draft model offers its likeliest tokens at the nodes most likely to be reached. The rule for
several sequences picks the nodes that are worth their rows. Verification walks down from the root
while the target's token is among a node's children, so it is lossless for any chooser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.loop import BatchMember, Rounds
from specdec.drafters.model import DraftMemory, softmax
from specdec.errors import SpecDecError
from specdec.policies.throughput import Throughput
from specdec.policies.value import best_count
from specdec.types import Decision, Draft, Policy, Round, TreeTarget

SOURCE = "tree"
FIRST = "draft"  # the likeliest child of a node is what a chain would draft
_NO_TREE = Draft((), (), SOURCE, Decision(0, "no tree beside other work"))


@dataclass(frozen=True, slots=True)
class _Node:
    """A drafted token. `parent` is the index of its parent, -1 at the root (the last token)."""

    token: int
    parent: int
    p: float  # of the token after its parent, as the draft says
    reached: float  # calibrated probability of the whole path
    rank: int  # among the children of its parent, as the draft says


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in the order of drafting, in which parents come first."""

    nodes: tuple[_Node, ...] = ()
    n_steps: int = 0
    catch_up_s: float = 0.0  # as Draft's
    reason: str = "no room for a draft"
    rest: int = 0  # as Decision's


class TreeDrafter:
    """Grows trees with a draft model that can evaluate them.

    `p_split` is the least probability of a second branch (llama.cpp's p_split);
    `n_vocab` cuts off padding that the target's vocabulary does not have.
    """

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

        The policy decides along the likeliest path, as for a chain, how deep the tree goes and
        whether the draft model is asked at all.
        """
        room = self._model.n_ctx - len(history)
        depth = min(limit, self._max_depth, room)
        walk = self._policy.begin(max(0, depth), FIRST)
        if not walk.wants:
            return DraftTree(reason=walk.reason, rest=walk.rest)
        nodes: list[_Node] = []
        least = self._policy.rate * self._policy.costs.draft_step_s  # worth another step
        feed, catch_up_s = self._memory.tail(sequence, history)
        frontier = [(-1, self._model.extend(sequence, feed, 1)[0])]
        self._memory.fed(sequence, feed)
        self._memory.mark(sequence)
        n_steps = 1
        while True:
            first = len(nodes)
            for parent, logits in frontier:
                self._branch(nodes, parent, logits)
            # The first child of the first node grown is the end of the likeliest path.
            if not walk.feed(nodes[first].p) or n_steps >= depth:
                break
            grown = [i for i in range(first, len(nodes)) if nodes[i].reached > least]
            if not grown or grown[0] != first or len(nodes) > min(2 * self._n_max, room):
                break
            tokens, parents = [n.token for n in nodes], [n.parent for n in nodes]
            rows = self._model.extend_tree(sequence, tokens, parents)
            self._model.keep_path(sequence, ())
            n_steps += 1
            frontier = [(i, rows[i]) for i in grown]
        return self._worthwhile(nodes, limit, n_steps, catch_up_s, walk.reason)

    def _branch(self, nodes: list[_Node], parent: int, logits: NDArray[np.float32]) -> None:
        """Add the likeliest tokens after a node as its children."""
        p = softmax(logits[: self._n_vocab])
        best = np.argsort(-p, kind="stable")[: self._n_branches]
        above = 1.0 if parent < 0 else nodes[parent].reached
        for rank, token in enumerate(best.tolist()):
            if rank and p[token] < self._p_split:
                break
            q = self._policy.calibration.probability(source_of(rank), float(p[token]))
            nodes.append(_Node(token, parent, float(p[token]), above * q, rank))

    def _worthwhile(
        self, nodes: list[_Node], limit: int, n_steps: int, catch_up_s: float, reason: str
    ) -> DraftTree:
        """The likeliest nodes; a child is never likelier than its parent, so parents stay."""
        order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].reached, i))
        gains = [nodes[i].reached for i in order[: min(limit, self._n_max)]]
        n = best_count(gains, self._policy.costs.planned, 1, self._policy.rate)
        kept = sorted(order[:n])
        new = {old: i for i, old in enumerate(kept)} | {-1: -1}
        return DraftTree(
            tuple(replace(nodes[i], parent=new[nodes[i].parent]) for i in kept),
            n_steps,
            catch_up_s,
            f"{n} of {len(nodes)} nodes pay; along the likeliest: {reason}",
        )

    def forget(self, sequence: int) -> None:
        """The history may be another."""
        self._memory.forget(sequence)


class TreeDrafting:
    """Trees by `drafter`, one sequence at a time: the loop's `Drafting`, and its `play`.

    In a step that reads prompts, and while the drafter rests, a round is one plain token.
    """

    def __init__(self, target: TreeTarget, drafter: TreeDrafter, policy: Throughput) -> None:
        """Raises SpecDecError for a target whose memory cannot be cut."""
        if not target.can_rewind:
            raise SpecDecError(
                "tree drafts need a target whose memory can be cut, not a recurrent one"
            )
        self.policy: Policy = policy
        self._target, self._drafter, self._throughput = target, drafter, policy

    def propose(self, members: Sequence[BatchMember]) -> list[Draft]:
        return [_NO_TREE] * len(members)

    def learn(self, rounds: Rounds, draft_s: float, *, is_priced: bool) -> None:
        """Several plain rounds in one batch teach nothing about trees."""
        if is_priced and len(rounds) == 1:
            self.policy.learn(rounds[0][1])

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
            tuple(node.token for node in tree.nodes),
            tuple(node.p for node in tree.nodes),
            SOURCE,
            Decision(len(tree.nodes), tree.reason, tree.rest),
            n_steps=tree.n_steps,
            parents=tuple(node.parent for node in tree.nodes),
            catch_up_s=tree.catch_up_s,
        )
        emitted = tuple(member.history[len(member.history) - path.n_emitted :])
        draft_s = drafted - began - tree.catch_up_s
        round_ = Round(draft, path.n_accepted, emitted, draft_s, verify_s)
        _learn(self._throughput, round_, path)
        return round_


def source_of(rank: int) -> str:
    """The name by which the calibration knows children of this rank."""
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
    """One decode of the last token and the tree. The target keeps the accepted path, or none of it
    after an exception."""
    history, sequence = member.history, member.sequence
    n_history = len(history)
    tokens = [history[-1], *(node.token for node in tree.nodes)]
    parents = [-1, *(node.parent + 1 for node in tree.nodes)]
    rows = target.extend_tree(sequence, tokens, parents)
    try:
        path, kept = _descend(rows, tree, member)
    except BaseException:
        del history[n_history:]
        target.keep_path(sequence, ())
        raise
    target.keep_path(sequence, kept)
    return path


def _descend(
    rows: NDArray[np.float32], tree: DraftTree, member: BatchMember
) -> tuple[_Path, list[int]]:
    """Follow the target's own tokens down the tree: the path, and the rows to keep."""
    history, chooser = member.history, member.chooser
    children: dict[int, list[int]] = {}
    for i, node in enumerate(tree.nodes):
        children.setdefault(node.parent, []).append(i)
    kept, at, n_emitted = [0], -1, 0
    evidence: list[tuple[str, float, bool]] = []
    while True:
        token = chooser.choose(rows[at + 1], history)
        chooser.accepted(token)
        history.append(token)
        n_emitted += 1
        found = -1
        for child in children.get(at, ()):
            node = tree.nodes[child]
            evidence.append((source_of(node.rank), node.p, node.token == token))
            found = child if node.token == token else found
        if found < 0:
            return _Path(n_emitted - 1, n_emitted, evidence), kept
        at = found
        if member.is_end(token):
            # The end token is the last of the history, which the target never holds.
            return _Path(n_emitted, n_emitted, evidence), kept
        kept.append(at + 1)
