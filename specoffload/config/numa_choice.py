"""Threads and memory nodes resolved: what was typed, what was tuned, what the machine is. Pure.

On one memory node nothing is pinned or placed, and one line says so.
"""

from __future__ import annotations

from dataclasses import replace

from numa.pinning import ThreadPlan, ThreadRequest, plan_threads
from numa.place import Strategy
from numa.strategy import ONE_NODE, threads_for
from numa.topology import Topology
from numa.tune import Candidate
from offload.nodes.numa_plan import NumaPlan, make_numa_plan
from specoffload.config.resolution import Config, Options, resolve
from specoffload.config.tuned import TUNE, Tuned, tuned_sentence


def resolve_on(options: Options, topology: Topology, tuned: Tuned) -> Config:
    """`resolve`, with threads and NUMA as this machine has them.

    Raises UsageError, and NoSuchNode for a `--numa-node` that does not exist.
    """
    resolve(options)  # says what is wrong with the flags before the machine is looked at
    if options.numa_node is not None:
        topology.node(options.numa_node)
    if not topology.is_numa:
        return _on_one_node(options, topology, tuned)
    if options.numa == "none":
        return _with_reasons(
            resolve(options),
            ("--numa none: threads and pages are left to the kernel and ggml",),
        )
    plan, reasons = _on_several_nodes(options, topology, tuned)
    config = resolve(
        replace(options, threads=plan.decode.n_threads, threads_batch=plan.batch.n_threads)
    )
    return _with_reasons(replace(config, numa=plan), (*reasons, *plan.reasons))


def _with_reasons(config: Config, reasons: tuple[str, ...]) -> Config:
    return replace(config, reasons=tuple(dict.fromkeys((*config.reasons, *reasons))))


def _on_one_node(options: Options, topology: Topology, tuned: Tuned) -> Config:
    """Only the number of threads may change: to the tuned one, and to the processors there are."""
    reasons: list[str] = []
    n_most = len(topology.allowed_cpus)
    wanted = {"--threads": options.threads, "--threads-batch": options.threads_batch}
    for flag, n in wanted.items():
        if n is not None and n > n_most:
            reasons.append(
                f"{flag} {n}: this process may use {n_most} processors, so {n_most} threads run"
            )
            wanted[flag] = n_most
    options = replace(options, threads=wanted["--threads"], threads_batch=wanted["--threads-batch"])
    if options.threads is None and tuned.result is not None:
        n_threads = min(tuned.result.best.n_threads, n_most)
        options = replace(options, threads=n_threads)
        reasons.append(f"{n_threads} threads, {tuned_sentence(tuned.result)}")
    elif tuned.why_not:
        reasons.append(tuned.why_not)
    reasons.append(ONE_NODE)
    return _with_reasons(resolve(options), tuple(reasons))


def _on_several_nodes(
    options: Options, topology: Topology, tuned: Tuned
) -> tuple[NumaPlan, tuple[str, ...]]:
    candidate, reasons = _candidate(options, topology, tuned)
    request = ThreadRequest(n_batch=options.threads_batch)
    threads: ThreadPlan = threads_for(topology, candidate, request)
    plan = make_numa_plan(
        topology,
        candidate.strategy,
        threads,
        node=candidate.node,
        huge_pages=candidate.huge_pages,
    )
    return plan, reasons


def _candidate(
    options: Options, topology: Topology, tuned: Tuned
) -> tuple[Candidate, tuple[str, ...]]:
    """What to run with, and why."""
    if options.numa == "auto" and options.numa_node is None and tuned.result is not None:
        best = tuned.result.best
        why = f"numa {best}, {tuned_sentence(tuned.result)}"
        if options.threads is not None:
            best = replace(best, n_threads=options.threads)
        return best, (why,)
    why_not = (tuned.why_not,) if tuned.why_not else ()
    if options.numa_node is not None:
        strategy, why = Strategy.SINGLE, f"numa single: node {options.numa_node}, as asked"
    elif options.numa == "auto":
        strategy = Strategy.ROWS if topology.ggml_is_numa else Strategy.INTERLEAVE
        why = f"numa {strategy}: nothing was measured on this machine yet, {TUNE} does"
    else:
        strategy, why = Strategy(options.numa), f"numa {options.numa}: as asked"
    node = options.numa_node
    if strategy is Strategy.SINGLE and node is None:
        node = _home(topology)
        why += f", on node {node}"
    n_threads = options.threads or _full_width(topology, node)
    return Candidate(strategy, n_threads, node), (*why_not, why, *_blind(strategy, topology))


def _home(topology: Topology) -> int:
    """The GPU's node if it has processors, else the first that has both."""
    computing = {core.node for core in topology.usable_cores}
    known = [g.node for g in topology.gpus if g.node in computing]
    both = [n for n in topology.memory_nodes if n in computing]
    return next((n for n in known if n is not None), (both or sorted(computing))[0])


def _full_width(topology: Topology, node: int | None) -> int:
    return plan_threads(topology, ThreadRequest(node=node)).decode.n_threads


def _blind(strategy: Strategy, topology: Topology) -> tuple[str, ...]:
    if topology.ggml_is_numa or strategy not in (Strategy.ROWS, Strategy.DISTRIBUTE):
        return ()
    return (
        f"numa {strategy}: node numbers have a gap, so ggml counts one node and lets threads steal"
        " rows from each other: reads are local by chance only (--numa interleave)",
    )
