"""Sysfs trees from tests/fixtures/sysfs. A fixture has a line `path = content` per sysfs file."""

import os
from pathlib import Path

from numa.machine import read_topology
from numa.topology import Topology

TREES = Path(__file__).parent / "fixtures" / "sysfs"


def grow(name: str, root: Path) -> Path:
    """Write the files of the tree `name` below `root`."""
    for line in (TREES / f"{name}.tree").read_text().splitlines():
        if line.startswith("#"):
            continue
        path, _, content = line.partition(" = ")
        put(root, path, content.replace("\\n", "\n").replace("\\t", "\t"))
    return root


def put(root: Path, path: str, content: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content + "\n")


def mount(root: Path, path: Path, source: str, file_system: str) -> str:
    """Describe the mount that `path` is on. Returns the number of its device, "major:minor"."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    line = f"27 1 {number} / /data rw,relatime shared:1 - {file_system} {source} rw"
    put(root, "proc/self/mountinfo", line)
    return number


def topology_of(name: str, root: Path) -> Topology:
    return read_topology(grow(name, root))
