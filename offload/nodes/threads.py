"""Pins an engine's compute threads as its NumaPlan says, and reads back where they may run.

Without a plan (one memory node, or `--numa none`) there is no object of this module at all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from numa.bind import thread_ids
from numa.errors import NoSuchNode
from numa.pinning import Team
from numa.topology import format_list
from offload.ggml import threadpool
from offload.ggml.llama import Context
from offload.ggml.product import run_once
from offload.nodes.numa_plan import NumaPlan

_logger = logging.getLogger(__name__)
_CHECK_EVERY = 1024  # decodes; a check takes well under a millisecond


class PinnedThreads:
    """The teams of one context. `computing` goes around each decode; close before the context.

    `notes` has one sentence for each thing that is not as planned; `bound` tells for each team
    the processors that a thread was found bound to when it was last checked.
    """

    def __init__(self, context: Context, plan: NumaPlan) -> None:
        """Attach the pools and check them. What cannot be had becomes a note, not an error."""
        self._context = context
        self.notes: list[str] = []
        self.bound: dict[str, tuple[int, ...]] = {}
        self._teams = (plan.decode, plan.batch)
        self._pools: list[threadpool.ThreadPool] = []
        self._n_decodes = 0
        self._several_nodes = threadpool.count_nodes() if plan.topology.is_numa else False
        context.set_threads(plan.decode.n_threads, plan.batch.n_threads)
        try:
            for team in self._teams:
                self._pools.append(threadpool.ThreadPool(team))
        except NoSuchNode as error:
            self.notes.append(f"threads are not pinned: {error}")
            self._free_pools()
            return
        threadpool.attach(context, *self._pools)
        self.check()

    @contextmanager
    def computing(self, n_tokens: int) -> Iterator[None]:
        """Around a decode of `n_tokens`: one token is the decode team's, more the batch team's."""
        if not self._pools:
            yield
            return
        team = self._teams[0 if n_tokens == 1 else 1]
        with _keeping_affinity():
            self._bind_caller(team)
            yield
        self._n_decodes += 1
        if self._n_decodes % _CHECK_EVERY == 0:
            self.check()

    def _bind_caller(self, team: Team) -> None:
        """Thread 0: ggml applies masks only to graphs of two threads and more."""
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
        """Start each team on something tiny, then read all affinities back."""
        for team, pool in zip(self._teams, self._pools, strict=True):
            with _keeping_affinity():
                self._bind_caller(team)
                run_once(pool)
                self._compare(team)

    def _compare(self, team: Team) -> None:
        """Each processor of the team must have a thread that may run there and nowhere else."""
        found = _bound_cpus()
        # Where ggml knows several nodes it has freed the calling thread again behind the graph.
        expected = team.cpus[1:] if self._several_nodes else team.cpus
        self.bound[team.name] = tuple(cpu for cpu in expected if cpu in found)
        missing = tuple(sorted(cpu for cpu in expected if cpu not in found))
        if missing:
            self._note(
                f"{team.name}: no thread is bound to processor {format_list(missing)} as planned"
                " (did the cpuset change?); it runs where the kernel lets it, and ggml binds it"
                " again at each graph"
            )

    @property
    def pools(self) -> Sequence[threadpool.ThreadPool]:
        """One token's and several tokens'; none where threads are not pinned."""
        return self._pools

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)
            if self._n_decodes:  # the start-up lines have been read by now
                _logger.warning(sentence)

    def _free_pools(self) -> None:
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    @property
    def sentence(self) -> str:
        """Where the threads are, for the start-up lines."""
        if not self._pools:
            return "threads run where the kernel puts them"
        teams = ", ".join(
            f"{team.name} {team.n_threads} on {format_list(tuple(sorted(team.cpus)))}"
            for team in self._teams
        )
        return f"threads pinned to processors: {teams}"

    def close(self) -> None:
        """Detach and free the pools; a second call does nothing."""
        if self._pools:
            threadpool.detach(self._context)
        self._free_pools()


@contextmanager
def _keeping_affinity() -> Iterator[None]:
    """Threads started later, for copies or requests, inherit what the calling thread may use."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        try:
            os.sched_setaffinity(0, before)
        except OSError:  # none of the old processors is ours any more: the kernel has chosen
            return


def _bound_cpus() -> set[int]:
    """Processors that some thread of this process is bound to, and to no other."""
    found: set[int] = set()
    for tid in thread_ids():
        try:
            cpus = os.sched_getaffinity(tid)
        except ProcessLookupError:
            continue  # ended meanwhile
        if len(cpus) == 1:
            found |= cpus
    return found
