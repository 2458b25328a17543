"""Chooses strategy, threads and page size by measuring: the search and its stored result.

`search` calls `measure(candidate)` for decode times, and chooses the candidate with the fastest
medians. It is pure otherwise. No strategy is fastest on all machines (docs/background.md, NUMA),
and measuring all combinations would take an hour. So strategies are compared with all threads
first. Then fewer threads and the other page size are tried with the fastest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

from numa.errors import NumaError
from numa.place import Candidate, Strategy
from numa.threads import ThreadPlan
from numa.topology import Topology

# Relative gain below which a later candidate does not replace an earlier, simpler one.
_NOISE = 0.02
_THREAD_SHARES = (0.75, 0.5)


@dataclass(frozen=True)
class Trial:
    """A measured candidate: median decode seconds by number of tokens, or why it was refused.

    `spreads` has half the interquartile range over the median, by number of tokens.
    """

    candidate: Candidate
    seconds: Mapping[int, float]
    refusal: str = ""
    spreads: Mapping[int, float] = field(default_factory=dict)

    @property
    def score_s(self) -> float:
        """Geometric mean of the times, so that batch sizes count alike; infinite if refused."""
        if self.refusal:
            return math.inf
        return math.exp(sum(math.log(s) for s in self.seconds.values()) / len(self.seconds))

    @property
    def times(self) -> str:
        """The time of a decode of each size, such as "T(1) 0.3 ms"."""
        return ", ".join(f"T({n}) {s * 1e3:.1f} ms" for n, s in sorted(self.seconds.items()))


@dataclass(frozen=True)
class TuneResult:
    """The fastest candidate, all trials and the reasons.

    `machine` is the `fingerprint` of the machine on which it was measured. `date` and `model` say
    when and with which file. `settings`, `n_slots` and `n_resident` are those of a run with the
    best candidate: its device and threads, the slots for experts, and the resident layers.
    """

    best: Candidate
    trials: tuple[Trial, ...]
    reasons: tuple[str, ...]
    machine: str
    date: str = ""
    model: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    n_slots: int = 0
    n_resident: int = 0

    def is_for(self, topology: Topology) -> bool:
        """True if the nodes, their usable cores and their memory are those of the measurement."""
        return self.machine == fingerprint(topology)


def fingerprint(topology: Topology) -> str:
    """The facts on which a tuned choice depends: usable cores and rounded memory of each node.

    Performance cores are counted too, if there are others.
    """
    cores, n_fast = topology.usable_cores, len(topology.performance_cores)
    parts = [
        f"node{n.id}:{sum(c.node == n.id for c in cores)}c,{round(n.memory_bytes / (1 << 30))}g"
        for n in topology.nodes
    ]
    return " ".join([*parts, f"{n_fast} fast"] if n_fast else parts)


def strategies(topology: Topology, plan: ThreadPlan, size_bytes: int) -> list[Candidate]:
    """Every strategy worth a trial with all threads, the most promising first.

    On a machine with one node, only `single` is worth a trial, on the performance cores alone if
    there are others, and on all cores. `single` needs a node with room for
    `size_bytes` of weights. `rows` and `distribute` need ggml's static partition of rows.
    """
    n_threads = plan.decode.n_threads
    if not topology.is_numa:
        counts = filter(None, (len(topology.performance_cores), n_threads))
        return [Candidate(Strategy.SINGLE, n) for n in counts]
    candidates = [
        Candidate(Strategy.SINGLE, len(cpus), node=node)
        for node, cpus in sorted(plan.decode.cpus_per_node().items())
        if topology.node(node).free_bytes >= size_bytes
    ]
    candidates.insert(0, Candidate(Strategy.INTERLEAVE, n_threads))
    if topology.ggml_is_numa:
        rows, distribute = (Candidate(s, n_threads) for s in (Strategy.ROWS, Strategy.DISTRIBUTE))
        candidates = [rows, *candidates, distribute]
    return candidates


def variations(winner: Candidate, *, with_pages: bool = True) -> list[Candidate]:
    """The winner with fewer threads, and with the other page size if `with_pages`.

    Fewer threads may suffice, because decoding often saturates the memory before the cores.
    """
    counts = {max(round(winner.n_threads * share), 1) for share in _THREAD_SHARES}
    fewer = sorted((n for n in counts if n < winner.n_threads), reverse=True)
    candidates = [replace(winner, n_threads=n) for n in fewer]
    return (
        [*candidates, replace(winner, huge_pages=not winner.huge_pages)]
        if with_pages
        else candidates
    )


Measure = Callable[[Candidate], Mapping[int, Sequence[float]]]


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
    """Measure promising candidates within the time limit, and return the best and all trials.

    `measure` returns the seconds of repeated decodes by number of tokens, such as {1: (0.08, 0.09),
    8: (0.21, 0.2)}. It raises NumaError for a candidate that cannot be placed. Raises NumaError if
    every candidate was refused.
    """
    first = strategies(topology, plan, size_bytes)
    # On one node no memory is placed, so there is no page size to choose.
    pages = topology.is_numa
    n_total = len(first) + len(variations(first[0], with_pages=pages))
    deadline, longest_s = clock() + time_limit_s, 0.0
    trials: list[Trial] = []
    skipped: list[Candidate] = []

    def run(candidates: list[Candidate]) -> Trial:
        """Try the candidates. Return the first trial that no later one beats by more than noise."""
        nonlocal longest_s
        for candidate in candidates:
            # Skip trials that may not end in time, but always run the first.
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
        measured = measure(candidate)
    except NumaError as error:
        return Trial(candidate, {}, str(error))
    seconds = {n: median(times) for n, times in measured.items()}
    if not seconds or min(seconds.values()) <= 0:
        return Trial(candidate, {}, f"measured nothing: {seconds}")
    spreads = {n: _spread(times) for n, times in measured.items() if len(times) > 1}
    return Trial(candidate, seconds, "", spreads)


def _spread(times: Sequence[float]) -> float:
    """Half the interquartile range over the median, which is not 0."""
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / middle


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
