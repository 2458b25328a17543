"""Records steps of the decoding loop in a trace: rounds, their parts, and their tokens."""

from __future__ import annotations

from collections.abc import Callable

from offload.trace import ROUND, TOKEN, Trace
from specdec.decoding.loop import Step
from specdec.types import Round

_SHOWN = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})
_MOST_NAME = 24  # characters of a token's text


class StepTrace:
    """Records each step of a batcher."""

    def __init__(self, trace: Trace, text_of: Callable[[int], bytes]) -> None:
        """`text_of` gives the bytes of one token."""
        self._trace, self._text_of = trace, text_of

    def add(self, start_s: float, end_s: float, step: Step) -> None:
        """Record a step: one slice with its parts, and the tokens of each slot. Times are seconds
        of time.perf_counter. Tokens of a round get equal shares of its time, since they arrive
        together."""
        rounds = [round_ for _, round_ in step.rounds]
        name = " and ".join(["round"] * bool(rounds) + ["prompt"] * bool(step.read))
        n_requests = len({id(member) for member in (*step.read, *(m for m, _ in step.rounds))})
        self._trace.sample("requests", start_s, running=n_requests)
        self._trace.add(
            ROUND, name or "step", start_s, end_s,
            n_requests=n_requests,
            n_drafted=sum(round_.n_drafted for round_ in rounds),
            n_accepted=sum(round_.n_accepted for round_ in rounds),
            n_tokens=sum(len(round_.emitted) for round_ in rounds),
        )  # fmt: skip
        if rounds:
            self._add_parts(start_s, end_s, rounds[0])
        for member, round_ in step.rounds:
            self._add_tokens(start_s, end_s, member.sequence, round_)

    def _add_parts(self, start_s: float, end_s: float, round_: Round) -> None:
        """Record the parts of a step. All rounds of a step share one decode and its times."""
        drafted_s = round_.draft_s + round_.draft.catch_up_s
        parts = (
            ("draft", drafted_s),
            ("verify", round_.verify_s),
            ("roll back", round_.rollback_s),
        )
        for name, duration_s in parts:
            until_s = min(end_s, start_s + duration_s)
            if duration_s > 0:
                why = {"drafter": round_.draft.source, "decision": round_.draft.decision.reason}
                self._trace.add(ROUND, name, start_s, until_s, **(why if name == "draft" else {}))
            start_s = until_s

    def _add_tokens(self, start_s: float, end_s: float, slot: int, round_: Round) -> None:
        share_s = (end_s - start_s) / max(1, len(round_.emitted))
        for i, token in enumerate(round_.emitted):
            text = self._text_of(token).decode("utf-8", "replace").translate(_SHOWN)
            self._trace.add(
                TOKEN, text[:_MOST_NAME] or f"token {token}",
                start_s + i * share_s, start_s + (i + 1) * share_s,
                slot=slot, token=token, drafted=int(i < round_.n_accepted),
            )  # fmt: skip
