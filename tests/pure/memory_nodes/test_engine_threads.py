"""Which pools compute one token and several, and how many threads other programs have taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from numa.threads import EVERYWHERE, Processors
from offload.threads import engine_threads
from offload.threads.engine_threads import EngineThreads
from offload.threads.governor import WantedThreads

FIRST, LAST = Processors((0, 1, 2, 3)), Processors((4, 5))


@dataclass(eq=False)
class FakePool:
    n_threads: int
    polls: bool
    on: Processors
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeTeam:
    """Keeps the pools that compute one token and several."""

    pools: tuple[FakePool, ...] = ()

    def use(self, pools: tuple[FakePool, ...]) -> None:
        self.pools = pools


@dataclass
class FakeGovernor:
    """Wants these numbers of threads, one after each decode."""

    left: list[int]
    wanted: WantedThreads = field(default_factory=lambda: WantedThreads(4, polls=True))

    def observe(self, *_: object) -> WantedThreads:
        self.wanted = WantedThreads(self.left.pop(0), polls=True)
        return self.wanted


def threads_of(
    monkeypatch: pytest.MonkeyPatch, n_threads: list[int], **on: Processors
) -> tuple[EngineThreads, FakeTeam]:
    """Four threads for one token and two for several, and what the governor wants of them."""
    monkeypatch.setattr(engine_threads, "ThreadPool", FakePool)
    team = FakeTeam()
    of_team: Any = team
    threads = EngineThreads([], 4, 2, team=of_team, **on)
    governor: Any = FakeGovernor(n_threads)
    threads._governor = governor
    return threads, team


def test_threads_for_batches_run_where_batches_are_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, team = threads_of(monkeypatch, [], decode_on=FIRST, batch_on=LAST)
    assert [(pool.n_threads, pool.on) for pool in team.pools] == [(4, FIRST), (2, LAST)]


def test_threads_that_were_given_up_count_since_the_last_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, team = threads_of(monkeypatch, [3, 1, 2, 4, 4, 3])
    assert threads.n_threads_lost() == 0
    for _ in range(3):
        threads.decoded(1, 1.0)
    assert [(pool.n_threads, pool.on) for pool in team.pools] == [(2, EVERYWHERE)] * 2
    assert threads.n_threads_lost() == 3
    threads.decoded(1, 1.0)
    assert threads.n_threads_lost() == 2, "two of four until this decode"
    threads.decoded(1, 1.0)
    assert threads.n_threads_lost() == 0
    threads.decoded(1, 1.0)
    assert threads.n_threads_lost() == 1
    assert not any(pool.is_closed for pool in team.pools)
