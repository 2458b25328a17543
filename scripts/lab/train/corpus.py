"""Reads CPython's standard library as text, and splits it by a fixed rule into training and
held-out files. Makes prompts of held-out files: starts of functions and classes, and docstrings.

This file imports only the standard library, so that tests and `measure` use the rule without torch.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

HELD_OUT_EVERY = 20
MIN_BYTES = 200
MAX_BYTES = 400_000
# site-packages is not the standard library. _sysconfigdata has the build's settings, not sources.
SKIPPED_PARTS = frozenset({"site-packages", "__pycache__"})
SKIPPED_PREFIXES = ("_sysconfigdata",)


@dataclass(frozen=True)
class SourceFile:
    """One file. `path` is relative to the standard library, with slashes."""

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
    """True for about one path in `HELD_OUT_EVERY`. Only the path's SHA-256 decides."""
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
    """The file, or None if it is too small, too large or not UTF-8 (some of CPython's tests)."""
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
    """Every wanted .py file under `root`, sorted by path. One of several equal files is kept.

    A file with the same text as a held-out file is not used for training, so that no held-out file
    is trained on under another path.
    """
    root = root or stdlib_root()
    paths = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.py"))]
    seen: set[str] = set()

    def unique(held_out: bool) -> Iterator[SourceFile]:
        for path in paths:
            if is_wanted(path) and is_held_out(path) == held_out:
                source = read_source(root / path, path)
                if source is not None and source.text not in seen:
                    seen.add(source.text)
                    yield source

    held_out = tuple(unique(True))
    return Split(tuple(unique(False)), held_out)


def python_version() -> str:
    return ".".join(str(part) for part in sys.version_info[:3])


# -- prompts ---------------------------------------------------------------------------------------

N_CODE, N_PROSE = 50, 10
MIN_TOKENS, MAX_TOKENS = 40, 120
STARTS = ("def ", "class ", "    def ", "async def ", "    async def ")
CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Prompt:
    kind: str
    file: str
    text: str


def _rank(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def code_prompt(source: SourceFile, count_tokens: CountTokens) -> Prompt | None:
    """Whole lines from the start of a definition, within the token limits. Hashes choose which
    definition. Returns None if none fits."""
    lines = source.text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.startswith(STARTS)]
    for start in sorted(starts, key=lambda i: _rank(f"{source.path}:{i}")):
        for end in range(start + 2, min(start + 20, len(lines))):
            text = "".join(lines[start:end])
            n_tokens = count_tokens(text)
            if n_tokens > MAX_TOKENS:
                break
            if n_tokens >= MIN_TOKENS and lines[end - 1].strip():
                return Prompt("code", source.path, text)
    return None


def prose_prompt(source: SourceFile, count_tokens: CountTokens) -> Prompt | None:
    """The first words of the file's longest docstring, about 60 tokens. None if it is too short."""
    longest = max(_docstrings(source.text), key=len, default="")
    words = longest.split(" ")
    for n_words in range(20, len(words)):
        text = " ".join(words[:n_words])
        if count_tokens(text) >= 60:
            return Prompt("prose", source.path, text) if n_words < len(words) - 10 else None
    return None


def _docstrings(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and ">>>" not in docstring:
                yield docstring


def pick_prompts(held_out: tuple[SourceFile, ...], count_tokens: CountTokens) -> list[Prompt]:
    """At most one code and one prose prompt per file. Hashes of paths give the order of files."""
    ranked = sorted(held_out, key=lambda source: _rank(source.path))
    code = [prompt for s in ranked if (prompt := code_prompt(s, count_tokens))]
    prose = [prompt for s in ranked if (prompt := prose_prompt(s, count_tokens))]
    return code[:N_CODE] + prose[:N_PROSE]


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    path.write_text(json.dumps([asdict(prompt) for prompt in prompts], indent=1) + "\n")


def read_prompts(path: Path) -> list[Prompt]:
    return [Prompt(**entry) for entry in json.loads(path.read_text())]
