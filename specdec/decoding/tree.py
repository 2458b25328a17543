"""Verifies a drafted tree for one member of the loop, in one decode.

Acceptance goes down from the root while the target's own choice is among a node's successors. So
each token of the text is the target's choice, whatever the tree holds.
"""

from __future__ import annotations

from typing import cast

from specdec.decoding.acceptance import MatchAcceptance, Verdict
from specdec.decoding.member import BatchMember
from specdec.types import Draft, Target, TreeTarget


class SamplerFailed(Exception):
    """A member's sampler raised `error`. The member and the target are as before the tree."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def verified_tree(target: Target, member: BatchMember, draft: Draft) -> Verdict:
    """Decode the member's last token and the tree, and keep the accepted path.

    Appends the emitted tokens to the member's history. If the decode or the sampler fails, the
    history and the sequence are as before. Raises SamplerFailed for exceptions of the sampler.
    """
    trees, accept = cast(TreeTarget, target), cast(MatchAcceptance, member.accept)
    history, sequence = member.history, member.sequence
    n_history = len(history)
    tokens = [history[-1], *draft.tokens]
    rows = trees.extend_tree(sequence, tokens, [-1, *(parent + 1 for parent in draft.parents)])
    try:
        verdict = accept.descend(draft, rows, history, member.is_end)
    except BaseException as e:
        del history[n_history:]
        trees.keep_path(sequence, ())
        if isinstance(e, Exception):
            raise SamplerFailed(e) from e
        raise
    # The target never holds the last token of the history, which may be an accepted end token.
    kept = [0, *(node + 1 for node in verdict.path)][: len(verdict.emitted)]
    trees.keep_path(sequence, kept)
    return verdict
