"""Reading the small text files of /sys and /proc below a root directory.

Every path is relative to `root`, so that a recorded tree can stand in for the machine. A file that
is missing is None: most of these files are optional. A file that is there and says something else
than its documented format is BadTopology.
"""

import re
from pathlib import Path

from numa.errors import BadTopology
from numa.topology import parse_list

_NUMBER = re.compile(r"\d+$")


def read(root: Path, name: str) -> str | None:
    """The stripped text of `root/name`, None where it is missing or may not be read."""
    try:
        return (root / name).read_text(errors="replace").strip()
    except OSError:
        return None


def read_int(root: Path, name: str) -> int | None:
    """The integer in `root/name`. Raises BadTopology when it holds anything else."""
    text = read(root, name)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise BadTopology(f"/{name} holds {text[:40]!r} where a number is expected") from None


def read_list(root: Path, name: str) -> tuple[int, ...] | None:
    """The list of numbers in `root/name`; None where it is missing or empty."""
    text = read(root, name)
    return parse_list(text, name) if text else None


def parse_size(text: str, source: str) -> int:
    """'48K' -> 49152, '1 kB' likewise, '12' -> 12. Raises BadTopology."""
    match = re.fullmatch(r"(\d+)\s*([kKmMgG]?)[bB]?", text.strip())
    if match is None:
        raise BadTopology(f"/{source} holds {text[:40]!r} where a size is expected")
    shift = {"": 0, "k": 10, "m": 20, "g": 30}[match.group(2).lower()]
    return int(match.group(1)) << shift


def numbered(root: Path, folder: str, prefix: str) -> list[int]:
    """The numbers N for which `folder` holds an entry `prefix`N, ascending."""
    try:
        names = [entry.name for entry in (root / folder).iterdir()]
    except OSError:
        return []
    return sorted(
        int(name[len(prefix) :])
        for name in names
        if name.startswith(prefix) and _NUMBER.match(name[len(prefix) :])
    )
