"""Read bandwidth of every (reading node, owning node) pair, with pinned threads over real pages.

Each thread scans its own part of memory for a byte that is not there (libc's vectorised memchr,
which releases the interpreter's lock). That is what a weight's rows do to memory in decoding.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

from numa import sys
from numa.bind import pinned
from numa.errors import NumaError
from numa.memory import PlacedMemory
from numa.place import PAGE_BYTES, place_single
from numa.topology import Topology

_MIN_BYTES = 256 << 20
_CACHE_FACTOR = 4
_FREE_SHARE = 0.25


@dataclass(frozen=True)
class PairBandwidth:
    """`bytes_per_s` of all threads of `reader` together, reading memory of `owner`.

    `local_share` is the proven share of pages on `owner`, None without proof. Where the pair could
    not be measured `bytes_per_s` is None and `note` says why.
    """

    reader: int
    owner: int
    n_threads: int
    bytes_per_s: float | None
    local_share: float | None
    note: str = ""


def trial_bytes(topology: Topology, owner: int) -> int:
    """Enough to leave every cache behind, and at most a quarter of the node's free memory."""
    last = max((c.level for c in topology.caches), default=0)
    cache_bytes = sum(c.size_bytes for c in topology.caches if c.level == last)
    wanted = max(_MIN_BYTES, _CACHE_FACTOR * cache_bytes)
    room = int(topology.node(owner).free_bytes * _FREE_SHARE)
    return max(min(wanted, room) // PAGE_BYTES, 1) * PAGE_BYTES


def read_bandwidth(
    topology: Topology,
    cpus_of_node: Mapping[int, Sequence[int]],
    *,
    size_bytes: int | None = None,
    n_repeats: int = 3,
    time_limit_s: float = 60.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[PairBandwidth]:
    """Measure every node that has processors against every node that has memory.

    The best of `n_repeats` counts. `cpus_of_node` names the processors to read from, per node.
    Pairs that the time limit leaves out are listed with a note. Refusals become notes.
    """
    readers = [n for n in sorted(cpus_of_node) if cpus_of_node[n]]
    pairs = [(r, o) for o in topology.memory_nodes for r in readers]
    found: list[PairBandwidth] = []
    deadline = time.monotonic() + time_limit_s
    for owner in topology.memory_nodes:
        mine = [r for r, o in pairs if o == owner]
        if time.monotonic() >= deadline:
            note = f"not measured: the limit of {time_limit_s:.0f} s was reached"
            found += [_unmeasured(r, owner, cpus_of_node, note) for r in mine]
            continue
        size = size_bytes or trial_bytes(topology, owner)
        found += _owner_row(owner, mine, cpus_of_node, size, n_repeats)
        progress(len(found), len(pairs))
    return found


def _unmeasured(
    reader: int, owner: int, cpus_of_node: Mapping[int, Sequence[int]], note: str
) -> PairBandwidth:
    return PairBandwidth(reader, owner, len(cpus_of_node[reader]), None, None, note)


def _owner_row(
    owner: int,
    readers: Sequence[int],
    cpus_of_node: Mapping[int, Sequence[int]],
    size_bytes: int,
    n_repeats: int,
) -> list[PairBandwidth]:
    touchers = {owner: cpus_of_node.get(owner) or cpus_of_node[readers[0]]}
    try:
        with PlacedMemory(size_bytes) as memory:
            report = memory.apply(place_single(size_bytes, owner), touchers)
            sys.touch(memory.address, memory.mapped_bytes)
            return [
                PairBandwidth(
                    reader,
                    owner,
                    len(cpus_of_node[reader]),
                    size_bytes
                    / min(_scan_s(memory, cpus_of_node[reader]) for _ in range(n_repeats)),
                    report.local_share,
                    "; ".join(report.notes),
                )
                for reader in readers
            ]
    except NumaError as error:
        return [_unmeasured(r, owner, cpus_of_node, str(error)) for r in readers]


def _scan_s(memory: PlacedMemory, cpus: Sequence[int]) -> float:
    """Seconds for all threads together to read the memory once, from the common start."""
    n_threads = len(cpus)
    share = -(-memory.size_bytes // n_threads // PAGE_BYTES) * PAGE_BYTES
    parts = [(i * share, min(share, memory.size_bytes - i * share)) for i in range(n_threads)]
    start = Barrier(n_threads)

    def scan(cpu: int, offset: int, n_bytes: int) -> tuple[float, float]:
        with pinned([cpu]):
            start.wait()
            begin = time.monotonic()
            if n_bytes > 0:
                sys.scan(memory.address + offset, n_bytes)
            return begin, time.monotonic()

    with ThreadPoolExecutor(max_workers=n_threads) as pool:
        futures = [pool.submit(scan, c, *part) for c, part in zip(cpus, parts, strict=True)]
        times = [future.result() for future in futures]
    return max(max(end for _, end in times) - min(begin for begin, _ in times), 1e-9)
