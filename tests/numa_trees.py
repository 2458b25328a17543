"""Sysfs trees from tests/fixtures/sysfs. A fixture has a line `path = content` per sysfs file."""

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


def topology_of(name: str, root: Path) -> Topology:
    return read_topology(grow(name, root))
