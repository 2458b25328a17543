"""Manages the threads of an engine's decodes: bound as a NumaPlan says, or governed.

On several memory nodes each thread is bound to a processor, and its affinity is read back. On one
node threads run wherever the kernel puts them, or on some processors, such as the performance
cores. Then `offload.threads.governor` decides how many threads compute while other programs use the
processors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from numa.errors import NoSuchNode
from numa.threads import EVERYWHERE, Processors, Team
from numa.topology import format_list
from offload.ggml.context import Context
from offload.ggml.threads import CpuTeam, ThreadPool, attach, count_nodes, detach
from offload.threads.governor import ThreadGovernor
from offload.threads.numa_plan import NumaPlan

_logger = logging.getLogger(__name__)
_PoolKey = tuple[int, bool, Processors]  # number of threads, whether idle ones poll, where
_CHECK_EVERY = 1024  # decodes; a check takes well under a millisecond


class EngineThreads:
    """The thread pools of an engine's contexts. Close it before the contexts.

    `notes` has one sentence for each difference from the plan. `bound` holds the processors that
    had a thread bound to them at the last check, by name of a team.
    """

    def __init__(
        self,
        contexts: Sequence[Context],
        n_decode: int,
        n_batch: int,
        plan: NumaPlan | None = None,
        team: CpuTeam | None = None,
        decode_on: Processors = EVERYWHERE,
        batch_on: Processors = EVERYWHERE,
    ) -> None:
        """Compute one token with `n_decode` threads and several tokens with `n_batch`.

        A `plan` replaces both. `team` computes the CPU's side of split layers on the same threads.
        Without a plan, the threads for one token run on the processors `decode_on`, and those for
        several tokens on `batch_on`.
        """
        self._contexts, self._team = contexts, team
        self.notes: list[str] = []
        self.bound: dict[str, tuple[int, ...]] = {}
        self._n_decodes = 0
        self.n_threads = n_decode  # threads that compute one token now
        self._n_fewest = n_decode  # the fewest of them since the last call of n_threads_lost
        self._teams: tuple[Team, ...] = ()
        self._on = (decode_on, batch_on) if plan is None else (EVERYWHERE, EVERYWHERE)
        # True if threads may run on some processors only, one each with a plan.
        self.is_bound = any(on.cpus for on in self._on)
        self._governor: ThreadGovernor | None = None
        self._pools: dict[_PoolKey, ThreadPool] = {}
        self._bound_pools: list[ThreadPool] = []
        # Expected seconds of an undisturbed decode of n tokens, used until enough were observed.
        self.expected_s: Callable[[int], float | None] = lambda n_tokens: None
        self._n_decode, self._n_batch = n_decode, n_batch
        if plan is not None:
            self._n_decode, self._n_batch = plan.decode.n_threads, plan.batch.n_threads
            self._bind(plan)
        if not self._teams:
            n_most = max(self._n_decode, self._n_batch)
            self._governor = ThreadGovernor(n_most) if plan is None else None
            self._use(self._n_decode, self._n_batch)
            self._check_strict()

    # -- governed ---------------------------------------------------------------------------------

    def decoded(self, n_tokens: int, seconds: float) -> None:
        """Learn from the seconds of a decode, and set the threads of the next decode."""
        governor = self._governor
        if governor is None:
            return
        before = governor.wanted
        wanted = governor.observe(n_tokens, seconds, self.expected_s(n_tokens))
        if wanted is before:
            return
        n = wanted.n_threads
        self._use(min(self._n_decode, n), min(self._n_batch, n), polls=wanted.polls)
        if wanted.sentence:
            _logger.warning(wanted.sentence)

    def n_threads_lost(self) -> int:
        """Return how many threads were given up, at most, at any time since the last call.

        They are given up while other programs take processors.
        """
        fewest, self._n_fewest = self._n_fewest, self.n_threads
        return self._n_decode - fewest

    def _use(self, n_decode: int, n_batch: int, *, polls: bool = True) -> None:
        self.n_threads = n_decode
        self._n_fewest = min(self._n_fewest, n_decode)
        wanted = self._keys(n_decode, n_batch, polls=polls)
        for key in wanted:
            if key not in self._pools:
                n, _, on = key
                self._pools[key] = ThreadPool(n, polls=polls, on=on)
        self._attach(*(self._pools[key] for key in wanted))
        # Close unused pools, although their threads only sleep.
        used = {*wanted, *self._keys(self._n_decode, self._n_batch, polls=True)}
        for key in self._pools.keys() - used:
            self._pools.pop(key).close()

    def _keys(self, n_decode: int, n_batch: int, *, polls: bool) -> tuple[_PoolKey, _PoolKey]:
        """The keys of the pools that compute one token and several tokens."""
        decode_on, batch_on = self._on
        return (n_decode, polls, decode_on), (n_batch, polls, batch_on)

    def _check_strict(self) -> None:
        """Note processors of --cpu-strict to which no thread could be bound."""
        keys = self._keys(self._n_decode, self._n_batch, polls=True)
        for name, key in zip(("decode", "batch"), keys, strict=True):
            if key[2].strict:
                self._check_bound(name, key[2].cpus, self._pools[key])

    def _attach(self, decode: ThreadPool, batch: ThreadPool) -> None:
        for context in self._contexts:
            attach(context, decode, batch)
        if self._team is not None:
            self._team.use((decode, batch))

    # -- bound ------------------------------------------------------------------------------------

    def _bind(self, plan: NumaPlan) -> None:
        """Attach bound pools and check them. A refusal becomes a note, not an error."""
        several_nodes = count_nodes() if plan.topology.is_numa else False
        # If ggml knows several nodes, it unbinds the calling thread after each graph. So the first
        # processor of a team is then not checked.
        self._n_unchecked = 1 if several_nodes else 0
        try:
            for team in (plan.decode, plan.batch):
                self._bound_pools.append(ThreadPool(team))
        except NoSuchNode as error:
            self.notes.append(f"threads are not bound: {error}")
            self._close_pools()
            return
        self._teams, self.is_bound = (plan.decode, plan.batch), True
        self.n_threads = self._n_fewest = plan.decode.n_threads
        self._attach(*self._bound_pools)
        self.check()

    @contextmanager
    def computing(self, n_tokens: int) -> Iterator[None]:
        """Bind the calling thread inside the context. If `is_bound`, wrap each decode in it."""
        with _keeping_affinity():
            index = 0 if n_tokens == 1 else 1
            if self._teams:
                self._bind_caller(self._teams[index])
            elif cpus := self._on[index].cpus:
                self._run_on(cpus, "threads")
            yield
        self._n_decodes += 1
        if self._n_decodes % _CHECK_EVERY == 0:
            self.check()

    def _bind_caller(self, team: Team) -> None:
        """Bind the calling thread if it is a whole team, since ggml binds only teams of several."""
        if team.n_threads == 1:
            self._run_on(team.cpus, team.name)

    def _run_on(self, cpus: tuple[int, ...], name: str) -> None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            self._note(
                f"{name}: the kernel refused processor {format_list(cpus)}"
                f" ({error.strerror}); the thread runs where it ran before"
            )

    def check(self) -> None:
        """Let each team compute a tiny product, then read the affinities of all threads.

        Adds a note if a processor of a team has no thread that may run only there.
        """
        for team, pool in zip(self._teams, self._bound_pools, strict=True):
            self._check_bound(team.name, team.cpus, pool, self._n_unchecked)

    def _check_bound(
        self, name: str, cpus: tuple[int, ...], pool: ThreadPool, n_unchecked: int = 0
    ) -> None:
        """Add a note if one of `cpus`, less the first ones, has no thread of `pool` bound to it."""
        with _keeping_affinity():
            if len(cpus) == 1:
                self._run_on(cpus, name)
            pool.run_once()
            bound = _bound_cpus()
        expected = cpus[n_unchecked:]
        self.bound[name] = tuple(cpu for cpu in expected if cpu in bound)
        missing = tuple(sorted(set(expected) - bound))
        if missing:
            self._note(
                f"{name}: no thread is bound to processor {format_list(missing)} as planned (did"
                " the cpuset change?); it runs where the kernel lets it, and ggml binds it again"
                " at each graph"
            )

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)
            if self._n_decodes:  # the start-up lines have been printed by now
                _logger.warning(sentence)

    @property
    def sentence(self) -> str:
        """The start-up line on the processors of the threads."""
        if not self._teams:
            return _where(*self._on)
        teams = ", ".join(
            f"{team.name} {team.n_threads} on {format_list(tuple(sorted(team.cpus)))}"
            for team in self._teams
        )
        return f"threads bound to processors: {teams}"

    def close(self) -> None:
        """Detach and free the pools. A second call does nothing."""
        for context in self._contexts:
            detach(context)
        self._close_pools()

    def _close_pools(self) -> None:
        for pool in (*self._pools.values(), *self._bound_pools):
            pool.close()
        self._pools.clear()
        self._bound_pools.clear()


def _where(decode: Processors, batch: Processors) -> str:
    """The sentence on where threads run that no plan binds."""
    if decode == batch:
        where = decode.words if decode.cpus else "where the kernel puts them"
        return f"threads run {'on ' * bool(decode.cpus)}{where}"
    parts = [
        f"{what} on {on.words}" if on.cpus else f"{what} where the kernel puts them"
        for what, on in (("for one token", decode), ("for several tokens", batch))
    ]
    return f"threads run {' and '.join(parts)}"


@contextmanager
def _keeping_affinity() -> Iterator[None]:
    """Restore the calling thread's affinity at the end, because later threads inherit it."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        try:
            os.sched_setaffinity(0, before)
        except OSError:  # none of the old processors is allowed any more; the kernel chose others
            return


def _bound_cpus() -> set[int]:
    """Return the processors to which a thread of this process is bound."""
    every: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            cpus = os.sched_getaffinity(int(task.name))
        except ProcessLookupError:
            continue  # the thread has ended
        if len(cpus) == 1:
            every |= cpus
    return every
