"""A pruned vocabulary as a file: the token ids that may be drafted, one per line, rising."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from specdec.whole_file import read_text, write_text
from specoffload.errors import UsageError


def read_kept(path: Path) -> tuple[int, ...]:
    """The ids; text behind a # is not read. Raises UsageError with the line that is none."""
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
        raise UsageError(f"--draft-vocab {path}: holds no token id")
    return tuple(sorted(set(kept)))


def write_kept(path: Path, kept: Sequence[int], remark: str) -> None:
    """Write what `read_kept` reads, with a first line that says where it is from."""
    text = "".join(f"{token}\n" for token in sorted(set(kept)))
    write_text(path, f"# {remark}\n{text}")


def choose_kept(counts: Sequence[int], always: Iterable[int], n: int) -> tuple[int, ...]:
    """`n` token ids, rising: those of `always`, then the most frequent by `counts` [n_vocab].

    Ids that were never counted are kept only to fill up, lowest first: vocabularies begin with
    bytes and short words. Raises UsageError where `n` is not possible.
    """
    chosen = set(always)
    if not max(1, len(chosen)) <= n <= len(counts):
        raise UsageError(
            f"{n} tokens cannot be kept: it must lie between {max(1, len(chosen))}, those that "
            f"always are, and {len(counts)}, all of the vocabulary"
        )
    order = sorted(range(len(counts)), key=lambda token: (-counts[token], token))
    for token in order:
        if len(chosen) == n:
            break
        chosen.add(token)
    return tuple(sorted(chosen))


def coverage(counts: Sequence[int], kept: Iterable[int]) -> float:
    """The share of counted tokens that are kept."""
    total = sum(counts)
    return sum(counts[token] for token in kept) / total if total else 0.0
