"""The simulator for several sequences that share each batch: traces, a profile and a policy.

The drafting is the decoding loop's own (`ChainDrafting`); what is played is the target, which says
of each trace how far a draft is right, and the clock, which says T(rows) and the draft's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.simulation.fake import FakeTarget
from lab.simulation.simulate import DraftTrace, draft_of_trace, emitted_of_trace
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import BatchMember
from specdec.types import Draft, DraftRequest, Policy, Round


@dataclass(frozen=True)
class SharedPlay:
    """The play of all traces; time in the profile's unit."""

    n_tokens: int
    time: float
    n_steps: int
    n_drafted: int
    n_accepted: int

    @property
    def rate(self) -> float:
        return self.n_tokens / self.time


class _TraceDrafter:
    """Proposes what the traces say; member `s` stands at token `at[s]` of trace `s`."""

    name = "draft"

    def __init__(self, traces: Sequence[DraftTrace]) -> None:
        self._traces = traces
        self.at = [0] * len(traces)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [
            draft_of_trace(self._traces[r.sequence], self.at[r.sequence], r, self.name)
            for r in requests
        ]

    def learn(self, sequence: int, round_: Round) -> None:
        self.at[sequence] += len(round_.emitted)

    def forget(self, sequence: int) -> None:
        pass


def simulate_shared(
    traces: Sequence[DraftTrace],
    profile: CostProfile,
    policy: Policy,
    *,
    n_outputs: int = 128,
) -> SharedPlay:
    """Decode the traces side by side until one of them ends: all share every batch."""
    drafter, greedy = _TraceDrafter(traces), Greedy()
    drafting = ChainDrafting(FakeTarget(n_outputs=n_outputs), drafter, policy)
    members = [
        BatchMember(s, [0], greedy, MatchAcceptance(greedy), len(trace.p), lambda _: False)
        for s, trace in enumerate(traces)
    ]
    time, n_tokens, n_steps, n_drafted, n_accepted = 0.0, 0, 0, 0, 0
    while all([member.n_left > 1 for member in members]):
        drafts = drafting.propose(members)
        verify = profile.time(sum([1 + len(draft.tokens) for draft in drafts]))
        drafting_time = max([draft.n_steps for draft in drafts]) * profile.draft_step_s
        rounds = []
        for member, trace, draft in zip(members, traces, drafts, strict=True):
            at, n = drafter.at[member.sequence], 0
            while n < len(draft.tokens) and trace.accepted[at + n]:
                n += 1
            emitted = emitted_of_trace(trace, at, n)
            rounds.append((member, Round(draft, n, emitted, drafting_time, verify)))
            member.n_left -= len(emitted)
            n_tokens, n_accepted = n_tokens + len(emitted), n_accepted + n
            n_drafted += len(draft.tokens)
        drafting.learn(rounds, drafting_time, is_priced=True)
        time += verify + drafting_time
        n_steps += 1
    return SharedPlay(n_tokens, time, n_steps, n_drafted, n_accepted)
