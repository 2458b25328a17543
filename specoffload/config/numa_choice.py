"""Chooses threads and memory nodes from flags, tuning and the machine's topology.

On a machine with one memory node, no thread is bound and no memory is placed. One start-up line
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from numa.place import Candidate, Strategy
from numa.threads import EVERYWHERE, Processors, plan_threads, processors_for
from numa.topology import ONE_NODE, Core, Topology, format_list
from offload.threads.numa_plan import NumaPlan, make_numa_plan
from offload.units import plural
from specoffload.config.environment import Host
from specoffload.config.options import DraftOptions, Options, of_draft
from specoffload.config.processors import FIELDS, AskedProcessors, asked_processors
from specoffload.config.speculation import ignored
from specoffload.kept_machine import TUNE, Tuned, tuned_sentence


@dataclass(frozen=True)
class Threads:
    """Numbers of CPU threads for decodes and for prefill, and the processors that they run on.

    `plan` is None if no thread is bound to a memory node. Then those for one token run on
    `decode_on`, and those for several tokens on `batch_on`.
    """

    n_decode: int
    n_batch: int
    plan: NumaPlan | None = None
    decode_on: Processors = EVERYWHERE
    batch_on: Processors = EVERYWHERE

    def restricted(self, topology: Topology) -> Threads:
        """The same, but no processor is left to the kernel to choose.

        Threads of OpenMP keep the processors that a graph gave them. So if one pool of a process
        is restricted, each pool has to name its processors.
        """
        if self.plan is not None:
            return self
        every = Processors(topology.allowed_cpus)
        decode_on = self.decode_on if self.decode_on.cpus else every
        batch_on = self.batch_on if self.batch_on.cpus else every
        return replace(self, decode_on=decode_on, batch_on=batch_on)

    @property
    def is_restricted(self) -> bool:
        """True if some threads may not run everywhere."""
        return bool(self.plan or self.decode_on.cpus or self.batch_on.cpus)


def choose_threads(options: Options, host: Host, reasons: list[str]) -> Threads:
    """Choose the threads and, on several memory nodes, the placement.

    Adds start-up lines with the reasons to `reasons`. Raises UsageError if flags name only
    processors that this process may not use.
    """
    topology = host.topology
    decode, batch = asked_processors(options, options.name, topology, reasons)
    if (decode.cpus or batch.cpus) and host.tuned.result is not None:
        reasons.append(
            f"{decode.names or batch.names}: the tuned number of threads is not used, since it was "
            "measured on all processors"
        )
    if decode.cpus or batch.cpus:
        host = replace(host, tuned=Tuned(None))
    if topology.is_numa and options.numa != "none":
        return _on_nodes(options, host, decode, batch, reasons)
    threads = _counted(options, host, decode, batch, reasons)
    n_decode, n_batch = threads
    if not any((decode.cpus, batch.cpus, decode.strict, batch.strict)):
        fast = () if topology.is_numa else topology.performance_cores
        on = Processors(_cpus(max(threads), fast, options, host, reasons))
        return Threads(n_decode, n_batch, None, on, on)
    chosen = _placed(threads, (decode, batch), options, topology).restricted(topology)
    for on in dict.fromkeys((chosen.decode_on, chosen.batch_on)):
        _say_slow(on, topology, reasons)
    return chosen


def choose_draft_threads(
    options: Options, of: DraftOptions, host: Host, target: Threads, reasons: list[str]
) -> tuple[Threads, Threads | None]:
    """The target's threads, and those of the draft model by its flags `of`; None: the target's.

    The target's change if only the draft model's processors are restricted.
    """
    topology = host.topology

    def name(field: str) -> str:
        return options.name(of_draft(field))

    if all(getattr(of, field) in ((), None) for field in ("threads", "threads_batch", *FIELDS)):
        return target, None
    default = asked_processors(options, options.name, topology, [])
    decode, batch = asked_processors(of, name, topology, reasons, default)
    counts = []
    for field, asked, usual in (
        ("threads", decode, target.n_decode),
        ("threads_batch", batch, target.n_batch),
    ):
        most = asked.n_most(topology)
        wanted = getattr(of, field)
        if wanted is None:
            counts.append(min(usual, most))
        else:
            counts.append(_at_most(most, wanted, f"{name(field)} {wanted}", asked, reasons))
    draft = _placed((counts[0], counts[1]), (decode, batch), options, topology)
    if draft.is_restricted or target.is_restricted:
        draft = draft.restricted(topology)
    return (target.restricted(topology) if draft.is_restricted else target), draft


def _on_nodes(
    options: Options,
    host: Host,
    decode: AskedProcessors,
    batch: AskedProcessors,
    reasons: list[str],
) -> Threads:
    """Choose threads and placement on a machine with several memory nodes."""
    topology = decode.machine(host.topology)
    n_spare = 0 if decode.cpus else None
    if False in (options.cpu_strict, options.cpu_strict_batch):
        field = "cpu_strict" if options.cpu_strict is False else "cpu_strict_batch"
        reasons.append(
            ignored(
                f"{options.name(field)} 0",
                "on several memory nodes each thread is bound to a processor, unless --numa is "
                "none",
            )
        )
    candidate = _candidate(options, topology, host.tuned, reasons, n_spare)
    if (most := _quota_threads(host)) is not None and candidate.n_threads > most:
        if options.threads is None:
            candidate = replace(candidate, n_threads=most)
        reasons.append(_quota_words(host, candidate.n_threads))
    plan = make_numa_plan(topology, candidate, options.threads_batch, n_spare_cores=n_spare)
    reasons += plan.reasons
    if batch.cpus and batch.cpus != decode.cpus:
        planned = plan_threads(
            batch.machine(host.topology), options.threads_batch or options.threads, n_spare_cores=0
        )
        plan = replace(plan, batch=replace(planned.decode, name="batch"))
    return Threads(plan.decode.n_threads, plan.batch.n_threads, plan)


def _placed(
    counts: tuple[int, int],
    asked: tuple[AskedProcessors, AskedProcessors],
    options: Options,
    topology: Topology,
) -> Threads:
    """The threads on the processors that flags name, or else on performance cores.

    `counts` and `asked` are those for one token and for several. `--numa none` leaves threads whose
    processors no flag names to the kernel.
    """
    places = []
    for n_threads, of in zip(counts, asked, strict=True):
        on = of.placed(n_threads, topology)
        if not on.cpus and options.numa != "none":
            on = Processors(processors_for(topology, n_threads))
        places.append(on)
    decode_on, batch_on = places
    return Threads(*counts, None, decode_on, batch_on)


def _say_slow(on: Processors, topology: Topology, reasons: list[str]) -> None:
    """Add a line if some of the processors `on` are on much slower cores than others."""
    cores = topology.within(on.cpus).usable_cores
    slow = [core for core in cores if not core.is_fast]
    if slow and len(slow) < len(cores):
        cpus = format_list(tuple(cpu for core in slow for cpu in core.cpus))
        reasons.append(
            f"threads run on {on.words}: those on {cpus} are much slower, and in each operation "
            "all threads wait for the last one"
        )


def _counted(
    options: Options,
    host: Host,
    decode: AskedProcessors,
    batch: AskedProcessors,
    reasons: list[str],
) -> tuple[int, int]:
    """Choose the numbers of threads that are not bound to memory nodes."""
    topology = host.topology
    n_threads, n_batch = options.threads, options.threads_batch
    if not topology.is_numa or decode.cpus or decode.strict:
        n_threads = _capped("threads", n_threads, decode, options, topology, reasons)
    if not topology.is_numa or batch.cpus or batch.strict:
        n_batch = _capped("threads_batch", n_batch, batch, options, topology, reasons)
    if not topology.is_numa:
        if n_threads is None and host.tuned.result is not None:
            n_threads = min(host.tuned.result.best.n_threads, decode.n_most(topology))
            reasons.append(f"{n_threads} threads, {tuned_sentence(host.tuned.result)}")
        elif host.tuned.reason:
            reasons.append(host.tuned.reason)
    if n_threads is None:
        n_threads, n_for_batch = _chosen(host, decode, reasons), None
        if batch.cpus != decode.cpus and n_batch is None:
            n_for_batch = _chosen(host, batch, reasons)
    else:
        n_for_batch = None
        if (most := _quota_threads(host)) is not None and n_threads > most:
            reasons.append(_quota_words(host, n_threads))
    if topology.is_numa:
        reasons.append(
            f"{options.name('numa')} none: threads and pages are left to the kernel and ggml"
        )
    else:
        reasons.append(ONE_NODE)
    n_batch = n_batch or n_for_batch or min(n_threads, batch.n_most(topology))
    return n_threads, n_batch


def _chosen(host: Host, asked: AskedProcessors, reasons: list[str]) -> int:
    """The number of threads if no flag says it: one for each core, or performance core."""
    topology = host.topology
    fast = () if topology.is_numa or asked.cpus else topology.performance_cores
    n_cores = len(asked.machine(topology).usable_cores)
    n_threads = n_cores if asked.cpus else len(fast) or min(host.n_physical, host.n_allowed)
    n_threads = max(1, n_threads)
    words = f"{n_threads} thread{'s' * (n_threads != 1)}"
    most = _quota_threads(host)
    if most is not None and most < n_threads:
        n_threads = most
        reasons.append(_quota_words(host, n_threads))
    elif asked.cpus:
        on = Processors(asked.cpus).words
        reasons.append(f"{words}: {asked.names} names {on}, on {plural(n_cores, 'core')}")
    elif not fast:
        reasons.append(
            f"{words}: {host.n_physical} physical cores, {host.n_allowed} allowed to this process"
        )
    return n_threads


def _cpus(
    n_most: int, fast: Sequence[Core], options: Options, host: Host, reasons: list[str]
) -> tuple[int, ...]:
    """The processors of the performance cores `fast`, or () for all. Adds the reason to `reasons`.

    `n_most`: the largest number of threads that compute together.
    """
    if not fast:
        return ()
    topology = host.topology
    n_slow = len(topology.usable_cores) - len(fast)
    cores = f"{len(fast)} performance core{'s' * (len(fast) != 1)}"
    slower = f"{n_slow} other{'s are' if n_slow != 1 else ' is'} much slower"
    if options.numa == "none":
        reasons.append(
            f"{options.name('numa')} none: threads run on all cores, though there are {cores} and "
            f"{slower}"
        )
        return ()
    cpus = processors_for(topology, n_most)
    if not cpus:
        reasons.append(
            f"{n_most} threads run on all cores, since there are {cores}: {slower}, and in each "
            "operation all threads wait for the last one"
        )
        return ()
    reasons.append(
        f"threads run on the {cores} ({Processors(cpus).words}): {slower}, and in each "
        f"operation all threads wait for the last one ({options.name('threads')} "
        f"{len(fast) + n_slow} uses all, {options.name('numa')} none leaves it to the kernel)"
    )
    return cpus


def _quota_threads(host: Host) -> int | None:
    """The most threads that a control group's quota keeps busy; None without a quota."""
    return None if host.cpu_quota is None else max(1, int(host.cpu_quota))


