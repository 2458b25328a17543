"""A pruned vocabulary as a file: the token ids that may be drafted, one per line, rising."""

from __future__ import annotations

from pathlib import Path

from specdec.whole_file import read_text
from specoffload.errors import UsageError


def read_kept(path: Path) -> tuple[int, ...]:
    """The token ids in the file. Text after a # is ignored. Raises UsageError for a bad line."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--draft-vocab {path}: cannot be read as UTF-8 text ({e})") from e
    kept: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not text.isdecimal():
            raise UsageError(f"--draft-vocab {path}: line {number} is {text!r:.40}, no token id")
        kept.append(int(text))
    if not kept:
        raise UsageError(
            f"--draft-vocab {path}: holds no token id; scripts/lab/run prune-vocab writes a file"
        )
    return tuple(sorted(set(kept)))
