"""The kept seconds of a draft's token in each engine, from several starts and from serving. Pure.

One measurement may have been disturbed, so each start measures once more until the values agree
(`offload.times.repeated`). Starts measure steps without a context. The steps of a session have the
context of its texts, and only of the engine in use. So they never count as values: they make a
start measure once more if the other engine seems faster than they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from offload.times.recent import RecentMedian
from offload.times.repeated import RepeatedTime
from specdec.options import DrafterName
from specoffload.kept_values import KeptTime

if TYPE_CHECKING:
    from specdec.decoding.loop import StepReport

TORCH: Final = "torch"
LIBLLAMA: Final = "libllama"
ENGINES: Final = (TORCH, LIBLLAMA)  # in the order of measuring: torch may be unable to start
_LEAST_ROUNDS = 16  # rounds with a draft below which a session adds no value


@dataclass(frozen=True)
class KeptEngines:
    """The measured seconds of a draft token by the name of the engine, and the day of the first."""

    seconds: dict[str, KeptTime] = field(default_factory=dict)
    date: str = ""

    @property
    def unsettled(self) -> tuple[str, ...]:
        """The engines that the next start measures once more."""
        return tuple(name for name in ENGINES if not self.of(name).is_settled())

    @property
    def faster(self) -> str:
        """The engine that takes less. Both have to be measured."""
        return min(ENGINES, key=lambda name: self.of(name).value)

    @property
    def words(self) -> str:
        """A clause with the time of each engine."""
        torch_ms, llama_ms = (1e3 * self.of(name).value for name in (TORCH, LIBLLAMA))
        return f"a token takes {torch_ms:.2f} ms in torch and {llama_ms:.2f} ms in libllama"

    def due(self, day: str) -> tuple[str, ...]:
        """The engines that a start of this day measures."""
        return tuple(name for name in ENGINES if self.of(name).is_due(day))

    def of(self, name: str) -> RepeatedTime:
        """The measurements of one engine."""
        return self.seconds.get(name, RepeatedTime())

    def with_seconds(
        self, seconds: Mapping[str, float], *, is_doubted: bool = False, day: str = ""
    ) -> KeptEngines:
        """Return these measurements and a further one of some engines, by a start of this day.

        `is_doubted`: other programs took much of the CPUs meanwhile.
        """
        new = {
            name: self.of(name).with_value(s, is_doubted=is_doubted, day=day)
            for name, s in seconds.items()
        }
        return replace(self, seconds=self.seconds | new)

    def with_served(self, name: str, step_s: float) -> KeptEngines:
        """Return these measurements and the step that a session with an engine showed.

        A step that is no longer than the other engine's changes no choice. So it confirms.
        """
        own = self.of(name)
        least_s = min((self.of(other).value for other in ENGINES if other != name), default=0.0)
        if not own.values or not least_s:
            return self
        seen = own.with_seen(step_s if step_s > least_s else own.value)
        return replace(self, seconds=self.seconds | {name: seen})


class DraftSteps:
    """Takes the time of a draft step from rounds of one text with a chain by the draft model."""

    def __init__(self) -> None:
        self._seconds = RecentMedian()
        self._n_rounds = 0

    def on_step(self, report: StepReport) -> None:
        """Learn from a step of the decoding loop."""
        if len(report.rounds) != 1:
            return
        ((_, round_),) = report.rounds
        draft = round_.draft
        is_chain = draft.n_steps and not draft.n_extra_rows
        if draft.source != DrafterName.DRAFT or not is_chain or round_.draft_s <= 0.0:
            return
        if any(other.n_steps for other in draft.others):
            return
        self._seconds.see(round_.draft_s / draft.n_steps)
        self._n_rounds += 1

    @property
    def step_s(self) -> float:
        """The lower median of the last rounds, or 0.0 after too few of them."""
        return self._seconds.value if self._n_rounds >= _LEAST_ROUNDS else 0.0
