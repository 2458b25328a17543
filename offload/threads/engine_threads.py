"""Manages the threads of an engine's decodes: bound as a NumaPlan says, or governed.

On several memory nodes each thread is bound to a processor, and its affinity is read back. On one
node threads run wherever the kernel puts them, and `offload.threads.governor` decides how many
threads compute while other programs use the processors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from numa.errors import NoSuchNode
from numa.threads import Team
from numa.topology import format_list
from offload.ggml.context import Context
from offload.ggml.threads import CpuTeam, ThreadPool, attach, count_nodes, detach
from offload.threads.governor import ThreadGovernor
from offload.threads.numa_plan import NumaPlan

_logger = logging.getLogger(__name__)
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
    ) -> None:
        """Compute one token with `n_decode` threads and several tokens with `n_batch`.

        A `plan` replaces both. `team` computes the CPU's side of split layers on the same threads.
        """
        self._contexts, self._team = contexts, team
        self.notes: list[str] = []
        self.bound: dict[str, tuple[int, ...]] = {}
        self._n_decodes = 0
        self.n_threads = n_decode  # threads that compute one token now
        self._n_fewest = n_decode  # the fewest of them since the last call of n_threads_lost
        self._teams: tuple[Team, ...] = ()
        self.is_bound = False  # True if each thread of the pools is bound to a processor
        self._governor: ThreadGovernor | None = None
        self._pools: dict[tuple[int, bool], ThreadPool] = {}
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
        for n in {n_decode, n_batch}:
            if (n, polls) not in self._pools:
                self._pools[n, polls] = ThreadPool(n, polls=polls)
        self._attach(self._pools[n_decode, polls], self._pools[n_batch, polls])
        # Close unused pools, although their threads only sleep.
        used = {(n_decode, polls), (n_batch, polls), (self._n_decode, True), (self._n_batch, True)}
        for key in self._pools.keys() - used:
            self._pools.pop(key).close()

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
            self._bind_caller(self._teams[0 if n_tokens == 1 else 1])
            yield
        self._n_decodes += 1
        if self._n_decodes % _CHECK_EVERY == 0:
            self.check()

    def _bind_caller(self, team: Team) -> None:
        """Bind the calling thread if it is a whole team, since ggml binds only teams of several."""
        if team.n_threads > 1:
            return
        try:
            os.sched_setaffinity(0, team.cpus)
        except OSError as error:
            self._note(
                f"{team.name}: the kernel refused processor {format_list(team.cpus)}"
                f" ({error.strerror}); the thread runs where it ran before"
            )

    def check(self) -> None:
        """Let each team compute a tiny product, then read the affinities of all threads.

        Adds a note if a processor of a team has no thread that may run only there.
        """
        for team, pool in zip(self._teams, self._bound_pools, strict=True):
            with _keeping_affinity():
                self._bind_caller(team)
                pool.run_once()
                found = _bound_cpus()
            expected = team.cpus[self._n_unchecked :]
            self.bound[team.name] = tuple(cpu for cpu in expected if cpu in found)
            missing = tuple(sorted(set(expected) - found))
            if missing:
                self._note(
                    f"{team.name}: no thread is bound to processor {format_list(missing)} as"
                    " planned (did the cpuset change?); it runs where the kernel lets it, and ggml"
                    " binds it again at each graph"
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
            return "threads run where the kernel puts them"
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
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            cpus = os.sched_getaffinity(int(task.name))
        except ProcessLookupError:
            continue  # the thread has ended
        if len(cpus) == 1:
            found |= cpus
    return found
