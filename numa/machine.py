"""Reads the machine from the text files of /sys and /proc: its topology, and this process's limits.

Every path is relative to a root directory, so that a recorded tree can stand in for the machine.
Most files are optional. A file whose content is not in its documented format raises BadTopology. If
the kernel describes no nodes (containers without /sys/devices/system/node, other systems than
Linux), the machine is one node.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from numa.errors import BadTopology
from numa.topology import Core, Gpu, MemoryNode, ReservedPages, Topology, parse_list

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_DISPLAY_CLASS = "0x03"
# Intel's hybrid processors have a device for each kind of core (Linux 5.18 and later).
_SLOW_KINDS = ("sys/devices/cpu_atom/cpus", "sys/devices/cpu_lowpower/cpus")
_FAST_KIND = "sys/devices/cpu_core/cpus"
# The kernel's estimate of a core's speed (Arm, and x86 of late), and the highest clock rate.
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
# A core below this share of the fastest one's speed is slow. Cores of one kind differ by up to 8 %
# in their highest clock rate, AMD's dense cores have two thirds of the others', and Arm's middle
# cores about 80 %.
_FAST_SHARE = 0.75
_LOCAL_DISTANCE, _REMOTE_DISTANCE = 10, 20
# Version 1 of control groups writes "no limit" as the largest page-aligned signed number.
_V1_UNLIMITED_BYTES = 1 << 62
# Above memory.high, the kernel makes a group's programs wait.
_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
# File names in version 2, in version 1, and in version 1 without effective masks.
_CPUSET = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
_CPUSET_NODES = ("cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems")


def read_topology(root: Path | str = "/") -> Topology:
    """The machine that files below `root` describe. Raises BadTopology for unexpected content."""
    base = Path(root)
    if not (base / _CPU).is_dir():
        return _without_sysfs()
    limits = read_limits(base)
    online = _list(base, f"{_CPU}/online") or tuple(_numbered(base, _CPU, "cpu"))
    if not online:
        raise BadTopology(f"/{_CPU} names no online processor")
    node_ids = _list(base, f"{_NODE}/online") or tuple(_numbered(base, _NODE, "node"))
    if len(node_ids) > 1:
        nodes = tuple(_read_node(base, node_id, node_ids, online) for node_id in node_ids)
    else:
        # On some virtual machines the node's own meminfo leaves out hot-added memory.
        nodes = (_whole_machine(base, online, *node_ids),)
    thp = _read(base, "sys/kernel/mm/transparent_hugepage/enabled") or "[never]"
    mode = re.search(r"\[(\w+)\]", thp)
    return Topology(
        nodes=nodes,
        cores=_read_cores(base, online, nodes),
        gpus=_read_gpus(base),
        allowed_cpus=_allowed(online, limits.cpus),
        allowed_nodes=_allowed(tuple(n.id for n in nodes), limits.nodes),
        huge_page_mode=mode.group(1) if mode else "never",
        from_kernel=bool(node_ids),
    )


def _allowed(present: tuple[int, ...], limit: tuple[int, ...] | None) -> tuple[int, ...]:
    return present if limit is None else tuple(n for n in present if n in set(limit))


def _without_sysfs() -> Topology:
    """One node with the cores that psutil counts."""
    import psutil

    n_cpus = psutil.cpu_count(logical=True) or 1
    n_cores = psutil.cpu_count(logical=False) or n_cpus
    cpus = tuple(range(n_cpus))
    memory = psutil.virtual_memory()
    node = MemoryNode(0, cpus, int(memory.total), int(memory.available), (_LOCAL_DISTANCE,))
    cores = tuple(Core(cpus[i::n_cores], 0) for i in range(n_cores))
    return Topology((node,), cores, (), cpus, (0,), from_kernel=False)


def _whole_machine(base: Path, online: tuple[int, ...], node_id: int = 0) -> MemoryNode:
    memory = _meminfo(base, "proc/meminfo")
    free = memory.get("MemAvailable", memory.get("MemFree", 0))
    huge_pages = _read_huge_pages(base, f"{_NODE}/node{node_id}")
    return MemoryNode(
        node_id, online, memory.get("MemTotal", 0), free, (_LOCAL_DISTANCE,), huge_pages
    )


def _read_node(
    base: Path, node_id: int, ids: tuple[int, ...], online: tuple[int, ...]
) -> MemoryNode:
    folder = f"{_NODE}/node{node_id}"
    memory = _meminfo(base, f"{folder}/meminfo")
    # The kernel gives clean page cache back on demand, so it counts as free for placement.
    free = sum(memory.get(key, 0) for key in ("MemFree", "Inactive(file)", "SReclaimable"))
    cpus = _list(base, f"{folder}/cpulist") or ()
    return MemoryNode(
        id=node_id,
        cpus=tuple(c for c in cpus if c in set(online)),
        memory_bytes=memory.get("MemTotal", 0),
        free_bytes=min(free, memory.get("MemTotal", 0)),
        distances=_read_distances(base, folder, node_id, ids),
        huge_pages=_read_huge_pages(base, folder),
    )


def _read_distances(base: Path, folder: str, node_id: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    text = _read(base, f"{folder}/distance")
    if text is None:
        return tuple(_LOCAL_DISTANCE if i == node_id else _REMOTE_DISTANCE for i in ids)
    words = text.split()
    if len(words) != len(ids) or not all(w.isdigit() for w in words):
        raise BadTopology(f"/{folder}/distance holds {text[:40]!r}, expected {len(ids)} numbers")
    return tuple(int(w) for w in words)


def _read_huge_pages(base: Path, folder: str) -> tuple[ReservedPages, ...]:
    pages: list[ReservedPages] = []
    for path in sorted((base / folder / "hugepages").glob("hugepages-*kB")):
        name = f"{folder}/hugepages/{path.name}"
        size = _parse_kib(path.name.removeprefix("hugepages-"), name)
        total = _int(base, f"{name}/nr_hugepages") or 0
        pages.append(ReservedPages(size, total, _int(base, f"{name}/free_hugepages") or 0))
    return tuple(pages)


def _meminfo(base: Path, name: str) -> dict[str, int]:
    """'Node 0 MemTotal:  32 kB' and 'MemTotal:  32 kB' -> {'MemTotal': 32768}."""
    sizes: dict[str, int] = {}
    for line in (_read(base, name) or "").splitlines():
        match = re.match(r"(?:Node \d+ )?([\w()]+):\s+(\d+ kB)$", line.strip())
        if match:
            sizes[match.group(1)] = _parse_kib(match.group(2), name)
    return sizes


def _read_cores(
    base: Path, online: tuple[int, ...], nodes: tuple[MemoryNode, ...]
) -> tuple[Core, ...]:
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    slow = _slow_cpus(base, online)
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in online:
        siblings = _list(base, f"{_CPU}/cpu{cpu}/topology/thread_siblings_list") or (cpu,)
        present = tuple(c for c in siblings if c in set(online)) or (cpu,)
        if cpu not in node_of:
            raise BadTopology(f"processor {cpu} is online but belongs to no node in /{_NODE}")
        cores.setdefault(present, Core(present, node_of[cpu], cpu not in slow))
    return tuple(sorted(cores.values(), key=lambda c: (c.node, c.cpus)))


def _slow_cpus(base: Path, online: tuple[int, ...]) -> frozenset[int]:
    """The processors that are much slower than others, by the first source that tells it."""
    fast = set(_list(base, _FAST_KIND) or ()) & set(online)
    slow = {cpu for kind in _SLOW_KINDS for cpu in _list(base, kind) or ()} & set(online)
    if fast and slow:
        return frozenset(slow)
    for name in _SPEEDS:
        speeds = {cpu: _int(base, f"{_CPU}/cpu{cpu}/{name}") for cpu in online}
        known = {cpu: speed for cpu, speed in speeds.items() if speed}
        if len(known) == len(online):
            least = _FAST_SHARE * max(known.values())
            return frozenset(cpu for cpu, speed in known.items() if speed < least)
    return frozenset()


def _read_gpus(base: Path) -> tuple[Gpu, ...]:
    try:
        names = sorted(path.name for path in (base / _PCI).iterdir())
    except OSError:
        return ()
    gpus: list[Gpu] = []
    for name in names:
        if (_read(base, f"{_PCI}/{name}/class") or "").startswith(_DISPLAY_CLASS):
            node = _int(base, f"{_PCI}/{name}/numa_node")
            # Firmware reports an unknown node as -1.
            gpus.append(Gpu(name, None if node is None or node < 0 else node))
    return tuple(gpus)


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of this process by its control group and /proc/self/status. None means unlimited.

    `memory_bytes` is the limit of the whole group, or of the parent that has least room left.
    `kept_bytes` is the group's memory that the
    kernel cannot drop (all but files in the page cache), of all its processes; 0 if unknown.
    """

    cpus: tuple[int, ...] | None = None
    nodes: tuple[int, ...] | None = None
    memory_bytes: int | None = None
    kept_bytes: int = 0


