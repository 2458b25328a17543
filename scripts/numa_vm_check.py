"""Checks the placement of pages and threads inside the two-node machine of scripts/numa-vm.

Prints one line per check and exits 0 only if all hold. The kernel reports the places of pages and
threads. Speed is not checked, because the machine is emulated in software. The search of `tune` is
compared with an exhaustive one nevertheless, on threads that read their slabs of the weights, and
the ratio of both results is printed.
"""

import ctypes
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

from numa import sys as calls
from numa.errors import PlacementRefused
from numa.machine import read_topology
from numa.memory import PlacedMemory
from numa.place import (
    PAGE_BYTES,
    Candidate,
    NodeRange,
    NodeRead,
    PlacedWeight,
    Placement,
    Strategy,
    fit_memory,
    node_reads,
    place_rows,
    place_whole,
    placement_for,
    with_huge_pages,
)
from numa.threads import ThreadPlan, plan_threads
from numa.topology import Topology
from numa.tune import search, strategies

MIB = 1 << 20
# Weights of DeepSeek-R1 (Q4_K), 42 MiB: two expert weights of two experts each, one dense weight.
SHAPES = ((2048, 4032, 2, True), (7168, 1152, 2, True), (24576, 432))
CPUS_OF_NODE = dict[int, list[int]]


def locality(placement: Placement, reads: Sequence[NodeRead]) -> float:
    """Share of the read bytes that lie on the reader's node; 1.0 if nothing is read."""
    total = local = 0.0
    ranges, first = placement.ranges, 0
    for read in sorted(reads, key=lambda r: r.start_bytes):
        while first < len(ranges) - 1 and ranges[first].stop_bytes <= read.start_bytes:
            first += 1
        at = first
        while at < len(ranges) and ranges[at].start_bytes < read.stop_bytes:
            r = ranges[at]
            n_bytes = min(r.stop_bytes, read.stop_bytes) - max(r.start_bytes, read.start_bytes)
            local += n_bytes / len(r.nodes) if read.node in r.nodes else 0
            at += 1
        total += read.stop_bytes - read.start_bytes
    return local / total if total else 1.0


class Checks:
    def __init__(self) -> None:
        self.n_failed = 0

    def expect(self, name: str, holds: bool, found: object) -> None:
        self.n_failed += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {name}: {found}", flush=True)


def packed(
    shapes: Sequence[tuple[int, int, int, bool] | tuple[int, int]] = SHAPES,
) -> tuple[list[PlacedWeight], int]:
    placed: list[PlacedWeight] = []
    offset = 0
    for shape in shapes:
        placed.append(PlacedWeight(offset, *shape))
        offset += placed[-1].size_bytes
    return placed, offset


def where_pages_are(memory: PlacedMemory) -> tuple[NodeRange, ...]:
    """The node of each page, as the kernel reports it. Absent pages are on node -2."""
    pages = range(0, memory.size_bytes, PAGE_BYTES)
    nodes = calls.node_of_pages([memory.address + page for page in pages])
    return tuple(
        NodeRange(page, page + PAGE_BYTES, (node,)) for page, node in zip(pages, nodes, strict=True)
    )


def real_locality(memory: PlacedMemory, wanted: list[NodeRead]) -> float:
    """Share of the read bytes that really lie on the reader's node."""
    actual = Placement(Strategy.ROWS, memory.size_bytes, where_pages_are(memory))
    return locality(actual, wanted)


def pages_per_node(memory: PlacedMemory) -> dict[int, int]:
    nodes = [r.nodes[0] for r in where_pages_are(memory)]
    return {node: nodes.count(node) for node in sorted(set(nodes))}


