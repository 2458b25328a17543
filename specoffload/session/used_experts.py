"""Counts the experts that a session's texts use, and copies the most used ones in advance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import date
from typing import TYPE_CHECKING

from offload.errors import DeviceFailed
from offload.plan.workload import TokenMix
from offload.routing.routing import LEAST_TOKENS, N_KEPT, counted_hits
from specoffload.kept import KeptFile, today

if TYPE_CHECKING:
    from offload.engine import Engine
    from offload.routing.routing import RoutingRecorder
    from specdec.decoding.loop import StepReport

log = logging.getLogger("specoffload.session")

_OFTEN, _OFTEN_MIX = 4 * N_KEPT, 1 << 16  # new tokens after which a session saves its counts


class UsedExperts:
    """The counts of one session, and the copies that are made before its first request."""

    def __init__(self, target: Engine, file: KeptFile, mix: Callable[[], TokenMix]) -> None:
        """Record what routers choose from now on. `mix` returns the session's tokens."""
        self._target = target
        hits = file.load()[0].hits
        uses = None if hits is None else hits.uses
        self._filling: Iterator[None] | None = target.fill_slots(uses)  # None: it is over
        self._keeper = HitKeeper(file, target.facts.n_experts, target.opened.routing, mix)
        target.opened.routing.is_on = True

    def on_step(self, _: StepReport) -> None:
        """Keep the counts, if it is time."""
        if self._keeper.is_due:
            self.keep()

    def keep(self) -> None:
        if failed := self._keeper.keep():
            log.warning("%s", failed)

    def fill_one(self) -> bool:
        """Copy one of the experts that earlier runs used most into a slot, or read some from disk.

        Returns True if it did, so there may be more. Does nothing after `end_filling`.
        """
        if self._filling is None:
            return False
        try:
            next(self._filling)
            return True
        except StopIteration:
            self.end_filling()
        except DeviceFailed as e:
            log.warning("experts are no longer copied in advance, only when used: %s", e)
            self._filling = None
        return False

    def end_filling(self) -> None:
        """Stop filling slots, since a request comes next."""
        if self._filling is None:
            return
        self._filling = None
        if n := self._target.counters().n_filled:
            log.info("slots: while the first request was awaited, %d experts were copied, those "
                     "that were used most at the end of the last run", n)  # fmt: skip
        if self._target.reads_experts:
            n = int(self._target.disk_counters()["experts_filled"])
            log.info("memory: while the first request was awaited, %d experts were read", n)


class HitKeeper:
    """Keeps a session's recorded hits and token counts, at its end and during long use."""

    def __init__(
        self, file: KeptFile, n_experts: int, recorder: RoutingRecorder,
        tokens: Callable[[], TokenMix],
    ) -> None:  # fmt: skip
        """`tokens` returns the tokens that the session has evaluated and generated so far."""
        self._file, self._n_experts, self._recorder = file, n_experts, recorder
        self._tokens, self._kept_mix = tokens, TokenMix(0, 0)
        self._n_kept = 0

    @property
    def is_due(self) -> bool:
        """True if many tokens were counted since the last `keep`."""
        new = self._new_tokens()
        n_recorded = self._recorder.n_tokens - self._n_kept
        return n_recorded >= _OFTEN or new.n_prompt + new.n_generated >= _OFTEN_MIX

    def _new_tokens(self) -> TokenMix:
        now, kept = self._tokens(), self._kept_mix
        return TokenMix(now.n_prompt - kept.n_prompt, now.n_generated - kept.n_generated)

    def keep(self) -> str:
        """Add the records since the last call to the kept file, if there are enough.

        Returns a sentence if the file cannot be written, else "".
        """
        mix, hits = self._new_tokens(), None
        n_new = min(self._recorder.n_tokens - self._n_kept, N_KEPT)
        if n_new >= LEAST_TOKENS:
            recorded = {layer: ids[-n_new:] for layer, ids in self._recorder.recorded().items()}
            hits = counted_hits(recorded, self._n_experts, date.fromisoformat(today()))
            self._n_kept = self._recorder.n_tokens
        if hits is None and mix.n_prompt + mix.n_generated < LEAST_TOKENS:
            return ""
        self._kept_mix = self._tokens()
        return self._file.update(lambda kept: kept.count(hits, mix))