def read_limits(root: Path) -> ProcessLimits:
    """The tightest limits of this process's control group (version 1 or 2) and of its parents.

    A container sees the host's /sys, so only control groups tell which part of the machine it may
    use. Raises BadTopology for a file with unexpected content.
    """
    cpus = _status_list(root, "Cpus_allowed_list")
    nodes = _status_list(root, "Mems_allowed_list")
    memory, kept_bytes = None, 0
    for folder in _group_folders(root, "cpuset"):
        cpus = _narrowed(cpus, root, folder, _CPUSET)
        nodes = _narrowed(nodes, root, folder, _CPUSET_NODES)
    for folder in _group_folders(root, "memory"):
        limit = _limit_bytes(root, folder)
        if limit is None:
            continue
        kept = _kept_bytes(root, folder)
        if memory is None or limit - kept < memory - kept_bytes:
            memory, kept_bytes = limit, kept
    return ProcessLimits(cpus, nodes, memory, kept_bytes)


class MemoryStalls:
    """Adds up the seconds for which programs of this control group waited for memory.

    The kernel tells them (pressure stall information), but not for groups of version 1. If such a
    group has a limit, the waits of all programs of the machine count for it, but only those of
    periods in which an allocation of the group met the limit. A kernel that tells no waits at all
    still counts such allocations. Then a whole period with one of them counts as waited.
    """

    def __init__(self, root: Path = Path("/"), now: Callable[[], float] = time.monotonic) -> None:
        self._root, self._now = root, now
        self._total_s = 0.0
        self._before = self._read()

    def __call__(self) -> float | None:
        """Return the seconds so far. None if the kernel tells nothing."""
        (own_s, machine_s, n_at_limit, now_s), before = self._read(), self._before
        self._before = own_s, machine_s, n_at_limit, now_s
        if own_s is not None:
            return own_s
        if n_at_limit is None:
            return machine_s
        if before[2] is not None and n_at_limit > before[2]:
            if machine_s is None or before[1] is None:
                self._total_s += now_s - before[3]
            else:
                self._total_s += machine_s - before[1]
        return self._total_s

    def _read(self) -> tuple[float | None, float | None, int | None, float]:
        """The waits of the group and of the machine, allocations that met the limit, and now."""
        root, n_at_limit = self._root, None
        folders = _group_folders(root, "memory")
        own_s = _stalled_s(root, f"{folders[0]}/memory.pressure") if folders else None
        if own_s is None:
            n_at_limit = _n_at_limit(root, folders)
        return own_s, _stalled_s(root, "proc/pressure/memory"), n_at_limit, self._now()


