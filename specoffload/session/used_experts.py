"""Counts the experts that a session's texts use, and copies the most used ones in advance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from offload.engine import Engine
from offload.errors import DeviceFailed
from offload.plan.workload import TokenMix
from specoffload.kept import HitKeeper, KeptFile

log = logging.getLogger("specoffload.session")


class UsedExperts:
    """The counts of one session, and the copies that are made before its first request."""

    def __init__(self, target: Engine, file: KeptFile, mix: Callable[[], TokenMix]) -> None:
        """Record what routers choose from now on. `mix` returns the session's tokens."""
        self._target = target
        hits = file.load()[0].hits
        uses = None if hits is None else hits.uses
        self._filling: Iterator[None] | None = target.fill_slots(uses)  # None: it is over
        self._keeper = HitKeeper(file, target.facts.n_experts, target.routing, mix)
        target.routing.is_on = True

    def on_step(self, *_: object) -> None:
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
