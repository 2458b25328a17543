"""The limits of this process's control group: processors, nodes and memory, version 1 and 2.

A container sees the host's /sys; only its control group and /proc/self/status tell which part of
the machine is its own.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from numa.sysfs import read
from numa.topology import parse_list

# Version 1 writes "no limit" as the largest page-aligned signed number.
_V1_UNLIMITED_BYTES = 1 << 62

# Version 2's name, version 1's, and what version 1 without effective masks has.
_CPUS = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
_NODES = ("cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems")


@dataclass(frozen=True)
class Limits:
    """None means that nothing limits it. `memory_bytes` is what the whole group may use.

    `cpuset_cpus` is the control group's word alone: unlike `cpus` it does not shrink when this
    process pins its own main thread, so it is the one to compare for a change.
    """

    cpus: tuple[int, ...] | None = None
    nodes: tuple[int, ...] | None = None
    cpuset_cpus: tuple[int, ...] | None = None
    memory_bytes: int | None = None


def read_limits(root: Path) -> Limits:
    """The tightest limits of the group of this process, of its parents and of /proc/self/status.

    Raises BadTopology when a file does not have its documented format.
    """
    groups = _groups(root)
    cpuset: tuple[int, ...] | None = None
    nodes = _status_list(root, "Mems_allowed_list")
    memory: int | None = None
    for folder in _folders(root, groups, "cpuset"):
        cpuset = _narrow(cpuset, root, folder, _CPUS)
        nodes = _narrow(nodes, root, folder, _NODES)
    for folder in _folders(root, groups, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read(root, f"{folder}/{name}")
            if text is None or not text.isdigit() or int(text) >= _V1_UNLIMITED_BYTES:
                continue
            if memory is None or int(text) < memory:
                memory = int(text)
    status = _status_list(root, "Cpus_allowed_list")
    cpus = cpuset if status is None or cpuset is None else tuple(c for c in cpuset if c in status)
    return Limits(status if cpuset is None else cpus, nodes, cpuset, memory)


def _groups(root: Path) -> dict[str, str]:
    """controller -> path inside its hierarchy; version 2's single hierarchy is the key ''."""
    groups: dict[str, str] = {}
    for line in (read(root, "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = parts[2]
    return groups


def _folders(root: Path, groups: dict[str, str], controller: str) -> list[str]:
    """The folders that may limit this process, innermost first, as far as they exist."""
    base, path = "sys/fs/cgroup", groups.get("", "/")
    if controller in groups:
        base, path = f"sys/fs/cgroup/{controller}", groups[controller]
    inner = PurePosixPath("/" + path.strip("/"))
    # A container sees the host's path in /proc/self/cgroup but its own group at the mount's root:
    # folders that do not exist are skipped and the root is always asked.
    names = [str(p).strip("/") for p in (inner, *inner.parents)]
    folders = [f"{base}/{name}".rstrip("/") for name in dict.fromkeys(names)]
    return [folder for folder in folders if (root / folder).is_dir()]


def _narrow(
    known: tuple[int, ...] | None, root: Path, folder: str, names: tuple[str, ...]
) -> tuple[int, ...] | None:
    for name in names:
        text = read(root, f"{folder}/{name}")
        if text:
            allowed = parse_list(text, f"{folder}/{name}")
            return allowed if known is None else tuple(n for n in known if n in set(allowed))
    return known


def _status_list(root: Path, key: str) -> tuple[int, ...] | None:
    for line in (read(root, "proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return parse_list(value.strip(), "proc/self/status") or None
    return None
