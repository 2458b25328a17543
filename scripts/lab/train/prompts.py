"""Held-out prompts for benches and agreement: starts of functions and classes, and docstrings."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.train.data import SourceFile

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
    """Whole lines from the definition whose line ranks lowest by hash, within the token limits."""
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
    """The opening words of the file's longest docstring, about 60 tokens of them."""
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
    """At most one code and one prose prompt per file, files in the order of their paths' hashes."""
    ranked = sorted(held_out, key=lambda source: _rank(source.path))
    code = [prompt for s in ranked if (prompt := code_prompt(s, count_tokens))]
    prose = [prompt for s in ranked if (prompt := prose_prompt(s, count_tokens))]
    return code[:N_CODE] + prose[:N_PROSE]


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    path.write_text(json.dumps([asdict(prompt) for prompt in prompts], indent=1) + "\n")


def read_prompts(path: Path) -> list[Prompt]:
    return [Prompt(**entry) for entry in json.loads(path.read_text())]
