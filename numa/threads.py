"""Chooses the processor of each compute thread. Pure: binds nothing itself.

Each thread gets a physical core of its own. Threads are numbered node by node, so that ggml's
contiguous slabs of rows become one slab per node. A core or two stay free for the API process and
for the host threads of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from numa.errors import NoSuchNode
from numa.topology import GGML_MAX_CPUS, ONE_NODE, Core, Topology, format_list

_MIN_CORES_TO_SPARE_ONE = 4
_MIN_CORES_TO_SPARE_TWO = 8
_MAX_DRAFT_THREADS = 8


def cpumask(cpus: Sequence[int]) -> list[bool]:
    """`ggml_threadpool_params.cpumask`: one bool per processor number.

    Raises NoSuchNode for processors that ggml has no bit for (512 and up).
    """
    if cpus and max(cpus) >= GGML_MAX_CPUS:
        raise NoSuchNode(f"processor {max(cpus)} is beyond ggml's mask of {GGML_MAX_CPUS} bits")
    return [cpu in cpus for cpu in range(GGML_MAX_CPUS)]


@dataclass(frozen=True)
class Team:
    """Threads that compute together: thread i runs on processor `cpus[i]`.

    `nodes[i]` is the node whose memory thread i should read: its own, or the nearest with memory.
    """

    name: str
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def n_threads(self) -> int:
        return len(self.cpus)

    def in_mask_order(self, *, openmp: bool) -> "Team":
        """The team as ggml binds it with `strict_cpu`, in ascending order of the mask's processors.

        Without OpenMP, workers 1..n-1 take the first processors and thread 0 takes the last one
        (ggml-cpu.c:ggml_threadpool_new_impl). Placement follows `nodes`, so reads stay local in any
        order. If processor numbers alternate between nodes, fewer pages can be huge.
        """
        node_of = dict(zip(self.cpus, self.nodes, strict=True))
        ascending = tuple(sorted(self.cpus))
        cpus = ascending if openmp else ascending[-1:] + ascending[:-1]
        return Team(self.name, cpus, tuple(node_of[cpu] for cpu in cpus))

    def cpus_per_node(self) -> dict[int, list[int]]:
        """By memory node, the processors of the threads that read it."""
        by_node: dict[int, list[int]] = {}
        for cpu, node in zip(self.cpus, self.nodes, strict=True):
            by_node.setdefault(node, []).append(cpu)
        return by_node


@dataclass(frozen=True)
class ThreadPlan:
    """Teams for one-token decoding, for batches and for the draft."""

    decode: Team
    batch: Team
    draft: Team
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Processors:
    """The processors that some threads run on; () means wherever the kernel puts them.

    If `strict`, each thread is bound to one of them. There are then as many as threads.
    """

    cpus: tuple[int, ...] = ()
    strict: bool = False

    @property
    def mask(self) -> str:
        """The processors as a mask in hexadecimal, as llama.cpp's --cpu-mask takes it."""
        return hex(sum(1 << cpu for cpu in self.cpus))

    @property
    def words(self) -> str:
        """The processors as text, such as "processors 0-3, one thread each"."""
        each = ", one thread each" if self.strict else ""
        return f"processor{'s' * (len(self.cpus) != 1)} {format_list(self.cpus)}{each}"


EVERYWHERE = Processors()


def one_each(topology: Topology, n_threads: int) -> tuple[int, ...]:
    """A processor for each of `n_threads`, or all usable ones if they are fewer.

    Each core gets one thread before any core gets a second one, and fast cores come first.
    """
    cores = sorted(topology.usable_cores, key=lambda core: not core.is_fast)
    n_rounds = max((len(core.cpus) for core in cores), default=0)
    ordered = [core.cpus[i] for i in range(n_rounds) for core in cores if i < len(core.cpus)]
    return tuple(sorted(ordered[:n_threads]))


def processors_for(topology: Topology, n_threads: int) -> tuple[int, ...]:
    """The processors on which `n_threads` run on a machine with one node, or () for all.

    They are the performance cores' first ones, if some cores are much slower and the performance
    cores are enough for a thread each.
    """
    fast = () if topology.is_numa else topology.performance_cores
    return tuple(core.cpus[0] for core in fast) if n_threads <= len(fast) else ()


