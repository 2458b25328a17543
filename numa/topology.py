"""The machine as placement sees it: nodes, cores, caches, memory, distances, GPUs. Pure.

`numa.machine` reads it.
"""

from dataclasses import dataclass

from numa.errors import BadTopology, NoSuchNode

# ggml/src/ggml-cpu/ggml-cpu.c: GGML_NUMA_MAX_NODES and GGML_NUMA_MAX_CPUS.
GGML_MAX_NODES = 8
GGML_MAX_CPUS = 512

ONE_NODE = "one memory node: page placement changes nothing here and is left alone"


@dataclass(frozen=True)
class Core:
    """One physical core. `cpus` are its hardware threads; the first is used first."""

    cpus: tuple[int, ...]
    node: int
    package: int


@dataclass(frozen=True)
class Cache:
    """One cache and the processors that share it."""

    level: int
    kind: str
    size_bytes: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class HugePages:
    """Reserved pages of one size on one node."""

    page_bytes: int
    n_total: int
    n_free: int


@dataclass(frozen=True)
class Node:
    """One memory node. `distances` follows Topology.nodes; `cpus` are the online processors."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int
    distances: tuple[int, ...]
    huge_pages: tuple[HugePages, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A display or 3D controller on the PCI bus; `node` is None where firmware does not say."""

    address: str
    vendor: str
    node: int | None


@dataclass(frozen=True)
class Topology:
    """The machine, and the part of it that this process may use.

    `cores` holds every online core, `allowed_cpus` those the cpuset leaves to this process.
    `from_kernel` is False where the single node is an assumption.
    """

    nodes: tuple[Node, ...]
    cores: tuple[Core, ...]
    caches: tuple[Cache, ...]
    gpus: tuple[Gpu, ...]
    allowed_cpus: tuple[int, ...]
    allowed_nodes: tuple[int, ...]
    memory_limit_bytes: int | None
    huge_page_mode: str
    from_kernel: bool

    def node(self, node_id: int) -> Node:
        """Raises NoSuchNode."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        ids = format_list(tuple(n.id for n in self.nodes))
        raise NoSuchNode(f"node {node_id} does not exist here (nodes: {ids}); nothing was placed")

    def node_of_cpu(self, cpu: int) -> int:
        """The node of a processor. Raises NoSuchNode."""
        for core in self.cores:
            if cpu in core.cpus:
                return core.node
        raise NoSuchNode(f"processor {cpu} does not exist here; nothing was pinned")

    def distance(self, reader: int, owner: int) -> int:
        """The firmware's relative cost of `reader` reading memory of `owner`; 10 is local."""
        ids = [n.id for n in self.nodes]
        return self.node(reader).distances[ids.index(self.node(owner).id)]

    @property
    def usable_cores(self) -> tuple[Core, ...]:
        """Physical cores of which the cpuset allows at least one thread, only those threads."""
        allowed = set(self.allowed_cpus)
        trimmed = (
            Core(tuple(c for c in core.cpus if c in allowed), core.node, core.package)
            for core in self.cores
        )
        return tuple(core for core in trimmed if core.cpus)

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """Nodes that have memory this process may use."""
        return tuple(
            n.id for n in self.nodes if n.memory_bytes > 0 and n.id in set(self.allowed_nodes)
        )

    @property
    def is_numa(self) -> bool:
        """More than one node can hold our memory: only then does placement change anything."""
        return len(self.memory_nodes) > 1

    @property
    def ggml_is_numa(self) -> bool:
        """The answer of `ggml_is_numa()` after `ggml_numa_init`: it counts /sys/.../node0, node1...

        It stops at the first gap and at 8 nodes, and looks at no cpuset
        (ggml-cpu.c:ggml_numa_init). Only when true is the partition of `numa.rows` static.
        """
        ids = {n.id for n in self.nodes}
        n_counted = next(i for i in range(len(ids) + 1) if i not in ids)
        return self.from_kernel and min(n_counted, GGML_MAX_NODES) > 1

    def memory_node_near(self, node_id: int) -> int:
        """The nearest usable node with memory: itself, unless it has none. Raises NoSuchNode."""
        if not self.memory_nodes:
            raise NoSuchNode("no node here has memory this process may use; nothing was placed")
        return min(self.memory_nodes, key=lambda m: (self.distance(node_id, m), m))

    def __repr__(self) -> str:
        return (
            f"<Topology {len(self.nodes)} nodes, {len(self.usable_cores)} of {len(self.cores)}"
            f" cores usable, {len(self.gpus)} gpus>"
        )


def parse_list(text: str, source: str) -> tuple[int, ...]:
    """The kernel's list format: '0-3,8,10-11' -> (0, 1, 2, 3, 8, 10, 11); '' -> ()."""
    numbers: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise BadTopology(f"/{source} holds {text[:40]!r} where a list like 0-3,8 is expected")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def format_list(numbers: tuple[int, ...]) -> str:
    """The inverse of parse_list: (0, 1, 2, 5) -> '0-2,5'; () -> 'none'."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for i, number in enumerate(ordered):
        if i + 1 < len(ordered) and ordered[i + 1] == number + 1:
            continue
        parts.append(str(number) if i == start else f"{ordered[start]}-{number}")
        start = i + 1
    return ",".join(parts) or "none"