def _stalled_s(root: Path, name: str) -> float | None:
    """Seconds in which some program waited, by a file of pressure stall information."""
    for line in (_read(root, name) or "").splitlines():
        total = line.rpartition("total=")[2]
        if line.startswith("some ") and total.isdigit():
            return int(total) / 1e6
    return None


def _n_at_limit(root: Path, folders: Iterable[str]) -> int | None:
    """How often allocations met the limit of one of these groups; None if none has a limit."""
    n_times = None
    for folder in folders:
        if _limit_bytes(root, folder) is None:
            continue
        events = (_read(root, f"{folder}/memory.events") or "").splitlines()
        counts = [line.split(" ", 1)[1] for line in events if line.startswith(("max ", "high "))]
        counts.append(_read(root, f"{folder}/memory.failcnt") or "")
        n_times = (n_times or 0) + sum(int(count) for count in counts if count.isdigit())
    return n_times


def _limit_bytes(root: Path, folder: str) -> int | None:
    """The limit on the memory of one control group; None if it has none."""
    texts = [_read(root, f"{folder}/{name}") for name in _MEMORY_LIMITS]
    limits = [int(text) for text in texts if text is not None and text.isdigit()]
    limit = min(limits, default=_V1_UNLIMITED_BYTES)
    return None if limit >= _V1_UNLIMITED_BYTES else limit


