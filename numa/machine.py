"""Reads the machine's topology: nodes, cores, caches, memory, distances, GPUs.

`read_topology(root)` parses /sys and /proc below `root`, so that recorded trees can be tested. It
changes nothing and needs no privilege. Where the kernel describes no nodes (a container without
/sys/devices/system/node, or another system than Linux) the machine is one node.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from numa.cgroup import Limits, read_limits
from numa.errors import BadTopology
from numa.sysfs import numbered, parse_size, read, read_int, read_list
from numa.topology import Cache, Core, Gpu, HugePages, Node, Topology

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_DISPLAY_CLASS = "0x03"
_LOCAL_DISTANCE = 10
_REMOTE_DISTANCE = 20


def read_topology(root: Path | str = "/") -> Topology:
    """Parse the machine below `root`. Raises BadTopology when a file is not what it should be."""
    base = Path(root)
    if not (base / _CPU).is_dir():
        return _without_sysfs(base)
    limits = read_limits(base)
    online = read_list(base, f"{_CPU}/online") or tuple(numbered(base, _CPU, "cpu"))
    if not online:
        raise BadTopology(f"/{_CPU} names no online processor")
    node_ids = read_list(base, f"{_NODE}/online") or tuple(numbered(base, _NODE, "node"))
    # A node's own meminfo leaves out hot-added memory on some virtual machines, so a single node
    # is described by the whole machine's.
    nodes: tuple[Node, ...] = ()
    if len(node_ids) > 1:
        nodes = tuple(_read_node(base, node_id, node_ids, online) for node_id in node_ids)
    else:
        nodes = (_whole_machine(base, online, *node_ids),)
    return Topology(
        nodes=nodes,
        cores=_read_cores(base, online, nodes),
        caches=_read_caches(base, online),
        gpus=_read_gpus(base),
        allowed_cpus=_allowed(online, limits.cpus),
        allowed_nodes=_allowed(tuple(n.id for n in nodes), limits.nodes),
        memory_limit_bytes=limits.memory_bytes,
        huge_page_mode=_huge_page_mode(base),
        from_kernel=bool(node_ids),
    )


def _allowed(present: tuple[int, ...], limit: tuple[int, ...] | None) -> tuple[int, ...]:
    if limit is None:
        return present
    return tuple(n for n in present if n in set(limit))


def _without_sysfs(base: Path) -> Topology:
    """A system without /sys: psutil knows how many cores there are, so they are one node."""
    import psutil

    n_cpus = psutil.cpu_count(logical=True) or 1
    n_cores = psutil.cpu_count(logical=False) or n_cpus
    cpus = tuple(range(n_cpus))
    memory = psutil.virtual_memory()
    node = Node(0, cpus, int(memory.total), int(memory.available), (_LOCAL_DISTANCE,))
    cores = tuple(Core(cpus[i::n_cores], 0, 0) for i in range(n_cores))
    limits: Limits = read_limits(base)
    return Topology(
        (node,), cores, (), (), cpus, (0,), limits.memory_bytes, "never", from_kernel=False
    )


def _whole_machine(base: Path, online: tuple[int, ...], node_id: int = 0) -> Node:
    memory = _meminfo(read(base, "proc/meminfo") or "", "proc/meminfo")
    free = memory.get("MemAvailable", memory.get("MemFree", 0))
    huge_pages = _read_huge_pages(base, f"{_NODE}/node{node_id}")
    total = memory.get("MemTotal", 0)
    return Node(node_id, online, total, free, (_LOCAL_DISTANCE,), huge_pages)


def _read_node(base: Path, node_id: int, ids: tuple[int, ...], online: tuple[int, ...]) -> Node:
    folder = f"{_NODE}/node{node_id}"
    memory = _meminfo(read(base, f"{folder}/meminfo") or "", f"{folder}/meminfo")
    # Clean page cache is given back on demand, so it counts as free for placement.
    free = (
        memory.get("MemFree", 0) + memory.get("Inactive(file)", 0) + memory.get("SReclaimable", 0)
    )
    cpus = read_list(base, f"{folder}/cpulist") or ()
    return Node(
        id=node_id,
        cpus=tuple(c for c in cpus if c in set(online)),
        memory_bytes=memory.get("MemTotal", 0),
        free_bytes=min(free, memory.get("MemTotal", 0)),
        distances=_read_distances(base, folder, node_id, ids),
        huge_pages=_read_huge_pages(base, folder),
    )


def _read_distances(base: Path, folder: str, node_id: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    text = read(base, f"{folder}/distance")
    if text is None:
        return tuple(_LOCAL_DISTANCE if i == node_id else _REMOTE_DISTANCE for i in ids)
    words = text.split()
    if len(words) != len(ids) or not all(w.isdigit() for w in words):
        raise BadTopology(f"/{folder}/distance holds {text[:40]!r}, expected {len(ids)} numbers")
    return tuple(int(w) for w in words)


def _read_huge_pages(base: Path, folder: str) -> tuple[HugePages, ...]:
    pages: list[HugePages] = []
    for path in sorted((base / folder / "hugepages").glob("hugepages-*kB")):
        name = f"{folder}/hugepages/{path.name}"
        size = parse_size(path.name.removeprefix("hugepages-"), name)
        total = read_int(base, f"{name}/nr_hugepages") or 0
        free = read_int(base, f"{name}/free_hugepages") or 0
        pages.append(HugePages(size, total, free))
    return tuple(pages)


def _meminfo(text: str, source: str) -> dict[str, int]:
    """'Node 0 MemTotal:  32 kB' and 'MemTotal:  32 kB' -> {'MemTotal': 32768}."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        match = re.match(r"(?:Node \d+ )?([\w()]+):\s+(\d+ kB)$", line.strip())
        if match:
            found[match.group(1)] = parse_size(match.group(2), source)
    return found


