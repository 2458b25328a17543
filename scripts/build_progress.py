"""Shows pip's verbose output as one line of progress, and writes all of it to a log.

pip --verbose wheel ... 2>&1 | python scripts/build_progress.py LOG
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_COMPILED = re.compile(r"^\s*\[(\d+)/(\d+)\]")  # ninja's prefix of each command: done, total
_PHASES = (
    (re.compile(r"^\s*Collecting ([^\s\[<>=!;]+)"), "fetching {}"),
    (re.compile(r"^\s*Building wheel for (\S+) .*: started"), "building {}"),
    (re.compile(r"^\s*Building editable for (\S+) .*: started"), "building {}"),
    (re.compile(r"^Installing collected packages: (.*)"), "installing"),
)
_QUIET_STEP = 20  # percent of the files per line, if stderr is no terminal


def progress(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields (current work, True if a log without a terminal should show it) at each change."""
    for line in lines:
        if found := _COMPILED.match(line):
            n, total = map(int, found.groups())
            worth = n == total or n % max(1, total * _QUIET_STEP // 100) == 0
            yield f"compiling libllama: {n} of {total} files", worth
            continue
        for pattern, words in _PHASES:
            if found := pattern.match(line):
                yield words.format(found.group(1)), False


def main() -> None:
    """Copy standard input to the log, and show its progress on standard error."""
    began = time.monotonic()
    terminal = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns - 1

    def logged(lines: Iterable[str]) -> Iterator[str]:
        with Path(sys.argv[1]).open("a", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                yield line

    for words, worth in progress(logged(sys.stdin)):
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        shown = f"{words} · {minutes}:{seconds:02}"
        if terminal:
            sys.stderr.write(f"\r\033[K{shown[:width]}")
            sys.stderr.flush()
        elif worth:
            print(shown, file=sys.stderr, flush=True)
    if terminal:
        sys.stderr.write("\r\033[K")


if __name__ == "__main__":
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    main()
