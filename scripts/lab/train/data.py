"""CPython's standard library as text, split by a fixed rule into training and held-out files.

Only the standard library is imported here: tests and `measure` use the same rule without torch.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 20
MIN_BYTES = 200
MAX_BYTES = 400_000
# site-packages is not the standard library, and the build's own settings are not source code.
SKIPPED_PARTS = frozenset({"site-packages", "__pycache__"})
SKIPPED_PREFIXES = ("_sysconfigdata",)


@dataclass(frozen=True)
class SourceFile:
    """One file: `path` relative to the standard library (posix), its text as UTF-8."""

    path: str
    text: str

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Split:
    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def is_held_out(relative_path: str) -> bool:
    """True for one path in `HELD_OUT_EVERY`, by its SHA-256 alone: no list to keep, no seed."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


def stdlib_root() -> Path:
    """The running interpreter's standard library folder."""
    return Path(sysconfig.get_path("stdlib"))


def is_wanted(relative_path: str) -> bool:
    parts = relative_path.split("/")
    if SKIPPED_PARTS.intersection(parts):
        return False
    return not parts[-1].startswith(SKIPPED_PREFIXES)


def read_source(path: Path, relative_path: str) -> SourceFile | None:
    """The file, or None where it is too small, too large or not UTF-8 (some tests are not)."""
    raw = path.read_bytes()
    if not MIN_BYTES <= len(raw) <= MAX_BYTES:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if "\x00" in text:
        return None
    return SourceFile(relative_path, text.replace("\r\n", "\n"))


def load_split(root: Path | None = None) -> Split:
    """Every wanted .py file under `root`, each content once, sorted by path.

    A file whose text also occurs as a held-out file is kept out of the training side, so that
    no held-out byte sequence is trained on as a whole file.
    """
    root = root or stdlib_root()
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if not is_wanted(relative):
            continue
        source = read_source(path, relative)
        if source is None:
            continue
        (held_out if is_held_out(relative) else train).append(source)
    unique_held_out = _unique(held_out, set())
    seen = {source.text for source in unique_held_out}
    return Split(_unique(train, seen), unique_held_out)


def _unique(sources: list[SourceFile], seen: set[str]) -> tuple[SourceFile, ...]:
    kept = []
    for source in sources:
        if source.text not in seen:
            seen.add(source.text)
            kept.append(source)
    return tuple(kept)


def python_version() -> str:
    return ".".join(str(part) for part in sys.version_info[:3])