def _kept_bytes(root: Path, folder: str) -> int:
    """The memory of a control group without pages of files, which the kernel can drop.

    The group changes while its files are read. So its use is read before and after the part that
    is pages of files, and the larger number counts.
    """
    for used, total in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        before = _read(root, f"{folder}/{used}")
        if before is None or not before.isdigit():
            continue
        lines = (_read(root, f"{folder}/memory.stat") or "").splitlines()
        after = _read(root, f"{folder}/{used}") or ""
        stat = dict(line.split(" ", 1) for line in lines if " " in line)
        names = f"{total}inactive_file", f"{total}active_file"
        files = [int(stat[name]) for name in names if stat.get(name, "").isdigit()]
        most = max(int(before), int(after) if after.isdigit() else 0)
        return max(0, most - sum(files))
    return 0


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The processors' worth of time that control groups leave this process; None: no limit.

    Groups are nested, and the tightest limit holds. Version 2 writes `cpu.max`, version 1
    `cpu.cfs_quota_us` and `cpu.cfs_period_us` (docs.kernel.org/admin-guide/cgroup-v2.html).
    """
    quotas = []
    for folder in _group_folders(root, "cpu"):
        words = (_read(root, f"{folder}/cpu.max") or "").split()
        if not words:
            parts = (_read(root, f"{folder}/cpu.cfs_{of}_us") for of in ("quota", "period"))
            words = [word for word in parts if word]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))  # "max" and -1 are no limit
    return min(quotas, default=None)


def _group_folders(root: Path, controller: str) -> list[str]:
    """The existing folders of control groups that may limit this process, innermost first."""
    paths: dict[str, str] = {}  # paths by controller; "" for version 2, which has one hierarchy
    for line in (_read(root, "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            paths.update(dict.fromkeys(parts[1].split(","), parts[2]))
    base, path = "sys/fs/cgroup", paths.get("", "/")
    if controller in paths:
        base, path = f"sys/fs/cgroup/{controller}", paths[controller]
    inner = PurePosixPath("/" + path.strip("/"))
    # A container sees the host's path in /proc/self/cgroup, but its own group is at the mount's
    # root. So folders that do not exist are skipped, and the root is always included.
    names = [str(p).strip("/") for p in (inner, *inner.parents)]
    folders = [f"{base}/{name}".rstrip("/") for name in dict.fromkeys(names)]
    return [folder for folder in folders if (root / folder).is_dir()]


def _narrowed(
    known: tuple[int, ...] | None, root: Path, folder: str, names: tuple[str, ...]
) -> tuple[int, ...] | None:
    for name in names:
        text = _read(root, f"{folder}/{name}")
        if text:
            allowed = parse_list(text, f"{folder}/{name}")
            return allowed if known is None else tuple(n for n in known if n in set(allowed))
    return known


def _status_list(root: Path, key: str) -> tuple[int, ...] | None:
    for line in (_read(root, "proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return parse_list(value.strip(), "proc/self/status") or None
    return None


def _read(root: Path, name: str) -> str | None:
    """The stripped text of a file. None if it is missing or may not be read."""
    try:
        return (root / name).read_text(errors="replace").strip()
    except OSError:
        return None


def _int(root: Path, name: str) -> int | None:
    text = _read(root, name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise BadTopology(f"/{name} holds {text[:40]!r} where a number is expected") from None


def read_setting(name: str, root: Path = Path("/")) -> int | None:
    """A number below /proc/sys, such as `kernel/numa_balancing`; None if there is none."""
    return _int(root, f"proc/sys/{name}")


def _list(root: Path, name: str) -> tuple[int, ...] | None:
    text = _read(root, name)
    return parse_list(text, name) if text else None


def _parse_kib(text: str, source: str) -> int:
    match = re.fullmatch(r"(\d+)\s*kB", text.strip())
    if match is None:
        raise BadTopology(f"/{source} holds {text[:40]!r} where a size is expected")
    return int(match.group(1)) << 10


def _numbered(root: Path, folder: str, prefix: str) -> list[int]:
    """The numbers N of entries in `folder` that are named `prefix` followed by N, ascending."""
    try:
        names = [entry.name for entry in (root / folder).iterdir()]
    except OSError:
        return []
    numbers = (re.fullmatch(prefix + r"(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in numbers if match)
