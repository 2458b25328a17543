"""Chooses threads and memory nodes from flags, tuning and the machine's topology.

On a machine with one memory node, no thread is bound and no memory is placed. One start-up line
says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numa.place import Candidate, Strategy
from numa.threads import plan_threads
from numa.topology import ONE_NODE, Topology
from offload.threads.numa_plan import NumaPlan, make_numa_plan
from specoffload.config.environment import Host
from specoffload.config.options import Options
from specoffload.kept_machine import TUNE, Tuned, tuned_sentence


@dataclass(frozen=True)
class Threads:
    """Numbers of CPU threads for decodes and for prefill; `plan` is None if no thread is bound."""

    n_decode: int
    n_batch: int
    plan: NumaPlan | None = None


def choose_threads(options: Options, host: Host, reasons: list[str]) -> Threads:
    """Choose the threads and, on several memory nodes, the placement.

    Adds start-up lines with the reasons to `reasons`.
    """
    topology = host.topology
    if topology.is_numa and options.numa != "none":
        candidate = _candidate(options, topology, host.tuned, reasons)
        if (most := _quota_threads(host)) is not None and candidate.n_threads > most:
            if options.threads is None:
                candidate = replace(candidate, n_threads=most)
            reasons.append(_quota_words(host, candidate.n_threads))
        plan = make_numa_plan(topology, candidate, options.threads_batch)
        reasons += plan.reasons
        return Threads(plan.decode.n_threads, plan.batch.n_threads, plan)
    n_threads, n_batch = options.threads, options.threads_batch
    if not topology.is_numa:
        n_most = len(topology.allowed_cpus)
        n_threads = _capped("threads", n_threads, n_most, options, reasons)
        n_batch = _capped("threads_batch", n_batch, n_most, options, reasons)
        if n_threads is None and host.tuned.result is not None:
            n_threads = min(host.tuned.result.best.n_threads, n_most)
            reasons.append(f"{n_threads} threads, {tuned_sentence(host.tuned.result)}")
        elif host.tuned.why_not:
            reasons.append(host.tuned.why_not)
    if n_threads is None:
        n_threads = max(1, min(host.n_physical, host.n_allowed))
        most = _quota_threads(host)
        if most is not None and most < n_threads:
            n_threads = most
            reasons.append(_quota_words(host, n_threads))
        else:
            reasons.append(
                f"{n_threads} thread{'s' * (n_threads != 1)}: {host.n_physical} physical cores, "
                f"{host.n_allowed} allowed to this process"
            )
    elif (most := _quota_threads(host)) is not None and n_threads > most:
        reasons.append(_quota_words(host, n_threads))
    if topology.is_numa:
        reasons.append(
            f"{options.name('numa')} none: threads and pages are left to the kernel and ggml"
        )
    else:
        reasons.append(ONE_NODE)
    return Threads(n_threads, n_batch or n_threads)


def _quota_threads(host: Host) -> int | None:
    """The most threads that a control group's quota keeps busy; None without a quota."""
    return None if host.cpu_quota is None else max(1, int(host.cpu_quota))


def _quota_words(host: Host, n_threads: int) -> str:
    return (
        f"{n_threads} thread{'s' * (n_threads != 1)}: this process's control group has a quota of "
        f"{host.cpu_quota:.3g} processors (cpu.max), and more threads than that wait for each other"
    )


def _capped(
    field: str, n: int | None, n_most: int, options: Options, reasons: list[str]
) -> int | None:
    """`n`, capped at `n_most`; adds a line to `reasons` if it is capped."""
    if n is None or n <= n_most:
        return n
    reasons.append(
        f"{options.name(field)} {n}: this process may use {n_most} processors, so {n_most} threads "
        "run"
    )
    return n_most


def _candidate(options: Options, topology: Topology, tuned: Tuned, reasons: list[str]) -> Candidate:
    """The placement to run with. Adds lines with the reasons to `reasons`."""
    if options.numa == "auto" and tuned.result is not None:
        best = tuned.result.best
        reasons.append(f"numa {best}, {tuned_sentence(tuned.result)}")
        return best if options.threads is None else replace(best, n_threads=options.threads)
    if tuned.why_not:
        reasons.append(tuned.why_not)
    if options.numa == "auto":
        strategy = Strategy.ROWS if topology.ggml_is_numa else Strategy.INTERLEAVE
        why = f"numa {strategy}: nothing was measured on this machine yet, {TUNE} does"
    else:
        strategy, why = Strategy(options.numa), f"numa {options.numa}: as asked"
    node = None
    if strategy is Strategy.SINGLE:
        node = _home(topology)
        why += f", on node {node}"
    reasons.append(why)
    if not topology.ggml_is_numa and strategy in (Strategy.ROWS, Strategy.DISTRIBUTE):
        reasons.append(
            f"numa {strategy}: node numbers have a gap, so ggml counts one node and lets threads "
            "take rows from each other. Reads are local only by chance; interleave avoids this"
        )
    n_threads = options.threads or plan_threads(topology, node=node).decode.n_threads
    return Candidate(strategy, n_threads, node)


def _home(topology: Topology) -> int:
    """The node for `single`: the GPU's if it has usable processors, else the first usable one.

    A node with memory and usable processors is preferred to one without memory.
    """
    computing = {core.node for core in topology.usable_cores}
    known = [g.node for g in topology.gpus if g.node in computing]
    both = [n for n in topology.memory_nodes if n in computing]
    return next((n for n in known if n is not None), (both or sorted(computing))[0])
