"""The machine's memory nodes, cores and GPUs, as `numa.machine` reads them. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from numa.errors import BadTopology, NoSuchNode

# ggml/src/ggml-cpu/ggml-cpu.c: GGML_NUMA_MAX_NODES and GGML_NUMA_MAX_CPUS.
_GGML_MAX_NODES = 8
GGML_MAX_CPUS = 512

ONE_NODE = "one memory node: page placement changes nothing here and is left alone"


@dataclass(frozen=True)
class Core:
    """One physical core. `cpus` are its hardware threads. The first one is used first.

    `is_fast` is False for a core that is much slower than others of its machine, such as Intel's
    efficiency cores and Arm's little ones.
    """

    cpus: tuple[int, ...]
    node: int
    is_fast: bool = True


@dataclass(frozen=True)
class ReservedPages:
    page_bytes: int
    n_total: int
    n_free: int


@dataclass(frozen=True)
class MemoryNode:
    """One memory node. `distances` follows Topology.nodes; `cpus` are the online processors."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int
    distances: tuple[int, ...]
    huge_pages: tuple[ReservedPages, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A display or 3D controller on the PCI bus; `node` is None if firmware does not name one."""

    address: str
    node: int | None


@dataclass(frozen=True)
class Topology:
    """The machine, and the part of it that this process may use.

    `cores` holds every online core, `allowed_cpus` the processors that the cpuset leaves to this
    process. `from_kernel` is False if the single node is an assumption.
    """

    nodes: tuple[MemoryNode, ...]
    cores: tuple[Core, ...]
    gpus: tuple[Gpu, ...]
    allowed_cpus: tuple[int, ...]
    allowed_nodes: tuple[int, ...]
    huge_page_mode: str = "never"
    from_kernel: bool = True

    def node(self, node_id: int) -> MemoryNode:
        """The node with this number. Raises NoSuchNode if there is none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        ids = format_list(tuple(n.id for n in self.nodes))
        raise NoSuchNode(f"node {node_id} does not exist here (nodes: {ids}); nothing was placed")

    def distance(self, reader: int, owner: int) -> int:
        """The firmware's relative cost of `reader` reading memory of `owner`; 10 is local."""
        ids = [n.id for n in self.nodes]
        return self.node(reader).distances[ids.index(self.node(owner).id)]

    @property
    def usable_cores(self) -> tuple[Core, ...]:
        """Cores that this process may use, with only the hardware threads in its cpuset."""
        allowed = set(self.allowed_cpus)
        trimmed = (replace(k, cpus=tuple(c for c in k.cpus if c in allowed)) for k in self.cores)
        return tuple(core for core in trimmed if core.cpus)

    def within(self, cpus: Collection[int]) -> "Topology":
        """The machine as a process sees it that may use only `cpus`; all allowed ones if none."""
        if not cpus:
            return self
        return replace(self, allowed_cpus=tuple(c for c in self.allowed_cpus if c in cpus))

    @property
    def performance_cores(self) -> tuple[Core, ...]:
        """The usable cores that are fast. () if all usable ones are alike.

        ggml divides each operation evenly and waits for the last thread, so a slow core holds up
        all fast ones.
        """
        cores = self.usable_cores
        fast = tuple(core for core in cores if core.is_fast)
        return fast if 0 < len(fast) < len(cores) else ()

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """Nodes that have memory this process may use."""
        allowed = set(self.allowed_nodes)
        return tuple(n.id for n in self.nodes if n.memory_bytes > 0 and n.id in allowed)

    @property
    def is_numa(self) -> bool:
        """True if more than one node can hold our memory. If not, placement changes nothing."""
        return len(self.memory_nodes) > 1

    @property
    def ggml_is_numa(self) -> bool:
        """The answer of `ggml_is_numa()` after `ggml_numa_init`.

        ggml counts /sys/.../node0, node1, ... up to the first gap or 8 nodes, and looks at no
        cpuset (ggml-cpu.c:ggml_numa_init). Its partition of rows is static only if this is True.
        """
        ids = {n.id for n in self.nodes}
        n_counted = next(i for i in range(len(ids) + 1) if i not in ids)
        return self.from_kernel and min(n_counted, _GGML_MAX_NODES) > 1

    def memory_node_near(self, node_id: int) -> int:
        """The nearest usable node with memory, itself if it has any. Raises NoSuchNode."""
        if not self.memory_nodes:
            raise NoSuchNode("no node here has memory this process may use; nothing was placed")
        return min(self.memory_nodes, key=lambda m: (self.distance(node_id, m), m))


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
