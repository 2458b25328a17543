"""Proposes drafts for the loop's members, and learns from their rounds.

Sequences that are decoded together share one batch and its price. So `throughput` decides for all
of them together how many tokens of each draft are verified. It takes the most probable tokens as
long as they pay. Other policies decide for each sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specdec.decoding.acceptance import MatchAcceptance
from specdec.decoding.member import BatchMember, Rounds
from specdec.policies.rules import DraftBounds, bounded
from specdec.types import (
    Decision,
    Draft,
    Drafter,
    DraftRequest,
    Policy,
    Round,
    Target,
    Trees,
    TreeTarget,
    Walk,
)

_MOST_RESTED = 32  # rounds of rest that are learnt from together


@dataclass
class DraftCounters:
    """How often several sequences were drafted for, and decided on, together."""

    draft_batches: int = 0  # steps in which the draft model served several sequences at once
    joint_steps: int = 0  # batches whose draft lengths were all chosen together
    joint_changed: int = 0  # draft lengths that the joint choice changed
    tree_rounds: int = 0  # rounds that verified a tree instead of a chain
    tree_nodes: int = 0  # drafted tokens in these trees
    tree_accepted: int = 0  # accepted tokens of these trees
    same_size_rounds: int = 0  # rounds of one sequence with as many rows as the round before
    tree_saved: int = 0  # accepted tokens after which a chain of likeliest tokens had ended


class ChainDrafting:
    """Proposes the drafts of `drafter`, with lengths that `policy` chooses."""

    def __init__(
        self, target: Target, drafter: Drafter, policy: Policy, *, draws: bool = False
    ) -> None:
        """`draws`: drafts may be drawn, for rejection sampling."""
        self.policy = policy
        self.counters = DraftCounters()
        self._target, self._drafter, self._draws = target, drafter, draws
        self._walks: dict[
            int, Mapping[str, Walk]
        ] = {}  # walks by sequence and drafter, for several sequences
        self._n_leaves = target.n_tree_leaves if isinstance(target, TreeTarget) else 0
        self._n_shared = 1  # members whose batch the policy prices
        self._n_rows = 0  # rows of the last round of an only member
        self._rested: list[tuple[int, Round]] = []  # by sequence, not learnt from yet
        policy.expect(_names(drafter))

    def use(self, drafter: Drafter, policy: Policy) -> None:
        """Draft with another drafter and another policy. The loop must have no members."""
        self._learn_rested()
        self._drafter, self.policy = drafter, policy
        policy.expect(_names(drafter))
        policy.share_batch(1)  # it may have priced a shared batch before
        self._walks.clear()
        self._n_shared = 1

    def propose(self, members: Sequence[BatchMember], *, trees: bool = False) -> list[Draft]:
        """A draft for each member, in order. The rows of all drafts together fit one decode.

        With `trees`, the draft of an only member may be a tree.
        """
        self._learn_rested()
        n_members = len(members)
        if n_members != self._n_shared:
            self.policy.share_batch(n_members)
            self._n_shared = n_members
        requests = [
            DraftRequest(
                member.sequence,
                member.history,
                bounded(self.policy, member.bounds),
                self._limit(member, member.n_left, len(member.history)),
                self._trees_for(member) if trees and n_members == 1 else None,
                self._n_nodes(member, len(member.history)),
                member.salt,
            )
            for member in members
        ]
        drafts = self._drafter.propose(requests)
        drafts = [
            without_images(draft) if member.images else draft
            for member, draft in zip(members, drafts, strict=True)
        ]
        if n_members == 1:
            return drafts
        for request in requests:
            self._walks[request.sequence] = request.walks
        if sum([draft.n_steps > 0 for draft in drafts]) > 1:
            self.counters.draft_batches += 1
        together = self._together(members, drafts)
        return self._cut_to_fit(drafts) if together is None else together

    def learn(self, rounds: Rounds, draft_s: float, *, is_priced: bool) -> None:
        """Learn from the rounds of a step, in which drafting took `draft_s` seconds.

        Without `is_priced`, the step included other work, so its times say nothing of these rows.
        """
        self._learn_rested()
        if is_priced and len(rounds) == 1:
            self._learn_alone(rounds[0][1])
        else:
            walked = [(round_, self._walks.get(m.sequence, {})) for m, round_ in rounds]
            self.policy.learn_together(walked, draft_s, is_priced=is_priced)
            self._walks.clear()
        for member, round_ in rounds:
            if round_.draft.parents:
                self._count_tree(round_)
            self._drafter.learn(member.sequence, round_)

    def rested(self, member: BatchMember, round_: Round) -> None:
        """Learn from a round in which drafting rested and the member was alone.

        Several such rounds are learnt from together, at the latest when drafting goes on. Each
        decode empties the processor's caches, so learning after each one would take three times as
        long.
        """
        self._rested.append((member.sequence, round_))
        if round_.end or len(self._rested) >= _MOST_RESTED:
            self._learn_rested()

    def _learn_rested(self) -> None:
        if not self._rested:
            return
        rested, self._rested = self._rested, []
        for sequence, round_ in rested:
            self._learn_alone(round_)
            self._drafter.learn(sequence, round_)

    def _learn_alone(self, round_: Round) -> None:
        """Give the policy a round of an only member."""
        n_before, self._n_rows = self._n_rows, 1 + round_.n_drafted
        self.policy.learn(round_)
        self.counters.same_size_rounds += self._n_rows == n_before

    def _count_tree(self, round_: Round) -> None:
        counters, draft = self.counters, round_.draft
        counters.tree_rounds += 1
        counters.tree_nodes += len(draft.tokens)
        counters.tree_accepted += round_.n_accepted
        rights = [right for _, right in round_.evidence]
        n_chain = rights.index(False) if False in rights else len(rights)
        counters.tree_saved += max(0, round_.n_accepted - n_chain)

    def n_possible(self, member: BatchMember, round_: Round) -> int:
        """The most tokens that the draft of the member's last round, `round_`, might have had.

        The context, the tokens left to write, the rows of a decode and the request's own limits
        bound it, and not what would have paid.
        """
        n = len(round_.emitted)
        if round_.draft.parents:
            return self._n_nodes(member, len(member.history) - n)
        return self._limit(member, member.n_left + n, len(member.history) - n)

    def heard(self, member: BatchMember) -> None:
        """Tell the drafters that the target has evaluated a part of the member's prompt."""
        self._learn_rested()
        self.policy.prompt_read()
        n_read = 0 if member.bounds.n_max == 0 else self._target.length(member.sequence)
        self._drafter.heard(member.sequence, member.history, n_read, member.salt)

    def forget(self, sequence: int) -> None:
        self._learn_rested()
        self._drafter.forget(sequence)

    def _trees_for(self, member: BatchMember) -> Trees | None:
        """Return the policy's prices of trees, or None if the member has limits of its own.

        None after images, too, because their tokens may share positions.
        """
        if not self._n_leaves or member.images:
            return None
        # Only the target's own choice can go down a tree.
        is_free = bounded(self.policy, member.bounds) is self.policy
        return self.policy.trees if is_free and isinstance(member.accept, MatchAcceptance) else None

    def _n_nodes(self, member: BatchMember, n_history: int) -> int:
        """The most nodes of a member's tree. Only its depth is limited by the text's end.

        Each node may be a leaf, and each leaf takes a sequence of the target.
        """
        target = self._target
        n_rows = min(target.n_outputs, target.n_batch, target.n_ctx - n_history)
        n_most = min(self.policy.n_max, n_rows - 1, self._n_leaves)
        return n_most if member.bounds.n_max is None else min(n_most, member.bounds.n_max)

    def _limit(self, member: BatchMember, n_left: int, n_history: int) -> int:
        """The most tokens that a member's draft may have after `n_history` of its text's tokens.

        A round of m drafted tokens feeds m + 1 tokens and may emit m + 1. Drawn drafts get equal
        shares of the batch, so that none has to be cut later. Cutting one would make the kept
        tokens depend on the drawn ones.
        """
        target = self._target
        n_rows = min(target.n_outputs, target.n_batch) // (self._n_shared if self._draws else 1)
        n_most = min(self.policy.n_max, n_rows - 1)
        if member.bounds.n_max is not None:
            n_most = min(n_most, member.bounds.n_max)
        return max(0, min(n_left - 1, target.n_ctx - n_history, n_most))

    # -- several together ------------------------------------------------------------------------

    def _cut_to_fit(self, drafts: list[Draft]) -> list[Draft]:
        """Cut the longest drafts if all drafts together need more rows than one decode takes."""
        n_most = min(self._target.n_outputs, self._target.n_batch) - len(drafts)
        n_over = sum([len(draft.tokens) for draft in drafts]) - n_most
        while n_over > 0:
            longest = max(drafts, key=lambda draft: len(draft.tokens))
            at, n = drafts.index(longest), len(longest.tokens)
            drafts[at] = cut(longest, max(0, n - max(1, n_over // len(drafts))))
            n_over -= n - len(drafts[at].tokens)
        return drafts

    def _together(self, members: Sequence[BatchMember], drafts: list[Draft]) -> list[Draft] | None:
        """Cut the drafts to the lengths that the policy chooses for all members together.

        None: it has no opinion. Drawn drafts are not cut. Rejection sampling is exact only if the
        decision to verify a token is made before the token is drawn, as the walk makes it.
        """
        if not any([not d.rows and (d.tokens or d.dropped) for d in drafts]):
            return drafts
        counts = self.policy.lengths(
            [_undecided(d, m.bounds) for d, m in zip(drafts, members, strict=True)],
            min(self._target.n_outputs, self._target.n_batch),
            n_beside=sum([len(draft.rows) for draft in drafts]),
            are_equal=self._target.needs_equal_lengths,
        )
        if counts is None:
            return None
        out = []
        for draft, member, n in zip(drafts, members, counts, strict=True):
            if not draft.rows and (draft.tokens or draft.dropped):
                n_kept = member.bounds.kept(n)
                self.counters.joint_changed += n_kept != len(draft.tokens)
                draft = cut(draft, n_kept)
            out.append(draft)
        self.counters.joint_steps += 1
        return out


def _names(drafter: Drafter) -> list[str]:
    """Return the names of all drafters that a drafter asks, itself if it asks none."""
    return [one.name for one in getattr(drafter, "every", (drafter,))]


def without_images(draft: Draft) -> Draft:
    """Cut a draft before the first number of an image, which only a copy of the prompt can hold.

    Such numbers are negative, and the target can only read them with their image.
    """
    kept = [*draft.tokens, *(token for token, _ in draft.dropped)]
    n = next((i for i, token in enumerate(kept) if token < 0), len(kept))
    if n == len(kept):
        return draft
    n_kept = min(n, len(draft.tokens))
    return replace(cut(draft, n_kept), dropped=draft.dropped[: n - n_kept])


def cut(draft: Draft, n: int) -> Draft:
    """Keep the first `n` of the draft's kept and dropped tokens, and drop the rest."""
    tokens = (*draft.tokens, *(t for t, _ in draft.dropped))
    probs = (*draft.probs, *(p for _, p in draft.dropped))
    # A drawn token that differs from the target's choice says nothing about the draft's quality.
    dropped = () if draft.rows else tuple(zip(tokens[n:], probs[n:], strict=True))
    return replace(
        draft,
        tokens=tokens[:n],
        probs=probs[:n],
        rows=draft.rows[:n],
        dropped=dropped,
        decision=Decision(n, f"{n} of {len(tokens)} drafted pay in this batch"),
    )


def _undecided(draft: Draft, bounds: DraftBounds) -> tuple[str, Sequence[float]]:
    """The drafter, and the probabilities of the tokens that may be kept; none of a drawn draft."""
    probs = (*draft.probs, *(p for _, p in draft.dropped))
    return draft.source, () if draft.rows else probs[: bounds.n_allowed(probs)]