def _read_cores(base: Path, online: tuple[int, ...], nodes: tuple[Node, ...]) -> tuple[Core, ...]:
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in online:
        folder = f"{_CPU}/cpu{cpu}/topology"
        siblings = read_list(base, f"{folder}/thread_siblings_list") or (cpu,)
        present = tuple(c for c in siblings if c in set(online)) or (cpu,)
        if cpu not in node_of:
            raise BadTopology(f"processor {cpu} is online but belongs to no node in /{_NODE}")
        package = read_int(base, f"{folder}/physical_package_id")
        cores.setdefault(present, Core(present, node_of[cpu], package or 0))
    return tuple(sorted(cores.values(), key=lambda c: (c.node, c.cpus)))


def _read_caches(base: Path, online: tuple[int, ...]) -> tuple[Cache, ...]:
    caches: set[tuple[int, str, int, tuple[int, ...]]] = set()
    for cpu in online:
        for index in numbered(base, f"{_CPU}/cpu{cpu}/cache", "index"):
            folder = f"{_CPU}/cpu{cpu}/cache/index{index}"
            size, level = read(base, f"{folder}/size"), read_int(base, f"{folder}/level")
            if not size or level is None:
                continue
            shared = read_list(base, f"{folder}/shared_cpu_list") or (cpu,)
            kind = (read(base, f"{folder}/type") or "Unified").lower()
            caches.add((level, kind, parse_size(size, f"{folder}/size"), shared))
    return tuple(Cache(*c) for c in sorted(caches))


def _read_gpus(base: Path) -> tuple[Gpu, ...]:
    gpus: list[Gpu] = []
    for path in sorted(_entries(base / _PCI)):
        folder = f"{_PCI}/{path.name}"
        if not (read(base, f"{folder}/class") or "").startswith(_DISPLAY_CLASS):
            continue
        node = read_int(base, f"{folder}/numa_node")
        vendor = read(base, f"{folder}/vendor") or ""
        # Firmware that does not know writes -1.
        gpus.append(Gpu(path.name, vendor, None if node is None or node < 0 else node))
    return tuple(gpus)


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _huge_page_mode(base: Path) -> str:
    text = read(base, "sys/kernel/mm/transparent_hugepage/enabled") or "never"
    match = re.search(r"\[(\w+)\]", text)
    return match.group(1) if match else "never"
