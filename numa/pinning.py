"""Which processor each compute thread runs on. Pure: decides, touches nothing.

Physical cores first, hardware siblings last; a core or two left for the API process and the
device's host threads; threads numbered node by node, so that ggml's contiguous row slabs
(`numa.rows`) become one slab per node. `numa.bind` carries it out.
"""

from dataclasses import dataclass
from typing import Literal

from numa.errors import NoSuchNode
from numa.topology import GGML_MAX_CPUS, ONE_NODE, Core, Topology, format_list

Order = Literal["by_node", "alternate"]

_MIN_CORES_TO_SPARE_ONE = 4
_MIN_CORES_TO_SPARE_TWO = 8
_MAX_DRAFT_THREADS = 8


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

    def cpumask(self) -> list[bool]:
        """`ggml_threadpool_params.cpumask`: one bool per processor number.

        Raises NoSuchNode for processors ggml has no bit for (512 and up).
        """
        if self.cpus and max(self.cpus) >= GGML_MAX_CPUS:
            raise NoSuchNode(
                f"processor {max(self.cpus)} is beyond ggml's mask of {GGML_MAX_CPUS} bits;"
                " pin the threads by their ids instead (numa.bind.bind_team)"
            )
        mask = [False] * GGML_MAX_CPUS
        for cpu in self.cpus:
            mask[cpu] = True
        return mask

    def cpus_under_strict_mask(self, *, openmp: bool) -> tuple[int, ...]:
        """Where `strict_cpu` really puts thread i: it hands out set bits in ascending order.

        Without OpenMP the workers 1..n-1 take theirs first and thread 0 the last bit
        (ggml-cpu.c:ggml_threadpool_new_impl). Only where this equals `cpus` may the mask be used;
        machines that number their nodes' processors alternately need bind_team instead.
        """
        ascending = tuple(sorted(self.cpus))
        return ascending if openmp else ascending[-1:] + ascending[:-1]

    def mask_keeps_order(self, *, openmp: bool) -> bool:
        """True where cpumask() with strict_cpu gives every thread its planned processor."""
        return bool(self.cpus) and self.cpus_under_strict_mask(openmp=openmp) == self.cpus

    def threads_per_node(self) -> dict[int, int]:
        """node -> number of threads."""
        return {node: self.nodes.count(node) for node in sorted(set(self.nodes))}

    def __repr__(self) -> str:
        return f"<Team {self.name}: {self.n_threads} threads on {format_list(self.cpus)}>"


