"""Chooses strategy, threads and page size by measuring: the search and its stored result.

Pure but for the callback: `search` asks `measure(candidate)` for decode times and picks the best.
No strategy wins everywhere (docs/background.md, NUMA) and all combinations would take an hour, so
strategies are compared at full width first, then thread counts and small pages of the winner.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from numa.errors import NumaError
from numa.place import Candidate, Strategy
from numa.threads import ThreadPlan
from numa.topology import Topology

# Measurements closer than this are equal: the simpler candidate, tried first, stays.
_NOISE = 0.02
_THREAD_SHARES = (0.75, 0.5)


@dataclass(frozen=True)
class Trial:
    """A measured candidate: seconds by number of tokens, or why there are none."""

    candidate: Candidate
    seconds: Mapping[int, float]
    refusal: str = ""

    @property
    def score_s(self) -> float:
        """Geometric mean of the times, so that T(1) and T(8) count alike; infinite if refused."""
        if self.refusal:
            return math.inf
        return math.exp(sum(math.log(s) for s in self.seconds.values()) / len(self.seconds))

    @property
    def times(self) -> str:
        return ", ".join(f"T({n}) {s * 1e3:.1f} ms" for n, s in sorted(self.seconds.items()))


@dataclass(frozen=True)
class TuneResult:
    """The winner, all trials and the reasons. `machine`: the valid machine's `fingerprint`."""

    best: Candidate
    trials: tuple[Trial, ...]
    reasons: tuple[str, ...]
    machine: str

    def is_for(self, topology: Topology) -> bool:
        """False if nodes, usable processors or memory changed since: tune again."""
        return self.machine == fingerprint(topology)


def fingerprint(topology: Topology) -> str:
    """The machine that a tuned choice depends on: usable cores and rounded memory per node."""
    cores = topology.usable_cores
    parts = [
        f"node{n.id}:{sum(c.node == n.id for c in cores)}c,{round(n.memory_bytes / (1 << 30))}g"
        for n in topology.nodes
    ]
    return " ".join(parts)


def strategies(topology: Topology, plan: ThreadPlan, size_bytes: int) -> list[Candidate]:
    """Every strategy worth a try at full width, the most promising first.

    On one node there is one. `single` needs a node that the weights fit; `rows` and `distribute`
    need ggml's static partition.
    """
    n_threads = plan.decode.n_threads
    if not topology.is_numa:
        return [Candidate(Strategy.SINGLE, n_threads)]
    found = [
        Candidate(Strategy.SINGLE, len(cpus), node=node)
        for node, cpus in sorted(plan.decode.cpus_per_node().items())
        if topology.node(node).free_bytes >= size_bytes
    ]
    found.insert(0, Candidate(Strategy.INTERLEAVE, n_threads))
    if topology.ggml_is_numa:
        rows, distribute = (Candidate(s, n_threads) for s in (Strategy.ROWS, Strategy.DISTRIBUTE))
        found = [rows, *found, distribute]
    return found


def variations(winner: Candidate, *, with_pages: bool = True) -> list[Candidate]:
    """Fewer threads (decoding often saturates memory before the cores) and small pages."""
    counts = {max(round(winner.n_threads * share), 1) for share in _THREAD_SHARES}
    fewer = sorted((n for n in counts if n < winner.n_threads), reverse=True)
    found = [replace(winner, n_threads=n) for n in fewer]
    return [*found, replace(winner, huge_pages=not winner.huge_pages)] if with_pages else found


Measure = Callable[[Candidate], Mapping[int, float]]


def search(
    topology: Topology,
    plan: ThreadPlan,
    size_bytes: int,
    measure: Measure,
    *,
    time_limit_s: float = 600.0,
    progress: Callable[[int, int, Candidate], None] = lambda done, total, candidate: None,
    clock: Callable[[], float],
) -> TuneResult:
    """Measure promising candidates within the time limit; return the best with all numbers.

    `measure` gives seconds by number of tokens, e.g. {1: 0.08, 8: 0.21}, and may raise NumaError
    for a candidate that cannot be placed. Raises NumaError if every candidate was refused.
    """
    first = strategies(topology, plan, size_bytes)
    # Page size is part of a placement, and on one node there is none.
    pages = topology.is_numa
    n_total = len(first) + len(variations(first[0], with_pages=pages))
    deadline, longest_s = clock() + time_limit_s, 0.0
    trials: list[Trial] = []
    skipped: list[Candidate] = []

    def run(candidates: list[Candidate]) -> Trial:
        """Try the candidates; return the first trial that no later one beats by more than noise."""
        nonlocal longest_s
        for candidate in candidates:
            # A trial takes about as long as the longest so far; the first always runs.
            if trials and clock() + longest_s > deadline:
                skipped.append(candidate)
                continue
            progress(len(trials), n_total, candidate)
            began = clock()
            trials.append(_try(measure, candidate))
            longest_s = max(longest_s, clock() - began)
        winner = trials[0]
        for trial in trials[1:]:
            if trial.score_s < winner.score_s * (1 - _NOISE):
                winner = trial
        return winner

    best = run(first)
    if not math.isfinite(best.score_s):
        raise NumaError(f"no candidate could be measured; the first: {best.refusal}")
    best = run(variations(best.candidate, with_pages=pages))
    reasons = _reasons(topology, trials, skipped, best)
    return TuneResult(best.candidate, tuple(trials), reasons, fingerprint(topology))


def _try(measure: Measure, candidate: Candidate) -> Trial:
    try:
        seconds = dict(measure(candidate))
    except NumaError as error:
        return Trial(candidate, {}, str(error))
    if not seconds or min(seconds.values()) <= 0:
        return Trial(candidate, {}, f"measured nothing: {seconds}")
    return Trial(candidate, seconds)


def _reasons(
    topology: Topology, trials: list[Trial], skipped: list[Candidate], best: Trial
) -> tuple[str, ...]:
    reasons: list[str] = []
    if not topology.is_numa:
        reasons.append("one memory node: only the number of threads was tried")
    reasons.append(f"chosen: {best.candidate}: {best.times}")
    for trial in sorted(trials, key=lambda t: t.score_s):
        if trial is best:
            continue
        if trial.refusal:
            reasons.append(f"{trial.candidate}: not possible, {trial.refusal}")
        else:
            ratio = trial.score_s / best.score_s
            reasons.append(f"{trial.candidate}: {trial.times}, {ratio:.2f} times the chosen")
    if skipped:
        names = "; ".join(map(str, skipped))
        reasons.append(f"not tried within the time limit: {names}")
    return tuple(reasons)