def check_topology(checks: Checks, topology: Topology) -> None:
    checks.expect("two nodes with two cores each", topology.is_numa and topology.ggml_is_numa
                  and [len(n.cpus) for n in topology.nodes] == [2, 2],
                  [(n.id, n.cpus, n.memory_bytes // MIB) for n in topology.nodes])  # fmt: skip
    checks.expect("distances", topology.distance(0, 1) == 21, topology.nodes[0].distances)


def check_strategies(checks: Checks, plan: ThreadPlan, cpus: CPUS_OF_NODE) -> None:
    placed, size = packed()
    wanted = node_reads(placed, plan.decode.nodes)
    alternate = tuple(i % 2 for i in range(plan.decode.n_threads))
    cases: list[tuple[Placement, list[NodeRead], Callable[[float, dict[int, int]], bool]]] = [
        (place_rows(size, placed, plan.decode.nodes), wanted, lambda s, _: s >= 0.98),
        (place_whole(Strategy.SINGLE, size, [0]), wanted, lambda _, n: set(n) == {0}),
        (place_whole(Strategy.SINGLE, size, [1]), wanted, lambda _, n: set(n) == {1}),
        # Nodes alternate by blocks of 512 pages if the kernel makes every anonymous page huge.
        (
            place_whole(Strategy.INTERLEAVE, size, [0, 1]),
            wanted,
            lambda _, n: abs(n[0] - n[1]) <= 512,
        ),
        (
            place_rows(size, placed, alternate, Strategy.DISTRIBUTE),
            node_reads(placed, alternate),
            lambda s, _: s >= 0.98,
        ),
    ]
    for placement, reads, holds in cases:
        with PlacedMemory(size) as memory:
            report = memory.apply(placement, cpus)
            share, nodes = real_locality(memory, reads), pages_per_node(memory)
            line = f"{share:.2%} of read bytes local, pages per node {nodes}, by {report.how}"
            good = holds(share, nodes) and report.notes == ()
            checks.expect(f"{placement.strategy}", good, line + "".join(report.notes))


def check_huge(checks: Checks, plan: ThreadPlan, cpus: CPUS_OF_NODE) -> None:
    placed, size = packed()
    wanted = node_reads(placed, plan.decode.nodes)
    placement = with_huge_pages(place_rows(size, placed, plan.decode.nodes))
    with PlacedMemory(size) as memory:
        memory.apply(placement, cpus)
        notes = memory.collapse()
        n_huge = sum(
            int(line.split()[1]) << 10
            for line in Path("/proc/self/smaps").read_text().splitlines()
            if line.startswith("AnonHugePages:")
        )
        share = real_locality(memory, wanted)
        planned = sum(stop - start for start, stop in placement.huge)
        checks.expect("rows, blocks with one reader huge",
                      share >= 0.98 and not notes and n_huge >= planned > 0,
                      f"{share:.2%} local, {n_huge // MIB} MiB in huge pages,"
                      f" {planned // MIB} MiB planned {notes}")  # fmt: skip


def check_balancing(checks: Checks, cpus: CPUS_OF_NODE) -> None:
    """Read node 0's pages from node 1: the kernel must move plain memory, but not placed memory."""
    Path("/proc/sys/kernel/numa_balancing").write_text("1")
    size = 16 * MIB
    placement = Placement(
        Strategy.ROWS, size,
        (NodeRange(0, size // 2, (0,)), NodeRange(size // 2, size, (0,))),
    )  # fmt: skip
    with PlacedMemory(size) as ours, PlacedMemory(size) as plain:
        ours.apply(placement, cpus)
        with calls.running_on(cpus[0]):
            calls.touch(plain.address, size)
        moved, deadline = 0, time.monotonic() + 60
        with calls.running_on(cpus[1]):
            while time.monotonic() < deadline and moved < size // PAGE_BYTES // 2:
                for _ in range(100):
                    for memory in (ours, plain):  # finding no 0xFF reads every byte
                        ctypes.string_at(memory.address, size).find(b"\xff")
                moved = pages_per_node(plain).get(1, 0)
        left = pages_per_node(ours)
        checks.expect("numa_balancing leaves memory alone",
                      left == {0: size // PAGE_BYTES} and moved > 0,
                      f"{left}; of memory without a policy it moved {moved} pages")  # fmt: skip


def check_full_node(checks: Checks, cpus: CPUS_OF_NODE) -> None:
    """Place 500 MiB on node 1, which has 512 MiB in all and less free: a note must say so."""
    size = 500 * MIB
    topology = read_topology()
    free = {n.id: n.free_bytes for n in topology.nodes}
    plain = place_whole(Strategy.SINGLE, size, [1])
    fitted = fit_memory(plain, free)
    checks.expect("a full node is foreseen", len(fitted.notes) == 1, fitted.notes)
    with PlacedMemory(size) as memory:
        report = memory.apply(plain, cpus)
        nodes = pages_per_node(memory)
        checks.expect("a full node spills and says so",
                      bool(report.notes) and nodes.get(0, 0) > 0 and nodes[1] > nodes[0],
                      f"{nodes} {report.notes}")  # fmt: skip


def check_threads(checks: Checks, plan: ThreadPlan) -> None:
    ran_on: dict[int, int] = {}

    def run_on(cpu: int) -> None:
        with calls.running_on([cpu]):
            time.sleep(0.1)
            stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat").read_text()
            ran_on[cpu] = int(stat.rpartition(")")[2].split()[36])  # proc(5): the last processor

    threads = [threading.Thread(target=run_on, args=(cpu,)) for cpu in plan.decode.cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = ran_on == {cpu: cpu for cpu in plan.decode.cpus}
    checks.expect("threads run where the plan says", right, ran_on)
    group = Path("/sys/fs/cgroup/less")  # take a processor away, as `docker update` does
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpuset")
    group.mkdir()
    (group / "cpuset.cpus").write_text("0-2")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    three = set(plan_threads(read_topology(), n_spare_cores=0).decode.cpus)
    checks.expect("a new plan obeys the cpuset", 3 not in three and len(three) <= 3, three)
    Path("/sys/fs/cgroup/cgroup.procs").write_text(str(os.getpid()))


TUNED_SHAPES = ((2048, 2016, 1, False),)  # one weight of 4 MiB, so that the searches end soon
N_READS, N_TURNS, N_BEST = 15, 5, 3


def read_s(topology: Topology, candidate: Candidate) -> float:
    """Median seconds in which the candidate's threads read their slabs of the weights once."""
    is_alternate = candidate.strategy is Strategy.DISTRIBUTE
    team = plan_threads(
        topology, candidate.n_threads, node=candidate.node, alternate=is_alternate, n_spare_cores=0
    ).decode
    placed, size = packed(TUNED_SHAPES)
    placement = placement_for(candidate, topology, team.nodes, placed, size)
    cpus = {n.id: list(n.cpus) for n in topology.nodes}
    with PlacedMemory(size) as memory, ThreadPoolExecutor(team.n_threads) as pool:
        memory.apply(placement, cpus)
        if candidate.huge_pages:
            memory.collapse()
        slab_bytes = size // team.n_threads

        def read(i: int) -> None:
            with calls.running_on([team.cpus[i]]):
                slab = (ctypes.c_char * slab_bytes).from_address(memory.address + i * slab_bytes)
                zlib.crc32(slab)  # reads every byte, and lets other threads run

        times_s = []
        for _ in range(1 + N_READS):
            began_s = time.perf_counter()
            list(pool.map(read, range(team.n_threads)))
            times_s.append(time.perf_counter() - began_s)
    return median(times_s[1:])


def check_tune(checks: Checks, topology: Topology, plan: ThreadPlan) -> None:
    """Compare the search of `tune` with one of every strategy, number of threads and page size."""

    def measure(candidate: Candidate) -> Mapping[int, Sequence[float]]:
        return {1: (read_s(topology, candidate),)}

    began_s = time.monotonic()
    _, size = packed(TUNED_SHAPES)
    first = strategies(topology, plan, size)
    found = search(topology, plan, size, measure, clock=time.monotonic)
    every = [
        replace(candidate, n_threads=n, huge_pages=huge)
        for candidate in first
        for n in range(1, candidate.n_threads + 1)
        for huge in (True, False)
    ]
    once_s = {candidate: read_s(topology, candidate) for candidate in every}
    best = sorted(every, key=lambda candidate: once_s[candidate])[:N_BEST]
    turns_s: dict[Candidate, list[float]] = {c: [] for c in dict.fromkeys((found.best, *best))}
    for _ in range(N_TURNS):
        for candidate, times_s in turns_s.items():
            times_s.append(read_s(topology, candidate))
    medians_s = {candidate: median(times_s) for candidate, times_s in turns_s.items()}
    fastest = min(medians_s, key=lambda candidate: medians_s[candidate])
    checks.expect("tune chooses one of the candidates", found.best in once_s,
                  f"{found.best}, after {len(found.trials)} of {len(every)}")  # fmt: skip
    print(f"     the fastest of all is {fastest}; its time / that of tune's choice: "
          f"{medians_s[fastest] / medians_s[found.best]:.3f} (worst of all "
          f"{medians_s[fastest] / max(once_s.values()):.3f}); "
          f"{time.monotonic() - began_s:.0f} s")  # fmt: skip


def check_refusals(checks: Checks) -> None:
    with PlacedMemory(MIB) as memory:
        try:
            calls.bind_pages(memory.address, memory.mapped_bytes, calls.MPOL_PREFERRED, [5])
            checks.expect("an unknown node is refused", False, "accepted")
        except PlacementRefused as refusal:
            checks.expect("an unknown node is refused", True, refusal)


def main() -> int:
    checks = Checks()
    topology = read_topology()
    check_topology(checks, topology)
    plan = plan_threads(topology, n_spare_cores=0)
    mask = plan.decode.in_mask_order(openmp=True) == plan.decode
    print(f"     plan {plan.decode.cpus} on nodes {plan.decode.nodes}, mask keeps order: {mask}")
    cpus: CPUS_OF_NODE = {n.id: list(n.cpus) for n in topology.nodes}
    check_strategies(checks, plan, cpus)
    check_huge(checks, plan, cpus)
    check_balancing(checks, cpus)
    check_tune(checks, topology, plan)
    check_full_node(checks, cpus)
    check_threads(checks, plan)
    check_refusals(checks)
    return 1 if checks.n_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