@dataclass(frozen=True)
class ThreadPlan:
    """Teams for one-token decoding, for batches and for the draft, and what is left free."""

    decode: Team
    batch: Team
    draft: Team
    spare_cpus: tuple[int, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ThreadRequest:
    """The user's wishes; None means that the plan chooses.

    `node` keeps every thread on one node; `smt` allows hardware siblings; `order` "alternate" puts
    thread i on node i modulo n, as llama.cpp's `distribute` does.
    """

    n_decode: int | None = None
    n_batch: int | None = None
    n_draft: int | None = None
    n_spare_cores: int | None = None
    node: int | None = None
    gpu_node: int | None = None
    smt: bool = False
    order: Order = "by_node"


def plan_threads(topology: Topology, request: ThreadRequest | None = None) -> ThreadPlan:
    """Choose processors for the three teams.

    Raises NoSuchNode for a node that does not exist, has no usable processor, or for a thread count
    below one. More threads than processors is not an error: the plan takes all and says so.
    """
    request = request or ThreadRequest()
    _check_counts(request)
    reasons: list[str] = []
    cores = _candidate_cores(topology, request, reasons)
    gpu_node = _gpu_node(topology, request)
    spare, cores = _spare(topology, cores, request, gpu_node, reasons)
    spare_cpus = tuple(sorted(c for core in spare for c in core.cpus))
    decode = _team("decode", topology, cores, request.n_decode, request, reasons)
    batch = _team("batch", topology, cores, request.n_batch or request.n_decode, request, reasons)
    draft = _draft_team(topology, cores, request, gpu_node, reasons)
    if not topology.is_numa:
        reasons.append(ONE_NODE)
    return ThreadPlan(decode, batch, draft, spare_cpus, tuple(dict.fromkeys(reasons)))


def _check_counts(request: ThreadRequest) -> None:
    for name in ("n_decode", "n_batch", "n_draft"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise NoSuchNode(f"{name} is {value}; a team needs at least one thread")


def _candidate_cores(
    topology: Topology, request: ThreadRequest, reasons: list[str]
) -> tuple[Core, ...]:
    cores = topology.usable_cores
    if len(cores) < len(topology.cores):
        reasons.append(
            f"the cpuset leaves {len(cores)} of {len(topology.cores)} cores to this process"
        )
    if request.node is not None:
        topology.node(request.node)
        cores = tuple(c for c in cores if c.node == request.node)
        reasons.append(f"all threads on node {request.node}, as asked")
    if not cores:
        where = "this machine" if request.node is None else f"node {request.node}"
        raise NoSuchNode(f"{where} has no processor this process may use; nothing was pinned")
    ids = {c.node for c in cores}
    bare = [n.id for n in topology.nodes if n.id in ids and n.id not in topology.memory_nodes]
    reasons.extend(
        f"node {n} has no memory: its threads read node {topology.memory_node_near(n)}"
        for n in bare
        if topology.memory_nodes
    )
    return cores


def _gpu_node(topology: Topology, request: ThreadRequest) -> int | None:
    if request.gpu_node is not None:
        return topology.node(request.gpu_node).id
    known = [g.node for g in topology.gpus if g.node is not None]
    return known[0] if known else None


def _spare(
    topology: Topology,
    cores: tuple[Core, ...],
    request: ThreadRequest,
    gpu_node: int | None,
    reasons: list[str],
) -> tuple[tuple[Core, ...], tuple[Core, ...]]:
    """(cores left free, cores for threads): free ones near the device, for its host threads."""
    n_spare = request.n_spare_cores
    if n_spare is None:
        wants = 2 if topology.gpus else 1
        allowed = sum(len(cores) >= n for n in (_MIN_CORES_TO_SPARE_ONE, _MIN_CORES_TO_SPARE_TWO))
        n_spare = min(wants, allowed)
    n_spare = min(n_spare, len(cores) - 1)
    nodes = sorted({c.node for c in cores})
    home = gpu_node if gpu_node in nodes else nodes[-1]
    ordered = sorted(cores, key=lambda c: (c.node != home, -c.cpus[0]))
    spare = tuple(ordered[:n_spare])
    if spare:
        cpus = format_list(tuple(c for core in spare for c in core.cpus))
        reasons.append(f"processors {cpus} left for the API process and the device's host threads")
    else:
        reasons.append(f"{len(cores)} cores: none is left free")
    return spare, tuple(c for c in cores if c not in spare)


def _team(
    name: str,
    topology: Topology,
    cores: tuple[Core, ...],
    n_wanted: int | None,
    request: ThreadRequest,
    reasons: list[str],
) -> Team:
    hardware = {core: core.cpus if request.smt else core.cpus[:1] for core in cores}
    n_most = sum(len(cpus) for cpus in hardware.values())
    n_threads = n_most if n_wanted is None else min(n_wanted, n_most)
    if n_wanted is not None and n_wanted > n_most:
        kind = "processors" if request.smt else "cores"
        reasons.append(
            f"{name}: {n_wanted} threads asked for but {n_most} {kind} are free for them,"
            f" so {n_threads} threads run, one each"
        )
    by_node = _node_order(topology, hardware)
    taken = [cpus[:n] for cpus, n in zip(by_node, _quotas(by_node, n_threads), strict=True)]
    cpus = _alternate(taken) if request.order == "alternate" else [c for t in taken for c in t]
    nodes = tuple(_memory_node(topology, cpu) for cpu in cpus)
    return Team(name, tuple(cpus), nodes)


def _memory_node(topology: Topology, cpu: int) -> int:
    node = topology.node_of_cpu(cpu)
    return topology.memory_node_near(node) if topology.memory_nodes else node


def _node_order(topology: Topology, hardware: dict[Core, tuple[int, ...]]) -> list[list[int]]:
    """Processors per node: first threads of every core, then their siblings; nodes by memory."""
    nodes = sorted({c.node for c in hardware})
    if topology.memory_nodes:
        nodes.sort(key=lambda n: (topology.memory_node_near(n), n))
    per_node: list[list[int]] = []
    for node in nodes:
        mine = [cpus for core, cpus in hardware.items() if core.node == node]
        depth = max(len(cpus) for cpus in mine)
        per_node.append([cpus[i] for i in range(depth) for cpus in mine if i < len(cpus)])
    return per_node


def _quotas(by_node: list[list[int]], n_threads: int) -> list[int]:
    """Threads per node, as equal as the nodes allow: equal slabs keep page boundaries together."""
    quotas = [0] * len(by_node)
    for _ in range(n_threads):
        room = [i for i, cpus in enumerate(by_node) if quotas[i] < len(cpus)]
        quotas[min(room, key=lambda i: (quotas[i], i))] += 1
    return quotas


def _alternate(taken: list[list[int]]) -> list[int]:
    longest = max(len(cpus) for cpus in taken)
    return [cpus[i] for i in range(longest) for cpus in taken if i < len(cpus)]


def _draft_team(
    topology: Topology,
    cores: tuple[Core, ...],
    request: ThreadRequest,
    gpu_node: int | None,
    reasons: list[str],
) -> Team:
    """One node only: a small model's barriers cost more across nodes than its reads gain."""
    nodes = sorted({c.node for c in cores})
    home = gpu_node if gpu_node in nodes else nodes[0]
    near = tuple(c for c in cores if c.node == home)
    n_threads = request.n_draft or min(_MAX_DRAFT_THREADS, len(near))
    if len(nodes) > 1:
        reasons.append(f"draft: on node {home} only, where its barriers are cheap")
    return _team("draft", topology, near, n_threads, request, reasons)
