"""Reading the small text files of /sys and /proc below a root directory.

Every path is relative to `root`, so that a recorded tree can stand in for the machine. A file that
is missing is None: most of these files are optional. A file that is there and says something else
than its documented format is BadTopology.
"""

import re
from pathlib import Path

from numa.errors import BadTopology

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