def plan_threads(
    topology: Topology,
    n_decode: int | None = None,
    n_batch: int | None = None,
    *,
    n_spare_cores: int | None = None,
    node: int | None = None,
    alternate: bool = False,
) -> ThreadPlan:
    """Choose processors for the three teams. If a number is None, the plan chooses it.

    `node` keeps every thread on one node. `alternate` puts thread i on node i modulo n, as
    llama.cpp's `distribute` does. Raises NoSuchNode for a node that does not exist or has no usable
    processor, and for a thread count below one. If more threads are asked for than there are cores,
    the plan takes all cores and says so.
    """
    for name, value in (("n_decode", n_decode), ("n_batch", n_batch)):
        if value is not None and value < 1:
            raise NoSuchNode(f"{name} is {value}; a team needs at least one thread")
    reasons: list[str] = []
    cores = _candidate_cores(topology, node, reasons)
    gpu_node = next((g.node for g in topology.gpus if g.node is not None), None)
    spare = _spare(topology, cores, n_spare_cores, gpu_node, reasons)
    cores = tuple(core for core in cores if core not in spare)
    decode = _team("decode", topology, cores, n_decode, reasons, alternate=alternate)
    batch = _team("batch", topology, cores, n_batch or n_decode, reasons, alternate=alternate)
    # For a small model, barriers across nodes cost more than local reads save.
    nodes = sorted({core.node for core in cores})
    draft_node = gpu_node if gpu_node in nodes else nodes[0]
    near = tuple(core for core in cores if core.node == draft_node)
    if len(nodes) > 1:
        reasons.append(f"draft: on node {draft_node} only, where its barriers are cheap")
    draft = _team("draft", topology, near, min(_MAX_DRAFT_THREADS, len(near)), reasons)
    if not topology.is_numa:
        reasons.append(ONE_NODE)
    return ThreadPlan(decode, batch, draft, tuple(dict.fromkeys(reasons)))


def _candidate_cores(topology: Topology, node: int | None, reasons: list[str]) -> tuple[Core, ...]:
    cores = topology.usable_cores
    if len(cores) < len(topology.cores):
        reasons.append(
            f"the cpuset leaves {len(cores)} of {len(topology.cores)} cores to this process"
        )
    if node is not None:
        topology.node(node)
        cores = tuple(core for core in cores if core.node == node)
        reasons.append(f"all threads on node {node}, as asked")
    if not cores:
        where = "this machine" if node is None else f"node {node}"
        raise NoSuchNode(f"{where} has no processor this process may use; no thread was bound")
    for n in sorted({core.node for core in cores}):
        if topology.memory_nodes and n not in topology.memory_nodes:
            near = topology.memory_node_near(n)
            reasons.append(f"node {n} has no memory: its threads read node {near}")
    return cores


def _spare(
    topology: Topology,
    cores: Sequence[Core],
    n_spare: int | None,
    gpu_node: int | None,
    reasons: list[str],
) -> tuple[Core, ...]:
    """Choose the cores to leave free, near the GPU if there is one, for its host threads."""
    if n_spare is None:
        wanted = 2 if topology.gpus else 1
        allowed = sum(len(cores) >= n for n in (_MIN_CORES_TO_SPARE_ONE, _MIN_CORES_TO_SPARE_TWO))
        n_spare = min(wanted, allowed)
    nodes = sorted({core.node for core in cores})
    spare_node = gpu_node if gpu_node in nodes else nodes[-1]
    ordered = sorted(cores, key=lambda core: (core.node != spare_node, -core.cpus[0]))
    spare = tuple(ordered[: min(n_spare, len(cores) - 1)])
    if spare:
        cpus = format_list(tuple(cpu for core in spare for cpu in core.cpus))
        reasons.append(f"processors {cpus} left for the API process and the device's host threads")
    else:
        reasons.append(f"{len(cores)} cores: none is left free")
    return spare


def _team(
    name: str,
    topology: Topology,
    cores: Sequence[Core],
    n_wanted: int | None,
    reasons: list[str],
    *,
    alternate: bool = False,
) -> Team:
    n_threads = len(cores) if n_wanted is None else min(n_wanted, len(cores))
    if n_wanted is not None and n_wanted > n_threads:
        reasons.append(
            f"{name}: {n_wanted} threads asked for but {n_threads} cores are free for them,"
            f" so {n_threads} threads run, one each"
        )

    def owner(core: Core) -> int:
        return topology.memory_node_near(core.node) if topology.memory_nodes else core.node

    nodes = sorted({core.node for core in cores})
    if topology.memory_nodes:
        nodes.sort(key=lambda n: (topology.memory_node_near(n), n))
    queues = {n: [core for core in cores if core.node == n] for n in nodes}
    # Take cores of the nodes in turn, so that nodes get equal numbers of threads where possible.
    rounds = [
        q[i] for i in range(max(map(len, queues.values()))) for q in queues.values() if i < len(q)
    ]
    taken = rounds[:n_threads]
    if not alternate:
        taken.sort(key=lambda core: nodes.index(core.node))
    return Team(name, tuple(core.cpus[0] for core in taken), tuple(map(owner, taken)))