def _quota_words(host: Host, n_threads: int) -> str:
    return (
        f"{n_threads} thread{'s' * (n_threads != 1)}: this process's control group has a quota of "
        f"{host.cpu_quota:.3g} processors (cpu.max), and more threads than that wait for each other"
    )


def _capped(
    field: str,
    n: int | None,
    asked: AskedProcessors,
    options: Options,
    topology: Topology,
    reasons: list[str],
) -> int | None:
    """`n`, capped at the number of processors; adds a line to `reasons` if it is capped."""
    if n is None:
        return None
    return _at_most(asked.n_most(topology), n, f"{options.name(field)} {n}", asked, reasons)


def _at_most(most: int, n: int, flag: str, asked: AskedProcessors, reasons: list[str]) -> int:
    if n <= most:
        return n
    who = f"{asked.names} names" if asked.cpus else "this process may use"
    reasons.append(f"{flag}: {who} {plural(most, 'processor')}, so {plural(most, 'thread')} run")
    return most


def _candidate(
    options: Options,
    topology: Topology,
    tuned: Tuned,
    reasons: list[str],
    n_spare_cores: int | None,
) -> Candidate:
    """The placement to run with. Adds lines with the reasons to `reasons`."""
    if options.numa == "auto" and tuned.result is not None:
        best = tuned.result.best
        reasons.append(f"numa {best}, {tuned_sentence(tuned.result)}")
        return best if options.threads is None else replace(best, n_threads=options.threads)
    if tuned.reason:
        reasons.append(tuned.reason)
    if options.numa == "auto":
        strategy = Strategy.ROWS if topology.ggml_is_numa else Strategy.INTERLEAVE
        reason = f"numa {strategy}: nothing was measured on this machine yet, {TUNE} does"
    else:
        strategy, reason = Strategy(options.numa), f"numa {options.numa}: as asked"
    node = None
    if strategy is Strategy.SINGLE:
        node = _single_node(topology)
        reason += f", on node {node}"
    reasons.append(reason)
    if not topology.ggml_is_numa and strategy in (Strategy.ROWS, Strategy.DISTRIBUTE):
        reasons.append(
            f"numa {strategy}: node numbers have a gap, so ggml counts one node and lets threads "
            "take rows from each other. Reads are local only by chance; interleave avoids this"
        )
    n_threads = options.threads
    if n_threads is None:
        planned = plan_threads(topology, node=node, n_spare_cores=n_spare_cores)
        n_threads = planned.decode.n_threads
    return Candidate(strategy, n_threads, node)


def _single_node(topology: Topology) -> int:
    """The node for `single`: the GPU's if it has usable processors, else the first usable one.

    A node with memory and usable processors is preferred to one without memory.
    """
    computing = {core.node for core in topology.usable_cores}
    known = [g.node for g in topology.gpus if g.node in computing]
    both = [n for n in topology.memory_nodes if n in computing]
    return next((n for n in known if n is not None), (both or sorted(computing))[0])
