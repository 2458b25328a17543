"""No drafter: every round is one token of the target."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specdec.types import Decision, Draft, Policy, Round

NO_DRAFT = Draft((), (), "none", Decision(0, "no drafter", rest=sys.maxsize))


class NoDrafter:
    name = "none"

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        return NO_DRAFT

    def learn(self, sequence: int, round_: Round) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass
